"""What the pages of a pool are, for those who read counts of them."""

from __future__ import annotations

from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from router.observe.diagnosis.words import listed

_MOST_NAMED = 8


def pages_words(geometry: KvGeometry, block_size: int) -> str:
    """Return how many pages a block of each group has; "" where a pool counts blocks."""
    if not geometry.groups:
        return ""
    parts = listed([f"{each.pages} {_kind(each)}" for each in geometry.groups], _MOST_NAMED)
    return f"Blocks are counted in pages: {block_size} tokens take {parts}"


def pages_of_block(geometry: KvGeometry) -> int:
    """Return the pages of a block of tokens in all groups; 1 where a pool counts blocks."""
    return sum(each.pages for each in geometry.groups) or 1


def _kind(group: KvGroup) -> str:
    match group.kind:
        case KvGroupKind.FULL:
            return "in full layers"
        case KvGroupKind.CHUNK:
            return f"in chunks of {group.span:,}"
        case _:
            return f"in windows of {group.span:,}"
