"""Runs whole steps on the native queue, from block copies to sampling (`gpuworker/native/whole_step.h`).

The engine's thread queues a step as one native call while the previous step runs. So no Python runs between two steps,
and a step neither waits for the GIL nor holds it. The collector thread waits for the outcomes and reports them.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.contracts.errors import EngineFailure
from common.contracts.lease import Copy, TierCopy
from common.contracts.types import BlockId
from gpuworker.attention.interface import Int32Array
from gpuworker.attention.native_backend import CacheStruct, StepStruct, cache_struct
from gpuworker.attention.native_parts import NativeParts
from gpuworker.attention.step_inputs import StepInputs
from gpuworker.memory.host_frames import HostFrames
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import state_group
from gpuworker.memory.state_store import StateStore
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.llama.cpu_model import DescribedRun, LlamaCpuModel, PlacedStates
from gpuworker.native.llama import LlamaRunStruct, LlamaStruct, PartsStruct, Refusal
from gpuworker.native.step_queue import StepQueue, address_of
from gpuworker.runner.executor import ExecutorParts, Failures, PlacedCheckpoint, RunnerStep
from gpuworker.runner.rank_steps import InFlightSteps, PlannedRows, RankLinks, RankPlan
from gpuworker.sampling.native_sampler import NativeSample, SampleCall
from gpuworker.sampling.rows import SampledTokens
from gpuworker.sampling.scoring import NativeScores, ScoreCall
from gpuworker.serial_thread import SerialThread

log = logging.getLogger(__name__)
_pointer, _int32 = ctypes.c_void_p, ctypes.c_int32


class _Take(ctypes.Structure):
    """quire_take."""

    _fields_ = (*((name, _pointer) for name in ("table", "places", "token_ids")), ("count", ctypes.c_int64))


class WholeStep(ctypes.Structure):
    """quire_whole_step."""

    _fields_ = (
        ("copies", _pointer),
        ("pools", ctypes.POINTER(CacheStruct)),
        ("parts", PartsStruct),
        ("model", ctypes.POINTER(LlamaStruct)),
        ("take", _Take),
        ("steps", ctypes.POINTER(StepStruct)),
        ("run", LlamaRunStruct),
        ("sample", SampleCall),
        ("score", ScoreCall),
        *((name, _int32) for name in ("num_copies", "num_pools", "num_rows", "threads", "deterministic", "reserved")),
        *((name, _pointer) for name in ("before", "behind")),
        *((name, ctypes.c_int64) for name in ("num_before", "num_behind")),
    )


@dataclass(slots=True)
class _Described:
    """A step in the form that the library takes, and the memory that must stay until it is over."""

    whole: WholeStep
    copies: npt.NDArray[np.int32]  # [C, 2]
    token_ids: torch.Tensor | None = None
    run: DescribedRun | None = None
    sample: NativeSample | None = None
    scores: NativeScores | None = None
    moves: tuple[_Moves, ...] = ()

    def move(self, before: _Moves, behind: _Moves) -> None:
        """Let bytes move before the step and behind it."""
        self.moves = before, behind = np.ascontiguousarray(before), np.ascontiguousarray(behind)
        self.whole.before, self.whole.num_before = before.ctypes.data, len(before)
        self.whole.behind, self.whole.num_behind = behind.ctypes.data, len(behind)


_Moves = npt.NDArray[np.int64]
"""quire_move: [n, 3], to, from and bytes; from 0 writes zeros."""
_NO_MOVES: _Moves = np.empty((0, 3), dtype=np.int64)


class _Checkpoints:
    """Describes what moves between the places of sequences and pages."""

    def __init__(self, states: PlacedStates, store: StateStore) -> None:
        self._states, self._store = states, store

    def clears(self, pages: Sequence[BlockId]) -> _Moves:
        """Return the moves that zero pages which held states."""
        return np.insert(self._store.bytes_of(pages), 1, 0, axis=1) if pages else _NO_MOVES

    def before(self, loads: Sequence[PlacedCheckpoint], cleared: Sequence[BlockId]) -> _Moves:
        """Return the moves before a step: those, and what loads checkpoints."""
        return np.concatenate([self.clears(cleared), *(self._moves(each, to_pages=False) for each in loads)])

    def behind(self, saves: Sequence[PlacedCheckpoint]) -> _Moves:
        """Return those behind it: checkpoints are saved."""
        return np.concatenate([self._moves(each, to_pages=True) for each in saves]) if saves else _NO_MOVES

    def _moves(self, checkpoint: PlacedCheckpoint, to_pages: bool) -> _Moves:
        state = self._states.kept[checkpoint.batch_index]
        at, count = self._store.places(len(state), checkpoint.pages).T
        own = state.data_ptr() + np.cumsum(count) - count
        return np.stack((at, own, count) if to_pages else (own, at, count), axis=1)


class Forwards:
    """Describes steps up to their forward, as every rank runs them."""

    def __init__(self, model: LlamaCpuModel, attention: NativeParts, threads: int, cache: KvCache) -> None:
        store = StateStore(cache) if state_group(cache.geometry.groups) is not None else None
        self._model, self._attention, self._threads, self._pools = model, attention, threads, _pools_of(cache)
        self._checkpoints = None if store is None or model.states is None else _Checkpoints(model.states, store)

    def only(self, moves: _Moves) -> _Described:
        """Describe a step that moves bytes and does nothing else."""
        whole = WholeStep(threads=self._threads)
        described = _Described(whole, np.empty((0, 2), dtype=np.int32))
        described.move(moves, _NO_MOVES)
        return described

    def clear(self, pages: Sequence[BlockId]) -> _Described:
        """Describe what is left of a step behind one that failed: later ones rely on pages that were cleared."""
        assert self._checkpoints is not None, "no page held states"
        return self.only(self._checkpoints.clears(pages))

    def move(
        self,
        described: _Described,
        loads: Sequence[PlacedCheckpoint],
        saves: Sequence[PlacedCheckpoint],
        cleared: Sequence[BlockId],
    ) -> None:
        """Let states move before a step and behind it."""
        if self._checkpoints is not None:
            described.move(self._checkpoints.before(loads, cleared), self._checkpoints.behind(saves))

    def copy(self, copies: npt.NDArray[np.int32]) -> _Described:
        """Describe a step that copies blocks, [C, 2], and has no rows."""
        whole = WholeStep(
            copies=copies.ctypes.data,
            pools=self._pools,
            num_pools=len(self._pools),
            parts=self._attention.struct,
            model=ctypes.pointer(self._model.packed.struct),
            num_copies=len(copies),
            threads=self._threads,
            deterministic=self._attention.deterministic,
        )
        return _Described(whole, copies)

    def run(
        self,
        copies: npt.NDArray[np.int32],
        inputs: StepInputs,
        batch_index: Int32Array | None,
        adapters: StepAdapters | None = None,
        *,
        hidden: bool,
    ) -> _Described:
        """Describe a step with rows; who runs it says from where its tokens are taken."""
        described = self.copy(copies)
        whole, token_ids = described.whole, torch.empty(len(inputs.positions), dtype=torch.int64)
        describe = self._model.describe_hidden if hidden else self._model.describe
        places = None if self._model.states is None else batch_index
        run = describe(token_ids, inputs.positions, inputs.keep, places, adapters)
        whole.steps, whole.run = self._attention.steps(inputs.metadata), run.run
        whole.num_rows = inputs.metadata.num_rows
        described.token_ids, described.run = token_ids, run
        return described


class StepTimes(NamedTuple):
    """Seconds between the previous step and this one, in this step, and in its forward (0 unless the model counts)."""

    idle_before: float
    took: float
    forward: float


class NativeExecutor:
    """Implements `StepExecutor`. While `spent` is a list, the time of each step is appended to it."""

    spent: list[StepTimes] | None = None
    follows_constraints = True
    repeats = True

    def __init__(
        self,
        model: LlamaCpuModel,
        attention: NativeParts,
        tokens: TokenTable,
        failures: Failures,
        threads: int,
        cache: KvCache,
        links: RankLinks | None = None,
    ) -> None:
        """`links` are to the other ranks, where there are some."""
        self._frames, self._links = cache.frames, links
        self._model, self._tokens, self._failures = model, tokens, failures
        self._threads = threads
        self._forwards = Forwards(model, attention, threads, cache)
        library = model.packed.library
        self._call, self._queue = address_of(library.quire_run_step), StepQueue(library)
        self._copied = 0.0  # seconds of the copies ahead of the next step that is collected
        self._collector = SerialThread("quire-collector", _single_threaded)

    def write(self, batch_index: int, tokens: npt.NDArray[np.int32], generation: int, first: int = 0) -> None:
        """Implement `StepExecutor`: at once, because no unfinished step contains the sequence."""
        self._tokens.write(batch_index, tokens, first)

    def submit(self, step: RunnerStep) -> None:
        if self._failures.failed(step.generation):
            described = self._forwards.clear(step.cleared) if step.cleared else None
            if described is not None and self._links is not None:
                self._links.send_plan(RankPlan(described.copies, None, cleared=step.cleared))
            number = 0 if described is None else self._queue.put(self._call, ctypes.addressof(described.whole))
            self._collector.put(lambda: self._refuse(step, number, described))
            return
        if self._frames is not None and step.copies:
            self._copy_ahead(self._frames, step.copies)
            step = replace(step, copies=())
        described = self._described(step)
        self._forwards.move(described, step.loads, step.saves, step.cleared)
        if self._links is not None:
            self._links.send_plan(self._plan(step, described))
        number = self._queue.put(self._call, ctypes.addressof(described.whole))
        self._collector.put(lambda: self._collect(number, step, described))

    def _copy_ahead(self, frames: HostFrames, copies: Sequence[Copy | TierCopy]) -> None:
        """Queue the copies of a step before it: those of one call are made side by side."""
        for moves in frames.rounds(copies):
            described = self._forwards.only(moves)
            number = self._queue.put(self._call, ctypes.addressof(described.whole))
            self._collector.put(partial(self._wait_for, number, described))

    def _wait_for(self, number: int, _: _Described) -> None:
        """Wait for copies ahead of a step; their memory stays until then."""
        self._copied += self._queue.wait(number)[1].took

    def close(self) -> None:
        self._collector.close()  # it waits for all queued steps
        self._queue.close()

    def _plan(self, step: RunnerStep, described: _Described) -> RankPlan:
        """Return what other ranks are to do; arrays that a later step writes over are read before `submit` returns."""
        inputs, work, rows = step.work.inputs, step.work, None
        if described.run is not None:
            assert inputs is not None, "arrays on a CPU"
            places = None if self._model.states is None else work.staged.batch_index
            rows = PlannedRows.of(inputs, places, hidden=work.pooling is not None, adapters=work.adapters)
        return RankPlan(described.copies, rows, step.loads, step.saves, step.cleared)

    def _described(self, step: RunnerStep) -> _Described:
        """Return a step as it is described already, if it runs on the arrays of an earlier one."""
        frame = step.frame
        if frame is None:
            return self._describe(step)
        made: _Described | None = frame.described
        if made is None or made.run is None or not self._model.again(made.run):
            made = frame.described = self._describe(step)
        elif made.sample is not None:
            made.sample.again()
        return made

    def _describe(self, step: RunnerStep) -> _Described:
        pairs = [(copy.src, copy.dst) for copy in step.copies if isinstance(copy, Copy)]
        copies = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        inputs, work = step.work.inputs, step.work
        if inputs is None or not len(work.staged.batch_index):
            return self._forwards.copy(copies)
        described = self._forwards.run(
            copies, inputs, work.staged.batch_index, work.adapters, hidden=work.pooling is not None
        )
        whole, run, token_ids = described.whole, described.run, described.token_ids
        assert run is not None
        assert token_ids is not None
        whole.take = _Take(self._tokens.flat.data_ptr(), inputs.take.data_ptr(), token_ids.data_ptr(), len(token_ids))
        if step.sequences:
            native = work.sampling.native
            assert native is not None, "a batch on a CPU with the native library has been prepared for it"
            point, table = work.point, self._tokens.tensor
            sample = NativeSample(native, point.positions, point.batch_index, table, self._threads, point.masks)
            sample.point_at(run.out)
            whole.sample, described.sample = sample.call, sample
        if work.scored is not None:
            logits = run.out[len(step.sequences) :]
            described.scores = NativeScores(work.scored, logits, self._model.packed.library, self._threads)
            whole.score = described.scores.call
        return described

    # ------------------------------------------------------------ the collector's thread

    def _refuse(self, step: RunnerStep, number: int = 0, described: _Described | None = None) -> None:
        """Fail a step behind one that failed, when its pages are cleared."""
        if described is not None:
            self._queue.wait(number)
        try:
            self._failures.refuse(step.generation)
        except EngineFailure as failure:
            self._failures.fail(step, failure)

    def _collect(self, number: int, step: RunnerStep, described: _Described) -> None:
        """Wait for a step and report its tokens; its memory is freed with `described`."""
        status, times = self._queue.wait(number)
        copied, self._copied = self._copied, 0.0
        if self.spent is not None:
            forward = sum(described.run.spent) if described.run is not None else 0.0
            self.spent.append(StepTimes(times.idle_before, times.took, forward))
        if self._failures.failed(step.generation):
            self._refuse(step)
        elif status:
            who = "cache" if status == Refusal.BLOCK else "model"
            what = f"the step has a {Refusal(status).name.lower()} that the {who} does not know"
            self._failures.fail(step, EngineFailure(what))
        else:
            self._tell(step, described, times.took, copied)

    def _tell(self, step: RunnerStep, described: _Described, took: float, copied: float) -> None:
        try:
            if described.run is not None:
                self._model.add_up(described.run)
            step.report(_results(step, described), took, at_once=True, copy_seconds=copied)
        except BaseException as error:  # the future of the step must end, whatever the error is
            log.error("step %d failed", step.number, exc_info=True)
            self._failures.fail(step, error)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Let torch pool on the calling thread alone: others of it would take the cores of the step that runs."""
    torch.set_num_threads(1)
    yield


def _results(step: RunnerStep, described: _Described) -> SampledTokens:
    work = step.work
    if work.pooling is not None and described.run is not None:
        return SampledTokens(_NONE, pooled=work.pooling.pool(described.run.out))
    sampled = SampledTokens(_NONE) if described.sample is None else work.sampling.sampled(described.sample)
    return sampled if described.scores is None else replace(sampled, scores=described.scores.scores())


_NONE = torch.empty(0, dtype=torch.int64)


class RankExecutor:
    """Runs the steps of rank 0 at another rank of its worker, in the same order."""

    def __init__(self, model: LlamaCpuModel, attention: NativeParts, cache: KvCache, threads: int) -> None:
        library = model.packed.library
        self._forwards = Forwards(model, attention, threads, cache)
        self._call, self._queue = address_of(library.quire_run_step), StepQueue(library)
        self._steps = InFlightSteps(self._queue.wait)

    def run(self, plan: RankPlan, adapters: StepAdapters | None = None) -> None:
        """Queue a step. A step that the library refuses is refused at rank 0 too, which reports it."""
        described = self._described(plan, adapters)
        number = self._queue.put(self._call, ctypes.addressof(described.whole))
        self._steps.add(number, (described, plan))

    def close(self) -> None:
        self._steps.finish()
        self._queue.close()

    def _described(self, plan: RankPlan, adapters: StepAdapters | None) -> _Described:
        if plan.rows is None:
            described = self._forwards.copy(plan.copies)
        else:
            inputs = plan.rows.inputs()
            described = self._forwards.run(plan.copies, inputs, plan.rows.places, adapters, hidden=plan.rows.hidden)
            token_ids = described.token_ids
            assert token_ids is not None
            described.whole.take = _Take(None, None, token_ids.data_ptr(), len(token_ids))
        self._forwards.move(described, plan.loads, plan.saves, plan.cleared)
        return described


def native_executor(parts: ExecutorParts, links: RankLinks | None = None) -> NativeExecutor:
    """Return an executor of native calls. Raises TypeError for a model or an attention that the library cannot call."""
    model = parts.model
    if not isinstance(model, LlamaCpuModel):
        raise TypeError(f"{type(model).__name__} has no native call")
    attention = model.parts_of(parts.attention)
    model.extend_rope(parts.tokens.width)
    return NativeExecutor(model, attention, parts.tokens, parts.failures, parts.threads, parts.cache, links)


def _pools_of(cache: KvCache) -> ctypes.Array[CacheStruct]:
    """Return the memory of all layers as C sees it: one cache, or one for each shape of layers."""
    caches = [cache.lanes] if cache.lanes is not None else cache.parts or [cache]
    return (CacheStruct * len(caches))(*map(cache_struct, caches))
