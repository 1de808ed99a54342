"""Models with groups of layers: tokens of transformers, from pages that other sequences take when nobody reads them."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from common.contracts.errors import Unsupported
from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from gpuworker.attention.backends import backends_on, make_backend
from gpuworker.attention.by_shape import AttentionByPart
from gpuworker.attention.interface import LayerAttention
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import page_layout
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import self_test
from gpuworker.native.library import best
from tests.support.gpuworker.full_forward import greedy_tokens, random_prompt
from tests.support.gpuworker.runner_harness import CPU, Driver, runner_on

FULL, WINDOW, CHUNK = KvGroupKind.FULL, KvGroupKind.WINDOW, KvGroupKind.CHUNK
S, F, C = "sliding_attention", "full_attention", "chunked_attention"
WIDE = {"head_dim": 32}
# What a family's published checkpoints say in small, and the groups of its layers.
CASES: dict[str, tuple[str, dict[str, Any], tuple[KvGroup, ...]]] = {
    "gpt_oss": (
        "gpt_oss",
        {"num_hidden_layers": 4, "layer_types": [S, F, S, F]},
        (KvGroup(FULL, 0, 1, (1, 3)), KvGroup(WINDOW, 8, 1, (0, 2))),
    ),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 6, "layer_types": [S, S, S, F, S, S]},
        (KvGroup(FULL, 0, 1, (3,)), KvGroup(WINDOW, 8, 5, (0, 1, 2, 4, 5))),
    ),
    "gemma4": (
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": [S, S, S, F], "per_layer_config": {3: WIDE}},
        # Lanes for one of two layers of the windows: the full one takes two, which lie in two pages.
        (KvGroup(FULL, 0, 2, (3,)), KvGroup(WINDOW, 8, 3, (0, 1, 2))),
    ),
    "gemma4 26b a4b": (
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": [S, F, S, F], "num_attention_heads": 12, "num_key_value_heads": 6}
        | {"per_layer_config": {n: WIDE | {"num_key_value_heads": 1} for n in (1, 3)}},
        # Two lanes a page: each windowed layer has its heads in three of them, in two pages.
        (KvGroup(FULL, 0, 1, (1, 3)), KvGroup(WINDOW, 8, 3, (0, 2))),
    ),
    "gemma4 e2b": (
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": [S, F, S, F], "num_kv_shared_layers": 2}
        | {"per_layer_config": {1: WIDE, 3: WIDE}},
        (KvGroup(FULL, 0, 2, (1,)), KvGroup(WINDOW, 8, 1, (0,))),
    ),
    "llama4": (
        "llama4_text",
        {"num_hidden_layers": 4, "layer_types": [C, C, C, F], "no_rope_layers": [1, 1, 1, 0]},
        (KvGroup(FULL, 0, 1, (3,)), KvGroup(CHUNK, 12, 3, (0, 1, 2))),
    ),
    # Beside states of convolutions, which no group has.
    "lfm3": (
        "lfm3",
        {"num_hidden_layers": 4, "layer_types": ["conv", S, F, S]},
        (KvGroup(FULL, 0, 1, (2,)), KvGroup(WINDOW, 8, 2, (1, 3))),
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {},
        (KvGroup(FULL, 0, 1, (0, 2)), KvGroup(WINDOW, 8, 1, (1,))),
    ),
    "mimo_v2_flash, by heads": (
        "mimo_v2_flash",
        {"layer_types": [F, S, S], "num_attention_heads": 8, "v_head_dim": 8},
        (KvGroup(FULL, 0, 1, (0,)), KvGroup(WINDOW, 8, 4, (1, 2))),
    ),
}


@functools.cache
def module_of(name: str) -> PreTrainedModel:
    family, options, _ = CASES[name]
    module = random_module(tiny_config(CONFIG_MAPPING[family](), **options), torch.float32, 0, CPU)
    module.train(False)
    return module


def model_of(name: str, kv_dtype: str | None = None) -> TransformersModel:
    return TransformersModel(copy.deepcopy(module_of(name)), kv_dtype)


def found_by_test(name: str, kv_dtype: str | None = None, length: int = 48) -> KvGeometry:
    return self_test(model_of(name, kv_dtype), lambda cache: make_backend("auto", cache), length=length, block_size=16)


@pytest.fixture(params=backends_on("cpu"))
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and best() is None:
        pytest.skip("the native library was not built")
    return str(request.param)


@pytest.mark.parametrize("name", CASES)
def test_the_self_test_finds_the_groups(name: str) -> None:
    assert found_by_test(name).groups == CASES[name][2]


@pytest.mark.parametrize("block_size", [4, pytest.param(16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(
    name: str, block_size: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.support.gpuworker.runner_harness.make_backend", lambda _, cache: make_backend(backend, cache)
    )
    runner = runner_on(model_of(name), block_size, max_model_len=96, grouped=True)
    driver = Driver(runner, block_size, groups=CASES[name][2])
    cases = [(random_prompt(length), chunk) for length, chunk in ((1, 9), (33, 7), (48, 13), (70, 99), (9, 1))]
    streams = [driver.add(prompt, 20, chunk) for prompt, chunk in cases]
    try:
        driver.run()
    finally:
        runner.close()
    outputs = [stream.output for stream in streams]
    found = zip(cases, outputs, strict=True)
    assert outputs == [greedy_tokens(module_of(name), prompt, 20, output) for (prompt, _), output in found]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_narrower_caches_give_the_tokens_of_one_group(kv_dtype: str) -> None:
    found = []
    for grouped in (True, False):
        runner = runner_on(model_of("gpt_oss", kv_dtype), 4, max_model_len=96, grouped=grouped)
        driver = Driver(runner, 4, groups=CASES["gpt_oss"][2] if grouped else ())
        streams = [driver.add(random_prompt(length), 20, chunk) for length, chunk in ((33, 7), (48, 13), (9, 1))]
        try:
            driver.run()
        finally:
            runner.close()
        found.append([stream.output for stream in streams])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "llama4"])
def test_what_leaves_too_early_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a block overwritten while a window still reaches into it, the logits would show it."""
    monkeypatch.setattr(
        "gpuworker.models.self_test.unread_blocks", lambda group, position, size: position // size if group.span else 0
    )
    with pytest.raises(Unsupported, match="through the paged cache, its logits differ"):
        found_by_test(name)


class ReadsFurther(AttentionByPart):
    """A backend whose layers read two positions beyond their windows."""

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        wide = layer if layer.window is None else replace(layer, window=layer.window + 2)
        return super().write_and_attend(wide, query, key, value)


def test_a_backend_that_reads_further_is_refused() -> None:
    def backend(cache: KvCache) -> ReadsFurther:
        parts = page_layout(cache.geometry).parts
        return ReadsFurther(
            [make_backend("torch", cache.parts[part.shape]) for part in parts], [part.lanes for part in parts]
        )

    with pytest.raises(Unsupported, match="through the paged cache, its logits differ"):
        self_test(model_of("gpt_oss"), backend, length=48, block_size=16)
