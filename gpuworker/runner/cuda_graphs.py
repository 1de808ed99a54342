"""Decode steps as CUDA graphs, captured at start for padded numbers of rows: two launches instead of hundreds.

A step in which all rows decode and sample runs as the graph of the next larger size. The graph reads the tokens that
the previous step put into the table on the device, and ends with logits. A second, small graph samples and puts the
tokens back, where all rows are greedy or have only a temperature. Other ways of sampling have shapes that depend on the
step; their kernels are launched one by one after the first graph. All other steps (a prefill, more rows than were
captured) go to the launcher beneath. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from gpuworker.attention.interface import AttentionBackend, AttentionMetadata, LayerSink
from gpuworker.memory.devices import free_bytes
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.token_table import TokenTable
from gpuworker.runner.graph_inputs import GraphInputs, graph_sizes, padded_size
from gpuworker.runner.launcher import EagerLauncher, LaidOutStep, LauncherFactory, StepLauncher
from gpuworker.sampling.rows import SampledTokens
from gpuworker.sampling.truncation import invert

if TYPE_CHECKING:
    from gpuworker.models.llama.gpu_model import LlamaGpuModel

_log = logging.getLogger(__name__)
Replay = Callable[[], None]
_WAYS = 5  # graphs of one size: three ways to plan attention, two to sample
_GRAPH_BYTES = 2 << 20  # of one graph: arguments of some hundred kernels
_DRAW_BYTES = 4 + 4 + 4 + 8 + 8  # of one logit: in float32, scaled, as weight; cumulated, and what it is compared with


class GraphModel(Protocol):
    """A model whose forward can be captured: no shape depends on data, and nothing waits for the device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def vocab_size(self) -> int: ...

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor | None,
        sink: LayerSink,
        out: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """Return logits [S, vocab], in `out` where it is given; token_ids and positions [T] int32 or int64.

        `keep` [S] indexes the tokens whose logits are wanted; None means all.
        """
        ...


class Recorder(Protocol):
    """Turns work into a function that repeats it on the same tensors."""

    def record(self, work: Callable[[], None], run: bool) -> Replay:
        """Return a function that repeats `work`.

        With `run`, `work` also runs now, so that libraries allocate their workspaces.
        """
        ...


class CudaRecorder:
    """Captures CUDA graphs that share memory: one replays at a time, and none reads what another left in it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one stream: each stream keeps memory of its own

    def record(self, work: Callable[[], None], run: bool) -> Replay:
        if run:
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        replay: Replay = graph.replay
        return replay


class RepeatingRecorder:
    """Repeats the work kernel by kernel, on devices without CUDA graphs."""

    def record(self, work: Callable[[], None], run: bool) -> Replay:
        if run:
            work()
        return work


@runtime_checkable
class PaddedAttention(AttentionBackend, Protocol):
    """A backend that can plan decode steps into memory that does not move."""

    def reserve_padded(self, rows: int, num_heads: int, dtype: torch.dtype) -> None:
        """Make room for steps of up to `rows` rows, for queries of this type."""
        ...

    def begin_padded(self, step: AttentionMetadata, num_heads: int, dtype: torch.dtype) -> Hashable:
        """Plan a step; rows without context are padding. Returns which kernels a layer launches, as `Plan`."""
        ...


Plan = Callable[[AttentionMetadata], Hashable]
"""Plans the attention of a padded step, outside of graphs, into memory that does not move.

What it returns says which kernels a layer launches: a graph fits the steps for which it is what it was at capture.
"""


@dataclass(frozen=True, slots=True)
class GraphParts:
    """The parts that graphs are built from."""

    model: GraphModel
    attention: LayerSink
    plan: Plan
    tokens: TokenTable
    inputs: GraphInputs
    sizes: tuple[int, ...]  # rising


class GraphLauncher:
    """Implements `StepLauncher`: decodes as graphs, other steps by `beneath`."""

    def __init__(self, parts: GraphParts, beneath: StepLauncher, recorder: Recorder) -> None:
        self._parts, self._beneath = parts, beneath
        model, most = parts.model, parts.sizes[-1]
        self._logits = torch.zeros((most, model.vocab_size), dtype=model.dtype, device=model.device)
        self._sampled = torch.zeros(most, dtype=torch.int64, device=model.device)
        self._forward: dict[tuple[int, Hashable], Replay] = {}
        self._greedy: dict[int, Replay] = {}
        self._random: dict[int, Replay] = {}
        began, free = time.perf_counter(), free_bytes(model.device)
        self._rehearse()
        # The largest comes first: its memory is enough for all others.
        for size in reversed(parts.sizes):
            self._capture(size, recorder)
        taken = (free - free_bytes(model.device)) / (1 << 20)
        seconds = time.perf_counter() - began
        _log.info("captured %d graphs, up to %d rows, in %.1f s and %.0f MiB", self.count, most, seconds, taken)

    @property
    def count(self) -> int:
        return len(self._forward) + len(self._greedy) + len(self._random)

    def launch(self, step: LaidOutStep) -> SampledTokens:
        size = self.size_of(step)
        if size is None:
            return self._beneath.launch(step)
        count, sampling, inputs = len(step.staged.batch_index), step.sampling, self._parts.inputs
        temperature = None if sampling.plain else sampling.temperatures
        uniform = None if temperature is None else _spread(step.point.uniform, temperature)
        planned = self._parts.plan(inputs.fill(size, step.staged, uniform, temperature))
        # A plan that was not captured is launched kernel by kernel, on the same padded inputs.
        self._forward.get((size, planned), lambda: self._to_logits(size))()
        if sampling.plain or temperature is not None:
            (self._greedy if temperature is None else self._random)[size]()
            return SampledTokens(self._sampled[:count])
        sampled = sampling.sample(self._logits[:count].float(), step.point, self._parts.tokens.tensor)
        self._parts.tokens.put(inputs.rows(count).put.long(), sampled.tokens)
        return sampled

    def size_of(self, step: LaidOutStep) -> int | None:
        """Return the size of the graph that a step runs as; None for one that must be launched kernel by kernel."""
        staged = step.staged
        rows = len(staged.batch_index)
        decodes = len(staged.rows.positions) == rows and bool(staged.samples.all())
        return padded_size(rows, self._parts.sizes) if decodes else None

    # ------------------------------------------------------------ capturing

    @torch.inference_mode()
    def _rehearse(self) -> None:
        """Run each kind of step, so that every kernel is compiled before anything is captured.

        One row compiles those of contexts that are cut; whether sharing a prefix pays off shows with the most rows.
        """
        for size in {self._parts.sizes[0], self._parts.sizes[-1]}:
            for step in self._parts.inputs.rehearsals(size):
                self._parts.plan(step)
                self._to_logits(size)

    @torch.inference_mode()
    def _capture(self, size: int, recorder: Recorder) -> None:
        """Capture the graphs of a step of this size. Only the first, of rows without context, also runs."""
        for nth, step in enumerate(self._parts.inputs.rehearsals(size)):
            planned = self._parts.plan(step)
            if (size, planned) not in self._forward:
                self._forward[size, planned] = recorder.record(lambda: self._to_logits(size), run=nth == 0)
        self._greedy[size] = recorder.record(lambda: self._sample_greedy(size), run=True)
        self._random[size] = recorder.record(lambda: self._sample_random(size), run=True)

    # ------------------------------------------------------------ what is captured

    def _to_logits(self, size: int) -> None:
        parts, rows = self._parts, self._parts.inputs.rows(size)
        token_ids = parts.tokens.flat.index_select(0, rows.take)
        parts.model.logits(token_ids, rows.positions, None, parts.attention, self._logits[:size])

    def _sample_greedy(self, size: int) -> None:
        torch.argmax(self._logits[:size], dim=-1, out=self._sampled[:size])
        self._put(size)

    def _sample_random(self, size: int) -> None:
        """Sample as `SamplingBatch` does for a temperature alone; padding and greedy rows take the likeliest token."""
        rows, logits = self._parts.inputs.rows(size), self._logits[:size]
        at_random = rows.temperature > 0
        scaled = logits.float() / torch.where(at_random, rows.temperature, 1.0)[:, None]
        sampled = torch.where(at_random, invert(scaled, None, rows.uniform), logits.argmax(dim=-1))
        self._sampled[:size].copy_(sampled)
        self._put(size)

    def _put(self, size: int) -> None:
        places = self._parts.inputs.rows(size).put
        self._parts.tokens.flat.index_copy_(0, places.long(), self._sampled[:size].int())


def _spread(uniform: npt.NDArray[np.float64], temperature: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return [S] with the numbers [D] of the rows that sample at random in their places."""
    spread = np.zeros(len(temperature), dtype=np.float64)
    spread[temperature > 0] = uniform
    return spread


def graph_launcher(
    model: LlamaGpuModel, cache: KvCache, attention: AttentionBackend, max_num_seqs: int, max_model_len: int
) -> LauncherFactory | None:
    """Return the factory of a launcher over a native GPU model: graphs up to `max_num_seqs` rows.

    `attention` is the runner's own: it plans the steps that are no graphs, too. None: it cannot plan for graphs.
    """
    if not isinstance(attention, PaddedAttention):
        return None

    def make(tokens: TokenTable) -> StepLauncher:
        heads, dtype = model.spec.num_heads, model.dtype
        attention.reserve_padded(max_num_seqs, heads, dtype)
        inputs = GraphInputs(max_num_seqs, cache, max_model_len, tokens.spare)
        plan = partial(attention.begin_padded, num_heads=heads, dtype=dtype)
        parts = GraphParts(model, attention, plan, tokens, inputs, graph_sizes(max_num_seqs))
        return GraphLauncher(parts, EagerLauncher(model, attention, tokens), CudaRecorder())

    return make


def graph_bytes(model: LlamaGpuModel, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Return what graphs take on the device beside the steps that are none, in bytes: an estimate from above.

    Inputs (block tables twice, as they land and as they are read); logits, and their samples in float32 and float64;
    the hidden states of the largest size; and for each graph what the driver keeps of it.
    """
    spec, rows = model.spec, max_num_seqs
    inputs = 4 * rows * (8 + 2 * -(-max_model_len // block_size))
    logits = rows * spec.vocab_size * (model.dtype.itemsize + _DRAW_BYTES)
    hidden = rows * (4 * spec.hidden_size + 3 * spec.intermediate_size) * model.dtype.itemsize
    return inputs + logits + hidden + _GRAPH_BYTES * _WAYS * len(graph_sizes(rows))
