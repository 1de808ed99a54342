"""Runs steps on the device: implements the port of `gpuworker/scheduling/batch_plan.py` over a model and a KV cache.

The engine's thread turns a plan into arrays while the previous step still runs. An executor then runs the step:
`gpuworker/runner/thread_executor.py`, or `gpuworker/runner/native_executor.py` where a step is one native call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final, cast

import numpy as np

from common.contracts.lease import Copy, TierCopy
from common.contracts.types import TRIMMED, BlockId, FrameId, KvGroup, KvGroupKind, SamplingParams, SequenceId
from gpuworker.attention.interface import AttentionBackend, Int32Array
from gpuworker.attention.step_inputs import StagedStep, StepInputs, pack_pages, pack_rows
from gpuworker.engine.ports import MaskLateness
from gpuworker.memory.devices import default_threads
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import attending_groups, page_layout, state_group
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.adapters import PreparedAdapter, StepAdapters
from gpuworker.models.step_model import StepModel
from gpuworker.runner.decode_frames import SPARE_BLOCKS, DecodeFrames, only_decodes
from gpuworker.runner.executor import (
    AcceptedDrafts,
    ExecutorFactory,
    ExecutorParts,
    Failures,
    PlacedCheckpoint,
    RunnerStep,
)
from gpuworker.runner.launcher import LaidOutStep
from gpuworker.runner.pooling import Pooler
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch
from gpuworker.sampling.scoring import ScoredPrompts, ScoredTokens
from gpuworker.scheduling.batch_plan import Checkpoint, ScheduledRow, StepNotBuilt, StepPlan, StepResult, laid_out
from gpuworker.scheduling.drafting import MAX_DRAFTS
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.mask_thread import GrammarMaskThread
from gpuworker.structured.native_matchers import Follower, follower, native_matchers


# The sequences that the runner holds: each has a batch index, its row of the token table and of the block tables.
# The block tables lie on the host and are kept from step to step, because a row seldom gains more than one block.
@dataclass(slots=True)
class BatchEntry:
    """One sequence of the batch; `blocks` are those that its row of the block table holds, or `pages` of each group."""

    index: int
    row: SampledRow
    adapter: PreparedAdapter | None = None
    blocks: tuple[BlockId, ...] = ()
    pages: list[tuple[BlockId, ...]] = field(default_factory=list)


class InputBatch:
    """Assigns batch indices to sequences, and keeps their block tables. Only the engine's thread uses it.

    Where the pool has groups, each of those that keep K and V has a table of the pages of its blocks. Pages may have
    been checkpoints of states, whose bytes need not be finite as numbers: `take_reused` says which to clear.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        groups: Sequence[KvGroup] = (),
        frames_of_states: set[FrameId] | None = None,
    ) -> None:
        """`frames_of_states` are the frames of host memory that hold states, which transfers change too."""
        self._free = list(range(max_num_seqs))[::-1]
        self._entries: dict[SequenceId, BatchEntry] = {}
        self._has_states = state_group(groups) is not None
        self._groups = groups = attending_groups(groups)
        self._table = np.zeros((max_num_seqs, 0 if groups else max_blocks), dtype=np.int32)
        self._pages = [np.zeros((max_num_seqs, max_blocks * group.pages), dtype=np.int32) for group in groups]
        self._adapted = 0  # sequences with an adapter
        self._of_states: set[BlockId] = set()
        self._reused: set[BlockId] = set()
        self._frames_of_states = set() if frames_of_states is None else frames_of_states
        # Pages that held states until K and V were loaded into them.
        self._loaded_over: set[BlockId] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, sequence: SequenceId) -> BatchEntry:
        return self._entries[sequence]

    def add(self, sequence: SequenceId, row: SampledRow, adapter: PreparedAdapter | None = None) -> BatchEntry:
        """Give a sequence a free index. Raises ValueError when the sequence has one already, or when none is free."""
        if sequence in self._entries or not self._free:
            why = "is in the batch already" if sequence in self._entries else f"finds {len(self._entries)} others in it"
            raise ValueError(f"sequence {sequence} {why}")
        entry = self._entries[sequence] = BatchEntry(self._free.pop(), row, adapter, pages=[()] * len(self._groups))
        self._adapted += adapter is not None
        return entry

    def remove(self, sequence: SequenceId) -> SampledRow | None:
        """Free the index of a sequence, and return its sampling parameters; None for an unknown sequence."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return None
        self._free.append(entry.index)
        self._adapted -= entry.adapter is not None
        return entry.row

    def adapters_of(self, rows: Sequence[ScheduledRow]) -> StepAdapters | None:
        """Return the adapters of the rows of a step; None where all are of the base."""
        if not self._adapted:
            return None
        lengths = np.array([row.length for row in rows], dtype=np.int32)
        return StepAdapters.of_rows([self._entries[row.sequence].adapter for row in rows], lengths)

    def indices_of(self, rows: Sequence[ScheduledRow]) -> Int32Array:
        """Return the batch indices [R] of the rows of a step, after writing their blocks into the tables.

        Raises ValueError for a row that has no table for each group that keeps K and V.
        """
        entries, indices = self._entries, []
        for row in rows:
            entry = entries[row.sequence]
            indices.append(entry.index)
            if self._groups:
                self._update_pages(entry, row.tables)
            elif row.blocks is not entry.blocks:
                self._update(entry, row.blocks)
        return np.array(indices, dtype=np.int32)

    def block_table(self, batch_index: Int32Array, width: int) -> Int32Array:
        """Return a copy [R, width] of the block tables at `batch_index` [R]; trimmed blocks are 0."""
        return self._table[batch_index, :width]

    def page_tables(self, batch_index: Int32Array, width: int) -> list[Int32Array]:
        """Return a copy [R, width * pages of a block] of each group's tables; trimmed pages are any."""
        return [
            table[batch_index, : width * group.pages] for table, group in zip(self._pages, self._groups, strict=True)
        ]

    def _update(self, entry: BatchEntry, blocks: tuple[BlockId, ...]) -> None:
        """Write only the new blocks where `blocks` extends the old table, which is the usual case."""
        known = len(entry.blocks)
        same = known <= len(blocks) and blocks[:known] == entry.blocks
        changed = np.array(blocks[known:] if same else blocks, dtype=np.int32)
        begin = known if same else 0
        end = min(len(blocks), self._table.shape[1])
        self._table[entry.index, begin:end] = np.maximum(changed[: end - begin], 0)
        entry.blocks = blocks

    def _update_pages(self, entry: BatchEntry, tables: Sequence[tuple[BlockId, ...]]) -> None:
        """Write only what is new behind trimmed pages: nobody reads what the table says of those."""
        of_attention = tables[: len(self._groups)]
        for group, (table, known, pages) in enumerate(zip(self._pages, entry.pages, of_attention, strict=True)):
            if pages is known:
                continue
            trimmed = pages.count(TRIMMED)
            same = trimmed <= len(known) <= len(pages) and pages[trimmed : len(known)] == known[trimmed:]
            begin, end = len(known) if same else trimmed, min(len(pages), table.shape[1])
            table[entry.index, begin:end] = pages[begin:end]
            entry.pages[group] = pages
            if self._has_states:
                table[entry.index, :trimmed] = pages[-1]  # what masks leave out is still read, and must be numbers
                self._reused |= self._of_states.intersection(pages[begin:])

    def note_copies(self, copies: Sequence[Copy | TierCopy]) -> None:
        """Follow what copies between pages and frames of host memory carry: states, or K and V of all slots."""
        for copy in copies:
            if not isinstance(copy, TierCopy):
                continue
            if not copy.load and copy.block in self._of_states:
                self._frames_of_states.add(copy.frame)
            elif not copy.load:
                self._frames_of_states.discard(copy.frame)
            elif copy.frame in self._frames_of_states:
                self._of_states.add(copy.block)
            elif copy.block in self._of_states:
                self._of_states.discard(copy.block)
                self._loaded_over.add(copy.block)

    def note_failure(self) -> None:
        """Note that steps have failed: copies of theirs were not made, so pages may still hold states."""
        self._of_states |= self._loaded_over
        self._loaded_over.clear()

    def write_states(self, pages: Sequence[BlockId]) -> None:
        """Note that pages are written as a checkpoint, so that they hold no numbers any more."""
        self._of_states.update(pages)

    def take_reused(self) -> tuple[BlockId, ...]:
        """Return the pages of checkpoints that rows have as K and V since the last call."""
        reused, self._reused = tuple(self._reused), set()
        self._of_states.difference_update(reused)
        return reused


log = logging.getLogger(__name__)

_KEPT_BATCHES: Final = 2 * (MAX_DRAFTS + 1)
"""Of samplers: with drafts a sequence samples once in one step and several times in the next."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The capacity of a runner: sequences at once, tokens of one sequence, threads on a CPU (0: all cores but one)."""

    max_num_seqs: int
    max_model_len: int
    threads: int = 0


class ModelRunner:
    """Implements `StepRunner`: lays out each step, and hands it to the executor that `executor` makes.

    With a `pooler`, a sequence ends with the vector of its prompt, and nothing is sampled.
    The engine's thread calls all methods.
    """

    def __init__(
        self,
        model: StepModel,
        cache: KvCache,
        attention: AttentionBackend,
        limits: RunnerLimits,
        executor: ExecutorFactory,
        eos_token_ids: tuple[int, ...] = (),
        pooler: Pooler | None = None,
    ) -> None:
        self._model, self._block_size = model, cache.block_size
        self._device, self._eos = model.device, eos_token_ids
        groups = cache.geometry.groups
        self._parts = page_layout(cache.geometry).parts if groups else ()
        self._has_states = state_group(groups) is not None
        of_states = None if cache.frames is None else cache.frames.of_states
        self._batch = InputBatch(limits.max_num_seqs, -(-limits.max_model_len // cache.block_size), groups, of_states)
        self._tokens = TokenTable(limits.max_num_seqs, limits.max_model_len + 1, self._device)
        self._sampling: dict[tuple[SequenceId, ...], SamplingBatch] = {}
        self._prompts = ScoredPrompts(model.vocab_size)
        self._generation, self._failures = 1, Failures()
        self._pooler = pooler
        self.grammars: GrammarCompiler | None = None
        """What compiles constraints; None where the runner follows none."""
        self._masks: GrammarMaskThread | None = None
        self.follows_constraints = False
        """Whether native steps follow the constraints of new sequences themselves; `constrain` sets it."""
        self._foresees = False
        self._followers: dict[SequenceId, Follower] = {}
        # Of a model with states: the sequences that drafted in the last step, and its result.
        self._drafted: dict[SequenceId, Future[StepResult]] = {}
        self.also_closed: list[Callable[[], None]] = []
        """What ends with the runner, such as a draft model."""
        threads = limits.threads or default_threads()
        self.executor = executor(ExecutorParts(model, cache, attention, self._tokens, self._failures, threads))
        repeats = self.executor.repeats and pooler is None
        if self._has_states:  # what was trimmed must be written over: it may become a checkpoint
            repeats &= all(group.kind is KvGroupKind.FULL for group in attending_groups(groups))
        self._frames = DecodeFrames(cache.block_size, self._parts) if repeats else None

    def constrain(self, grammars: GrammarCompiler, foresee: bool = False) -> None:
        """Accept sequences with constraints too, which `grammars` compiles. Call once, before the first sequence.

        With `foresee`, results tell which tokens a constraint forces to follow.
        """
        self.grammars, self._masks = grammars, GrammarMaskThread(grammars, foresee)
        self.follows_constraints, self._foresees = self.executor.follows_constraints, foresee
        if self.follows_constraints:
            grammars.make_native = native_matchers

    @property
    def mask_lateness(self) -> MaskLateness:
        """How often and how long sampling has waited for masks; any thread may read it."""
        return MaskLateness() if self._masks is None else self._masks.lateness

    # ------------------------------------------------------------ the port

    def add_sequence(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        sampling: SamplingParams,
        prompt_tokens: int,
        adapter: object | None = None,
    ) -> None:
        """Implement `StepRunner`.

        Raises ValueError for three mistakes of the caller: no batch index is free, the tokens do not fit, or the
        sequence needs masks and the runner has no grammars.
        """
        if len(tokens) >= self._tokens.width:
            raise ValueError(f"sequence {sequence} has {len(tokens)} tokens; {self._tokens.width - 1} fit")
        row = SampledRow(sampling, prompt_tokens, self._eos)
        if row.masked:
            if self._masks is None or self.grammars is None:
                what = "has a constraint or a budget of thoughts, and the runner has no grammars: see `constrain`"
                raise ValueError(f"sequence {sequence} {what}")
            followed = follower(self.grammars, row, self._foresees) if self.follows_constraints else None
            if followed is not None:
                self._followers[sequence] = followed
            else:
                self._masks.add(sequence, row, tokens[prompt_tokens:])
        if self._pooler is not None:
            self._pooler.add(sequence)
        entry = self._batch.add(sequence, row, cast("PreparedAdapter | None", adapter))
        self.executor.write(entry.index, np.array(tokens, dtype=np.int32), self._generation)
        self._prompts.add(sequence, tokens[:prompt_tokens], sampling)

    def rewrite(self, sequence: SequenceId, first: int, tokens: Sequence[int]) -> None:
        """Replace the tokens of a sequence from position `first` on; no unfinished step contains it."""
        written = np.array(tokens, dtype=np.int32)
        self.executor.write(self._batch[sequence].index, written, self._generation, first)

    def remove(self, sequence: SequenceId) -> None:
        """Implement `StepRunner`; an unknown sequence is ignored."""
        left = self._batch.remove(sequence)
        self._drafted.pop(sequence, None)
        self._prompts.remove(sequence)
        if self._followers.pop(sequence, None) is None and self._masks is not None and left is not None and left.masked:
            self._masks.remove(sequence)
        if self._pooler is not None:
            self._pooler.remove(sequence)
        self._forget_batches()
        if not self._batch and self._failures.failed(self._generation):
            self._generation += 1
            self._batch.note_failure()

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        """Implement `StepRunner`."""
        try:
            step = self._repeated(self._frames, plan) if self._frames and only_decodes(plan) else self._lay_out(plan)
        except Exception as error:
            raise self._blame(plan, error) from error
        try:
            self._write_drafts(plan)
            self.executor.submit(replace(step, accepted=self._accepted()) if self._drafted else step)
            self._drafted = dict.fromkeys(step.drafts, step.result) if self._model.states is not None else {}
        except Exception as error:
            if (masks := step.work.point.masks) is not None:
                masks.failed()
            raise StepNotBuilt((), f"a step could not be submitted: {error!r}") from error
        return step.result

    def _accepted(self) -> tuple[AcceptedDrafts, ...]:
        """Return how many drafts of the last step were right; it is over, because a step with drafts is alone."""
        right = {
            sequence: len(result.result().sampled[sequence]) - 1
            for sequence, result in self._drafted.items()
            if result.exception() is None
        }
        return tuple([AcceptedDrafts(self._batch[sequence].index, count) for sequence, count in right.items() if count])

    def _write_drafts(self, plan: StepPlan) -> None:
        """Put drafts where the step reads tokens; its samples take their place."""
        for row in plan.rows if plan.drafts else ():
            if row.drafts:
                self.rewrite(row.sequence, row.start + row.length, row.drafts)

    def _blame(self, plan: StepPlan, error: Exception) -> StepNotBuilt:
        """Return the failure of a layout, with the sequences that fail alone too."""
        self._forget_batches()
        culprits = [row.sequence for row in plan.rows if not self._can_lay_out(plan, row)]
        return StepNotBuilt(culprits, f"a step could not be laid out: {error!r}")

    def _can_lay_out(self, plan: StepPlan, row: ScheduledRow) -> bool:
        try:
            self._arrays(laid_out(StepPlan(plan.step, (row,), drafts=len(row.drafts))))
        except Exception:
            log.exception("sequence %d cannot be laid out", row.sequence)
            return False
        return True

    def close(self) -> None:
        self.executor.close()
        for close in self.also_closed:
            close()
        if self._masks is not None:
            self._masks.close()

    # ------------------------------------------------------------ laying out

    def _repeated(self, frames: DecodeFrames, plan: StepPlan) -> RunnerStep:
        """Return a step of decodes on the arrays of an earlier one, or laid out anew where none fits that is over."""
        sequences = tuple([row.sequence for row in plan.rows])
        frame = frames.take(plan.rows, sequences)
        if frame is not None:
            frame.result = _begun()
            step = RunnerStep(plan.step, self._generation, (), frame.work, sequences, frame.result, frame=frame)
            if not self._has_states:
                return step
            self._batch.indices_of(plan.rows)  # rows may have taken pages of checkpoints
            return replace(step, cleared=self._batch.take_reused())
        step = self._lay_out(plan)
        if step.work.point.masks is not None:
            return step
        return replace(step, frame=frames.keep(step.work, plan.rows, sequences, step.result))

    def _lay_out(self, plan: StepPlan) -> RunnerStep:
        """Return a plan as arrays, and begin the masks of its constrained rows; nothing fails after that."""
        drafts = {row.sequence: row.drafts for row in plan.rows if row.drafts} if plan.drafts else {}
        if self._has_states and plan.copies:
            self._batch.note_copies(plan.copies)
        plan = laid_out(plan)
        scored = self._prompts.scored_by(plan)
        staged, inputs, sequences, sampling = self._arrays(plan, scored)
        loads, saves = self._placed(plan.loads), self._placed(plan.saves)
        positions = staged.rows.context_len[staged.samples].astype(np.int64)
        point = sampling.at(positions, staged.batch_index[staged.samples])
        if len(sampling.constrained):
            assert self._masks is not None, "`add` takes no constraint without it"
            masks = self._masks.masks(sequences, sampling.constrained, positions, self._masked(drafts))
            point = replace(point, masks=masks)
        pooling = None if self._pooler is None else self._pooler.step(plan.rows)
        work = LaidOutStep(staged, inputs, point, sampling, scored, pooling, self._batch.adapters_of(plan.rows))
        step = RunnerStep(plan.step, self._generation, plan.copies, work, sequences, _begun(), drafts)
        for checkpoint in saves:
            self._batch.write_states(checkpoint.pages)
        return replace(step, loads=loads, saves=saves, cleared=self._batch.take_reused()) if self._has_states else step

    def _placed(self, checkpoints: Sequence[Checkpoint]) -> tuple[PlacedCheckpoint, ...]:
        return tuple([PlacedCheckpoint(self._batch[sequence].index, pages) for sequence, pages in checkpoints])

    def _masked(self, drafts: Mapping[SequenceId, tuple[int, ...]]) -> Mapping[SequenceId, tuple[int, ...]]:
        """Return the drafts of sequences with masks."""
        return {each: tokens for each, tokens in drafts.items() if self._batch[each].row.masked} if drafts else drafts

    def _arrays(
        self, plan: StepPlan, scored: ScoredTokens | None = None
    ) -> tuple[StagedStep, StepInputs | None, tuple[SequenceId, ...], SamplingBatch]:
        """Return a plan as arrays, on a CPU also as tensors, which are the same memory; and what samples."""
        rows, on_cpu = plan.rows, self._device.type == "cpu"
        start = np.array([row.start for row in rows], dtype=np.int32)
        length = np.array([row.length for row in rows], dtype=np.int32)
        samples = np.array([row.samples for row in rows], dtype=bool)
        batch_index = self._batch.indices_of(rows)
        width = -(-int((start + length).max(initial=1)) // self._block_size) + (SPARE_BLOCKS if self._frames else 0)
        if self._parts:
            tables = self._batch.page_tables(batch_index, width)
            packed = pack_pages(start, length, tables, self._parts, self._block_size)
        else:
            packed = pack_rows(start, length, self._batch.block_table(batch_index, width), self._block_size)
        pooled = None if self._pooler is None else self._pooler.tokens(packed.query_start, samples)
        if pooled is not None:
            samples = np.zeros_like(samples)
        staged = StagedStep(packed, batch_index, samples, self._tokens.width, pooled=pooled)
        if scored is not None:
            staged = replace(staged, scored=scored.keep)
        sequences = tuple([row.sequence for row in rows if row.samples]) if pooled is None else ()
        sampling = self._sampling_batch(sequences)
        if on_cpu:
            sampling.prepare()
        return staged, staged.on(self._device) if on_cpu else None, sequences, sampling

    def _forget_batches(self) -> None:
        self._sampling.clear()
        if self._frames:
            self._frames.clear()

    def _sampling_batch(self, sequences: tuple[SequenceId, ...]) -> SamplingBatch:
        """Return the batch of an earlier step where the same sequences sample again, as often as they did."""
        found = self._sampling.get(sequences)
        if found is None:
            if len(self._sampling) >= _KEPT_BATCHES:
                self._sampling.clear()
            rows = [self._batch[sequence].row for sequence in sequences]
            followers = [self._followers.get(sequence) for sequence in sequences] if self._followers else ()
            found = self._sampling[sequences] = SamplingBatch(rows, self._model.vocab_size, self._device, followers)
        return found


def _begun() -> Future[StepResult]:
    """Return a future that cannot be cancelled."""
    future: Future[StepResult] = Future()
    future.set_running_or_notify_cancel()
    return future
