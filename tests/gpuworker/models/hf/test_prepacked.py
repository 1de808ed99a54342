"""Prepacked linear layers: the same results as torch's own, and only where no other layer needs the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gpuworker.models.hf import loader
from gpuworker.models.hf.loader import PrepackedLinear, prepack, why_not
from gpuworker.models.hf.model import TransformersModel
from gpuworker.plane.memory import weight_bytes
from tests.support.checkpoints import SERVED, checkpoint

CPU = torch.device("cpu")
TOKENS = torch.arange(12)[None]
needs_packing = pytest.mark.skipif(bool(why_not(torch.float32)), reason="this torch cannot prepack")
needs_bfloat16 = pytest.mark.skipif(bool(why_not(torch.bfloat16)), reason="this CPU has no bfloat16 in oneDNN")


def plain(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> TransformersModel:
    module = AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype=dtype, attn_implementation="eager", **options)
    return TransformersModel(module)


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [(1,), (7,), (1, 33), (2, 3, 5), (0,)])
def test_it_computes_what_the_plain_layer_computes(tokens: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 40, bias=bias), torch.randn(*tokens, 96)
    with torch.inference_mode():
        torch.testing.assert_close(PrepackedLinear(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


@needs_bfloat16
@pytest.mark.parametrize("tokens", [(1,), (7,), (1, 33), (2, 3, 5)])
def test_in_bfloat16_it_rounds_a_float32_sum(tokens: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 40, dtype=torch.bfloat16), torch.randn(*tokens, 96).bfloat16()
    with torch.inference_mode():
        exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        torch.testing.assert_close(PrepackedLinear(layer)(x).double(), exact, rtol=2**-8, atol=1e-3)


@needs_packing
def test_inputs_of_any_strides_are_taken() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16), torch.randn(32, 9).t()
    with torch.inference_mode():
        torch.testing.assert_close(PrepackedLinear(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("kind", SERVED)
def test_a_prepacked_model_computes_the_same(kind: str) -> None:
    model = plain(kind)
    expected = model.reference_logits(TOKENS)
    done = prepack(model)
    assert any(isinstance(each, PrepackedLinear) for each in model.module.modules())
    # State spaces of mamba 1 read the weight of one of their linear layers, and indexers the type of one, as models of
    # such mixers alone do of their head. Each of zamba2's two layers with attention has the adapters of the other one
    # too, eight linears, which it never calls.
    left = {"jamba": 2, "deepseek_v32": 3, "zamba2": 16, "mamba": 4, "falcon_mamba": 4, "mamba2": 1}.get(kind, 0)
    assert done.layers == done.total - left
    # zamba2's logits, of up to 10, are off by 3e-4 from float64 either way.
    torch.testing.assert_close(model.reference_logits(TOKENS), expected, rtol=1e-4, atol=1e-3)


@needs_packing
def test_the_weights_count_as_before() -> None:
    model = plain("llama")
    before = weight_bytes(model.module)
    assert prepack(model).copied_bytes == 0
    assert weight_bytes(model.module) == before


@needs_packing
def test_a_head_that_shares_the_embedding_is_copied_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    model = plain("gpt2")  # its head is its embedding; its other layers are not nn.Linear
    before, expected = weight_bytes(model.module), model.reference_logits(TOKENS)
    with caplog.at_level("INFO"):
        done = prepack(model)
    assert (done.layers, done.total) == (1, 1)
    assert done.copied_bytes == model.module.get_input_embeddings().weight.nbytes
    assert weight_bytes(model.module) == before + done.copied_bytes
    assert "1 of 1 linear layers prepacked for oneDNN, 0 MiB, 0 MiB of it beside embeddings" in caplog.text
    torch.testing.assert_close(model.reference_logits(TOKENS), expected, rtol=1e-4, atol=1e-4)


@needs_packing
def test_a_weight_that_layers_share_is_packed_once() -> None:
    model = plain("zamba2")
    done = prepack(model)
    assert done.packed_bytes == sum(
        each.packed_bytes for each in model.module.modules() if isinstance(each, PrepackedLinear)
    )
    queries: list[Any] = [each.q_proj for each in model.module.modules() if hasattr(each, "q_proj")]
    assert [type(each) for each in queries] == [PrepackedLinear] * 2
    assert queries[0].packed is queries[1].packed
    assert [each.packed_bytes for each in queries] == [4 * 128 * 128, 0]


@needs_packing
def test_it_is_not_copied_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain("gpt2")
    embedding: Any = model.module.get_input_embeddings()
    monkeypatch.setattr(loader, "free_bytes", lambda _: 4 * embedding.weight.nbytes - 1)
    with caplog.at_level("INFO"):
        assert prepack(model).layers == 0
    assert type(model.module.get_output_embeddings()) is nn.Linear
    assert "lm_head is not prepacked: beside the embedding 0 MiB more are too much" in caplog.text


class Peeking(nn.Module):
    """An MLP that reads the weight of one of its layers, and leaves another one uncalled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate, self.spare = inner, nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out + nn.functional.linear(x, self.gate.weight)


class Scaled(nn.Linear):
    """Not what nn.Linear computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


@needs_packing
def test_layers_that_others_read_or_that_are_more_than_linear_stay() -> None:
    model = plain("llama")
    layers: Any = model.module.get_submodule("model.layers")
    peeking = layers[0].mlp = Peeking(layers[0].mlp)
    old = layers[1].mlp.up_proj
    scaled = layers[1].mlp.up_proj = Scaled(old.in_features, old.out_features, bias=False)
    hooked = layers[2].mlp.up_proj
    hooked.register_forward_hook(lambda _, __, out: 2 * out)
    twice = layers[2].self_attn.k_proj = layers[2].self_attn.v_proj
    expected = model.reference_logits(TOKENS)
    prepack(model)
    assert (layers[0].mlp.gate, layers[0].mlp.spare) == (peeking.gate, peeking.spare)
    assert (layers[1].mlp.up_proj, layers[2].mlp.up_proj) == (scaled, hooked)
    assert layers[2].self_attn.v_proj is twice
    assert isinstance(peeking.inner.up_proj, PrepackedLinear)
    assert type(peeking.gate) is nn.Linear
    torch.testing.assert_close(model.reference_logits(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_without_the_operations_layers_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(PrepackedLinear, "__init__", missing)
    model = plain("llama")
    with caplog.at_level("INFO"):
        assert prepack(model).layers == 0
    assert "no prepacking in float32, linear layers run as torch has them: '_OpNamespace'" in caplog.text


def test_a_wrong_result_of_the_probe_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrepackedLinear, "forward", lambda _, x: x)
    assert why_not(torch.float32) == "its results are wrong"
