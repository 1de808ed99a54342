"""The lean path of the GPU, here in plain torch on the CPU: it computes what the hosted path does, switch by switch."""

from __future__ import annotations

import pytest
import torch

from gpuworker.kernels import torch_elementwise
from gpuworker.kernels.torch_attention import TorchAttention
from gpuworker.models.lean_gpu import LeanGpuModel
from gpuworker.models.lean_gpu_weights import fused_weights, random_weights
from gpuworker.models.self_test import CallRecorder
from tests.gpuworker.models.lean_cases import CASES, Case, case_tokens, make_case, steps

CPU = torch.device("cpu")


def lean(case: Case) -> LeanGpuModel:
    weights = fused_weights(case.spec, case.tensor, torch.float32, CPU)
    return LeanGpuModel(case.config, weights, "float32", 64)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_hosted_path(name: str) -> None:
    case = make_case(name)
    tokens = case_tokens(case.spec)
    ours = torch.cat(list(steps(lean(case), TorchAttention(case.cache()), tokens)))
    theirs = torch.cat(list(steps(case.hosted, TorchAttention(case.cache()), tokens)))
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


class CountingElementwise:
    """The plain-torch kernels; notes how many rows each layer's MLP sees."""

    rms_norm = staticmethod(torch_elementwise.rms_norm)
    add_rms_norm = staticmethod(torch_elementwise.add_rms_norm)

    def __init__(self) -> None:
        self.rows: list[int] = []

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(gate_up))
        return torch_elementwise.silu_and_mul(gate_up)


def test_the_last_layer_goes_on_with_sampled_tokens_only() -> None:
    case, counting, position = make_case("llama"), CountingElementwise(), torch.arange(12)
    model = LeanGpuModel(case.config, random_weights(case.spec, torch.float32, CPU), "float32", 64, counting)
    model.forward(position, position, torch.tensor([11]), CallRecorder())
    assert counting.rows == [12, 12, 1]


def test_logits_of_all_tokens_are_those_of_keeping_all() -> None:
    case = make_case("qwen3, wide heads")
    model, position = lean(case), torch.arange(12)
    everything = model.logits(position, position, None, CallRecorder())
    torch.testing.assert_close(everything, model.forward(position, position, position, CallRecorder()))


def test_tied_weights_are_held_once() -> None:
    case = make_case("llama, tied, scaled")
    weights = fused_weights(case.spec, case.tensor, torch.float32, CPU)
    assert weights.head is weights.embedding
    assert weights.num_bytes == 4 * sum(parameter.numel() for parameter in case.hosted.module.parameters())


def test_a_missing_tensor_is_named() -> None:
    case = make_case("llama")
    with pytest.raises(KeyError, match=r"model.layers.0.input_layernorm.weight"):
        fused_weights(case.spec, lambda name: {"model.embed_tokens.weight": torch.ones(1)}[name], torch.float32, CPU)


@pytest.mark.parametrize("name", CASES)
def test_random_weights_have_the_shapes_of_a_checkpoint(name: str) -> None:
    case = make_case(name)
    made = random_weights(case.spec, torch.bfloat16, CPU)
    stored = fused_weights(case.spec, case.tensor, torch.bfloat16, CPU)
    assert [tensor.shape for tensor in made.tensors()] == [tensor.shape for tensor in stored.tensors()]
    assert {tensor.dtype for tensor in made.tensors()} == {torch.bfloat16}
