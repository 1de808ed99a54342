"""K and V that layers share are kept once, and read by all of them."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from common.contracts.errors import Unsupported
from gpuworker.attention.backends import make_backend
from gpuworker.attention.interface import LayerAttention
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.shared_kv import source_of
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import CallRecorder, self_test
from tests.support.gpuworker.full_forward import greedy_tokens
from tests.support.gpuworker.runner_harness import Driver, runner_on

CPU = torch.device("cpu")
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
FIRST = torch.zeros(1, dtype=torch.int64)


@functools.cache
def module_of(shared: int = 3) -> PreTrainedModel:
    """Return a tiny gemma3n of five layers, of which the last ones share K and V, as transformers runs it."""
    tiny = tiny_config(CONFIG_MAPPING["gemma3n_text"]())
    options = {each: getattr(tiny, each) for each in ("intermediate_size", "activation_sparsity_pattern")}
    lists = {name: [value[0]] * len(LAYERS) for name, value in options.items()}
    changes = {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "num_kv_shared_layers": shared, **lists}
    module = random_module(tiny_config(CONFIG_MAPPING["gemma3n_text"](), **changes), torch.float32, 0, CPU)
    module.train(False)
    return module


def model_of(kv_dtype: str | None = None, shared: int = 3) -> TransformersModel:
    return TransformersModel(copy.deepcopy(module_of(shared)), kv_dtype)


def recorded(model: TransformersModel) -> list[LayerAttention]:
    recorder = CallRecorder()
    model.forward(FIRST, FIRST, FIRST, recorder)
    return recorder.layers


def greedy(prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    return greedy_tokens(module_of(), prompt, count, guess)


def test_each_layer_attends_on_the_last_one_of_its_kind_that_has_its_own() -> None:
    assert [layer.source for layer in recorded(model_of())] == [None, None, 0, 1, 0]
    assert [layer.source for layer in recorded(model_of(shared=2))] == [None, None, None, 1, 2]
    assert [layer.source for layer in recorded(model_of(shared=0))] == [None] * 5


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_tokens_are_those_of_transformers(backend: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks beside decodes, across windows and blocks: with two of five layers in the cache."""
    monkeypatch.setattr(
        "tests.support.gpuworker.runner_harness.make_backend", lambda _, cache: make_backend(backend, cache)
    )
    model = model_of()
    draw = random.Random(0)
    cases = [([draw.randrange(6, 160) for _ in range(n)], chunk) for n, chunk in ((1, 9), (33, 7), (41, 13), (9, 1))]
    runner = runner_on(model, block_size, max_model_len=96)
    driver = Driver(runner, block_size)
    streams = [driver.add(prompt, 16, chunk) for prompt, chunk in cases]
    driver.run()
    runner.close()
    for (prompt, _), stream in zip(cases, streams, strict=True):
        assert stream.output == greedy(prompt, 16, stream.output)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_a_cache_of_any_type_has_the_layers_with_their_own(kv_dtype: str) -> None:
    found = self_test(model_of(kv_dtype), lambda cache: make_backend("auto", cache))
    assert (found.num_layers, found.window, found.dtype) == (2, 0, kv_dtype)


class WritesAgain(TorchAttention):
    """Writes what a layer shares in place of the next layer's K and V."""

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        wrong = layer if layer.source is None else LayerAttention(1 - layer.source, layer.scale, layer.window)
        return super().write_and_attend(wrong, query, key, value)


def test_a_backend_that_writes_what_is_shared_elsewhere_is_refused() -> None:
    with pytest.raises(Unsupported, match="run through the paged cache, its logits differ"):
        self_test(model_of(), WritesAgain)


def test_own_layers_need_not_be_the_first() -> None:
    """Layer 1 of five shares with layer 0: the cache has no layer for it."""
    module: Any = copy.deepcopy(module_of(shared=0))
    attention = [each for each in module.modules() if hasattr(each, "is_kv_shared_layer")]
    attention[1].is_kv_shared_layer = attention[0].store_full_length_kv = True
    attention[1].layer_type = attention[0].layer_type
    model = TransformersModel(module)
    assert [source_of(each) for each in attention] == [None, 0, None, None, None]
    found = self_test(model, lambda cache: make_backend("auto", cache))
    assert (found.num_layers, found.shapes) == (4, "a=2x16+16 a-aaa")


def test_a_layer_that_says_that_it_shares_and_does_not_keeps_its_own() -> None:
    module: Any = copy.deepcopy(module_of(shared=0))
    attention = [each for each in module.modules() if hasattr(each, "is_kv_shared_layer")]

    own = attention[1].forward

    def forward(*args: Any, **options: Any) -> Any:
        attention[1].is_kv_shared_layer = False
        found = own(*args, **options)
        attention[1].is_kv_shared_layer = True
        return found

    attention[1].is_kv_shared_layer, attention[1].forward = True, forward
    assert [layer.source for layer in recorded(TransformersModel(module))] == [None] * 5
