"""Decodes as graphs, without a GPU: what is captured is done again by hand, on the same padded inputs."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
import torch

from common.contracts.types import Constraint, ConstraintKind, KvGeometry, SamplingParams
from gpuworker.attention.interface import AttentionBackend, AttentionMetadata, DeviceTables, LayerAttention
from gpuworker.attention.step_inputs import StagedStep, pack_rows
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.hf.loader import read_config
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.llama.gpu_weights import fused_weights
from gpuworker.models.llama.spec import llama_spec
from gpuworker.runner.cuda_graphs import (
    GraphInputs,
    GraphLauncher,
    GraphParts,
    RepeatingRecorder,
    graph_sizes,
    padded_size,
)
from gpuworker.runner.launcher import EagerLauncher, LaidOutStep, StepLauncher
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.thread_executor import thread_executor
from gpuworker.sampling import sampler
from gpuworker.sampling.rows import SampledRow, SampledTokens
from gpuworker.sampling.sampler import SamplingBatch
from gpuworker.structured.grammars import GrammarCompiler
from tests.support.checkpoints import EOS, VOCAB_SIZE, checkpoint, hf_greedy, tokenizer
from tests.support.gpuworker.runner_harness import GREEDY, Driver

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS, MAX_LEN = 16, 128, 256
PROMPTS = [list(range(6 + n, 6 + n + length)) for n, length in enumerate((3, 41, 70, 17, 5))]


class UnpaddedAttention:
    """Keeps padding from a backend without support for it: rows without a slot attend to nothing."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self._count = 0

    def plan(self, step: AttentionMetadata) -> Hashable:
        count = self._count = int((step.slot_mapping >= 0).sum())
        if count:
            device = DeviceTables(
                step.device.query_start[: count + 1],
                step.device.context_len[:count],
                step.device.block_table[:count],
                step.device.slot_mapping[:count],
            )
            table, slots = step.block_table[:count], step.slot_mapping[:count]
            rows = step.query_start[: count + 1], step.context_len[:count]
            self._backend.begin(AttentionMetadata(count, *rows, table, slots, device))
        return "the only way"

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out, count = torch.zeros_like(query), self._count
        if count:
            out[:count] = self._backend.write_and_attend(layer, query[:count], key[:count], value[:count])
        return out


class Counting:
    """The launcher beneath; counts what reaches it."""

    def __init__(self, beneath: StepLauncher) -> None:
        self._beneath = beneath
        self.steps = 0

    def launch(self, step: LaidOutStep) -> SampledTokens:
        self.steps += 1
        return self._beneath.launch(step)


def llama_model() -> LlamaGpuModel:
    directory = checkpoint("llama")
    config, files = read_config(directory), Checkpoint(directory)
    spec = llama_spec(config)
    assert spec is not None
    weights = fused_weights(spec, lambda name: files.tensor(name, torch.float32), torch.float32, CPU)
    return LlamaGpuModel(config, weights, "float32", MAX_LEN)


def cache_of(model: LlamaGpuModel) -> KvCache:
    spec = model.spec
    geometry = KvGeometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim, "float32")
    return KvCache(geometry, BLOCKS, BLOCK_SIZE, CPU)


class Captured:
    """A runner whose decodes are graphs of at most four rows, and what of its steps was not."""

    def __init__(self) -> None:
        model = llama_model()
        cache = cache_of(model)
        attention = TorchAttention(cache)

        def launcher(tokens: TokenTable) -> StepLauncher:
            unpadded = UnpaddedAttention(attention)
            inputs = GraphInputs(4, cache, MAX_LEN, tokens.spare)
            self.tokens, self.beneath = tokens, Counting(EagerLauncher(model, attention, tokens))
            parts = GraphParts(model, unpadded, unpadded.plan, tokens, inputs, (1, 2, 4))
            self.graphs = GraphLauncher(parts, self.beneath, RepeatingRecorder())
            return self.graphs

        self.runner = ModelRunner(model, cache, attention, RunnerLimits(8, MAX_LEN, 1), thread_executor(launcher))


def eager_runner() -> ModelRunner:
    model = llama_model()
    cache = cache_of(model)
    return ModelRunner(model, cache, TorchAttention(cache), RunnerLimits(8, MAX_LEN, 1), thread_executor())


def outputs(runner: ModelRunner, samplings: list[SamplingParams]) -> list[list[int]]:
    driver = Driver(runner, BLOCK_SIZE)
    streams = [driver.add(PROMPTS[n], 12 + n, 7, sampling) for n, sampling in enumerate(samplings)]
    driver.run()
    runner.close()
    return [stream.output for stream in streams]


# ---------------------------------------------------------------- sizes


def test_sizes_rise_in_steps_that_suit_the_hardware_up_to_the_most() -> None:
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(1) == (1,)
    assert graph_sizes(96) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96)


def test_a_step_runs_at_the_next_larger_size() -> None:
    assert [padded_size(rows, (1, 2, 4, 8)) for rows in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]


# ---------------------------------------------------------------- inputs


def staged(
    start: list[int], length: list[int], batch_index: list[int], samples: list[bool] | None = None
) -> StagedStep:
    table = np.arange(3 * len(start), dtype=np.int32).reshape(-1, 3) + 40
    rows = pack_rows(np.array(start, dtype=np.int32), np.array(length, dtype=np.int32), table, 4)
    drawing = np.array(samples if samples is not None else [True] * len(start))
    return StagedStep(rows, np.array(batch_index, dtype=np.int32), drawing, table_width=100)


def small_inputs() -> GraphInputs:
    return GraphInputs(8, KvCache(KvGeometry(1, 1, 2, 2, "float32"), 64, 4, CPU), 20, spare_place=999)


def test_inputs_hold_the_rows_of_a_step_and_padding_behind_them() -> None:
    inputs = small_inputs()
    step = inputs.fill(4, staged([5, 11, 2], [1, 1, 1], [3, 0, 7]))
    rows = inputs.rows(4)
    assert rows.positions.tolist() == [5, 11, 2, 0]
    assert rows.take.tolist() == [305, 11, 702, 0]
    assert rows.put.tolist() == [306, 12, 703, 999]
    assert step.context_len.tolist() == step.device.context_len.tolist() == [6, 12, 3, 0]
    assert step.slot_mapping.tolist() == step.device.slot_mapping.tolist() == [41 * 4 + 1, 45 * 4 + 3, 46 * 4 + 2, -1]
    assert step.device.query_start.tolist() == [0, 1, 2, 3, 4]
    assert step.device.block_table[:, :3].tolist() == [[40, 41, 42], [43, 44, 45], [46, 47, 48], [0, 0, 0]]
    assert step.num_decodes == step.num_rows == 4


def test_inputs_forget_the_rows_of_the_step_before() -> None:
    inputs = small_inputs()
    drawing = np.array([0.25, 0.5, 0.75]), np.array([1.0, 0.5, 2.0], dtype=np.float32)
    for _ in range(2):  # both buffers
        inputs.fill(4, staged([5, 11, 2], [1, 1, 1], [3, 0, 7]), *drawing)
    assert inputs.rows(4).uniform.tolist() == [0.25, 0.5, 0.75, 0.0]
    assert inputs.rows(4).temperature.tolist() == [1.0, 0.5, 2.0, 0.0]
    inputs.fill(4, staged([9], [1], [1]))
    rows = inputs.rows(4)
    assert rows.temperature.tolist() == [0.0] * 4
    assert rows.put.tolist() == [110, 999, 999, 999]
    assert rows.slot_mapping.tolist() == [42 * 4 + 1, -1, -1, -1]


def test_tensors_that_graphs_read_never_move() -> None:
    inputs = small_inputs()
    first = inputs.fill(2, staged([5, 11], [1, 1], [3, 0])).device
    second = inputs.fill(2, staged([6, 10], [1, 1], [3, 0])).device
    for name in ("query_start", "context_len", "block_table", "slot_mapping"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
    assert second.block_table.stride() == (5, 1)  # of the longest context, whatever the step has


def test_rehearsals_read_blocks_that_are_there_and_write_none() -> None:
    inputs = GraphInputs(4, KvCache(KvGeometry(1, 1, 2, 2, "float32"), 3, 4, CPU), 20, spare_place=999)
    seen = [(s.context_len.tolist(), s.slot_mapping.tolist(), s.block_table.tolist()) for s in inputs.rehearsals(2)]
    assert seen == [
        ([0, 0], [-1, -1], [[0], [0]]),
        ([20, 0], [-1, -1], [[0, 1, 2, 2, 2]] * 2),
        ([20, 20], [-1, -1], [[0, 1, 2, 2, 2]] * 2),
    ]
    assert inputs.rows(2).put.tolist() == [999, 999]


# ---------------------------------------------------------------- steps


def test_greedy_tokens_of_graphs_equal_generate() -> None:
    captured = Captured()
    found = outputs(captured.runner, [GREEDY] * 4)
    assert found == [hf_greedy(checkpoint("llama"), PROMPTS[n], 12 + n) for n in range(4)]
    # The longest prompt takes ten steps of seven tokens; when it has drawn, all that follows is decodes.
    assert captured.beneath.steps == 10


@pytest.mark.parametrize(
    "samplings",
    [
        [SamplingParams(temperature=0.8, seed=n) for n in range(4)],
        [GREEDY, SamplingParams(temperature=1.3, seed=5), GREEDY],
        [SamplingParams(temperature=0.9, top_k=9, seed=3), GREEDY],
        [
            SamplingParams(temperature=0.0, repetition_penalty=1.4),
            SamplingParams(temperature=0.0, logit_bias=((9, 4.0),)),
        ],
    ],
    ids=["temperature", "some greedy", "truncated", "penalty and bias"],
)
def test_draws_of_graphs_are_those_of_single_kernels(samplings: list[SamplingParams]) -> None:
    captured = Captured()
    assert outputs(captured.runner, samplings) == outputs(eager_runner(), samplings)
    assert captured.beneath.steps <= 10


@pytest.mark.parametrize("by_torch", [False, True])
def test_constrained_rows_draw_behind_the_graph(by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the forward is a graph, masks are waited for behind it, the draw is launched kernel by kernel."""
    if by_torch:
        monkeypatch.setattr(sampler, "native_rows", lambda *_: None)
    endless = Constraint(ConstraintKind.REGEX, "([a-f]|[0-9]{2}){40}")
    samplings = [
        SamplingParams(temperature=0.0, constraint=endless),
        SamplingParams(temperature=1.0, seed=4, constraint=endless),
        GREEDY,
    ]
    captured, eager = Captured(), eager_runner()
    for runner in (captured.runner, eager):
        runner.constrain(GrammarCompiler(checkpoint("llama") / "tokenizer.json", VOCAB_SIZE, (EOS,)))
    found = outputs(captured.runner, samplings)
    assert found == outputs(eager, samplings)
    assert captured.beneath.steps <= 10
    letters = set(tokenizer().encode("abcdef0123456789"))
    assert set(found[0]) | set(found[1]) <= letters
    assert not set(found[2]) <= letters


def test_more_rows_than_were_captured_run_kernel_by_kernel() -> None:
    captured = Captured()
    assert outputs(captured.runner, [GREEDY] * 5) == outputs(eager_runner(), [GREEDY] * 5)
    assert captured.beneath.steps > 10


def test_padding_draws_beside_the_table() -> None:
    captured = Captured()
    outputs(captured.runner, [GREEDY] * 3)
    table = captured.tokens.tensor
    written = [len(PROMPTS[n]) + 12 + n for n in range(3)]
    assert [int(table[batch_index].count_nonzero()) for batch_index in range(3)] == written
    assert int(table[3:].count_nonzero()) == 0


def laid_out(step: StagedStep) -> LaidOutStep:
    count = int(step.samples.sum())
    batch = SamplingBatch([SampledRow(GREEDY, 1)] * count, VOCAB_SIZE, CPU)
    return LaidOutStep(step, None, batch.at(np.zeros(count, dtype=np.int64), step.batch_index[step.samples]), batch)


def test_only_decodes_that_all_sample_are_graphs() -> None:
    graphs = Captured().graphs
    assert graphs.size_of(laid_out(staged([5, 6, 7], [1, 1, 1], [0, 1, 2]))) == 4
    assert graphs.size_of(laid_out(staged([5, 6], [1, 2], [0, 1]))) is None
    assert graphs.size_of(laid_out(staged([5, 6], [1, 1], [0, 1], [True, False]))) is None
    assert graphs.size_of(laid_out(staged([5] * 5, [1] * 5, [0, 1, 2, 3, 4]))) is None
