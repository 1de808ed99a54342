"""`--deterministic`: a sequence's tokens and log-probabilities are the same to the last bit however it came to be run.

In bfloat16, where an error of one bit shows at once, on contexts that are long enough for attention to be split. Tokens
are drawn at random: a draw and its log-probabilities carry the bits of the logits.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.contracts.errors import Unsupported
from common.contracts.types import ANY_ARITHMETIC, SamplingParams, TokenLogprobs
from gpuworker.attention.backends import BackendOptions, make_backend
from gpuworker.attention.interface import AttentionBackend
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.bit_equality import refuse_unequal_bits
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.native.library import best
from gpuworker.plane.assembly import ModelPlane, assemble
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.gpuworker.engine_harness import EngineDriver, Result

pytestmark = pytest.mark.skipif(best() is None, reason="the native library was not built")
FAMILY = ("llama", "qwen3", "mistral", "mixtral", "qwen3_moe", "olmoe")
COUNT, PROMPT, SHARED = 24, 300, 160
ASKED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, logprobs=3, ignore_eos=True)
Bits = tuple[list[int], list[TokenLogprobs]]


def plane(kind: str = "llama", **options: Any) -> ModelPlane:
    settings: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True, "threads": 1}
    settings |= {"device": "cpu", "kv_blocks": 128, "max_model_len": 512, **options}
    return assemble(GpuWorkerSettings(model=str(checkpoint(kind)), **settings))


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(6, VOCAB_SIZE) for _ in range(count)]


PROMPT_TOKENS = tokens(PROMPT, 0)


def neighbours(count: int) -> list[list[int]]:
    """Return prompts of all lengths that share nothing with the asked one."""
    return [tokens(1 + 61 * n, 100 + n) for n in range(count)]


def bits(result: Result) -> Bits:
    assert result.message == ""
    return result.tokens, result.logprobs


def run(
    worker: ModelPlane, before: Iterable[Sequence[int]] = (), beside: Iterable[Sequence[int]] = (), budget: int = 2048
) -> Result:
    """Return what the asked sequence gets on a fresh engine, after sequences that have ended and beside others."""
    config = replace(worker.agent_config(), max_num_batched_tokens=budget)
    with EngineDriver(worker.runner, config) as engine:
        for prompt in before:
            engine.submit(prompt, 4)
        engine.finish()
        for prompt in beside:
            engine.submit(prompt, COUNT + 9)
        asked = engine.submit(PROMPT_TOKENS, COUNT, ASKED)
        engine.finish()
        return engine.results[asked]


@functools.cache
def alone(kind: str) -> Result:
    """What the sequence gets on a worker of its own."""
    return run(plane(kind))


@pytest.fixture(params=FAMILY)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_in_a_batch(kind: str) -> None:
    assert bits(run(plane(kind), beside=neighbours(7))) == bits(alone(kind))


@pytest.mark.parametrize("budget", [5, 64, 257])
def test_in_chunks_beside_others(kind: str, budget: int) -> None:
    assert bits(run(plane(kind), beside=neighbours(3), budget=budget)) == bits(alone(kind))


def test_after_a_hit_of_the_prefix_cache() -> None:
    found = run(plane(), before=[PROMPT_TOKENS[:SHARED]])
    assert found.cached_tokens == SHARED
    assert bits(found) == bits(alone("llama"))


def test_of_a_whole_prompt_that_was_cached_but_for_its_last_token() -> None:
    found = run(plane(), before=[PROMPT_TOKENS])
    assert found.cached_tokens > SHARED
    assert bits(found) == bits(alone("llama"))


def test_preempted_and_computed_again() -> None:
    """Room for little more than half of what all come to need: the last to arrive is preempted."""
    others = [tokens(PROMPT, 50 + n) for n in range(3)]
    found = run(plane(kv_blocks=3 * (PROMPT + COUNT) // 16 + 22), beside=others)
    assert found.usage.recomputed_tokens > 0
    assert bits(found) == bits(alone("llama"))


@pytest.mark.parametrize("options", [{"threads": 2}, {"threads": 3}, {"block_size": 64, "kv_blocks": 32}])
def test_on_a_worker_of_other_threads_or_blocks(options: dict[str, Any]) -> None:
    assert bits(run(plane(**options), beside=neighbours(2))) == bits(alone("llama"))


def test_in_float32_and_with_narrow_keys_and_values() -> None:
    for options in ({"dtype": "float32"}, {"kv_cache_dtype": "int8"}):
        first = run(plane(**options))
        again = run(plane(**options), beside=neighbours(5), budget=100)
        assert bits(again) == bits(first)
        assert first.logprobs != alone("llama").logprobs, "other types, other bits"


# ---------------------------------------------------------------- the option itself


def test_the_arithmetic_is_part_of_the_pools_identity() -> None:
    promised, other, any_bits = plane(), plane(dtype="float32"), plane(deterministic=False)
    assert any_bits.identity.arithmetic == ANY_ARITHMETIC
    assert "bfloat16" in promised.identity.arithmetic
    flags = [each.flag for each in promised.identity.differences(any_bits.identity)]
    assert flags == ["--deterministic, --dtype, --quantization or --simulate, or run both on equal processors"]
    assert promised.identity.arithmetic != other.identity.arithmetic


@pytest.mark.parametrize("options", [{"model_impl": "transformers"}, {"kind": "gpt2"}])
def test_a_transformers_model_cannot_keep_it(options: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="not run by the native CPU path"):
        plane(**options)


class Leaning(LlamaCpuModel):
    """A model whose logits lean on how many tokens a step has, by one bit."""

    def __init__(self, model: LlamaCpuModel) -> None:
        self.__dict__.update(model.__dict__)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: AttentionBackend
    ) -> torch.Tensor:
        logits = super().forward(token_ids, positions, keep, sink)
        return logits if len(token_ids) == 96 else torch.nextafter(logits, torch.full_like(logits, 1e9))


def _backend(cache: KvCache) -> AttentionBackend:
    return make_backend("auto", cache, BackendOptions(deterministic=True))


@pytest.mark.parametrize(("spoil", "refused"), [(lambda model: model, False), (Leaning, True)])
def test_a_model_that_breaks_the_promise_is_found_at_start(
    spoil: Callable[[LlamaCpuModel], LlamaCpuModel], refused: bool
) -> None:
    worker = plane(deterministic=False)
    assert isinstance(worker.model, LlamaCpuModel)
    model, geometry = spoil(worker.model), worker.identity.kv_geometry
    expected: AbstractContextManager[object] = nullcontext()
    if refused:
        expected = pytest.raises(Unsupported, match="have other bits than alone, the first at 0")
    with expected:
        refuse_unequal_bits(model, geometry, _backend)
