"""The experts of a layer in Triton: the choice of each token, and products grouped by expert.

A pair is a token and one of its experts. Pairs are ordered by expert, and each tile of a product belongs to one expert:
a step reads the weights of an expert once for a tile of rows, and only of experts that some token chose.

No shape, grid or allocation depends on the choice, and nothing waits for the device: CUDA graphs can hold all of it.
The grid of a product has as many tiles as the least favourable choice would need. A program finds its expert by the
counts in memory, and ends at once where there is no tile left.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from gpuworker.kernels.torch_experts import Experts

_PLACE_TILE: Final = 1024
_SUM_TILE: Final = 1024
_FEW_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile of a grouped product: `rows` of one expert, `outputs` of them at once, over `inputs` at a time."""

    rows: int
    outputs: int
    inputs: int
    warps: int


@dataclass(frozen=True, slots=True)
class Groups:
    """The pairs of a step by expert. Pair p is token p // top_k with its choice p % top_k.

    order [T * top_k] int32: pairs, expert by expert, each expert's in the order of tokens; counts [experts] int32: the
    pairs of each.
    """

    order: torch.Tensor
    counts: torch.Tensor


def mix_experts(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the outputs of each token's experts, added up by weight, [T, hidden] for x [T, hidden] with whole rows."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return out
    chosen, weights = choose(linear(x, experts.router), experts.top_k, normalised=experts.normalised)
    groups = group(chosen, experts.count)
    inner = gate_up_product(x, experts.gate_up, groups, experts.top_k)
    made = product(inner, experts.down, groups)
    grid = (len(x), triton.cdiv(x.shape[1], _SUM_TILE))
    add_up_kernel[grid](made, weights, out, x.shape[1], TOP_K=experts.top_k, TILE=_SUM_TILE, num_warps=4)
    return out


def choose(logits: torch.Tensor, top_k: int, *, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts [T, top_k] int32, the best first, and their weights in float32.

    logits [T, count]. Of equal logits the lower number is taken. A logit that is not a number leads to some expert:
    no later kernel reads beside the weights.
    """
    tokens, count = logits.shape
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    choose_kernel[(tokens,)](
        logits,
        chosen,
        weights,
        logits.stride(0),
        COUNT=count,
        COUNT_TILE=triton.next_power_of_2(count),
        TOP_K=top_k,
        TOP_TILE=triton.next_power_of_2(top_k),
        NORMALISED=normalised,
        num_warps=1,
    )
    return chosen, weights


def group(chosen: torch.Tensor, count: int) -> Groups:
    """Order the pairs of a step by expert; chosen [T, top_k] int32, contiguous, of numbers below `count`."""
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    counts = torch.empty(count, dtype=torch.int32, device=chosen.device)
    group_kernel[(count,)](chosen, order, counts, chosen.numel(), TILE=_PLACE_TILE, num_warps=4)
    return Groups(order, counts)


def gate_up_product(x: torch.Tensor, gate_up: torch.Tensor, groups: Groups, top_k: int) -> torch.Tensor:
    """Return silu(gate) * up of every pair, [T * top_k, inner], for x [T, hidden]; gate_up [count, 2 * inner, hidden].

    Gate and up stay in float32 until they are multiplied.
    """
    return _product(x, gate_up, groups, gate_up.shape[1] // 2, top_k, paired=True)


def product(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return, for each pair of x [pairs, inputs], its product with its expert of weight [count, outputs, inputs]."""
    return _product(x, weight, groups, weight.shape[1], 1, paired=False)


def _product(
    x: torch.Tensor, weight: torch.Tensor, groups: Groups, outputs: int, shared_by: int, *, paired: bool
) -> torch.Tensor:
    """Return [pairs, outputs]; row p // shared_by of x is the input of pair p."""
    pairs, count = len(groups.order), len(groups.counts)
    out = x.new_empty((pairs, outputs))
    tiles = tiles_for(pairs, count, x.dtype)
    grid = (most_tiles(pairs, count, tiles.rows), triton.cdiv(outputs, tiles.outputs))
    # The interpreter multiplies tiles of bfloat16 as if they were integers: there, they are widened before.
    widened = x.dtype == torch.bfloat16 and triton.knobs.runtime.interpret
    expert_product_kernel[grid](
        x,
        weight,
        groups.order,
        groups.counts,
        out,
        x.stride(0),
        COUNT=count,
        COUNT_TILE=triton.next_power_of_2(count),
        OUTPUTS=outputs,
        INPUTS=weight.shape[2],
        SHARED_BY=shared_by,
        PAIRED=paired,
        WIDENED=widened,
        ROW_TILE=tiles.rows,
        OUTPUT_TILE=tiles.outputs,
        INPUT_TILE=tiles.inputs,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
    )
    return out


def tiles_for(pairs: int, count: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles of products: few rows, as matrix units take at least, or many where experts have more pairs.

    There are these two alone: the self-test and the profile of a full step compile both, and no later step compiles.
    Float32 has no matrix unit: its tiles are small, so that all sums stay in registers.
    """
    few = pairs <= _FEW_ROWS * min(count, pairs)
    if dtype.itemsize > 2:
        return Tiles(_FEW_ROWS if few else 32, 32, 32, 4)
    return Tiles(_FEW_ROWS, 64, 64, 4) if few else Tiles(128, 64, 64, 8)


def most_tiles(pairs: int, count: int, rows: int) -> int:
    """Return how many tiles of rows any choice needs at most: each expert with pairs may leave its last one open."""
    chosen = min(pairs, count)
    return chosen + (pairs - chosen) // rows


@triton.jit
def choose_kernel(
    logits,
    chosen,
    weights,
    stride,
    COUNT: tl.constexpr,
    COUNT_TILE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_TILE: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """One program chooses the experts of one token."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COUNT_TILE)
    value = tl.load(logits + row * stride + at, mask=at < COUNT, other=float("-inf")).to(tl.float32)
    peak = tl.max(value, axis=0)
    total = tl.sum(tl.exp(value - peak), axis=0)
    rank = tl.arange(0, TOP_TILE)
    number = tl.zeros([TOP_TILE], tl.int32)
    weight = tl.zeros([TOP_TILE], tl.float32)
    for turn in range(TOP_K):
        best = tl.max(value, axis=0)
        expert = tl.min(tl.where(value == best, at, COUNT - 1), axis=0)
        number = tl.where(rank == turn, expert, number)
        weight = tl.where(rank == turn, tl.exp(best - peak), weight)
        value = tl.where(at == expert, float("-inf"), value)
    if NORMALISED:
        total = tl.sum(weight, axis=0)
    into = row * TOP_K + rank
    tl.store(chosen + into, number, mask=rank < TOP_K)
    tl.store(weights + into, weight / total, mask=rank < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def group_kernel(chosen, order, counts, pairs, TILE: tl.constexpr):
    """One program counts the pairs of one expert, and those of experts before it; then it places its own.

    Programs need nothing of each other, and the order is the same in each run.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, TILE)
    before = tl.zeros([TILE], tl.int32)
    own = tl.zeros([TILE], tl.int32)
    for start in range(0, pairs, TILE):
        # What is read behind the pairs is larger than any expert.
        found = tl.load(chosen + start + at, mask=start + at < pairs, other=0x7FFFFFFF)
        before += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(own, axis=0))
    place = tl.sum(before, axis=0)
    for start in range(0, pairs, TILE):
        found = tl.load(chosen + start + at, mask=start + at < pairs, other=0x7FFFFFFF)
        hit = (found == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(hit, axis=0) - 1, start + at, mask=hit != 0)
        place += tl.sum(hit, axis=0)


@triton.jit
def expert_product_kernel(
    x,
    weight,
    order,
    counts,
    out,
    x_stride,
    COUNT: tl.constexpr,
    COUNT_TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARED_BY: tl.constexpr,
    PAIRED: tl.constexpr,
    WIDENED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    INPUT_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program makes a tile of outputs of one expert; with PAIRED, of silu(gate) * up.

    Programs with the same outputs are adjacent: those of one expert find its weights in the cache.
    """
    tile = tl.program_id(0)
    at = tl.arange(0, COUNT_TILE)
    own = tl.load(counts + at, mask=at < COUNT, other=0)
    tiles = (own + ROW_TILE - 1) // ROW_TILE
    # The first expert whose tiles end behind this one. With no tile left, all end before it.
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    if expert < COUNT:
        first = tl.sum(tl.where(at < expert, own, 0), axis=0)
        count = tl.sum(tl.where(at == expert, own, 0), axis=0)
        row = (tile - tl.sum(tl.where(at < expert, tiles, 0), axis=0)) * ROW_TILE + tl.arange(0, ROW_TILE)
        inside = row < count
        pair = tl.load(order + first + row, mask=inside, other=0).to(tl.int64)
        output = tl.program_id(1) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
        there = output < OUTPUTS
        at_input = tl.arange(0, INPUT_TILE)
        x_at = x + (pair // SHARED_BY * x_stride)[:, None] + at_input[None, :]
        MATRICES: tl.constexpr = 2 if PAIRED else 1
        base = weight + expert.to(tl.int64) * (MATRICES * OUTPUTS * INPUTS)
        weight_at = base + (output.to(tl.int64) * INPUTS)[None, :] + at_input[:, None]
        acc = tl.zeros([ROW_TILE, OUTPUT_TILE], tl.float32)
        acc_up = tl.zeros([ROW_TILE, OUTPUT_TILE], tl.float32)
        for start in range(0, INPUTS, INPUT_TILE):
            known = start + at_input < INPUTS
            rows = tl.load(x_at + start, mask=inside[:, None] & known[None, :], other=0.0)
            taken = there[None, :] & known[:, None]
            columns = tl.load(weight_at + start, mask=taken, other=0.0)
            if WIDENED:
                rows = rows.to(tl.float32)
                columns = columns.to(tl.float32)
            acc = tl.dot(rows, columns, acc, input_precision=PRECISION)
            if PAIRED:
                ups = tl.load(weight_at + OUTPUTS * INPUTS + start, mask=taken, other=0.0)
                if WIDENED:
                    ups = ups.to(tl.float32)
                acc_up = tl.dot(rows, ups, acc_up, input_precision=PRECISION)
        if PAIRED:
            acc = acc * tl.sigmoid(acc) * acc_up
        into = out + (pair * OUTPUTS)[:, None] + output[None, :]
        tl.store(into, acc.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit
def add_up_kernel(made, weights, out, hidden, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """One program adds up TILE outputs of one token's experts, the one of the largest weight first."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < hidden
    total = tl.zeros([TILE], tl.float32)
    for rank in range(TOP_K):
        pair = token * TOP_K + rank
        value = tl.load(made + pair * hidden + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * value
    tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), mask=inside)
