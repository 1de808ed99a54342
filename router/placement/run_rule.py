"""Which cached blocks a sequence needs before it can go on at a boundary between blocks.

A prompt of which b leading blocks are skipped needs the blocks that its next token reads, in each group of layers. A
full group reads all b. The index says nothing of it: blocks of the other groups imply its own. Those have a span, and
what they read together is a run of blocks that ends with block b - 1. Of states that is the checkpoint alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from common.contracts.lease import unread_blocks, window_blocks
from common.contracts.types import KvGeometry, KvGroup, KvGroupKind


def groups_of(window: int, groups: tuple[KvGroup, ...]) -> tuple[KvGroup, ...]:
    """Return the groups of a pool; where it has none, one of all layers, whose blocks are those of the pool.

    `window` is that of all layers, or 0: then they are full.
    """
    return groups or _one_group(window)


@lru_cache(maxsize=64)
def _one_group(window: int) -> tuple[KvGroup, ...]:
    return (KvGroup(KvGroupKind.WINDOW if window else KvGroupKind.FULL, window, 1, ()),)


def rule_of(geometry: KvGeometry, block_size: int) -> RunRule | None:
    """Return the rule of a pool; None where hits are the leading blocks: no group has a window or chunks."""
    runs = runs_of(geometry.window, geometry.groups)
    return RunRule(runs, block_size) if runs else None


def runs_of(window: int, groups: tuple[KvGroup, ...]) -> list[KvGroup]:
    """Return the groups that do not read all: those with a window or chunks, and checkpoints of states."""
    return [each for each in groups_of(window, groups) if each.kind is not KvGroupKind.FULL]


def most_unfinished(geometry: KvGeometry, block_size: int) -> int | None:
    """Return how many leading blocks a prompt may share while another request computes them; None: all of them.

    A sequence gets the blocks of a window or of chunks as it goes on, so nobody shares more than its first ones. Nobody
    goes on from states that are being computed.
    """
    runs = runs_of(geometry.window, geometry.groups)
    most = [0 if each.kind is KvGroupKind.STATE else window_blocks(each.span, block_size) for each in runs]
    return min(most, default=None)


class RunRule:
    """The rule of all groups that do not read everything together: the longest of their runs is needed."""

    def __init__(self, runs: Sequence[KvGroup], block_size: int) -> None:
        """`block_size` is in slots."""
        self._runs, self._block_size = tuple(runs), block_size
        self._known_probes = [0]

    def first_block(self, boundary: int) -> int:
        """Return which block is needed first to go on behind so many blocks; `boundary` itself: none is needed."""
        position = boundary * self._block_size
        return min([unread_blocks(each, position, self._block_size) for each in self._runs])

    def next_boundary(self, block: int) -> int:
        """Return the first boundary whose run begins behind a block; each run has one block at least."""
        return max(block + 2, *[self._boundary_of(each, block) for each in self._runs])

    def probes(self, boundary: int) -> list[int]:
        """Return the fewest blocks, in order, of which each run up to a boundary has one.

        Where no block so far is in a boundary's run, the block before the boundary is the next one.
        """
        known = self._known_probes
        while (end := self.next_boundary(known[-1])) <= boundary:
            known.append(end - 1)
        return known[: bisect_left(known, boundary)]

    def _boundary_of(self, run: KvGroup, block: int) -> int:
        """Return the first boundary at which a group reads no block up to this one."""
        size, behind = self._block_size, (block + 1) * self._block_size
        if run.kind is KvGroupKind.STATE:
            return block + 2
        if run.kind is KvGroupKind.CHUNK:
            return -(-(-(-behind // run.span) * run.span) // size)
        return block + 1 + -(-(run.span - 1) // size)
