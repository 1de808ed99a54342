"""Finds rows of a step that begin with the same blocks, so that their prefix is attended once (cascade attention).

Blocks are shared by id alone, so the block tables suffice. The manager gives two sequences one block where their tokens
up to it are the same. Prefixes nest: all rows may share a system prompt and some of them a document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpuworker.attention.interface import Int32Array

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows order[first : last] share the blocks of columns begin .. end-1, and all columns before them."""

    first: int
    last: int
    begin: int
    end: int


def shared_prefixes(
    table: Int32Array, context_len: Int32Array, block_size: int, worth: int
) -> tuple[Int64Array, list[SharedPrefix]]:
    """Return an order of the rows, and what neighbours in it share where that saves reading `worth` slots at least.

    table [R, max_blocks], context_len [R]. Outer prefixes stand before those nested in them. The block of a row's last
    position is never counted as shared, so each row keeps something of its own to attend.
    """
    usable = np.clip((context_len.astype(np.int64) - 1) // block_size, 0, table.shape[1])
    if table.shape[1] > 1:
        # No row has a block twice; only trimmed entries repeat, and they are the same in all rows.
        usable[table[:, 0] == table[:, 1]] = 0
    identity = np.arange(len(table))
    if not _may_share(table, usable, block_size, worth):
        return identity, []
    keys = [table[row, :count].tobytes() for row, count in enumerate(usable)]
    order = np.array(sorted(range(len(table)), key=keys.__getitem__))
    found = _nested(_common(table[order], usable[order]), block_size, worth)
    return (order, found) if found else (identity, [])


def _may_share(table: Int32Array, usable: Int64Array, block_size: int, worth: int) -> bool:
    """Rule out most steps cheaply: no two rows begin alike, or all that begin alike are too short."""
    if len(table) < 2:
        return False
    _, group, size = np.unique(np.where(usable > 0, table[:, 0], -1), return_inverse=True, return_counts=True)
    return int(usable[size[group] > 1].sum()) * block_size >= worth


def _common(table: Int32Array, usable: Int64Array) -> Int64Array:
    """Return [R - 1], how many blocks each row has in common with the next one."""
    width = int(usable.max())
    differs = table[:-1, :width] != table[1:, :width]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    return np.minimum(first, np.minimum(usable[:-1], usable[1:]))


def _nested(common: Int64Array, block_size: int, worth: int) -> list[SharedPrefix]:
    """Walk the tree of prefixes from the root: rows first .. last-1 share min(common) blocks, `begin` are done with."""
    found, waiting = [], [(0, len(common) + 1, 0)]
    while waiting:
        first, last, begin = waiting.pop()
        if last - first < 2:
            continue
        inner = common[first : last - 1]
        end = int(inner.min())
        if (last - first - 1) * (end - begin) * block_size >= worth:
            found.append(SharedPrefix(first, last, begin, end))
            begin = end
        cuts = [first, *(first + 1 + np.flatnonzero(inner == end)).tolist(), last]
        waiting += [(low, high, begin) for low, high in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]
    return found
