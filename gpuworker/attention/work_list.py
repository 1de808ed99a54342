"""Cuts the attention of a step into items of about equal work, on the host, once for all layers.

An item is a few queries and a chunk of the context that they see. A program of the attention kernel computes one item
of one K/V head. The context of a query may be cut (split-KV, or a shared prefix apart from its tail). Its items then
write partial results, which a second kernel merges. Tables have fixed widths, so that a CUDA graph may read them:
padding does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpuworker.attention.interface import AttentionMetadata, Int32Array

Int64Array = npt.NDArray[np.int64]


# Finds rows of a step that begin with the same blocks, so that their prefix is attended once (cascade attention).
# Blocks are shared by id alone, so the block tables suffice. The manager gives two sequences one block where their
# tokens up to it are the same. Prefixes nest: all rows may share a system prompt and some of them a document.
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


# Columns of the table of items: row of the block table (-1: padding), first query and number of queries (in the table
# of queries), positions begin .. end-1 of the context, lowest and highest position of its queries, and which of its
# queries' parts it is (-1: the only one).
ITEM_FIELDS = 8
# Columns of the table of queries: token of the step, position, its first partial result (-1: none), number of parts.
QUERY_FIELDS = 4


@dataclass(frozen=True, slots=True)
class Cut:
    """How a kind of items is cut.

    An item has at most `queries` queries; the chunk of one that is cut is a multiple of `tile` positions and no shorter
    than `smallest`; `items` of them are enough to fill the device, so that no more is cut than makes about as many.
    """

    queries: int
    tile: int
    smallest: int
    items: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of a step. `single` are those of decodes, `many` those of prefills and of shared prefixes."""

    single: Int32Array  # [n, ITEM_FIELDS], those with the longest chunks first
    many: Int32Array  # [m, ITEM_FIELDS], likewise
    queries: Int32Array  # [T, QUERY_FIELDS], decodes first
    partials: int  # how many partial results there are
    merged: int  # queries[: merged] holds all that have several parts


@dataclass(slots=True)
class _Blocks:
    """Blocks of queries that see the same context, before it is cut; arrays of one length."""

    row: Int64Array
    first: Int64Array
    count: Int64Array
    begin: Int64Array
    end: Int64Array
    lowest: Int64Array
    highest: Int64Array

    def chunks(self, cut: Cut) -> tuple[Int64Array, Int64Array]:
        """Return for each block the number of its chunks and their size: equal chunks, at least one a block.

        A chunk is about the whole over the items wanted: rounding up would cut in two what is hardly longer than that.
        """
        length = self.end - self.begin
        wanted = max(cut.smallest, -(-int(length.sum()) // cut.items))
        parts = np.maximum(np.minimum((2 * length + wanted) // (2 * wanted), length // cut.smallest), 1)
        size = np.maximum(-(-length // (parts * cut.tile)), 1) * cut.tile
        return np.maximum(-(-length // size), 1), size

    def items(self, parts: Int64Array, size: Int64Array, base: Int64Array, cut: npt.NDArray[np.bool_]) -> Int32Array:
        """Return the items, [sum(parts), ITEM_FIELDS], the longest first; a block's parts count from its `base`."""
        block = np.repeat(np.arange(len(parts)), parts)
        nth = np.arange(len(block)) - np.repeat(np.cumsum(parts) - parts, parts)
        begin = self.begin[block] + nth * size[block]
        end = np.minimum(begin + size[block], self.end[block])
        part = np.where(cut[block], base[block] + nth, -1)
        columns = (self.row[block], self.first[block], self.count[block], begin, end)
        table = np.stack((*columns, self.lowest[block], self.highest[block], part), axis=1)
        return table[np.argsort(begin - end, kind="stable")].astype(np.int32)


def work_list(step: AttentionMetadata, block_size: int, single: Cut, many: Cut, worth: int | None) -> WorkList:
    """Cut a step. What decodes share is attended apart where that saves reading `worth` slots (None: nowhere)."""
    decodes = step.num_decodes
    order, shared = np.arange(decodes), list[SharedPrefix]()
    if worth is not None:
        order, shared = shared_prefixes(step.block_table[:decodes], step.context_len[:decodes], block_size, worth)
    queries = _queries(step, order)
    if not shared and decodes == step.num_rows:
        return _decodes_alone(_decode_blocks(step, order, np.zeros_like(order)), queries, single)
    stacks, spans = _shared_blocks(shared, order, queries, block_size, many.queries)
    blocks = _joined(stacks, _prefill_blocks(step, many.queries))
    parts, size = blocks.chunks(many)
    # Parts of decodes: those of the prefixes that they share, outermost first, then those of their tails.
    done, tail = np.zeros(decodes, dtype=np.int64), np.zeros(decodes, dtype=np.int64)
    base = np.zeros(len(parts), dtype=np.int64)
    for prefix, span in zip(shared, spans, strict=True):
        base[span] = done[prefix.first]
        done[prefix.first : prefix.last] += parts[span.start]
        tail[prefix.first : prefix.last] = prefix.end * block_size
    tails = _decode_blocks(step, order, tail)
    tail_parts, tail_size = tails.chunks(single)
    cut = parts > 1
    cut[: len(stacks.row)] = True
    per_query = np.concatenate((done + tail_parts, np.repeat(parts, blocks.count)[int(stacks.count.sum()) :]))
    partials, merged = _number(queries, per_query)
    return WorkList(
        tails.items(tail_parts, tail_size, done, per_query[:decodes] > 1),
        blocks.items(parts, size, base, cut),
        queries,
        partials,
        merged,
    )


def _decodes_alone(rows: _Blocks, queries: Int32Array, single: Cut) -> WorkList:
    """Cut a step of decodes that share nothing. Most steps are of this kind, and the engine waits for the result."""
    parts, size = rows.chunks(single)
    partials, merged = _number(queries, parts)
    none = np.empty((0, ITEM_FIELDS), dtype=np.int32)
    return WorkList(rows.items(parts, size, np.zeros_like(parts), parts > 1), none, queries, partials, merged)


def _queries(step: AttentionMetadata, order: Int64Array) -> Int32Array:
    """Return the table of queries without their parts: decodes in `order`, then prefills as they stand."""
    table = np.empty((step.num_tokens, QUERY_FIELDS), dtype=np.int32)
    table[:, 0] = np.arange(step.num_tokens)
    table[: len(order), 0] = order
    # A row's last query stands at the last position of its context.
    before_end = step.query_start[1:] - step.context_len
    table[:, 1] = table[:, 0] - np.repeat(before_end, np.diff(step.query_start))[table[:, 0]]
    return table


def _number(queries: Int32Array, parts: Int64Array) -> tuple[int, int]:
    """Number the partial results, those of one query in a row; return how many, and where the last such query ends."""
    wanted = np.where(parts > 1, parts, 0)
    queries[:, 2] = np.where(parts > 1, np.cumsum(wanted) - wanted, -1)
    queries[:, 3] = parts
    cut = np.flatnonzero(wanted)
    return int(wanted.sum()), int(cut[-1]) + 1 if len(cut) else 0


def _decode_blocks(step: AttentionMetadata, order: Int64Array, begin: Int64Array) -> _Blocks:
    """Return one block for each decode; a padding row sees nothing."""
    end = step.context_len[order].astype(np.int64)
    return _Blocks(order, np.arange(len(order)), np.ones_like(end), begin, end, end - 1, end - 1)


def _prefill_blocks(step: AttentionMetadata, at_most: int) -> _Blocks:
    """Return the blocks of the rows behind the decodes: `at_most` queries each, seen from the start of the context."""
    rows = np.arange(step.num_decodes, step.num_rows)
    start = step.query_start[rows].astype(np.int64)
    length = step.query_start[rows + 1] - start
    count, row, nth = _pieces(length, at_most)
    first = start[row] + nth * at_most
    position = first + step.context_len[rows[row]] - step.query_start[rows[row] + 1]
    end = position + count
    return _Blocks(rows[row], first, count, np.zeros_like(end), end, position, end - 1)


def _shared_blocks(
    shared: list[SharedPrefix], order: Int64Array, queries: Int32Array, block_size: int, at_most: int
) -> tuple[_Blocks, list[slice]]:
    """Return the blocks of the queries of rows that share a prefix, and for each prefix which blocks are its own."""
    first = np.array([prefix.first for prefix in shared], dtype=np.int64)
    members = np.array([prefix.last for prefix in shared], dtype=np.int64) - first
    count, prefix, nth = _pieces(members, at_most)
    begin, end = (
        np.array(columns, dtype=np.int64) * block_size
        for columns in ([prefix.begin for prefix in shared], [prefix.end for prefix in shared])
    )
    at = first[prefix] + nth * at_most
    positions = [queries[one : one + many, 1] for one, many in zip(at, count, strict=True)]
    lowest, highest = (np.array([pick(p) for p in positions], dtype=np.int64) for pick in (np.min, np.max))
    last = np.cumsum(-(-members // at_most))
    spans = [slice(low, high) for low, high in zip(last + (-members // at_most), last, strict=True)]
    return _Blocks(order[at], at, count, begin[prefix], end[prefix], lowest, highest), spans


def _pieces(length: Int64Array, at_most: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut runs into pieces: return for each piece its length, the run it is of, and the how-manieth it is there."""
    pieces = -(-length // at_most)
    run = np.repeat(np.arange(len(length)), pieces)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.minimum(length[run] - nth * at_most, at_most), run, nth


def _joined(one: _Blocks, other: _Blocks) -> _Blocks:
    names = ("row", "first", "count", "begin", "end", "lowest", "highest")
    return _Blocks(*(np.concatenate((getattr(one, name), getattr(other, name))) for name in names))
