"""Low-rank products of LoRA adapters in Triton, grouped by adapter: the idea of Punica's SGMV (arXiv 2310.18547).

A first kernel shrinks: u = A · x for a tile of rows of one adapter, each of its parts, and a piece of the inputs. A
second one expands: it adds the pieces of u up, and B · u to a tile of outputs. Pieces make enough programs of a few
rows; they are added up in order, so the bits do not depend on which program ends first. A program reads where A and B
lie from a table of addresses: adapters have ranks and memory of their own.

The grids follow from the rows of each adapter, which the host knows. Nothing waits for the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from gpuworker.kernels.torch_adapters import NUM_PARTS, ROW_TILE, AdapterRows

_OUTPUT_TILE: Final = 64
_INPUT_TILE: Final = 64
_PIECE: Final = 512
"""Inputs of one program at least; a product has at most _MOST_PIECES of these programs for a part."""
_MOST_PIECES: Final = 8
_LEAST_RANK_TILE: Final = 16


def add_low_rank(out: torch.Tensor, x: torch.Tensor, product: int, sizes: Sequence[int], rows: AdapterRows) -> None:
    """Add what adapters do to a product, in place, as `torch_adapters.add_low_rank`.

    The last axis of `x` and `out` is contiguous, and so are A and B, whose type is that of `x`.
    """
    inputs, outputs = x.shape[1], sum(sizes)
    rank_tile = max(_LEAST_RANK_TILE, triton.next_power_of_2(max(each.rank for each in rows.adapters)))
    pieces = max(1, min(_MOST_PIECES, inputs // _PIECE))
    shrunk = x.new_empty((pieces, len(rows.rows), len(sizes), rank_tile), dtype=torch.float32)
    # The interpreter multiplies tiles of bfloat16 as if they were integers: there, they are widened before.
    widened = x.dtype == torch.bfloat16 and triton.knobs.runtime.interpret
    constants = {
        "PARTS": len(sizes),
        "MOST_PARTS": NUM_PARTS,
        "INPUTS": inputs,
        "ROW_TILE": ROW_TILE,
        "RANK_TILE": rank_tile,
        "WIDENED": widened,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    of_step = (rows.rows, rows.tiles, rows.tables, rows.ranks)
    tiles, count = len(rows.tiles), len(rows.rows)
    piece = triton.cdiv(triton.cdiv(inputs, pieces), _INPUT_TILE) * _INPUT_TILE
    shrink_kernel[(tiles, len(sizes), pieces)](
        x, shrunk, *of_step, product, x.stride(0), count, PIECE=piece, INPUT_TILE=_INPUT_TILE, **constants
    )
    ends = [*(sum(sizes[: at + 1]) for at in range(len(sizes))), *[outputs] * (NUM_PARTS - len(sizes))]
    expand_kernel[(tiles, triton.cdiv(outputs, _OUTPUT_TILE))](
        out,
        shrunk,
        *of_step,
        product,
        out.stride(0),
        count,
        END_0=ends[0],
        END_1=ends[1],
        END_2=ends[2],
        PIECES=pieces,
        OUTPUT_TILE=_OUTPUT_TILE,
        **constants,
    )


@triton.jit
def _address(tables, adapter, product, part, side, MOST_PARTS: tl.constexpr):
    """Return where A (side 0) or B (1) of a part lies; 0: the adapter does not change it."""
    table = tl.load(tables + adapter).to(tl.pointer_type(tl.int64))
    return tl.load(table + (product * MOST_PARTS + part) * 2 + side)


@triton.jit(do_not_specialize=["product", "count"])
def shrink_kernel(
    x,
    shrunk,
    rows,
    tiles,
    tables,
    ranks,
    product,
    x_stride,
    count,
    PIECE: tl.constexpr,
    INPUT_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    WIDENED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program makes a piece of A · x for a tile of rows and one part."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    piece = tl.program_id(2)
    adapter = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    own = tl.load(tiles + tile * 3 + 2)
    rank = tl.load(ranks + adapter)
    address = _address(tables, adapter, product, part, 0, MOST_PARTS)
    if address != 0:
        a = address.to(tl.pointer_type(x.dtype.element_ty))
        row = tl.arange(0, ROW_TILE)
        inside = row < own
        taken = tl.load(rows + first + row, mask=inside, other=0).to(tl.int64)
        j = tl.arange(0, RANK_TILE)
        at = tl.arange(0, INPUT_TILE)
        acc = tl.zeros([ROW_TILE, RANK_TILE], tl.float32)
        for start in range(0, PIECE, INPUT_TILE):
            column = piece * PIECE + start + at
            known = column < INPUTS
            given = tl.load(
                x + (taken * x_stride)[:, None] + column[None, :], mask=inside[:, None] & known[None, :], other=0.0
            )
            factor = tl.load(
                a + (j * INPUTS)[None, :] + column[:, None], mask=(j < rank)[None, :] & known[:, None], other=0.0
            )
            if WIDENED:
                given = given.to(tl.float32)
                factor = factor.to(tl.float32)
            acc = tl.dot(given, factor, acc, input_precision=PRECISION)
        place = (piece.to(tl.int64) * count + first + row) * PARTS + part
        tl.store(shrunk + (place * RANK_TILE)[:, None] + j[None, :], acc, mask=inside[:, None])


@triton.jit(do_not_specialize=["product", "count"])
def expand_kernel(
    out,
    shrunk,
    rows,
    tiles,
    tables,
    ranks,
    product,
    out_stride,
    count,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    END_2: tl.constexpr,
    PIECES: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    WIDENED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program adds B · u to a tile of outputs, for a tile of rows; the tile may have outputs of several parts."""
    tile = tl.program_id(0)
    low = tl.program_id(1) * OUTPUT_TILE
    adapter = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    own = tl.load(tiles + tile * 3 + 2)
    rank = tl.load(ranks + adapter)
    row = tl.arange(0, ROW_TILE)
    inside = row < own
    taken = tl.load(rows + first + row, mask=inside, other=0).to(tl.int64)
    output = low + tl.arange(0, OUTPUT_TILE)
    j = tl.arange(0, RANK_TILE)
    for part in tl.static_range(PARTS):
        begin = 0 if part == 0 else (END_0 if part == 1 else END_1)
        end = END_0 if part == 0 else (END_1 if part == 1 else END_2)
        address = _address(tables, adapter, product, part, 1, MOST_PARTS)
        if (address != 0) & (low < end) & (low + OUTPUT_TILE > begin):
            made = tl.zeros([ROW_TILE, RANK_TILE], tl.float32)
            for piece in range(PIECES):
                place = (tl.full([], piece, tl.int64) * count + first + row) * PARTS + part
                made += tl.load(
                    shrunk + (place * RANK_TILE)[:, None] + j[None, :],
                    mask=inside[:, None] & (j < rank)[None, :],
                    other=0.0,
                )
            mine = (output >= begin) & (output < end)
            b = address.to(tl.pointer_type(out.dtype.element_ty))
            factor = tl.load(
                b + ((output - begin).to(tl.int64) * rank)[None, :] + j[:, None],
                mask=mine[None, :] & (j < rank)[:, None],
                other=0.0,
            )
            u = made.to(factor.dtype)
            if WIDENED:
                u = u.to(tl.float32)
                factor = factor.to(tl.float32)
            acc = tl.dot(u, factor, tl.zeros([ROW_TILE, OUTPUT_TILE], tl.float32), input_precision=PRECISION)
            into = out + (taken * out_stride)[:, None] + output[None, :]
            there = inside[:, None] & mine[None, :]
            before = tl.load(into, mask=there, other=0.0).to(tl.float32)
            tl.store(into, (before + acc).to(out.dtype.element_ty), mask=there)
