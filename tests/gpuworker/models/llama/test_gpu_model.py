"""The native path of the GPU, in plain torch on the CPU: it computes what transformers does, option by option."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config

from common.contracts.errors import Unsupported
from common.contracts.types import KvGeometry
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.kernels import torch_elementwise
from gpuworker.memory.byte_plan import GIB
from gpuworker.models.choose import Weights, load_on_gpu, why_not_native
from gpuworker.models.hf.loader import ModelSource
from gpuworker.models.hf.precision import Precision
from gpuworker.models.llama.gpu_model import Kernels, LlamaGpuModel
from gpuworker.models.llama.gpu_weights import fused_weights, random_weights
from gpuworker.models.self_test import CallRecorder, self_test
from gpuworker.plane import memory
from gpuworker.plane.memory import MemoryOptions, plan_memory
from tests.support.gpuworker.llama_cases import CASES, EXPERT_CASES, Case, case_tokens, make_case, steps

CPU = torch.device("cpu")


def llama_model(case: Case) -> LlamaGpuModel:
    weights = fused_weights(case.spec, case.tensor, torch.float32, CPU)
    return LlamaGpuModel(case.config, weights, "float32", 64)


@pytest.mark.parametrize("name", [*CASES, *EXPERT_CASES])
def test_logits_are_those_of_the_transformers_path(name: str) -> None:
    case = make_case(name)
    tokens = case_tokens(case.spec)
    ours = torch.cat(list(steps(llama_model(case), TorchAttention(case.cache()), tokens)))
    theirs = torch.cat(list(steps(case.transformers_model, TorchAttention(case.cache()), tokens)))
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
    model = LlamaGpuModel(case.config, random_weights(case.spec, torch.float32, CPU), "float32", 64, Kernels(counting))
    model.forward(position, position, torch.tensor([11]), CallRecorder())
    assert counting.rows == [12, 12, 1]


def test_logits_of_all_tokens_are_those_of_keeping_all() -> None:
    case = make_case("qwen3, wide heads")
    model, position = llama_model(case), torch.arange(12)
    everything = model.logits(position, position, None, CallRecorder())
    torch.testing.assert_close(everything, model.forward(position, position, position, CallRecorder()))


def test_tied_weights_are_held_once() -> None:
    case = make_case("llama, tied, scaled")
    weights = fused_weights(case.spec, case.tensor, torch.float32, CPU)
    assert weights.head is weights.embedding
    assert weights.num_bytes == 4 * sum(parameter.numel() for parameter in case.transformers_model.module.parameters())


def test_a_missing_tensor_is_named() -> None:
    case = make_case("llama")
    with pytest.raises(KeyError, match=r"model.layers.0.input_layernorm.weight"):
        fused_weights(case.spec, lambda name: {"model.embed_tokens.weight": torch.ones(1)}[name], torch.float32, CPU)


@pytest.mark.parametrize("name", [*CASES, *EXPERT_CASES])
def test_random_weights_have_the_shapes_of_a_checkpoint(name: str) -> None:
    case = make_case(name)
    made = random_weights(case.spec, torch.bfloat16, CPU)
    stored = fused_weights(case.spec, case.tensor, torch.bfloat16, CPU)
    assert [tensor.shape for tensor in made.tensors()] == [tensor.shape for tensor in stored.tensors()]
    assert {tensor.dtype for tensor in made.tensors()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama, tied, scaled", "qwen2, a window above", "qwen3 with biases", *EXPERT_CASES])
def test_the_start_up_test_passes_on_the_layers_that_it_runs(name: str) -> None:
    case = make_case(name)
    model, _ = load_on_gpu(case.config, case.spec, Weights(case.tensor), Precision(torch.float32, "float32"), CPU)
    geometry = self_test(case.transformers_model, TorchAttention, model.only(range(3)))
    assert (geometry.num_layers, geometry.num_kv_heads) == (3, case.spec.num_kv_heads)
    assert model.only([2]).spec.windows == (case.spec.windows[2],)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_start_up_test_refuses_weights_that_are_not_the_models(name: str) -> None:
    case = make_case(name)
    wrong = LlamaGpuModel(case.config, random_weights(case.spec, torch.float32, CPU), "float32", 64)
    with pytest.raises(Unsupported, match="run through the paged cache"):
        self_test(case.transformers_model, TorchAttention, wrong)


@pytest.mark.parametrize("part", ["router", "gate_up", "down"])
def test_the_start_up_test_refuses_experts_in_another_order(part: str) -> None:
    case = make_case("mixtral")
    model = llama_model(case)
    swapped = replace(model.weights.layers[1], **{part: getattr(model.weights.layers[1], part).flip(0)})
    model.weights = replace(model.weights, layers=(model.weights.layers[0], swapped, model.weights.layers[2]))
    with pytest.raises(Unsupported, match="run through the paged cache"):
        self_test(case.transformers_model, TorchAttention, model)


def test_a_model_of_some_layers_keeps_their_experts() -> None:
    part = llama_model(make_case("qwen3_moe, dense layers, normalised")).only([2, 1])
    assert [part.spec.has_experts(layer) for layer in range(2)] == [True, False]
    assert [layer.router is not None for layer in part.weights.layers] == [True, False]


def test_what_cannot_take_the_native_path_on_cuda_is_said_before_weights_are_read() -> None:
    source, cuda = ModelSource("", dtype="float16"), torch.device("cuda")
    assert why_not_native(make_case("llama").config, source, cuda) is None
    int4 = why_not_native(make_case("llama").config, replace(source, quantization="int4"), cuda)
    assert int4 == "on CUDA linears are not quantised at start, to int4 or else"
    other = why_not_native(GPT2Config(), source, cuda)
    families = (
        "llama, mistral, mixtral, olmoe, qwen2, qwen3, qwen3_moe, lfm2, lfm2_moe, qwen3_next, qwen3_5_text,"
        " qwen3_5_moe_text, gemma4_text"
    )
    assert other == f"gpt2 is not of the Llama family ({families})"


def test_the_ledger_keeps_room_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: GIB)
    model, geometry = llama_model(make_case("llama")), KvGeometry(3, 2, 8, 8, "float32")
    options = MemoryOptions(max_num_seqs=4, kv_blocks=10)
    without = plan_memory(model, geometry, 64, options)
    ledger = plan_memory(model, geometry, 64, replace(options, cuda_graphs=True))
    # Inputs have 8 words a row and two block tables of 4. There are logits and 28 bytes for a sample, hidden states,
    # and graphs of 1, 2 and 4 rows.
    inputs, logits, hidden = 4 * 4 * (8 + 2 * 4), 4 * 96 * (4 + 28), 4 * (4 * 32 + 3 * 48) * 4
    assert ledger.graphs == inputs + logits + hidden + 3 * 5 * (2 << 20)
    assert (ledger.weights, without.graphs) == (model.weight_bytes, 0)
    assert [line.split()[:2] for line in ledger.lines() if "graphs" in line] == [["CUDA", "graphs"]]
    assert not any("graphs" in line for line in without.lines())
