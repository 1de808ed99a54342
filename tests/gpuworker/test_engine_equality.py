"""Greedy output of the whole engine equals transformers' `generate`, token for token, for each kind of model."""

from __future__ import annotations

import random

import pytest
import torch

from gpuworker.attention import make_backend
from gpuworker.core.outcomes import AgentConfig
from gpuworker.kv_cache import KvCache
from gpuworker.model_runner import ModelRunner, RunnerLimits
from gpuworker.models.loader import ModelSource, load_model
from gpuworker.models.self_test import self_test
from tests.checkpoints import checkpoint, hf_greedy
from tests.gpuworker.engine_driver import EngineDriver

COUNT = 12
SLOTS = 2048
KINDS = ("llama", "qwen3", "mistral", "gemma2", "gpt2")


def driver(kind: str, block_size: int, prefix_caching: bool, num_blocks: int = 0, budget: int = 48) -> EngineDriver:
    """Return an engine on a tiny checkpoint; the small budget makes prefills go in chunks beside decodes."""
    model = load_model(ModelSource(str(checkpoint(kind)), dtype="float32"), torch.device("cpu"))
    geometry = self_test(model, lambda cache: make_backend("auto", cache))
    num_blocks = num_blocks or SLOTS // block_size
    cache = KvCache(geometry, num_blocks, block_size, torch.device("cpu"))
    runner = ModelRunner(model, cache, make_backend("auto", cache), RunnerLimits(8, 256, threads=1))
    config = AgentConfig(
        num_blocks, block_size, budget, window=geometry.window, prefix_caching=prefix_caching, max_num_seqs=8
    )
    return EngineDriver(runner, config)


def prompts() -> list[list[int]]:
    """Return prompts of odd lengths, two of which share a long prefix."""
    rng = random.Random(5)
    shared = [rng.randrange(6, 264) for _ in range(70)]
    lengths = (1, 17, 33)
    tails = [[rng.randrange(6, 264) for _ in range(n)] for n in (3, 9)]
    return [*([rng.randrange(6, 264) for _ in range(n)] for n in lengths), *(shared + tail for tail in tails)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [4, 16, 64, 256])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
def test_tokens_equal_transformers(kind: str, block_size: int, prefix_caching: bool) -> None:
    wanted = [hf_greedy(checkpoint(kind), prompt, COUNT) for prompt in prompts()]
    with driver(kind, block_size, prefix_caching) as engine:
        assert engine.run(prompts()[:1], COUNT) == wanted[:1]
        assert engine.run(prompts(), COUNT) == wanted
        assert engine.run(prompts(), COUNT) == wanted
        engine.assert_all_free()


def test_preempted_sequences_keep_their_tokens() -> None:
    asked = [[*prompts()[1][:9], 20 + index] for index in range(6)]
    wanted = [hf_greedy(checkpoint("llama"), prompt, 40) for prompt in asked]
    with driver("llama", 4, prefix_caching=True, num_blocks=40) as engine:
        assert engine.run(asked, 40) == wanted
        assert sum(result.preemptions for result in engine.results.values()) > 0
        engine.assert_all_free()
