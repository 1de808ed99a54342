"""The native path of the GPU with its real kernels: it computes what transformers does, also as padded graphs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from common.contracts.types import SamplingParams
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.step_inputs import StagedStep, pack_rows
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.attention.triton_backend import TritonAttention
from gpuworker.checkpoints.lora import LoraAdapter, LowRank
from gpuworker.kernels import torch_adapters, triton_adapters, triton_elementwise, triton_experts
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama.gpu_model import AdapterProducts, Kernels, LlamaGpuModel
from gpuworker.models.llama.gpu_weights import fused_weights
from gpuworker.runner.cuda_graphs import GraphInputs, GraphLauncher, GraphParts, RepeatingRecorder
from gpuworker.runner.launcher import EagerLauncher, LaidOutStep, StepLauncher
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch
from tests.suites.triton_interpreted.attention_cases import small
from tests.support.gpuworker.llama_cases import (
    BLOCK_SIZE,
    EXPERT_CASES,
    STEP_LENGTHS,
    Case,
    case_tokens,
    make_case,
    steps,
)

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def llama_model(case: Case) -> LlamaGpuModel:
    weights = fused_weights(case.spec, case.tensor, torch.float32, CPU)
    return LlamaGpuModel(case.config, weights, "float32", 64, Kernels(triton_elementwise, triton_experts))


QUICK = ("llama", "qwen3, wide heads", "mistral, a window", "mixtral", "qwen3_moe, dense layers, normalised", "olmoe")
MORE = [name for name in ("qwen3 with biases", *EXPERT_CASES) if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_logits_are_those_of_the_transformers_path(name: str) -> None:
    case = make_case(name)
    tokens = case_tokens(case.spec)
    ours = torch.cat(list(steps(llama_model(case), TritonAttention(case.cache()), tokens)))
    theirs = torch.cat(list(steps(case.transformers_model, TorchAttention(case.cache()), tokens)))
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=5e-5)


def drawn_adapter(model: LlamaGpuModel, rank: int) -> LoraAdapter:
    draw = torch.Generator().manual_seed(rank)
    parts = {
        name: LowRank(
            0.3 * torch.randn((rank, inputs), generator=draw), 0.3 * torch.randn((outputs, rank), generator=draw)
        )
        for name, (outputs, inputs) in model.adapter_targets.items()
    }
    return LoraAdapter("", rank, parts)


@pytest.mark.parametrize("kernels", [triton_adapters, torch_adapters], ids=["triton", "torch"])
@pytest.mark.parametrize("name", ["qwen3, wide heads", "olmoe, clipped, normalised, biases"])
def test_rows_of_adapters_have_the_logits_of_the_transformers_path(name: str, kernels: AdapterProducts) -> None:
    """The two sequences have adapters of different ranks, then one of them the base: its logits keep their bits."""
    case = make_case(name)
    tokens, theirs = case_tokens(case.spec), case.transformers_model
    weights = fused_weights(case.spec, case.tensor, torch.float32, CPU)
    ours = LlamaGpuModel(case.config, weights, "float32", 64, Kernels(adapters=kernels))
    for model in (ours, theirs):
        model.allow_adapters(20)
    assert ours._low_rank is kernels
    read = [drawn_adapter(ours, rank) for rank in (3, 20)]

    def logits(model: LlamaGpuModel | TransformersModel, attention: AttentionBackend, *of_rows: int) -> torch.Tensor:
        prepared = [model.prepare_adapter(each) for each in read]
        found, steps_of = [], steps(model, attention, tokens)
        for lengths in STEP_LENGTHS:
            of_rows_now = [None if each < 0 else prepared[each] for each in of_rows]
            model.adapters = StepAdapters.of_rows(of_rows_now, np.array(lengths, dtype=np.int32))
            found.append(next(steps_of))
        model.adapters = None
        return torch.cat(found)

    base = logits(ours, TorchAttention(case.cache()), -1, -1)
    for of_rows in ((0, 1), (1, -1)):
        found = logits(ours, TorchAttention(case.cache()), *of_rows)
        wanted = logits(theirs, TorchAttention(case.cache()), *of_rows)
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
        assert not torch.allclose(found, base, atol=1e-2)


def test_kernels_that_fail_their_test_leave_adapters_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    case = make_case("llama")

    class Wrong:
        def add_low_rank(self, out: torch.Tensor, *others: Any) -> None:
            out.add_(1.0)

    class Failing:
        def add_low_rank(self, *given: Any) -> None:
            raise RuntimeError("no image for this chip")

    weights = fused_weights(case.spec, case.tensor, torch.float32, CPU)
    for kernels, words in ((Wrong(), "they are off by"), (Failing(), "no image for this chip")):
        model = LlamaGpuModel(case.config, weights, "float32", 64, Kernels(adapters=kernels))
        model.allow_adapters(4)
        assert model._low_rank is torch_adapters
        assert words in caplog.text


class Decoding:
    """Three sequences at batch indices 0 to 2, the first two on one block to begin with, run step by step."""

    def __init__(self, case: Case, graphs: bool) -> None:
        model, cache, heads = llama_model(case), case.cache(12), case.spec.num_heads
        self._vocab, self.tokens = case.spec.vocab_size, TokenTable(3, 33, CPU)
        attention = TritonAttention(cache, tuned=small(2), cascade_bytes=1)
        self.launcher: StepLauncher = EagerLauncher(model, attention, self.tokens)
        if graphs:
            attention.reserve_padded(4, heads, torch.float32)
            plan = partial(attention.begin_padded, num_heads=heads, dtype=torch.float32)
            inputs = GraphInputs(4, cache, 32, self.tokens.spare)
            parts = GraphParts(model, attention, plan, self.tokens, inputs, (4,))
            self.launcher = self.graphs = GraphLauncher(parts, self.launcher, RepeatingRecorder())
        for batch_index in range(3):
            self.tokens.write(batch_index, [5 + batch_index * (batch_index // 2), 9, 70, 31, 12 - batch_index])

    def step(self, start: list[int], length: list[int]) -> None:
        table = np.array([[0, 1, 2, 3], [0, 4, 5, 6], [7, 8, 9, 10]], dtype=np.int32)
        rows = pack_rows(np.array(start, dtype=np.int32), np.array(length, dtype=np.int32), table, BLOCK_SIZE)
        batch_index = np.arange(3, dtype=np.int32)
        batch = SamplingBatch([SampledRow(GREEDY, 4)] * 3, self._vocab, CPU)
        staged = StagedStep(rows, batch_index, np.ones(3, dtype=bool), self.tokens.width)
        point = batch.at(rows.context_len.astype(np.int64), batch_index)
        self.launcher.launch(LaidOutStep(staged, staged.on(CPU), point, batch))


@pytest.mark.parametrize(("name", "decodes"), [("llama", 2), ("mixtral", 1)])
def test_padded_decodes_draw_what_kernels_draw_one_by_one(name: str, decodes: int) -> None:
    sampled = []
    for graphs in (False, True):
        decoding = Decoding(make_case(name), graphs)
        decoding.step([0, 0, 0], [5, 5, 2])
        for n in range(decodes):
            decoding.step([5 + n, 5 + n, 2 + n], [1, 1, 1])
        sampled.append(decoding.tokens.tensor.tolist())
    assert sampled[0] == sampled[1]
    assert len({tuple(row[5 : 6 + decodes]) for row in sampled[0]}) == 3


def test_each_way_to_plan_has_a_graph() -> None:
    graphs = Decoding(make_case("llama"), graphs=True).graphs
    assert graphs.count == 3 + 2  # short contexts, contexts that are cut, shared blocks; plus two ways to sample
