"""Embeddings of real (tiny) models through engine, lease agent and runner, against transformers' hidden states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from common.checkpoint.pooling import Pooling, PoolingMode, needs_every_token
from common.contracts.types import BlockId, FinishReason, KvGeometry, SamplingParams, SequenceId
from gpuworker.attention.backends import make_backend
from gpuworker.attention.interface import AttentionBackend
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.choose import LlamaModel, open_native
from gpuworker.models.hf.loader import ModelSource, load_model
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.self_test import self_test
from gpuworker.native.library import best
from gpuworker.plane.assembly import executor_for
from gpuworker.runner.launcher import pooling_launcher
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.pooling import Pooler, StepPooling
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from gpuworker.scheduling.outcomes import AgentConfig
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.embeddings import Vectors, embedding_checkpoint, pooled_by_hand, unpacked
from tests.support.gpuworker.engine_harness import EngineDriver, Result

BLOCKS, SIZE = 128, 16
CPU = torch.device("cpu")
LIMITS = RunnerLimits(8, 512, threads=1)
PATHS = ["native", "transformers"]
MODES = ["last", "mean"]


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(sum(lengths))
    return [[draw.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def on_cache(cache: KvCache) -> AttentionBackend:
    return make_backend("auto", cache)


def model_on(directory: Path, path: str) -> tuple[TransformersModel | LlamaModel, KvGeometry]:
    """Return a model in float32 on one of the paths."""
    source = ModelSource(str(directory), dtype="float32", pooled=True)
    if path == "transformers":
        model = load_model(source, CPU)
        return model, self_test(model, on_cache)
    if best() is None:
        pytest.skip("the native library was not built")
    opened = open_native(source, CPU, "native", on_cache)
    assert opened is not None
    return opened


def pooling_runner(directory: Path, path: str, pooling: Pooling) -> ModelRunner:
    model, geometry = model_on(directory, path)
    cache = KvCache(geometry, BLOCKS, SIZE, CPU)
    attention = on_cache(cache)
    executor = executor_for(model, pooling_launcher(model, attention))
    return ModelRunner(model, cache, attention, LIMITS, executor, pooler=Pooler(pooling))


def embedded(
    directory: Path, path: str, pooling: Pooling, asked: Sequence[Sequence[int]], **options: int
) -> list[Result]:
    """Run prompts one after the other or, where they fit, together; a step has few tokens, so that long ones divide."""
    sizes = {"num_blocks": BLOCKS, "block_size": SIZE, "max_num_batched_tokens": 24, "max_num_seqs": 8} | options
    config = AgentConfig(prefix_caching=not needs_every_token(str(pooling)), **sizes)  # type: ignore[arg-type]
    with EngineDriver(pooling_runner(directory, path, pooling), config) as driver:
        for prompt in asked:
            driver.submit(prompt, 1)
        return driver.finish()


def vectors_of(results: Sequence[Result]) -> Vectors:
    assert [(result.reason, result.tokens) for result in results] == [(FinishReason.STOP, [])] * len(results)
    return unpacked([result.embedding for result in results])


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", PATHS)
def test_prompts_in_chunks_pool_to_what_transformers_computes(path: str, mode: str, normalised: bool) -> None:
    asked, pooling = prompts(1, 5, 24, 25, 130, 16), Pooling(PoolingMode(mode), normalised)
    directory = checkpoint("llama")
    found = vectors_of(embedded(directory, path, pooling, asked))
    expected = pooled_by_hand(directory, asked, mode, normalised)
    assert np.abs(found - expected).max() < 1e-5 * max(1.0, np.abs(expected).max())
    if normalised:
        assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
@pytest.mark.parametrize("path", PATHS)
def test_a_bare_decoder_without_a_head_embeds(path: str, kind: str, mode: str) -> None:
    directory, asked = embedding_checkpoint(kind, mode), prompts(3, 41)
    found = vectors_of(embedded(directory, path, Pooling(PoolingMode(mode)), asked))
    assert np.abs(found - pooled_by_hand(directory, asked, mode)).max() < 1e-5


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_other_decoders_embed_on_transformers(kind: str) -> None:
    asked = prompts(7, 40)
    found = vectors_of(embedded(checkpoint(kind), "transformers", Pooling(PoolingMode.MEAN), asked))
    assert np.abs(found - pooled_by_hand(checkpoint(kind), asked, "mean")).max() < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_the_last_token_takes_a_prefix_hit_and_the_mean_takes_none(path: str) -> None:
    (prompt,) = prompts(70)
    for mode, cached in (("last", 64), ("mean", 0)):
        results = []
        pooling, config = Pooling(PoolingMode(mode)), AgentConfig(BLOCKS, SIZE, prefix_caching=mode == "last")
        with EngineDriver(pooling_runner(checkpoint("llama"), path, pooling), config) as driver:
            for _ in range(2):
                driver.submit(prompt, 1)
                results = driver.finish()
        assert [result.usage.cached_tokens for result in results] == [0, cached]
        first, second = vectors_of(results)
        assert np.abs(first - second).max() < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_a_preempted_sum_begins_again(path: str) -> None:
    """The runner forgets a preempted sequence, and gets it again with its first token."""
    (prompt,), one = prompts(40), SequenceId(1)
    runner = pooling_runner(checkpoint("llama"), path, Pooling(PoolingMode.MEAN))
    blocks = tuple(map(BlockId, range(3)))

    def step(number: int, start: int, length: int) -> bytes | None:
        row = ScheduledRow(one, start, length, blocks, samples=start + length == len(prompt))
        ended = runner.submit_step(StepPlan(number, (row,))).result(timeout=60).ended
        return ended[one].embedding if ended else None

    sampling = SamplingParams(max_tokens=1)
    runner.add_sequence(one, prompt, sampling, len(prompt))
    assert step(1, 0, 30) is None
    runner.remove(one)
    runner.add_sequence(one, prompt, sampling, len(prompt))
    assert step(2, 0, 25) is None
    vector = step(3, 25, 15)
    runner.close()
    assert vector is not None
    assert np.abs(unpacked([vector]) - pooled_by_hand(checkpoint("llama"), [prompt], "mean")).max() < 1e-5


def test_numbers_that_are_not_finite_end_the_sequence_with_an_error() -> None:
    one, other = SequenceId(1), SequenceId(2)
    step = StepPooling(Pooling(PoolingMode.LAST, normalised=False), (1, 1), (), (True, True), (one, other))
    result = step.result(7, step.pool(torch.tensor([[1.0, 2.0], [1.0, float("nan")]])), 0.5)
    assert (result.step, result.seconds, result.sampled) == (7, 0.5, {one: (), other: ()})
    assert (result.ended[one].reason, len(result.ended[one].embedding)) == (FinishReason.STOP, 8)
    assert (result.ended[other].reason, result.ended[other].embedding) == (FinishReason.ERROR, b"")
    assert "not finite" in result.ended[other].message
