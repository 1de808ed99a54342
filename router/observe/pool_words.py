"""What the pages of a pool are, for those who read counts of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from common.wire.enum_codec import group_kind_from_proto
from quire.kvmanager.v1 import kvmanager_pb2
from router.observe.diagnosis.words import count, listed

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


def name_of(kind: KvGroupKind, span: int) -> str:
    """Return the name of a group of layers: full, window of 128, chunk of 8,192."""
    return f"{kind.value} of {span:,}" if span else kind.value


def held_words(pools: Iterable[kvmanager_pb2.Pool]) -> str:
    """Return the blocks of each group in use and cached, all pools together; "" where pools count blocks."""
    held: dict[str, tuple[int, int]] = {}
    for pool in pools:
        for each in pool.groups:
            name = name_of(group_kind_from_proto(each.kind), each.span)
            in_use, cached = held.get(name, (0, 0))
            held[name] = in_use + each.in_use, cached + each.cached
    return "; ".join(f"{name}: {count(used, 'block')} in use, {kept:,} cached" for name, (used, kept) in held.items())


def host_words(pools: Collection[kvmanager_pb2.Pool]) -> str:
    """Return how many blocks each worker's host memory holds, and has room for; "" where no worker has any.

    Where pools have groups, both are pages.
    """
    those = [each for each in pools if each.host_frames]
    found = [f"{each.worker_id} {each.host_held:,} of {each.host_frames:,}" for each in those]
    unit = "pages" if any(each.groups for each in those) else "blocks"
    ahead = sum(each.ahead for each in those)
    coming = f" ({ahead:,} {'prefix' if ahead == 1 else 'prefixes'} on the way ahead of need)" if ahead else ""
    return f"{listed(found, _MOST_NAMED)} {unit}{coming}" if found else ""


def disk_words(pools: Iterable[kvmanager_pb2.Pool]) -> str:
    """Return how many blocks each worker's disk holds, and has room for; "" where no worker has a disk cache."""
    found = [_disk_of(each) for each in pools if each.disk_frames or each.disk_closed]
    return listed(found, _MOST_NAMED)


def disk_problems(pools: Iterable[kvmanager_pb2.Pool]) -> list[str]:
    """Return in words which workers have given up their disk."""
    return [f"{each.worker_id} has given up its disk cache; its log says why" for each in pools if each.disk_closed]


def _disk_of(pool: kvmanager_pb2.Pool) -> str:
    if pool.disk_closed:
        return f"{pool.worker_id} has given it up"
    words = f"{pool.worker_id} {pool.disk_held:,} of {pool.disk_frames:,} blocks"
    wait = "sequence waits" if pool.fetching == 1 else "sequences wait"
    return f"{words} ({pool.fetching:,} {wait} for some)" if pool.fetching else words


def _kind(group: KvGroup) -> str:
    match group.kind:
        case KvGroupKind.FULL:
            return "in full layers"
        case KvGroupKind.CHUNK:
            return f"in chunks of {group.span:,}"
        case _:
            return f"in windows of {group.span:,}"
