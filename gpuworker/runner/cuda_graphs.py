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
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from gpuworker.attention.interface import AttentionBackend, AttentionMetadata, DeviceTables, Int32Array, LayerSink
from gpuworker.attention.step_inputs import StagedStep
from gpuworker.memory.devices import free_bytes
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.token_table import TokenTable
from gpuworker.runner.launcher import EagerLauncher, LaidOutStep, LauncherFactory, StepLauncher, use_adapters
from gpuworker.sampling.rows import SampledTokens
from gpuworker.sampling.truncation import invert

if TYPE_CHECKING:
    from gpuworker.models.llama.gpu_model import LlamaGpuModel

_BUFFERS = 2  # at most two steps are unfinished, so the second last transfer is over when the next begins
_PER_ROW = 8  # words of 32 bits in RowFields


# The inputs of captured steps: tensors at fixed addresses, filled by one transfer from pinned memory a step.
# A step of R rows runs as a step of a captured size. The rows beyond R are padding. They have no context and no
# slot to write, and their samples go to a spare place beside the token table. The memory has the same layout on the
# device and on the host. First come the fields of every row, for the largest number of rows. Then come the block
# tables of this step's rows, as wide as this step needs. So a transfer is a few kilobytes, whatever the longest
# context.
def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows to capture, rising: 1, 2, 4, then multiples of 8, from 64 on of 16, and the most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs + 16, 16)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def padded_size(rows: int, sizes: tuple[int, ...]) -> int | None:
    """Return the smallest of the rising `sizes` that holds so many rows; None when none does."""
    return next((size for size in sizes if size >= rows), None)


@dataclass(frozen=True, slots=True)
class RowFields:
    """Views of one piece of memory, [rows] each."""

    uniform: torch.Tensor  # float64, the number in [0, 1) at which a row inverts its distribution
    temperature: torch.Tensor  # float32; 0: the most likely token
    positions: torch.Tensor  # int32, like the rest
    take: torch.Tensor  # the place of its token in the token table
    put: torch.Tensor  # the place for its sampled token
    context_len: torch.Tensor
    slot_mapping: torch.Tensor

    @staticmethod
    def of(words: torch.Tensor, rows: int) -> RowFields:
        """Return views of int32 words [8 * rows or more]."""
        uniform, temperature, *rest = torch.split(words[: _PER_ROW * rows], [2 * rows, *[rows] * (_PER_ROW - 2)])
        return RowFields(uniform.view(torch.float64), temperature.view(torch.float32), *rest)


class _HostBuffer:
    """Pinned words, the views that fill them, and the event after their last transfer."""

    def __init__(self, words: int, rows: int, on_cuda: bool) -> None:
        self.words = torch.zeros(words, dtype=torch.int32, pin_memory=on_cuda)
        self.fields = {name: view.numpy() for name, view in _views(RowFields.of(self.words, rows))}
        self.tables: Int32Array = self.words[_PER_ROW * rows :].numpy()
        self.sent = torch.cuda.Event() if on_cuda else None


class GraphInputs:
    """The inputs of all captured sizes: `max_rows` rows of `max_model_len` positions, for the runner's thread.

    `spare_place` is a place of the token table that belongs to no sequence.
    """

    def __init__(self, max_rows: int, cache: KvCache, max_model_len: int, spare_place: int) -> None:
        device, max_blocks = cache.keys.device, -(-max_model_len // cache.block_size)
        words, on_cuda = (_PER_ROW + max_blocks) * max_rows, cache.keys.is_cuda
        self._rows, self._max_context, self._last_block = max_rows, max_model_len, cache.num_blocks - 1
        self._padding = {"put": spare_place, "slot_mapping": -1}
        self._landing = torch.zeros(words, dtype=torch.int32, device=device)
        self._fields = RowFields.of(self._landing, max_rows)
        self._block_table = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._buffers = [_HostBuffer(words, max_rows, on_cuda) for _ in range(_BUFFERS)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs on the device."""
        return 4 * (self._landing.numel() + self._block_table.numel() + self._query_start.numel())

    def rows(self, size: int) -> RowFields:
        """Return the fields that the graph of this size reads of each row."""
        return RowFields(*(view[:size] for _, view in _views(self._fields)))

    def rehearsals(self, size: int) -> Iterator[AttentionMetadata]:
        """Fill the inputs with one step of each kind that attention may plan in its own way, and yield it.

        Rows without context; one row of the longest, whose work is cut; the longest all on the same blocks. No row
        writes into the cache, and their samples go to the spare place.
        """
        width = self._block_table.shape[1]
        none = np.zeros(size, dtype=np.int32)
        one, all_rows = (np.where(np.arange(size) < rows, self._max_context, 0).astype(np.int32) for rows in (1, size))
        same = np.tile(np.minimum(np.arange(width, dtype=np.int32), self._last_block), (size, 1))
        for context_len, table in ((none, same[:, :1]), (one, same), (all_rows, same)):
            yield self._fill(size, {"context_len": context_len}, table)

    def fill(
        self,
        size: int,
        staged: StagedStep,
        uniform: npt.NDArray[np.float64] | None = None,
        temperature: npt.NDArray[np.float32] | None = None,
    ) -> AttentionMetadata:
        """Fill the inputs with a step of decodes that all sample, padded to `size` rows, and return it for attention.

        uniform and temperature [R] are of rows that sample at random. The transfer is queued after the running work.
        """
        rows, first = staged.rows, staged.batch_index.astype(np.int64) * staged.table_width
        fields: dict[str, npt.NDArray[np.generic] | None] = {
            "uniform": uniform,
            "temperature": temperature,
            "positions": rows.positions,
            "take": first + rows.positions,
            "put": first + rows.context_len,
            "context_len": rows.context_len,
            "slot_mapping": rows.slot_mapping,
        }
        return self._fill(size, fields, rows.block_table)

    def _fill(
        self, size: int, fields: Mapping[str, npt.NDArray[np.generic] | None], block_table: Int32Array
    ) -> AttentionMetadata:
        """Fill the inputs, with padding for what is absent, and send them; block_table [R, width]."""
        buffer = self._buffers[0]
        self._buffers.reverse()
        if buffer.sent is not None:
            buffer.sent.synchronize()
        count, width = block_table.shape
        for name, field in buffer.fields.items():
            field[:size] = self._padding.get(name, 0)
            if (values := fields.get(name)) is not None:
                field[:count] = values
        table = buffer.tables[: size * width].reshape(size, width)
        table[:count], table[count:] = block_table, 0
        self._send(buffer, size, width)
        # Attention plans from the host arrays now; the buffer is written again only two steps later.
        on_device = self.rows(size)
        return AttentionMetadata(
            num_decodes=size,
            query_start=np.arange(size + 1, dtype=np.int32),
            context_len=buffer.fields["context_len"][:size],
            block_table=table,
            slot_mapping=buffer.fields["slot_mapping"][:size],
            device=DeviceTables(
                self._query_start[: size + 1],
                on_device.context_len,
                self._block_table[:size],
                on_device.slot_mapping,
            ),
        )

    def _send(self, buffer: _HostBuffer, size: int, width: int) -> None:
        """Transfer the filled inputs: fields of rows to where graphs read them, block tables to their wide table."""
        begin = _PER_ROW * self._rows
        end = begin + size * width
        self._landing[:end].copy_(buffer.words[:end], non_blocking=True)
        if buffer.sent is not None:
            buffer.sent.record()
        self._block_table[:size, :width].copy_(self._landing[begin:end].view(size, width))


def _views(fields: RowFields) -> list[tuple[str, torch.Tensor]]:
    return [(name, getattr(fields, name)) for name in RowFields.__slots__]


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
        use_adapters(self._parts.model, None)
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
        """Return the size of the graph that a step runs as; None for one that must be launched kernel by kernel.

        Graphs are those of the base: what adapters add depends on which rows have which.
        """
        if step.adapters is not None:
            return None
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

    `attention` is the runner's own: it plans the steps that are not graphs, too. None: it cannot plan for graphs.
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
