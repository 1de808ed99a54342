"""Cascade attention: rows on shared blocks give the same results as apart, and so do steps padded for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gpuworker.attention import triton_backend as triton_attention
from gpuworker.attention.interface import DeviceTables
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.attention.triton_backend import Launches, TritonAttention
from gpuworker.kernels import triton_cache
from gpuworker.memory.kv_cache import KvCache
from tests.suites.triton_interpreted.attention_cases import OPTIONS, PLAIN, attend, quantised, small
from tests.support.gpuworker.attention_reference import CPU, Case, Step, random_step, reference

BLOCK = 4
ALWAYS = 1  # a cascade wherever it saves a byte


def sharing(rows: list[tuple[int, int]], shared: list[tuple[int, int, int]], seed: int = 0) -> Step:
    """A step of rows (start, length) in which, for each (row, of, blocks), a row begins with blocks of another one."""
    step = random_step(Case(tuple(rows), BLOCK, layers=2), seed)
    table = step.metadata.block_table.copy()
    past = list(step.past)
    for row, of, blocks in shared:
        table[row, :blocks], end = table[of, :blocks], blocks * BLOCK
        (their_keys, their_values), (keys, values) = past[of], past[row]
        past[row] = (
            torch.cat((their_keys[:, :end], keys[:, end:]), dim=1),
            torch.cat((their_values[:, :end], values[:, end:]), dim=1),
        )
    start, length = np.array(rows, dtype=np.int32).T
    packed = pack_rows(start, length, table, BLOCK)
    metadata = attention_metadata(packed, to_device(attention_arrays(packed), CPU))
    return replace(step, metadata=metadata, past=past)


NESTED = sharing(
    [(45, 1), (13, 1), (38, 1), (40, 1), (17, 1), (36, 1), (5, 9)],
    # Rows 0, 2, 3, 5 share eight blocks, 3 and 5 one more; row 4 four of them; row 1 stands alone.
    [(2, 0, 8), (3, 0, 8), (5, 3, 9), (4, 0, 4)],
)


@pytest.mark.parametrize("option", OPTIONS)
def test_rows_on_shared_blocks_attend_as_the_formula_says(option: str) -> None:
    attention = TritonAttention(NESTED.cache, tuned=small(2), cascade_bytes=ALWAYS)
    out = attend(NESTED, attention, OPTIONS[option])
    np.testing.assert_allclose(out.numpy(), reference(NESTED, OPTIONS[option]), atol=2e-5)


def test_they_do_so_in_parts_that_are_cut_too() -> None:
    for items in (1, 30):
        attention = TritonAttention(NESTED.cache, tuned=small(2, items=items), cascade_bytes=ALWAYS)
        np.testing.assert_allclose(attend(NESTED, attention, PLAIN).numpy(), reference(NESTED, PLAIN), atol=2e-5)


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_the_cascade_changes_nothing_in_a_quantised_cache(cache_dtype: str) -> None:
    cache = KvCache(replace(NESTED.case.geometry, dtype=cache_dtype), NESTED.cache.num_blocks, BLOCK, CPU)
    assert cache.key_scales is not None
    assert cache.value_scales is not None
    for pool, scales, given in (
        (cache.keys, cache.key_scales, NESTED.cache.keys),
        (cache.values, cache.value_scales, NESTED.cache.values),
    ):
        stored, scale = quantised(given, pool.dtype)
        pool.copy_(stored)
        scales.copy_(scale)
    step = replace(NESTED, cache=cache)
    outs = [
        attend(step, TritonAttention(cache, tuned=small(2), cascade_bytes=cascade), OPTIONS["all"])
        for cascade in (ALWAYS, None)
    ]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=0)


def test_a_cascade_that_does_not_pay_is_left_alone() -> None:
    step = sharing([(37, 1), (38, 1)], [(1, 0, 8)])
    # One layer keeps 2 * 8 floats a slot and head, 2 heads: reading 32 slots once less saves 4096 bytes.
    for cascade_bytes, launched in ((4096, True), (4097, False)):
        attention = TritonAttention(step.cache, tuned=small(2, items=1), cascade_bytes=cascade_bytes)
        assert bool(begin_padded(attention, step).many) is launched


@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize("shared", [[], [(1, 0, 7), (2, 0, 7)]], ids=["apart", "shared"])
def test_a_padded_step_attends_alike_and_padding_gets_zeros(option: str, shared: list[tuple[int, int, int]]) -> None:
    step = with_padding(sharing([(29, 1), (30, 1), (33, 1)], shared))
    attention = TritonAttention(step.cache, tuned=small(2), cascade_bytes=ALWAYS)
    assert bool(begin_padded(attention, step).many) is bool(shared)
    before = step.cache.keys.clone()
    out = attention.write_and_attend(OPTIONS[option], step.query, step.key, step.value)
    np.testing.assert_allclose(out[:3].numpy(), reference(step, OPTIONS[option]), atol=2e-5)
    assert not out[3].any()
    assert (step.cache.keys != before).any(dim=-1).sum() == 3 * step.case.num_kv_heads  # padding is written nowhere


def test_launches_of_one_step_repeat_as_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph repeats them: same arguments, other numbers behind their pointers."""
    first = with_padding(sharing([(29, 1), (30, 1), (33, 1)], [(1, 0, 7), (2, 0, 7)]))
    second = with_padding(sharing([(41, 1), (13, 1), (12, 1)], [(2, 1, 3)], seed=1))
    attention = TritonAttention(first.cache, tuned=small(2), cascade_bytes=ALWAYS)
    captured = begin_padded(attention, first)
    launched = [Recorded(monkeypatch, name) for name in ("write_kv_kernel", "attend_kernel", "merge_kernel")]
    out = attention.write_and_attend(PLAIN, first.query, first.key, first.value)
    assert [len(kernel.launches) for kernel in launched] == [1, 2, 1]
    expected = reference(second, PLAIN)
    for old, new in (
        (first.cache.keys, second.cache.keys),
        (first.cache.values, second.cache.values),
        (first.query, second.query),
        (first.key, second.key),
        (first.value, second.value),
        *((getattr(first.metadata.device, name), getattr(second.metadata.device, name)) for name in TABLES),
    ):
        old.copy_(new)
    assert begin_padded(attention, second) == captured
    out.fill_(torch.nan)
    for kernel in launched:
        kernel.repeat()
    np.testing.assert_allclose(out[:3].numpy(), expected, atol=2e-5)
    assert not out[3].any()


def test_a_step_that_was_not_reserved_for_is_refused() -> None:
    step = sharing([(5, 1), (6, 1)], [])
    attention = TritonAttention(step.cache, tuned=small(2))
    with pytest.raises(ValueError, match="does not fit"):
        attention.begin_padded(step.metadata, 4, torch.float32)
    attention.reserve_padded(2, 4, torch.float32)
    attention.begin_padded(step.metadata, 4, torch.float32)
    prefill = sharing([(5, 1), (6, 2)], [])
    with pytest.raises(ValueError, match="only steps of decodes"):
        attention.begin_padded(prefill.metadata, 4, torch.float32)


def begin_padded(attention: TritonAttention, step: Step) -> Launches:
    attention.reserve_padded(8, step.case.num_heads, torch.float32)
    return attention.begin_padded(step.metadata, step.case.num_heads, torch.float32)


TABLES = ("query_start", "context_len", "block_table", "slot_mapping")


def with_padding(step: Step) -> Step:
    """Add a padding row: context 0, slot -1."""
    old = step.metadata
    arrays = [
        np.append(old.query_start, old.num_tokens + 1),
        np.append(old.context_len, 0),
        np.concatenate((old.block_table, np.zeros_like(old.block_table[:1]))),
        np.append(old.slot_mapping, -1),
    ]
    tables: dict[str, Any] = dict(zip(TABLES, (array.astype(np.int32) for array in arrays), strict=True))
    device = DeviceTables(*(torch.from_numpy(array.copy()) for array in tables.values()))
    metadata = replace(old, num_decodes=old.num_decodes + 1, device=device, **tables)
    query, key, value = (torch.cat((t, t[:1])) for t in (step.query, step.key, step.value))
    return replace(step, metadata=metadata, query=query, key=key, value=value)


class Recorded:
    """Replaces a kernel: launches it, and can repeat its launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        module = triton_cache if hasattr(triton_cache, name) else triton_attention
        self._kernel = getattr(module, name)
        self.launches: list[Callable[[], None]] = []
        monkeypatch.setattr(module, name, self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            self.launches.append(lambda: self._kernel[grid](*arguments, **options))
            self.launches[-1]()

        return launch

    def repeat(self) -> None:
        for launch in self.launches:
            launch()
