"""A part of a cached block is copied in every layout of the KV cache, and no token or log-probability changes by it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from common.contracts.types import SamplingParams
from gpuworker.config import GpuWorkerSettings
from gpuworker.native.library import best
from gpuworker.plane.assembly import ModelPlane, assemble
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.gpuworker.engine_harness import EngineDriver, Result

SIZE, COUNT = 64, 12
ASKED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, logprobs=3, ignore_eos=True)

needs_native = pytest.mark.skipif(best() is None, reason="the native library was not built")
NATIVE = [
    {"dtype": "bfloat16", "kv_cache_dtype": kv, "deterministic": True}
    for kv in ("auto", "float32", "float16", "int8")
]  # fmt: skip
TORCH = [{"dtype": "float32", "kv_cache_dtype": kv, "model_impl": "transformers"} for kv in ("auto", "int8", "fp8")]
WAYS = [pytest.param(way, id=f"native {way['kv_cache_dtype']}", marks=needs_native) for way in NATIVE]
WAYS += [pytest.param(way, id=f"transformers {way['kv_cache_dtype']}") for way in TORCH]


def plane(**options: Any) -> ModelPlane:
    settings: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "kv_blocks": 16,
        "block_size": SIZE,
        "max_model_len": 512,
    }
    return assemble(GpuWorkerSettings(model=str(checkpoint("llama")), **(settings | options)))


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(6, VOCAB_SIZE) for _ in range(count)]


FIRST = tokens(3 * SIZE, 1)
DIVERGING = {
    "in the first block": (FIRST[:40] + tokens(50, 2), 32),
    "in a later block": (FIRST[: SIZE + 50] + tokens(70, 3), SIZE + 48),
    "at the end of the prompt": (FIRST[: SIZE + 33], SIZE + 32),
    "whole blocks": (FIRST, 3 * SIZE - 1),
}


def run(worker: ModelPlane, before: Sequence[Sequence[int]], prompt: Sequence[int], caching: bool) -> Result:
    """Return what a prompt gets on a fresh engine after sequences that have ended."""
    config = replace(worker.agent_config(), prefix_caching=caching)
    with EngineDriver(worker.runner, config) as engine:
        for each in before:
            engine.submit(each, 4)
            engine.finish()
        asked = engine.submit(prompt, COUNT, ASKED)
        engine.finish()
        engine.assert_all_free()
        return engine.results[asked]


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_part_changes_no_token(way: dict[str, Any]) -> None:
    for where, (prompt, cached) in DIVERGING.items():
        alone, after = run(plane(**way), (), prompt, caching=False), run(plane(**way), [FIRST], prompt, caching=True)
        assert (alone.message, after.message) == ("", "")
        assert (alone.usage.cached_tokens, after.usage.cached_tokens) == (0, cached), where
        assert after.tokens == alone.tokens, where
        if way.get("deterministic"):
            assert after.logprobs == alone.logprobs, where


@needs_native
def test_a_block_that_was_completed_behind_a_copy_is_a_hit_for_others() -> None:
    """The second prompt's block begins with a copy. The third shares it whole, and part of the fourth."""
    second = FIRST[: SIZE + 50] + tokens(2 * SIZE, 4)
    third = second[: 2 * SIZE + 20] + tokens(30, 5)
    way = {"dtype": "bfloat16", "deterministic": True}
    alone = run(plane(**way), (), third, caching=False)
    after = run(plane(**way), [FIRST, second], third, caching=True)
    assert after.usage.cached_tokens == 2 * SIZE + 16
    assert (after.tokens, after.logprobs) == (alone.tokens, alone.logprobs)


def test_blocks_of_32_slots_are_shared_whole_or_not_at_all() -> None:
    way = {"dtype": "float32", "block_size": 32, "model_impl": "transformers"}
    after = run(plane(**way), [FIRST], FIRST[: SIZE + 30] + tokens(40, 6), caching=True)
    assert after.usage.cached_tokens == SIZE
