"""The order of eviction after a rebuild, when the order of release is unknown: deepest first keeps children first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from common.contracts.types import BlockId

_AT_ONCE = 1 << 15


def order_after_rebuild(
    levels: Iterable[list[BlockId]], last_used: Callable[[BlockId], int]
) -> Iterator[list[BlockId]]:
    """Yield the blocks of each level (those of one depth), the least recently used first.

    They come in lists, some of them empty, so that no list takes more than some milliseconds to make.
    """
    for level in levels:
        runs = []
        for at in range(0, len(level), _AT_ONCE):
            runs.append(sorted(level[at : at + _AT_ONCE], key=last_used))
            yield []
        if len(runs) < 2:
            yield from runs
            continue
        merged = heapq.merge(*runs, key=last_used)
        while part := list(islice(merged, _AT_ONCE)):
            yield part
