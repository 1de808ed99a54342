"""The lean path of the GPU with its real kernels: it computes what the hosted path does, also as padded graphs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from common.types import SamplingParams
from gpuworker.cuda_graphs import GraphLauncher, GraphParts, RepeatingRecorder
from gpuworker.graph_inputs import GraphInputs
from gpuworker.kernels import triton_elementwise
from gpuworker.kernels.torch_attention import TorchAttention
from gpuworker.kernels.triton_attention import TritonAttention
from gpuworker.models.lean_gpu import LeanGpuModel
from gpuworker.models.lean_gpu_weights import fused_weights
from gpuworker.models.lean_spec import rotary_table
from gpuworker.sampler import SampledRow, SamplingBatch
from gpuworker.step_inputs import StagedStep, pack_rows
from gpuworker.step_launch import EagerLauncher, LaidOutStep
from gpuworker.token_table import TokenTable
from tests.gpuworker.models.lean_cases import BLOCK_SIZE, Case, case_tokens, make_case, steps

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def lean(case: Case) -> LeanGpuModel:
    weights = fused_weights(case.spec, case.tensor, torch.float32, CPU)
    return LeanGpuModel(case.spec, weights, rotary_table(case.config, 64), "float32", triton_elementwise)


@pytest.mark.parametrize("name", ["llama", "qwen3, wide heads", "qwen3 with biases", "mistral, a window"])
def test_logits_are_those_of_the_hosted_path(name: str) -> None:
    case = make_case(name)
    tokens = case_tokens(case.spec)
    ours = torch.cat(list(steps(lean(case), TritonAttention(case.cache()), tokens)))
    theirs = torch.cat(list(steps(case.hosted, TorchAttention(case.cache()), tokens)))
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=5e-5)


def step_of(spec_vocab: int, start: list[int], length: list[int], width: int) -> LaidOutStep:
    """Return a step of three sequences, in seats 0 to 2, on blocks of their own."""
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    rows = pack_rows(np.array(start, dtype=np.int32), np.array(length, dtype=np.int32), table, BLOCK_SIZE)
    seats = np.arange(3, dtype=np.int32)
    batch = SamplingBatch([SampledRow(GREEDY, 4)] * 3, spec_vocab, CPU)
    staged = StagedStep(rows, seats, np.ones(3, dtype=bool), width)
    return LaidOutStep(staged, staged.on(CPU), batch.at(rows.context_len.astype(np.int64), seats), batch)


def test_padded_decodes_draw_what_kernels_draw_one_by_one() -> None:
    case = make_case("llama")
    model, drawn = lean(case), []
    for graphs in (False, True):
        cache, tokens = case.cache(12), TokenTable(3, 17, CPU)
        attention = TritonAttention(cache)
        launcher = beneath = EagerLauncher(model, attention, tokens)
        if graphs:
            attention.reserve_padded(4, case.spec.num_heads, torch.float32)
            plan = partial(attention.begin_padded, num_heads=case.spec.num_heads, dtype=torch.float32)
            parts = GraphParts(model, attention, plan, tokens, GraphInputs(4, cache, 16, tokens.spare), (4,))
            launcher = GraphLauncher(parts, beneath, RepeatingRecorder())  # type: ignore[assignment]
        for seat in range(3):
            tokens.write(seat, [5 + seat, 9, 70, 31 - seat])
        beneath.launch(step_of(case.spec.vocab_size, [0, 0, 0], [4, 3, 2], 17))
        for n in range(3):
            launcher.launch(step_of(case.spec.vocab_size, [4 + n, 3 + n, 2 + n], [1, 1, 1], 17))
        drawn.append(tokens.tensor.tolist())
    assert drawn[0] == drawn[1]
    assert len({tuple(row[4:8]) for row in drawn[0]}) == 3
