"""The worker's side of the lease protocol: it runs steps on granted blocks and reports what each block holds.

Three rules keep the worker safe. It touches only blocks in its block tables and its pool. It sends a report that frees
blocks of a sequence only when no step in flight contains the sequence. After every break, undelivered messages are
void: the next session starts from an inventory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from common.errors import AlreadyExists, FieldViolation, InvalidRequest, NotFound
from common.lease import (
    Admit,
    Copy,
    GrantBatch,
    Inventory,
    InventorySequence,
    Report,
    blocks_before_window,
    blocks_needed,
)
from common.types import TRIMMED, BlockId, FinishReason, SequenceId, SequencePhase, Usage
from gpuworker.core.batch_plan import ScheduledRow, StepPlan, StepResult
from gpuworker.core.block_states import BlockStates, Content
from gpuworker.core.draft_tally import DraftKind, DraftTally, added
from gpuworker.core.drafting import NO_PRICES, DraftPrices
from gpuworker.core.grant_check import check_grants, leading_empty
from gpuworker.core.invariants import violations
from gpuworker.core.outcomes import AgentConfig, Applied, Completion, Counts, SequenceFinished
from gpuworker.core.partial_copies import PartialCopies
from gpuworker.core.report_builder import ReportBuilder, SessionState
from gpuworker.core.sequence import NewSequence, Sequence
from gpuworker.core.step_scheduler import StepScheduler
from gpuworker.core.stopping import LENGTH, FinishCause

MAX_STEPS_IN_FLIGHT = 2


class LeaseAgent:
    """The sequences, blocks, steps in flight and the report of one worker. Only the engine's thread may use it."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self._partly = config.block_size >= config.min_partial_block and not config.window
        self._block_shift = config.block_size.bit_length() - 1
        self._blocks = BlockStates(config.num_blocks, linked=not config.window)
        self._scheduler = StepScheduler(
            self._blocks,
            config.block_size,
            config.max_num_batched_tokens,
            config.long_prefill_cap,
            config.max_scored_tokens,
            config.draft_model,
        )
        self._report = ReportBuilder()
        self._sequences: dict[SequenceId, Sequence] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._copies: list[Copy] = []
        self._partial_copies = PartialCopies()
        self._lease_target = 0
        self._want = 0  # at the last report, or at an admission since
        self._next_step = 1
        self._arrivals = 0
        # The id of the last reset of the prefix cache that was carried out.
        self.reset = 0
        self._last_sequence = -1
        self._deferred = 0
        self._clear_events()

    def _clear_events(self) -> None:
        self._finished: list[SequenceFinished] = []
        self._preempted: list[SequenceId] = []
        self._forgotten: list[SequenceId] = []
        self._recounted: dict[SequenceId, int] = {}

    # ------------------------------------------------------------ requests of clients

    def submit(self, new: NewSequence) -> None:
        """Queue a sequence for blocks. Raises InvalidRequest with the numbers when it could never run."""
        self._check_id(new.sequence)
        hashed = self.config.prefix_caching and not new.no_cache
        sequence = Sequence(new, self._arrivals, hashed, self._partly)
        self._refuse_impossible(sequence)
        self._arrivals += 1
        self._last_sequence = new.sequence
        self._sequences[new.sequence] = sequence
        self._report.reserve(sequence.reserve())

    def unfinished(self) -> list[Sequence]:
        """Return the sequences that have not ended, in order of arrival."""
        return [each for each in self._sequences.values() if each.phase is not SequencePhase.DRAINING_FINISH]

    def take_over(self, others: list[Sequence]) -> None:
        """Queue sequences of an agent whose K/V is void, before the first session; they keep tokens and hashes."""
        for sequence in others:
            sequence.restart()
            self._sequences[sequence.id] = sequence
            self._arrivals, self._last_sequence = sequence.arrival + 1, sequence.id

    def _check_id(self, sequence: SequenceId) -> None:
        if sequence <= self._last_sequence:
            raise AlreadyExists(f"sequence {sequence}: ids rise, and {self._last_sequence} was used already")

    def _refuse_impossible(self, sequence: Sequence) -> None:
        prompt, limit, config = sequence.prompt_tokens, sequence.limit, self.config
        sampled = int(sequence.new.stop.max_tokens != 0)
        if not 0 < prompt <= limit - sampled:
            text = f"{prompt} tokens, with room for {limit} in all: at least one is needed, and room to sample one"
            raise InvalidRequest(FieldViolation("prompt", text))
        needed = blocks_needed(prompt, limit, config.block_size, config.window)
        if needed > config.num_blocks:
            text = (
                f"{limit} tokens (prompt {prompt}) need {needed} blocks of {config.block_size}; "
                f"the worker has {config.num_blocks}: shorten the prompt or lower max_tokens"
            )
            raise InvalidRequest(FieldViolation("sampling.max_tokens", text))

    def cancel(self, sequence: SequenceId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence in any phase; nothing when it is unknown or has ended already."""
        found = self._sequences.get(sequence)
        if found is not None and found.phase is not SequencePhase.DRAINING_FINISH:
            self._end(found, FinishCause(reason))
            self._leave_if_idle(found)

    # ------------------------------------------------------------ what the manager grants and orders

    def apply(self, batch: GrantBatch) -> Applied:
        """Apply a batch of the current session by columns. Raises ProtocolViolation, with nothing applied, when a grant
        names a block that the worker still holds, or leaves a sequence nothing to compute.
        """
        check_grants(batch, self._blocks, self._sequences, self.config.block_size, self.config.window)
        self._lease_target = batch.lease_target
        for copy in batch.copy:
            self._copy(copy)
        copied = frozenset(copy.dst for copy in batch.copy)
        admitted = tuple([admit for admit in batch.admit if self._admit(admit, copied)])
        if batch.copy:
            self._partial_copies.granted(admitted, batch.copy, self.config.block_size)
        for block in batch.lease:
            self._blocks.lease(block)
        if batch.reset:
            self._reset_cache(batch.reset)
        preempting = tuple([order for order in batch.preempt if self._preempt(order.sequence)])
        for sequence in batch.cancel:
            self.cancel(sequence)
        self._report.applied()
        if admitted:
            self._want = self._scheduler.lease_want(self.config.runway_slots)
        taken = {admit.sequence for admit in admitted}
        dropped = tuple([admit.sequence for admit in batch.admit if admit.sequence not in taken])
        return Applied(admitted, preempting, dropped, len(batch.lease))

    def _reset_cache(self, number: int) -> None:
        """Forget cached content, and confirm that: the next inventory must not bring it back."""
        self._blocks.forget_unheld()
        self.reset = number
        self._report.reset(number)

    def _copy(self, copy: Copy) -> None:
        slots = copy.length % self.config.block_size or self.config.block_size
        self._blocks.copy(copy.src, copy.dst, slots)
        self._copies.append(copy)

    def _admit(self, admit: Admit, copied: frozenset[BlockId]) -> bool:
        """Empty the granted blocks; give the block table to the sequence if it still waits.

        The blocks of a dropped admission are emptied too: a second sharer may already be admitted on them.
        """
        sequence = self._sequences.get(admit.sequence)
        self._blocks.reset_fresh(admit.block_table[admit.n_shared :], copied)
        if sequence is None or sequence.phase is not SequencePhase.WAITING:
            return False
        sequence.start(admit.block_table, admit.cached_tokens)
        if empty := leading_empty(admit.block_table):
            sequence.trimmed = empty
            sequence.skip(empty << self._block_shift, self.config.block_size)
        self._blocks.hold(admit.block_table)
        self._uncover_last_known(sequence, admit.n_shared)
        self._scheduler.add(sequence)
        return True

    def _uncover_last_known(self, sequence: Sequence, n_shared: int) -> None:
        """Leave the slot of the last token unfilled in a copied block: its logits must be computed."""
        index, offset = divmod(len(sequence.tokens) - 1, self.config.block_size)
        if n_shared <= index < len(sequence.block_table):
            block = sequence.block_table[index]
            self._blocks.fill[block] = min(self._blocks.fill[block], offset)

    def _preempt(self, sequence_id: SequenceId) -> bool:
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.phase is not SequencePhase.RUNNING:
            return False
        self._halt(sequence)
        sequence.phase = SequencePhase.DRAINING_PREEMPT
        self._leave_if_idle(sequence)
        return True

    # ------------------------------------------------------------ steps

    def plan(self, prices: DraftPrices = NO_PRICES) -> StepPlan | None:
        """Plan the next step; None when two are in flight or nothing can run. An idle worker calls it too.

        A step with drafts is in flight alone: it starts from known tokens, and the next one from what it accepts. So
        None, too, when the step in flight has drafts, or when by `prices` it pays to wait for its tokens and draft.
        """
        prices = self._priced(self.config.draft_prices or prices)
        if len(self._in_flight) >= MAX_STEPS_IN_FLIGHT or self._waits_for_tokens(prices):
            return None
        drafting = self.config.new_drafter is not None and not self._in_flight
        step = self._scheduler.compose(prices if drafting else None)
        self._report.bind(step.bound)
        self._report.stalled = tuple(sorted(step.stalled))
        self._deferred = step.deferred
        self._recounted.update(step.recounted)
        self._return_excess()
        if not step.rows:
            return None
        copies, scored = tuple(self._copies), tuple(step.scored)
        plan = StepPlan(self._next_step, tuple(step.rows), copies, scored, step.drafts, step.guessing)
        self._copies.clear()
        self._next_step += 1
        self._in_flight.append(plan)
        return plan

    def _priced(self, prices: DraftPrices) -> DraftPrices:
        return prices if self.config.draft_model is None else self.config.draft_model.priced(prices)

    def _waits_for_tokens(self, prices: DraftPrices) -> bool:
        """Whether the tokens of the step in flight must be known before the next step is planned."""
        if self.config.new_drafter is None or not self._in_flight:
            return False
        return self._in_flight[-1].drafts > 0 or self._scheduler.wants_to_draft(prices)

    def _return_excess(self) -> None:
        """Return the blocks of the pool above the lease target, last leased first; without a session they stay."""
        pool = self._blocks.pool
        if self._report.state is SessionState.OPEN and len(pool) > self._lease_target:
            self._report.give_back([pool.pop() for _ in range(len(pool) - self._lease_target)])

    def complete(self, result: StepResult) -> Completion:
        """Process the result of the oldest step in flight: deliver tokens, seal blocks, let drained sequences go."""
        plan = self._in_flight.popleft()
        if plan.step != result.step:
            raise ValueError(f"step {result.step} completed, but {plan.step} is the oldest in flight")
        tokens: dict[SequenceId, tuple[int, ...]] = {}
        drafts, shift, sequences = dict[DraftKind, DraftTally](), self._block_shift, self._sequences
        scored = self._score(plan) if plan.scored else ()
        if plan.copies:
            self._report.copied(self._partial_copies.ran(plan.copies))
        for row in plan.rows:
            sequence_id, start, length, blocks, samples, drafted = row
            sequence, end = sequences[sequence_id], start + length
            sequence.in_flight -= 1
            if samples:
                sequence.sampling -= 1
                self._deliver(sequence, row, result, tokens)
                if drafted:
                    right = sequence.advance(end, len(result.sampled[sequence_id]) - 1)
                    self._blocks.fill_up(blocks, end, end + right, shift)
                    end, tally = end + right, DraftTally(len(drafted), right)
                    drafts = added(drafts, {sequence.draft_kind: tally})
            elif end == sequence.limit and sequence.phase is not SequencePhase.DRAINING_FINISH:
                self._end(sequence, LENGTH)  # nothing is sampled after its prompt
            if end >> shift != start >> shift:
                self._close_blocks(sequence, row, end)
            if start < sequence.recompute_below:
                sequence.recomputed += min(end, sequence.recompute_below) - start
            if sequence.phase is not SequencePhase.RUNNING:
                self._leave_if_idle(sequence)
        self._report.computed(plan)
        completion = self._completion(tokens, plan.scheduled_tokens, scored)
        return replace(completion, drafts=drafts) if drafts else completion

    def _score(self, plan: StepPlan) -> tuple[SequenceId, ...]:
        """Count the scored positions of a step, and return the sequences that still want them."""
        found = [(self._sequences[plan.rows[part.row].sequence], part.end) for part in plan.scored]
        live = [each for each in found if each[0].phase is not SequencePhase.DRAINING_FINISH]
        for sequence, end in live:
            sequence.scored = end
        return tuple([sequence.id for sequence, _ in live])

    def departures(self) -> Completion:
        """Return the sequences that ended since the last completion without a step.

        Call it after `apply` and `cancel`.
        """
        return self._completion({}, 0)

    def _completion(
        self, tokens: dict[SequenceId, tuple[int, ...]], computed: int, scored: tuple[SequenceId, ...] = ()
    ) -> Completion:
        left = tuple(self._finished), tuple(self._preempted), tuple(self._forgotten)
        completion = Completion(tokens, *left, computed, scored, recounted=self._recounted)
        if self._finished or self._preempted or self._forgotten or self._recounted:
            self._clear_events()
        return completion

    def _deliver(
        self, sequence: Sequence, row: ScheduledRow, result: StepResult, tokens: dict[SequenceId, tuple[int, ...]]
    ) -> None:
        """Accept the tokens of a step up to a stop; drop them if the sequence has ended, but not if it is preempted."""
        if sequence.phase is SequencePhase.DRAINING_FINISH:
            return
        sequence_id, config = row.sequence, self.config
        sampled = result.sampled[sequence_id]
        if sequence_id in result.ended:
            self._end(sequence, result.ended[sequence_id])
            return
        ending, count = None, 0
        for token in sampled:
            ending = sequence.accept(token, config.block_size)
            count += 1
            if ending is not None:
                break
        tokens[sequence_id] = sampled[:count]
        if row.drafts:
            sequence.count_drafts(len(row.drafts), min(count, len(sampled) - 1))
        if ending is not None:
            self._end(sequence, ending)
        elif config.new_drafter is not None:
            sequence.follow(sampled, config.new_drafter)
            sequence.expect(sampled, result.forced.get(sequence_id, ()))

    def _close_blocks(self, sequence: Sequence, row: ScheduledRow, end: int) -> None:
        """Seal each block whose last slot before position `end` this row wrote, by its id in the snapshot.

        None is sealed past the accepted tokens.
        """
        if sequence.hashed:
            for index in range(row.start >> self._block_shift, min(end, len(sequence.tokens)) >> self._block_shift):
                self._seal(row.blocks[index], sequence, index)
        if self.config.window:
            self._trim(sequence, end)

    def _seal(self, block: BlockId, sequence: Sequence, index: int) -> None:
        block_hashes, parts = sequence.block_hashes, sequence.parts_of(index) if sequence.partly else ()
        parent = block_hashes[index - 1] if index else None
        self._blocks.content[block] = Content(block_hashes[index], parent, index, self._next_step - 1)
        self._report.seal(block, block_hashes[index], parts)

    def _trim(self, sequence: Sequence, next_position: int) -> None:
        """Free leading blocks that no position from `next_position` on reads; steps in flight start there or later."""
        gone = blocks_before_window(next_position, self.config.window, self.config.block_size)
        if gone <= sequence.trimmed or sequence.phase is not SequencePhase.RUNNING:
            return
        self._blocks.let_go(sequence.block_table[sequence.trimmed : gone], self._next_step - 1)
        sequence.block_table[sequence.trimmed : gone] = [TRIMMED] * (gone - sequence.trimmed)
        sequence.snapshot = None
        sequence.trimmed = gone
        self._report.trim(sequence.id, gone)

    # ------------------------------------------------------------ how sequences leave

    def _end(self, sequence: Sequence, ending: FinishCause) -> None:
        """Report a sequence's end and keep it out of later steps.

        Its block table stays until no step in flight has it.
        """
        if sequence.phase is SequencePhase.RUNNING:
            self._halt(sequence)
        sequence.phase = SequencePhase.DRAINING_FINISH
        sequence.reason = ending.reason
        cause = ending.stop_token, ending.message, ending.wrong_field, ending.embedding
        self._finished.append(SequenceFinished(sequence.id, ending.reason, sequence.usage(), *cause))

    def _halt(self, sequence: Sequence) -> None:
        """Leave a sequence out of later steps and of the stalled set, so that it does not come back as stalled."""
        self._scheduler.remove(sequence)
        stalled = self._report.stalled
        if sequence.id in stalled:
            self._report.stalled = tuple(each for each in stalled if each != sequence.id)

    def _leave_if_idle(self, sequence: Sequence) -> None:
        """Release the block table of a draining sequence, unless a step in flight contains it."""
        if not sequence.draining or sequence.in_flight:
            return
        self._partial_copies.left(sequence.id)
        if sequence.block_table:
            self._blocks.let_go(sequence.block_table, self._next_step - 1)
            self._forgotten.append(sequence.id)
        if sequence.phase is SequencePhase.DRAINING_FINISH:
            self._forget(sequence)
            return
        sequence.requeue()
        self._preempted.append(sequence.id)
        self._report.preempted(sequence.id, len(sequence.tokens))

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        if sequence.drafter is not None and self.config.draft_model is not None:
            self.config.draft_model.release(sequence.drafter)
        self._report.finished(sequence.id, sequence.reason)

    # ------------------------------------------------------------ sessions

    def detach(self) -> None:
        """Handle the loss of the session: steps go on with block tables and pool.

        Pending content is dropped, because the next inventory has it all.
        """
        self._report.state = SessionState.DETACHED
        self._report.discard()

    def inventory(self) -> Inventory:
        """Open a session: return everything held at this instant. Content is recorded from now on.

        Draining sequences are in it. Otherwise the manager would grant their blocks again while a step writes them.
        """
        self.detach()
        self._report.state = SessionState.OPENING
        sequences = tuple(map(_inventory_of, self._sequences.values()))
        return Inventory(sequences, tuple(self._blocks.pool), self._blocks.cached_blocks())

    def attached(self, lease_target: int) -> None:
        """The manager has rebuilt its state from the inventory; reports may be sent."""
        self._lease_target = lease_target
        self._report.state = SessionState.OPEN

    @property
    def report_is_urgent(self) -> bool:
        """Whether the next report should not wait for later steps: others wait for it, or the pool runs short.

        It does where it has less than half of the lease want, as of the last report or of an admission since.
        """
        return self._report.urgent or 2 * len(self._blocks.pool) < self._want

    def take_report(self) -> Report | None:
        """Return the next report; None when there is nothing to report, or no session."""
        if self._report.state is not SessionState.OPEN:
            return None
        self._want = self._scheduler.lease_want(self.config.runway_slots)
        return self._report.take(self._want)

    # ------------------------------------------------------------ levels

    @property
    def has_work(self) -> bool:
        """Whether any sequence is live or any step in flight."""
        return bool(self._sequences or self._in_flight)

    @property
    def steps_in_flight(self) -> int:
        """Planned and not completed; at most two."""
        return len(self._in_flight)

    def counts(self) -> Counts:
        draining = sum(s.draining for s in self._sequences.values())
        running = self._scheduler.running
        in_flight = sum(plan.prefilled for plan in self._in_flight)
        return Counts(
            running=running,
            waiting=len(self._sequences) - running - draining,
            draining=draining,
            stalled=len(self._report.stalled),
            deferred=self._deferred,
            pool=len(self._blocks.pool),
            lease_target=self._lease_target,
            steps_in_flight=len(self._in_flight),
            pending_prefill=in_flight
            + sum(max(0, len(s.tokens) - s.num_computed_tokens - 1) for s in self._sequences.values()),
            prefill_in_flight=in_flight,
            unheld=self.config.num_blocks - self._blocks.held - len(self._blocks.pool),
        )

    def tokens_of(self, sequence: SequenceId) -> tuple[int, ...]:
        """Return prompt and output so far, for the runner when the sequence is admitted. Raises NotFound."""
        return tuple(self._live(sequence).tokens)

    def phase(self, sequence: SequenceId) -> SequencePhase:
        """Return where a live sequence is. Raises NotFound."""
        return self._live(sequence).phase

    def usage(self, sequence: SequenceId) -> Usage:
        """Return the tokens that a live sequence has cost so far.

        Raises NotFound; for an ended sequence see SequenceFinished.
        """
        return self._live(sequence).usage()

    def _live(self, sequence: SequenceId) -> Sequence:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise NotFound(f"sequence {sequence} is not live") from None

    # ------------------------------------------------------------ checks

    def check_invariants(self) -> None:
        """Raise AssertionError with every rule of the bookkeeping that does not hold."""
        found = violations(self._sequences, self._blocks, self._in_flight, self.config.block_size)
        if found:
            raise AssertionError("; ".join(found))


def _inventory_of(sequence: Sequence) -> InventorySequence:
    return InventorySequence(sequence.reserve(), sequence.phase, sequence.arrival, sequence.blocks())
