"""The self-test: what it lets through, what it refuses, and why."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.contracts.errors import EngineFailure, Unsupported
from common.contracts.types import KvGeometry
from gpuworker.attention.backends import make_backend
from gpuworker.attention.interface import LayerAttention
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.hf.loader import ModelSource, load_model
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.self_test import CallRecorder, Limit, as_kept, self_test
from tests.support.checkpoints import REFUSED, REPRESENTATIVES, SERVED, WINDOW, checkpoint
from tests.support.gpuworker.runner_harness import transformers_model

CPU = torch.device("cpu")
SHAPES = {
    "llama": KvGeometry(3, 2, 16, 16, "float32"),
    "qwen3": KvGeometry(3, 2, 32, 32, "float32"),
    "mistral": KvGeometry(3, 2, 16, 16, "float32", window=WINDOW),
    "gemma2": KvGeometry(3, 2, 16, 16, "float32"),
    "gpt2": KvGeometry(3, 4, 16, 16, "float32"),
    "mixtral": KvGeometry(3, 2, 16, 16, "float32", window=WINDOW),
    "qwen3_moe": KvGeometry(3, 2, 32, 32, "float32"),
    "olmoe": KvGeometry(3, 2, 16, 16, "float32"),
    "gpt_oss": KvGeometry(3, 2, 16, 16, "float32"),
    "llama4_text": KvGeometry(3, 2, 16, 16, "float32"),
    "qwen3_next": KvGeometry(1, 2, 16, 16, "float32", shapes="a=2x16+16 ---a"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), KvGeometry(1, 2, 16, 16, "float32", shapes="a=2x16+16 ---a")),
    "minimax": KvGeometry(1, 2, 16, 16, "float32", shapes="a=2x16+16 -a"),
    "lfm2": KvGeometry(1, 2, 16, 16, "float32", shapes="a=2x16+16 -a"),
    "falcon_h1": KvGeometry(3, 2, 16, 16, "float32"),
    "jamba": KvGeometry(1, 2, 16, 16, "float32", shapes="a=2x16+16 -a"),
    "zaya": KvGeometry(3, 2, 16, 16, "float32"),
    "zamba2": KvGeometry(2, 4, 32, 32, "float32", shapes="a=4x32+32 a-a"),
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), KvGeometry(0, 0, 0, 0, "float32")),
    "deepseek_v3": KvGeometry(3, 1, 24, 16, "float32", values_in_keys=True),
    "deepseek_v32": KvGeometry(3, 1, 24, 16, "float32", values_in_keys=True, shapes="a=1x24/16,16:float32 aaa"),
}


def run(model: TransformersModel) -> KvGeometry:
    return self_test(model, lambda cache: make_backend("auto", cache))


@pytest.mark.parametrize("kind", SERVED)
def test_a_model_that_runs_right_gives_its_shape(kind: str) -> None:
    assert run(transformers_model(checkpoint(kind))) == SHAPES[kind]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "deepseek_v3", "gpt_oss"])
def test_sixteen_bits_are_close_enough(kind: str, dtype: str) -> None:
    model = load_model(ModelSource(str(checkpoint(kind)), dtype=dtype), CPU)
    assert run(model) == replace(SHAPES[kind], dtype=dtype)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_attention_never_reaches_the_cache_is_refused(kind: str) -> None:
    with pytest.raises(Unsupported, match=f"{kind} cannot be served: 0 of its 2 layers"):
        run(transformers_model(checkpoint(kind)))


def on_cache(kind: str, kv_dtype: str) -> TransformersModel:
    return load_model(ModelSource(str(checkpoint(kind)), dtype="float32", kv_cache_dtype=kv_dtype), CPU)


class Rounding(TorchAttention):
    """Keeps K and V in float32, rounded as the cache that it was asked for would."""

    def __init__(self, cache: KvCache) -> None:
        self.kept_as = cache.geometry.dtype
        super().__init__(KvCache(replace(cache.geometry, dtype="float32"), cache.num_blocks, cache.block_size, CPU))

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return super().write_and_attend(layer, query, as_kept(key, self.kept_as), as_kept(value, self.kept_as))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
def test_the_cache_may_be_narrower_than_the_model(kind: str, kv_dtype: str) -> None:
    assert self_test(on_cache(kind, kv_dtype), Rounding) == replace(SHAPES[kind], dtype=kv_dtype)


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [
        pytest.param(
            kind, kv_dtype, marks=() if kind in REPRESENTATIVES or kv_dtype == "int8" else pytest.mark.exhaustive
        )
        for kind in SERVED
        for kv_dtype in ("bfloat16", "float16", "int8")
    ],
)
def test_the_attention_that_is_chosen_keeps_to_the_cache(kind: str, kv_dtype: str) -> None:
    assert run(on_cache(kind, kv_dtype)) == replace(SHAPES[kind], dtype=kv_dtype)


def test_the_cache_may_be_wider_than_the_model() -> None:
    source = ModelSource(str(checkpoint("llama")), dtype="bfloat16", kv_cache_dtype="float32")
    assert run(load_model(source, CPU)) == SHAPES["llama"]


def test_the_worst_rounding_is_half_a_step_of_the_largest_number() -> None:
    numbers = torch.tensor([[[127.0, 1.5, 0.4, -127.0]], [[0.0, 0.0, 0.0, 0.0]]])
    assert as_kept(numbers, "int8").tolist() == [[[127.0, 2.0, 0.0, -127.0]], [[0.0, 0.0, 0.0, 0.0]]]
    assert as_kept(torch.tensor([[[448.0, 17.0, 1.0]]]), "fp8").tolist() == [[[448.0, 16.0, 1.0]]]


def test_a_type_that_the_model_cannot_bear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuworker.models.self_test._ROUNDED", Limit(1e-3))
    with pytest.raises(Unsupported, match="cannot be served with K and V in fp8: rounded to it"):
        self_test(on_cache("llama", "fp8"), Rounding)


class Careless(TorchAttention):
    """A backend that forgets one thing."""

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return super().write_and_attend(self.forget(layer), query, key, value)

    def forget(self, layer: LayerAttention) -> LayerAttention:
        raise NotImplementedError


class ForgetsWindow(Careless):
    def forget(self, layer: LayerAttention) -> LayerAttention:
        return LayerAttention(layer.layer, layer.scale, None, layer.softcap, layer.sinks)


class ForgetsChunk(Careless):
    def forget(self, layer: LayerAttention) -> LayerAttention:
        return replace(layer, chunk=None)


class ForgetsSinks(Careless):
    def forget(self, layer: LayerAttention) -> LayerAttention:
        return LayerAttention(layer.layer, layer.scale, layer.window, layer.softcap, None)


class ForgetsLayer(Careless):
    def forget(self, layer: LayerAttention) -> LayerAttention:
        return LayerAttention(0, layer.scale, layer.window, layer.softcap, layer.sinks)


WRONG = [("mistral", ForgetsWindow), ("gpt_oss", ForgetsSinks), ("llama", ForgetsLayer)]


@pytest.mark.parametrize(("kind", "backend"), [*WRONG, ("llama4_text", ForgetsChunk)])
def test_a_backend_that_attends_wrongly_is_refused(kind: str, backend: type[Careless]) -> None:
    with pytest.raises(Unsupported, match="through the paged cache, its logits differ"):
        self_test(transformers_model(checkpoint(kind)), backend)


@pytest.mark.parametrize(("kind", "backend"), WRONG)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_it_is_refused_in_sixteen_bits_too(kind: str, backend: type[Careless], dtype: str, kv_dtype: str) -> None:
    source = ModelSource(str(checkpoint(kind)), dtype=dtype, kv_cache_dtype=kv_dtype)
    with pytest.raises(Unsupported, match="through the paged cache, its logits differ"):
        self_test(load_model(source, CPU), backend)


def test_a_layer_that_slides_without_saying_its_window_is_refused() -> None:
    model = transformers_model(checkpoint("llama"))
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(Unsupported, match="layer 1 slides, but does not say its window"):
        run(model)


def test_a_layer_that_attends_in_chunks_without_saying_their_size_is_refused() -> None:
    model = transformers_model(checkpoint("llama"))
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(Unsupported, match="layer 1 attends in chunks, but does not say their size"):
        run(model)


def test_a_window_that_no_layer_reports_is_refused() -> None:
    model = transformers_model(checkpoint("llama"))
    model.config = copy.copy(model.config)  # the layers have another one
    model.config.sliding_window = WINDOW
    with pytest.raises(Unsupported, match="llama cannot be served: its configuration has a sliding_window of 8"):
        run(model)


def test_a_window_that_holds_every_context_is_none() -> None:
    model = transformers_model(checkpoint("mistral"))
    model.config.max_position_embeddings = WINDOW + 1
    assert run(model).window == WINDOW
    model.config.max_position_embeddings = WINDOW
    assert run(model).window == 0


def test_what_a_model_raises_is_the_reason_of_its_refusal() -> None:
    model = transformers_model(checkpoint("llama"))
    first_layer: Any = model.module.get_submodule("model.layers.0.self_attn")
    first_layer.layer_idx = 7
    with pytest.raises(Unsupported, match="llama"):
        run(model)
    first_layer.layer_idx = None
    with pytest.raises(Unsupported, match="attention that is not causal self-attention of a numbered layer"):
        run(model)


def test_attention_outside_of_a_step_is_an_error() -> None:
    model = transformers_model(checkpoint("llama"))
    with pytest.raises(EngineFailure, match="outside of a step"):
        model.module(torch.zeros((1, 3), dtype=torch.int64), use_cache=False)


def test_it_leaves_the_model_on_our_attention() -> None:
    model, recorder, first = transformers_model(checkpoint("llama")), CallRecorder(), torch.zeros(1, dtype=torch.int64)
    run(model)
    model.forward(first, first, first, recorder)
    assert [layer.layer for layer in recorder.layers] == [0, 1, 2]
