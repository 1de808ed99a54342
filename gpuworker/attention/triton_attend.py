"""The kernels of paged attention in Triton: one that attends, for decodes and prefills alike, and one that merges.

A program of the first computes one item of the work list (gpuworker/attention/work_list.py) for one K/V head. The query
heads that share the K/V head are adjacent rows of one tile: K and V are read once for all of them. The softmax is
computed on the way (online), in powers of two: exp(x) = 2^(x log2 e), with the factor folded into the scale. Quantised
K and V are never scaled back as tiles. A slot's K scale multiplies its column of scores, its V scale its column of
weights.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpuworker.attention.work_list import ITEM_FIELDS, QUERY_FIELDS

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
_LARGEST_HALF = tl.constexpr(65504.0)
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_QUERY_FIELDS = tl.constexpr(QUERY_FIELDS)


@triton.jit
def _widened(x, dtype: tl.constexpr):
    """Convert a tile of K or V to the type of the product, exactly; uint8 holds fp8 e4m3 as bits.

    Shifted into a float16, an e4m3 number is 2^-8 of itself: the two formats differ in the bias of the exponent.
    """
    if x.dtype == tl.uint8:
        wide = x.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(dtype)
    return x.to(dtype)


@triton.jit
def _first_seen(position, span, CHUNKED: tl.constexpr):
    """Return the first position that queries see from a window of `span` positions or a chunk of so many."""
    return position // span * span if CHUNKED else position - span + 1


@triton.jit
def _attend_tiles(
    acc,
    total,
    peak,
    query,
    first,
    stop,
    end,
    position,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    scale,
    softcap,
    span,
    one,
    MASKED: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    QUANTISED: tl.constexpr,
    BY_WORDS: tl.constexpr,
    LIFT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from `query` [M, K] over tiles of positions that begin at `first`, up to `stop`; update the softmax.

    acc [M, V] and peak [M] are its weighted sum and maximum (as power of two) so far, `total` its sum: [M], or with
    ONE_QUERY [M, TILE], which is summed up at the end, because there a tile is spread over warps that would have to
    wait for each other. MASKED tiles look at each score's position, and at `end`; in the others every query sees every
    position. `position` is [M], or one for all with ONE_QUERY, where nothing before `end` lies behind it.
    """
    TILE_K: tl.constexpr = query.shape[1]
    TILE_V: tl.constexpr = acc.shape[1]
    in_tile = tl.arange(0, TILE)
    dim_k = tl.arange(0, TILE_K)
    dim_v = tl.arange(0, TILE_V)
    for start in range(first, stop, TILE):
        at = start + in_tile
        # A slot of a head is one row of a pool, in all pools alike. Counted in rows, its place takes 32 bits, and one
        # multiplication by a constant makes an address of it. Tiles begin at the edge of a block or divide it.
        if BLOCK_SIZE >= TILE:
            block = tl.load(table + start // BLOCK_SIZE)
            slot = (block * KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE + in_tile
        else:
            blocks_at = table + start // BLOCK_SIZE + in_tile // BLOCK_SIZE
            block = tl.load(blocks_at, mask=at < end, other=0) if MASKED else tl.load(blocks_at)
            slot = (block * KV_HEADS + kv_head) * BLOCK_SIZE + in_tile % BLOCK_SIZE
        key_at = keys + slot.to(tl.int64)[:, None] * HEAD_DIM_K + dim_k[None, :]
        value_at = values + slot.to(tl.int64)[:, None] * VALUE_STRIDE + dim_v[None, :]
        # Slots past the end are not read, which saves traffic; a head whose size is not a power of two is padded.
        if MASKED:
            key = tl.load(key_at, mask=(at < end)[:, None] & (dim_k < HEAD_DIM_K)[None, :], other=0.0)
        elif HEAD_DIM_K != TILE_K:
            key = tl.load(key_at, mask=(dim_k < HEAD_DIM_K)[None, :], other=0.0)
        else:
            key = tl.load(key_at)
        scores = tl.dot(query, tl.trans(_widened(key, query.dtype)), input_precision=PRECISION)
        if QUANTISED:
            key_scale = tl.load(key_scales + slot, mask=at < end, other=0.0) if MASKED else tl.load(key_scales + slot)
            scores *= (key_scale * scale)[None, :]
        if SOFTCAPPED:
            if not QUANTISED:
                scores *= scale
            # softcap * tanh(x / softcap), where scale has brought 2 / softcap along.
            scores = (2.0 * tl.sigmoid(scores) - 1.0) * (softcap * _LOG2_E)
        if MASKED:
            if ONE_QUERY:
                seen = (at < end)[None, :]
                if WINDOWED:
                    seen = seen & (at >= _first_seen(position, span, CHUNKED))[None, :]
            else:
                seen = (at < end)[None, :] & (at[None, :] <= position[:, None])
                if WINDOWED:
                    seen = seen & (at[None, :] >= _first_seen(position, span, CHUNKED)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.max(scores, axis=1)
        # Where nothing stands between the product and the exponent, scaling and subtraction are one operation.
        if not SOFTCAPPED and not QUANTISED:
            new_peak *= scale
        new_peak = tl.maximum(peak, new_peak)
        # A query that has seen nothing yet has no maximum: -inf - -inf is not a number.
        pivot = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        if not SOFTCAPPED and not QUANTISED:
            weights = tl.exp2(scores * scale - pivot[:, None])
        else:
            weights = tl.exp2(scores - pivot[:, None])
        fade = tl.exp2(peak - pivot)
        total = total * fade[:, None] + weights if ONE_QUERY else total * fade + tl.sum(weights, axis=1)
        acc = acc * fade[:, None]
        peak = new_peak
        if QUANTISED:
            if MASKED:
                value_scale = tl.load(value_scales + slot, mask=at < end, other=0.0)
            else:
                value_scale = tl.load(value_scales + slot)
            weights *= (value_scale * LIFT)[None, :]
            if LIFT != 1.0:
                weights = tl.minimum(weights, _LARGEST_HALF)
        if MASKED:
            value = tl.load(value_at, mask=(at < end)[:, None] & (dim_v < HEAD_DIM_V)[None, :], other=0.0)
        elif HEAD_DIM_V != TILE_V:
            value = tl.load(value_at, mask=(dim_v < HEAD_DIM_V)[None, :], other=0.0)
        else:
            value = tl.load(value_at)
        value = _widened(value, query.dtype)
        if QUANTISED and ONE_QUERY and BY_WORDS:
            # Keeps the compiler from widening V byte by byte in the layout of the matrix unit. As it was loaded, in
            # whole words, a tile takes a seventh less instructions, and loads are of 16 bytes.
            value *= tl.full((1, 1), one, query.dtype)
        acc = tl.dot(weights.to(query.dtype), value, acc, input_precision=PRECISION)
    return acc, total, peak


# Arguments that change from step to step are not specialised: that would compile a kernel while serving.
@triton.jit(
    do_not_specialize=["table_row", "span"],
    do_not_specialize_on_alignment=["block_table", "items", "queries", "partial_out", "partial_lse"],
)
def attend_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    out,
    partial_out,
    partial_lse,
    items,
    queries,
    block_table,
    query_token,
    query_head,
    table_row,
    scale,
    softcap,
    span,
    one,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SLICES: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    QUANTISED: tl.constexpr,
    HALVES: tl.constexpr,
    BY_WORDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one item for GROUP heads: into `out` if it is its queries' only part, else as a partial result.

    query [T, H, K] and out [T, H, V] (contiguous), H = KV_HEADS * SLICES * GROUP: SLICES programs share a K/V head.
    keys, values and their scales: one layer of the pools, contiguous, but that slots of V are VALUE_STRIDE numbers
    apart; partial_out [n, H, V] and partial_lse [n, H] float32, the latter as power of two. `scale`
    holds log2(e), or with SOFTCAPPED 2 / softcap instead; `one` is 1.0. WINDOWED queries see a window of `span`
    positions, or with CHUNKED their chunk of `span`. With ONE_QUERY an item has no more, and one loop masks all tiles:
    where loading bounds, filling and draining the pipeline of loads once more costs more than masks. With HALVES
    products are of float16 whatever the type of the queries: fp8 widens to it in a third of the instructions. BY_WORDS
    saves a chip with registers to spare instructions on quantised V.
    """
    HEADS: tl.constexpr = KV_HEADS * SLICES * GROUP
    item = items + (tl.program_id(0) // (KV_HEADS * SLICES)).to(tl.int64) * _ITEM_FIELDS
    stack = tl.program_id(0) % (KV_HEADS * SLICES)
    kv_head = stack // SLICES
    row = tl.load(item)
    if row < 0:
        return
    first_query = tl.load(item + 1)
    count = tl.load(item + 2)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    lowest = tl.load(item + 5)
    highest = tl.load(item + 6)
    part = tl.load(item + 7)

    # Row m of the tile is head m % GROUP of the item's query m // GROUP.
    m = tl.arange(0, BLOCK_M)
    valid = m // GROUP < count
    of_query = queries + (first_query + m // GROUP) * _QUERY_FIELDS
    token = tl.load(of_query, mask=valid, other=0).to(tl.int64)
    position = highest
    if not ONE_QUERY:
        position = tl.load(of_query + 1, mask=valid, other=-1)
    head = stack * GROUP + m % GROUP
    dim_k = tl.arange(0, TILE_K)
    q = tl.load(
        query + (token * query_token + head * query_head)[:, None] + dim_k[None, :],
        mask=valid[:, None] & (dim_k < HEAD_DIM_K)[None, :],
        other=0.0,
    )
    if HALVES:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -_LARGEST_HALF), _LARGEST_HALF).to(tl.float16)
    # Weights times the scales of V would be lost below the smallest float16 where V is small.
    LIFT: tl.constexpr = 256.0 if QUANTISED and q.dtype == tl.float16 else 1.0
    acc = tl.zeros((BLOCK_M, TILE_V), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    if WITH_SINKS:
        # A sink is a key without value: it counts once, with the first part of a query.
        here = valid & (part <= 0)
        peak = tl.load(sinks + head, mask=here, other=float("-inf")).to(tl.float32) * _LOG2_E
        total = tl.where(here, 1.0, 0.0)
    if ONE_QUERY:
        total = tl.where(tl.arange(0, TILE)[None, :] == 0, total[:, None], 0.0)

    table = block_table + row.to(tl.int64) * table_row
    first = begin
    if WINDOWED:
        first += tl.maximum(_first_seen(lowest, span, CHUNKED) - begin, 0) // TILE * TILE
    # Tiles from `inner` up to `edge` lie in the window or chunk of every query and before all of them.
    inner = first
    edge = first
    if not ONE_QUERY:
        edge += tl.maximum(tl.minimum(end, lowest + 1) - first, 0) // TILE * TILE
        if WINDOWED:
            inner += (tl.maximum(_first_seen(highest, span, CHUNKED) - first, 0) + TILE - 1) // TILE * TILE
            acc, total, peak = _attend_tiles(
                acc, total, peak, q, first, tl.minimum(inner, end), end, position,
                keys, values, key_scales, value_scales, table, kv_head, scale, softcap, span, one,
                True, ONE_QUERY, WINDOWED, CHUNKED, SOFTCAPPED, QUANTISED, BY_WORDS, LIFT,
                KV_HEADS, BLOCK_SIZE, TILE, HEAD_DIM_K, HEAD_DIM_V, VALUE_STRIDE, PRECISION,
            )  # fmt: skip
        acc, total, peak = _attend_tiles(
            acc, total, peak, q, inner, edge, end, position,
            keys, values, key_scales, value_scales, table, kv_head, scale, softcap, span, one,
            False, ONE_QUERY, WINDOWED, CHUNKED, SOFTCAPPED, QUANTISED, BY_WORDS, LIFT,
            KV_HEADS, BLOCK_SIZE, TILE, HEAD_DIM_K, HEAD_DIM_V, VALUE_STRIDE, PRECISION,
        )  # fmt: skip
    acc, total, peak = _attend_tiles(
        acc, total, peak, q, tl.maximum(inner, edge), end, end, position,
        keys, values, key_scales, value_scales, table, kv_head, scale, softcap, span, one,
        True, ONE_QUERY, WINDOWED, CHUNKED, SOFTCAPPED, QUANTISED, BY_WORDS, LIFT,
        KV_HEADS, BLOCK_SIZE, TILE, HEAD_DIM_K, HEAD_DIM_V, VALUE_STRIDE, PRECISION,
    )  # fmt: skip
    if ONE_QUERY:
        total = tl.sum(total, axis=1)

    # A query that sees nothing (a padding row, a part of the context outside of the window) gets zeros.
    total = tl.where(total > 0.0, total, 1.0)
    acc = acc / (total * LIFT)[:, None]
    dim_v = tl.arange(0, TILE_V)
    stored = valid[:, None] & (dim_v < HEAD_DIM_V)[None, :]
    if part < 0:
        at = ((token * HEADS + head) * HEAD_DIM_V)[:, None] + dim_v[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=stored)
    else:
        slot = (tl.load(of_query + 2, mask=valid, other=0) + part).to(tl.int64) * HEADS + head
        tl.store(partial_out + (slot * HEAD_DIM_V)[:, None] + dim_v[None, :], acc, mask=stored)
        tl.store(partial_lse + slot, peak + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize_on_alignment=["partial_out", "partial_lse", "queries"])
def merge_kernel(
    partial_out,
    partial_lse,
    out,
    queries,
    HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_V: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the partial results of one query and head, PARTS at a time, weighted by their log-sum-exp."""
    of_query = queries + (tl.program_id(0) // HEADS).to(tl.int64) * _QUERY_FIELDS
    head = tl.program_id(0) % HEADS
    count = tl.load(of_query + 3)
    if count < 2:
        return
    token = tl.load(of_query).to(tl.int64)
    first = tl.load(of_query + 2).to(tl.int64)
    in_tile = tl.arange(0, PARTS)
    dim = tl.arange(0, TILE_V)
    acc = tl.zeros((TILE_V,), dtype=tl.float32)
    total = 0.0
    peak = float("-inf")
    for start in range(0, count, PARTS):
        there = start + in_tile < count
        slot = (first + start + in_tile) * HEADS + head
        lse = tl.load(partial_lse + slot, mask=there, other=float("-inf"))
        part = tl.load(
            partial_out + (slot * HEAD_DIM_V)[:, None] + dim[None, :],
            mask=there[:, None] & (dim < HEAD_DIM_V)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        pivot = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - pivot)
        fade = tl.exp2(peak - pivot)
        total = total * fade + tl.sum(weights, axis=0)
        acc = acc * fade + tl.sum(part * weights[:, None], axis=0)
        peak = new_peak
    acc = acc / tl.where(total > 0.0, total, 1.0)
    at = (token * HEADS + head) * HEAD_DIM_V + dim
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=dim < HEAD_DIM_V)
