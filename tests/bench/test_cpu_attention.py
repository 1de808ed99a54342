"""The attention benchmark: what it divides by, and that both sides read as many bytes."""

from __future__ import annotations

import pytest
import torch

from bench import cpu_attention
from bench.cpu_attention import Heads, Rows, first_quartiles, floor_calls, geometric_mean, native_calls
from gpuworker.native import library as native

SMALL = Heads(4, 2, 16)


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "_ROTATED_BYTES", 1 << 18)


def test_the_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert geometric_mean([4.0, 0.25, 1.0]) == pytest.approx(1.0)


def test_bytes_are_those_of_k_and_v_of_one_layer() -> None:
    rows = Rows(SMALL, "bfloat16", [(63, 1)] * 3)
    assert rows.bytes == 2 * 3 * 64 * 2 * 16 * 2
    assert rows.bytes == rows.cache.keys[0].nbytes + rows.cache.values[0].nbytes
    assert rows.layers * rows.bytes >= 1 << 18


def test_shared_positions_lie_on_the_same_blocks() -> None:
    table = Rows(SMALL, "float32", [(63, 1)] * 3, shared=32).step.block_table
    assert (table[:, :2] == table[0, :2]).all()
    assert len(set(table[:, 2:].ravel().tolist())) == 6


def test_quartiles_are_of_the_calls_own_times() -> None:
    indices: list[int] = []
    large = torch.randn(1 << 16)
    quick, slow = first_quartiles([indices.append, lambda _: large.sort() and None], seconds=0.0)
    assert indices == [*range(len(indices))]
    assert 0 < quick < slow


@pytest.mark.skipif(native.best() is None, reason="the native library was not built")
def test_ours_and_the_floor_run_on_every_layer() -> None:
    library = native.best()
    assert library is not None
    rows = Rows(SMALL, "int8", [(63, 1)] * 3)
    before = rows.cache.keys.clone()
    attend, read = native_calls(rows, library, 1), floor_calls(rows, library, 1)
    for layer in range(rows.layers):
        attend(layer)
        read(layer)
    changed = (rows.cache.keys != before).flatten(2).any(dim=-1)  # the slots that the rows' own tokens went to
    assert changed.any(dim=1).all()
