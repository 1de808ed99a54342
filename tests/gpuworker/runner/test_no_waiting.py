"""Off the CPU no step waits for the device: on one whose tensors hold nothing, whatever looks at a value fails."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.contracts.types import KvGeometry, SamplingParams
from gpuworker.attention.interface import AttentionMetadata, LayerAttention
from gpuworker.attention.step_inputs import StagedStep, pack_rows
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.llama.gpu_weights import fused_weights
from gpuworker.runner.cuda_graphs import GraphInputs, GraphLauncher, GraphParts, RepeatingRecorder
from gpuworker.runner.launcher import EagerLauncher, LaidOutStep, StepLauncher
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch
from tests.support.gpuworker.llama_cases import make_case

NOTHING = torch.device("meta")
GREEDY = SamplingParams(temperature=0.0)
VOCAB = 96
SAMPLINGS = {
    "greedy": [GREEDY] * 3,
    "temperature": [SamplingParams(temperature=0.8)] * 3,
    "top_k beside greedy": [SamplingParams(temperature=0.8, top_k=5), GREEDY, GREEDY],
    "top_p and min_p": [SamplingParams(top_p=0.9), SamplingParams(min_p=0.1), SamplingParams(top_k=3, top_p=0.5)],
    "penalties": [replace(GREEDY, repetition_penalty=1.3), replace(GREEDY, presence_penalty=0.5), GREEDY],
    "bias, ends, log-probabilities": [
        replace(GREEDY, logit_bias=((3, 1.0),)),
        replace(GREEDY, min_tokens=9, stop_token_ids=(5,)),
        replace(GREEDY, logprobs=2),
    ],
}


class NoAttention:
    """Attends to nothing, and asks nothing of a step."""

    def begin(self, step: AttentionMetadata) -> None: ...

    def plan(self, step: AttentionMetadata) -> Hashable:
        return len(step.context_len)

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return torch.empty_like(query)


def launchers() -> tuple[StepLauncher, StepLauncher]:
    """Return what launches kernel by kernel and what launches graphs, on the device that holds nothing."""
    case = make_case("qwen3 with biases")
    weights = fused_weights(case.spec, lambda name: case.tensor(name).to(NOTHING), torch.float32, NOTHING)
    model, attention = LlamaGpuModel(case.config, weights, "float32", 64), NoAttention()
    tokens = TokenTable(4, 65, NOTHING)
    tokens.write(0, np.arange(5, dtype=np.int32))
    eager = EagerLauncher(model, attention, tokens)
    cache = KvCache(KvGeometry(3, 2, 16, 16, "float32"), 16, 16, NOTHING)
    inputs = GraphInputs(4, cache, 64, tokens.spare)
    parts = GraphParts(model, attention, attention.plan, tokens, inputs, (1, 2, 4))
    return eager, GraphLauncher(parts, eager, RepeatingRecorder())


def step(samplings: list[SamplingParams], length: list[int]) -> LaidOutStep:
    rows = pack_rows(
        np.array([5, 9, 2], dtype=np.int32), np.array(length, dtype=np.int32), np.zeros((3, 4), dtype=np.int32), 16
    )
    batch_index = np.arange(3, dtype=np.int32)
    batch = SamplingBatch([SampledRow(params, 4, (2,)) for params in samplings], VOCAB, NOTHING)
    staged = StagedStep(rows, batch_index, np.ones(3, dtype=bool), 65)
    return LaidOutStep(staged, None, batch.at(rows.context_len.astype(np.int64), batch_index), batch)


def check(launcher: StepLauncher, work: LaidOutStep) -> None:
    with torch.inference_mode():
        sampled = launcher.launch(work)
    assert (sampled.tokens.shape, sampled.tokens.device) == ((3,), NOTHING)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_prefills_are_launched_without_looking(kind: str) -> None:
    check(launchers()[0], step(SAMPLINGS[kind], [1, 7, 3]))


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_decodes_are_launched_without_looking(kind: str) -> None:
    eager, graphs = launchers()
    for launcher in (eager, graphs):
        check(launcher, step(SAMPLINGS[kind], [1, 1, 1]))


def test_looking_would_be_noticed() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device=NOTHING).nonzero()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device=NOTHING).argmax().item()
