"""Groups of layers: each part has a backend of its own on the same pages, seen with the shape of its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.contracts.types import KvGroup, KvGroupKind
from gpuworker.attention.by_shape import AttentionByPart
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.triton_backend import TritonAttention
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import page_layout
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from tests.support.gpuworker.full_forward import greedy_tokens, random_prompt
from tests.support.gpuworker.runner_harness import CPU, Driver, runner_on

S, F = "sliding_attention", "full_attention"
WIDE = {"head_dim": 32, "num_key_value_heads": 1}


def triton(_: str, cache: KvCache) -> AttentionBackend:
    if not cache.geometry.groups:
        return TritonAttention(cache)
    parts = page_layout(cache.geometry).parts
    return AttentionByPart([TritonAttention(cache.parts[part.shape]) for part in parts], [part.lanes for part in parts])


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        # A full layer with heads of 32, and windowed ones of half the size, two of which share a lane.
        ({}, (KvGroup(KvGroupKind.FULL, 0, 1, (2,)), KvGroup(KvGroupKind.WINDOW, 8, 1, (0, 1)))),
        # Windowed ones of three times the size, each by heads in three lanes of two pages.
        (
            {"num_hidden_layers": 4, "layer_types": [S, F, S, F], "num_attention_heads": 12, "num_key_value_heads": 6}
            | {"per_layer_config": {1: WIDE, 3: WIDE}},
            (KvGroup(KvGroupKind.FULL, 0, 1, (1, 3)), KvGroup(KvGroupKind.WINDOW, 8, 3, (0, 2))),
        ),
    ],
    ids=["shared lanes", "by heads"],
)
def test_tokens_are_those_of_transformers_beyond_windows(
    options: dict[str, Any], groups: tuple[KvGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import CONFIG_MAPPING

    monkeypatch.setattr("tests.support.gpuworker.runner_harness.make_backend", triton)
    module = random_module(tiny_config(CONFIG_MAPPING["gemma4_text"](), **options), torch.float32, 0, CPU)
    model = TransformersModel(module)
    runner = runner_on(model, 4, max_model_len=48, grouped=True)
    driver = Driver(runner, 4, groups=groups)
    cases = [(random_prompt(length), chunk) for length, chunk in ((21, 13), (9, 9))]
    streams = [driver.add(prompt, 5, chunk) for prompt, chunk in cases]
    try:
        driver.run()
    finally:
        runner.close()
    module.set_attn_implementation("eager")
    assert [stream.output for stream in streams] == [greedy_tokens(module, prompt, 5) for prompt, _ in cases]
