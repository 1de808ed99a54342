"""Prompts that a step computes whole: attended apart, written into the cache as all others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuworker.attention.backends import backends_on, make_backend
from gpuworker.attention.interface import LayerAttention
from gpuworker.attention.torch_backend import TorchAttention, attend_packed
from gpuworker.attention.whole_prompts import WholePrompts
from gpuworker.native import library as native
from tests.support.gpuworker.attention_reference import CPU, Case, Step, in_type, random_step, reference

HEADS, DIM_K, DIM_V = 6, 40, 32  # of every head
PLAIN = LayerAttention(1, 0.3, values_in_keys=True)
# Rows as (start, length), and the first token of those at the end that are whole prompts.
STEPS = {
    "a chunk between": (((7, 1), (30, 1), (5, 6), (0, 9), (0, 21)), 8),
    "whole prompts alone": (((0, 40), (0, 3)), 0),
    "a chunk behind one": (((7, 1), (0, 9), (5, 6), (0, 4)), 16),
    "a chunk at the end": (((0, 9), (5, 6)), 15),
    "decodes alone": (((7, 1), (0, 1)), 2),
}


@pytest.fixture(params=backends_on("cpu"))
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.best() is None:
        pytest.skip("the native library was not built")
    return str(request.param)


def step_of(name: str) -> Step:
    return random_step(Case(STEPS[name][0], 4, HEADS, 1, 24, 16, values_in_keys=True))


def of_every_head(tokens: int) -> list[torch.Tensor]:
    """Return queries, K and V of every head."""
    draw = torch.Generator().manual_seed(tokens)
    return [torch.randn((tokens, HEADS, size), generator=draw) for size in (DIM_K, DIM_K, DIM_V)]


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 2.0, "sinks": torch.linspace(-1, 1, HEADS)}])
@pytest.mark.parametrize("name", STEPS)
def test_others_attend_on_latents_and_all_are_written(backend: str, name: str, options: dict[str, object]) -> None:
    step, cut, layer = step_of(name), STEPS[name][1], replace(PLAIN, **options)  # type: ignore[arg-type]
    attention = make_backend(backend, step.cache)
    assert isinstance(attention, WholePrompts)
    attention.begin(step.metadata)
    for number in (0, 1):  # two layers of a step
        here = replace(layer, layer=number)
        assert attention.first_whole(here, torch.float32) == cut
        out = attention.write_and_attend(here, step.query[:cut], step.key, step.value)
        assert out.shape == (cut, HEADS, 16)
        np.testing.assert_allclose(out.numpy(), reference(step, here)[:cut], atol=2e-5)
        query, key, value = of_every_head(step.case.tokens - cut)
        if cut < step.case.tokens:
            found, first = attention.attend_whole(here, query, key, value), 0
            for length in np.diff(step.metadata.query_start[step.metadata.query_start >= cut]):
                row = slice(first, first := first + int(length))
                expected = attend_packed(here, query[row], key[row], value[row])
                torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=0)
    plain = step_of(name)
    alone = TorchAttention(plain.cache)
    alone.begin(plain.metadata)
    for number in (0, 1):
        alone.write_and_attend(replace(PLAIN, layer=number), plain.query, plain.key, plain.value)
    assert torch.equal(step.cache.keys, plain.cache.keys)


def test_a_caller_that_does_not_ask_gives_all_queries(backend: str) -> None:
    step = step_of("a chunk between")
    attention = make_backend(backend, step.cache)
    attention.begin(step.metadata)
    out = attention.write_and_attend(PLAIN, step.query, step.key, step.value)
    np.testing.assert_allclose(out.numpy(), reference(step, PLAIN), atol=2e-5)


def test_steps_of_all_sizes_follow_each_other(backend: str) -> None:
    step = step_of("whole prompts alone")
    attention = make_backend(backend, step.cache)
    assert isinstance(attention, WholePrompts)
    for rows in (((0, 3),), ((0, 200), (0, 70), (0, 2)), ((0, 64),), ((0, 65), (0, 129))):
        size = 256  # so that the table has room; the cache is not read
        metadata = random_step(Case(rows, size, HEADS, 1, 24, 16, values_in_keys=True)).metadata
        attention.begin(metadata)
        assert attention.first_whole(PLAIN, torch.float32) == 0
        query, key, value = of_every_head(metadata.num_tokens)
        found, first = attention.attend_whole(PLAIN, query, key, value), 0
        for _, length in rows:
            row = slice(first, first := first + length)
            expected = attend_packed(PLAIN, query[row], key[row], value[row])
            torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_where_the_cache_rounds_all_attend_on_what_it_keeps(kv_dtype: str) -> None:
    step = in_type(step_of("a chunk between"), kv_dtype)
    attention = make_backend("auto", step.cache)
    assert isinstance(attention, WholePrompts)
    attention.begin(step.metadata)
    assert attention.first_whole(PLAIN, torch.float32) == step.case.tokens
    assert attention.first_whole(PLAIN, torch.bfloat16) == (8 if kv_dtype == "bfloat16" else step.case.tokens)


def test_a_cache_with_values_of_its_own_needs_no_such_backend() -> None:
    cache = random_step(Case(((0, 3),))).cache
    assert not isinstance(make_backend("auto", cache), WholePrompts)
    assert cache.keys.device == CPU
