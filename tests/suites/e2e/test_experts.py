"""A suite on a model with experts: its worker takes the native path, and its tokens are those of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli.suite.stack import StackOptions
from gpuworker.native import library as native
from tests.support.checkpoints import checkpoint, hf_greedy
from tests.support.suite import greedy, running_suite

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")
TOKENS = 24


async def test_a_model_with_experts_is_served_natively(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe")
    flags = ("--dtype", "float32", "--model-impl", "native", "--kv-blocks", "64", "--max-num-batched-tokens", "48")
    prompts = [[6 + (31 * n + 7 * i) % 250 for i in range(length)] for n, length in enumerate((3, 71, 17))]
    async with running_suite(tmp_path, StackOptions(model=folder, worker_flags=flags)) as suite:
        outcomes = await asyncio.gather(*(suite.generate(greedy(prompt, TOKENS)) for prompt in prompts))
        again = await suite.generate(greedy(prompts[1], TOKENS))
    expected = [hf_greedy(folder, prompt, TOKENS) for prompt in prompts]
    assert [outcome.tokens for outcome in outcomes] == expected
    assert again.tokens == expected[1]
    assert again.admitted is not None
    assert again.admitted.cached_tokens >= 64
