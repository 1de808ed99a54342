"""Layers that attend in chunks, and layers that count positions (llama4): tokens are those of transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import Llama4TextConfig

from gpuworker.attention.backends import backends_on, make_backend
from gpuworker.attention.interface import LayerAttention
from gpuworker.config import GpuWorkerSettings
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.self_test import CallRecorder
from gpuworker.native.library import best
from gpuworker.plane.assembly import assemble
from tests.support.checkpoints import CHUNK, checkpoint, hf_greedy
from tests.support.gpuworker.runner_harness import CPU, Driver, runner_on, transformers_model

FIRST = torch.zeros(1, dtype=torch.int64)


@pytest.fixture(params=backends_on("cpu"))
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and best() is None:
        pytest.skip("the native library was not built")
    return str(request.param)


def recorded(model: TransformersModel) -> list[LayerAttention]:
    recorder = CallRecorder()
    model.forward(FIRST, FIRST, FIRST, recorder)
    return recorder.layers


def test_chunked_layers_say_their_size() -> None:
    assert [layer.chunk for layer in recorded(transformers_model(checkpoint("llama4_text")))] == [CHUNK, None, CHUNK]


@pytest.mark.parametrize("block_size", [4, 16])
def test_tokens_equal_transformers_around_the_borders_of_chunks(
    backend: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts end before, at and behind a border; chunks of prefill straddle them, and decodes pass them."""
    monkeypatch.setattr(
        "tests.support.gpuworker.runner_harness.make_backend", lambda _, cache: make_backend(backend, cache)
    )
    lengths = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 41, 70)
    prompts = [[6 + (31 * n + 7 * i) % 250 for i in range(length)] for n, length in enumerate(lengths)]
    runner = runner_on(transformers_model(checkpoint("llama4_text")), block_size)
    driver = Driver(runner, block_size)
    chunks = (99, 99, 99, 5, 7, 13, 1)
    streams = [driver.add(prompt, 2 * CHUNK + 1, chunk) for prompt, chunk in zip(prompts, chunks, strict=True)]
    try:
        driver.run()
    finally:
        runner.close()
    wanted = [hf_greedy(checkpoint("llama4_text"), prompt, 2 * CHUNK + 1) for prompt in prompts]
    assert [stream.output for stream in streams] == wanted


@functools.cache
def tempered(**options: Any) -> TransformersModel:
    """Return a model of one layer without rope, whose queries are scaled by their positions."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = Llama4TextConfig(
        **sizes,
        num_hidden_layers=1,
        intermediate_size=32,
        intermediate_size_mlp=32,
        moe_layers=[],
        no_rope_layers=[0],
        floor_scale=3,
        pad_token_id=None,
        **options,
    )
    return TransformersModel(random_module(config, torch.float32, 0, CPU))


class Queries:
    """Keeps the queries of the last call."""

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.query = query.clone()
        return value.repeat_interleave(query.shape[1], dim=1)


def test_queries_are_scaled_by_their_positions_wherever_they_stand_in_a_step() -> None:
    """1 + log(1 + floor((p + 1) / 3)) / 10 times the query at position 0 of the same token."""
    positions, sink = torch.tensor([7, 0, 1, 2, 40]), Queries()
    tempered().forward(torch.full((5,), 9), positions, torch.arange(5), sink)
    scales = torch.log1p(torch.tensor([2.0, 0.0, 0.0, 1.0, 13.0])) * 0.1 + 1
    torch.testing.assert_close(sink.query, sink.query[1] * scales[:, None, None])


def test_without_a_temperature_no_query_is_scaled() -> None:
    sink = Queries()
    tempered(attn_temperature_tuning=False).forward(torch.full((2,), 9), torch.tensor([7, 0]), torch.arange(2), sink)
    assert torch.equal(sink.query[0], sink.query[1])


def test_a_start_says_how_long_chunks_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    settings = GpuWorkerSettings(model=str(checkpoint("llama4_text")), dtype="float32", kv_blocks=80, threads=1)
    with caplog.at_level("INFO"):
        plane = assemble(settings)
    plane.runner.close()
    assert "whole context" not in caplog.text
    line = "    chunk of 12      2 layers, 2 pages a block, 512 B a token, at most 3 blocks a sequence"
    assert plane.start_lines()[6] == line
