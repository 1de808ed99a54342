"""Low-rank products in Triton against the same sums in float64: rows of several adapters, of any ranks and parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gpuworker.kernels import torch_adapters, triton_adapters
from gpuworker.kernels.torch_adapters import ROW_TILE, AdapterRows, DeviceAdapter, LowRankPart
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.llama.adapters import adapter_rows

CPU = torch.device("cpu")
DRAW = torch.Generator()
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test draws the same numbers, whichever ran before it in its process."""
    DRAW.manual_seed(0)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made: torch.Tensor = torch.randn(shape, generator=DRAW) * float(shape[-1]) ** -0.5
    return made.to(dtype)


def made(
    rank: int, inputs: int, sizes: Sequence[int], without: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> DeviceAdapter:
    """Return an adapter of two products, the second of which counts."""
    parts = [
        None if place in without else LowRankPart(drawn(rank, inputs, dtype=dtype), drawn(size, rank, dtype=dtype))
        for place, size in enumerate(sizes)
    ]
    return DeviceAdapter.of(rank, [[None] * len(sizes), parts], CPU)


def gathered(adapters: Sequence[DeviceAdapter], of_row: Sequence[int]) -> AdapterRows:
    return adapter_rows(StepAdapters(tuple(adapters), np.array(of_row, dtype=np.int32)), CPU)


def expected(
    out: torch.Tensor, x: torch.Tensor, sizes: Sequence[int], adapters: Sequence[DeviceAdapter], of_row: Sequence[int]
) -> torch.Tensor:
    found = out.double().clone()
    for row, number in enumerate(of_row):
        parts = adapters[number].products[1] if number >= 0 else ()
        for part, first, size in zip(parts, np.cumsum([0, *sizes]), sizes, strict=False):
            if part is not None:
                found[row, first : first + size] += part.b.double() @ (part.a.double() @ x[row].double())
    return found


MIXED = [0, -1, 1, 0, 2, 0, -1, 2, 0, 0]
MANY = [place % 4 - 1 for place in range(4 * (2 * ROW_TILE + 1))]
CASES = {
    "one row of one adapter": (1, [0], 40, (48,)),
    "several adapters beside the base": (3, MIXED, 40, (48,)),
    "several linears, none a multiple of a tile": (3, MIXED, 70, (65, 30, 33)),
    "more rows than a tile": (3, MANY, 33, (20, 20)),
    "inputs in pieces": (3, MIXED, 2100, (16,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_what_is_added_is_that_of_each_rows_adapter(name: str, dtype: torch.dtype) -> None:
    count, of_row, inputs, sizes = CASES[name]
    adapters = [made(rank, inputs, sizes, dtype=dtype) for rank in (3, 16, 40)[:count]]
    x, out = drawn(len(of_row), inputs, dtype=dtype), drawn(len(of_row), sum(sizes), dtype=dtype)
    wanted, before = expected(out, x, sizes, adapters, of_row), out.clone()
    rows = gathered(adapters, of_row)
    triton_adapters.add_low_rank(out, x, 1, sizes, rows)
    base = [row for row, number in enumerate(of_row) if number < 0]
    assert torch.equal(out[base], before[base])
    assert (out.double() - wanted).norm() / (wanted - before.double()).norm() < TOLERANCE[dtype]
    by_torch = before.clone()
    torch_adapters.add_low_rank(by_torch, x, 1, sizes, rows)
    torch.testing.assert_close(out, by_torch, atol=20 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_what_an_adapter_does_not_change_keeps_its_bits() -> None:
    sizes, of_row = (65, 30, 33), [0, 1, 1, 0]
    adapters = [made(4, 40, sizes, without=(1,)), made(8, 40, sizes, without=(0, 2))]
    x, out = drawn(4, 40), drawn(4, sum(sizes))
    wanted, before = expected(out, x, sizes, adapters, of_row), out.clone()
    rows = gathered(adapters, of_row)
    triton_adapters.add_low_rank(out, x, 0, sizes, rows)
    assert torch.equal(out, before)
    triton_adapters.add_low_rank(out, x, 1, sizes, rows)
    assert torch.equal(out[0, 65:95], before[0, 65:95])
    assert torch.equal(out[1, :65], before[1, :65])
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_rows_of_wider_tensors_and_no_dependence_on_the_rows_beside() -> None:
    adapters = [made(5, 40, (48,)), made(9, 40, (48,))]
    x, out = drawn(6, 50)[:, :40], drawn(6, 60)[:, 3:51]
    alone = out[3:4].clone()
    triton_adapters.add_low_rank(alone, x[3:4], 1, (48,), gathered(adapters, [1]))
    of_row = [0, 1, 0, 1, 1, -1]
    triton_adapters.add_low_rank(out, x, 1, (48,), gathered(adapters, of_row))
    assert torch.equal(out[3:4], alone)


def test_rows_are_gathered_by_adapter_in_tiles() -> None:
    adapters = [made(2, 8, (8,)) for _ in range(3)]
    of_row = [2] * (ROW_TILE + 1) + [-1, 0]
    rows = gathered(adapters, of_row)
    assert rows.rows.tolist() == [ROW_TILE + 2, *range(ROW_TILE + 1)]
    assert rows.tiles.tolist() == [[0, 0, 1], [2, 1, ROW_TILE], [2, 1 + ROW_TILE, 1]]
    assert rows.counts == (1, 0, ROW_TILE + 1)
