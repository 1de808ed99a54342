"""The worker's side of the lease protocol: it runs steps on granted blocks and reports what each block holds.

Three rules keep the worker safe. It touches only blocks in its block tables and its pool. It sends a report that frees
blocks of a sequence only when no step in flight contains the sequence. After every break, undelivered messages are
void: the next session starts from an inventory.

This file has the life of a step and of a session. `GrantApplier` has the effects of grants, `BlockCloser` those of
completed steps on blocks, `Departures` how sequences end and are preempted, and `ReportBuilder` the next report.
"""

from __future__ import annotations

from collections import deque

from common.contracts.errors import AlreadyExists, NotFound
from common.contracts.lease import Copy, GrantBatch, Inventory, InventorySequence, Report
from common.contracts.types import FinishReason, SequenceId, SequencePhase, Usage
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan, StepResult
from gpuworker.scheduling.block_closer import BlockCloser
from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.departures import Departures
from gpuworker.scheduling.draft_tally import DraftKind, DraftTally, added
from gpuworker.scheduling.drafting import NO_PRICES, DraftPrices
from gpuworker.scheduling.grant_applier import GrantApplier
from gpuworker.scheduling.invariants import violations
from gpuworker.scheduling.outcomes import AgentConfig, Applied, Completion, Counts
from gpuworker.scheduling.partial_copies import PartialCopies
from gpuworker.scheduling.report_builder import ReportBuilder, SessionState
from gpuworker.scheduling.request_check import check_request
from gpuworker.scheduling.sequence import NewSequence, Sequence
from gpuworker.scheduling.step_scheduler import StepScheduler
from gpuworker.scheduling.stopping import LENGTH

MAX_STEPS_IN_FLIGHT = 2


class LeaseAgent:
    """The sequences, blocks, steps in flight and the report of one worker. Only the engine's thread may use it."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self._partly = config.block_size >= config.min_partial_block and not config.window
        # Where every layer has a window, each prompt is granted in parts, and decodes come first in a step alone.
        self._kept_slots = 0 if config.window else config.runway_slots
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
        self._grants = GrantApplier(config, self._sequences, self._blocks, self._scheduler, self._partial_copies)
        self._closer = BlockCloser(config.block_size, config.window, self._blocks, self._report)
        self._departures = Departures(
            self._sequences, self._blocks, self._scheduler, self._report, self._partial_copies, config.draft_model
        )
        self._lease_target = 0
        self._want = 0  # at the last report, or at an admission since
        self._next_step = 1
        self._arrivals = 0
        # The id of the last reset of the prefix cache that was carried out.
        self.reset = 0
        self._last_sequence = -1
        self._deferred = 0

    # ------------------------------------------------------------ requests of clients

    def submit(self, new: NewSequence) -> None:
        """Queue a sequence for blocks. Raises InvalidRequest with the numbers when it could never run."""
        self._check_id(new.sequence)
        hashed = self.config.prefix_caching and not new.no_cache
        sequence = Sequence(new, self._arrivals, hashed, self._partly)
        check_request(sequence, self.config)
        self._arrivals += 1
        self._last_sequence = new.sequence
        self._sequences[new.sequence] = sequence
        self._report.reserve(sequence.reserve())

    def unfinished(self) -> list[Sequence]:
        """Return the sequences that have not ended, in order of arrival."""
        return [each for each in self._sequences.values() if not each.ended]

    def take_over(self, others: list[Sequence]) -> None:
        """Queue sequences of an agent whose K/V is void, before the first session; they keep tokens and hashes."""
        for sequence in others:
            sequence.restart()
            self._sequences[sequence.id] = sequence
            self._arrivals, self._last_sequence = sequence.arrival + 1, sequence.id

    def _check_id(self, sequence: SequenceId) -> None:
        if sequence <= self._last_sequence:
            raise AlreadyExists(f"sequence {sequence}: ids rise, and {self._last_sequence} was used already")

    def cancel(self, sequence: SequenceId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence in any phase; nothing when it is unknown or has ended already."""
        self._departures.cancel(sequence, reason, self._next_step - 1)

    def hand_over(self, sequence: SequenceId) -> None:
        """End a sequence that goes on elsewhere, behind what the steps in flight sample for it. Idempotent."""
        self._departures.hand_over(sequence, self._next_step - 1)

    # ------------------------------------------------------------ what the manager grants and orders

    def apply(self, batch: GrantBatch) -> Applied:
        """Apply a batch of the current session by columns. Raises ProtocolViolation, with nothing applied, when a grant
        names a block that the worker still holds, or leaves a sequence nothing to compute.
        """
        admitted = self._grants.apply(batch)
        self._lease_target = batch.lease_target
        self._copies += batch.copy
        if batch.reset:
            self._reset_cache(batch.reset)
        planned = self._next_step - 1
        preempting = tuple([order for order in batch.preempt if self._departures.preempt(order.sequence, planned)])
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
        step = self._scheduler.compose(prices if drafting else None, self._kept_slots)
        self._report.bind(step.bound)
        self._report.stalled = tuple(sorted(step.stalled))
        self._deferred = step.deferred
        self._departures.recounted.update(step.recounted)
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
        planned = self._next_step - 1
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
            elif end == sequence.limit and not sequence.ended:
                self._departures.end(sequence, LENGTH)  # nothing is sampled after its prompt
            if end >> shift != start >> shift:
                self._closer.close(sequence, row, end, planned)
            if sequence.phase is not SequencePhase.RUNNING:
                self._departures.leave_if_idle(sequence, planned)
        self._report.computed(plan)
        return self._departures.completion(tokens, plan.scheduled_tokens, scored, drafts)

    def _score(self, plan: StepPlan) -> tuple[SequenceId, ...]:
        """Count the scored positions of a step, and return the sequences that still want them."""
        found = [(self._sequences[plan.rows[part.row].sequence], part.end) for part in plan.scored]
        live = [each for each in found if not each[0].ended]
        for sequence, end in live:
            sequence.scored = end
        return tuple([sequence.id for sequence, _ in live])

    def departures(self) -> Completion:
        """Return the sequences that ended since the last completion without a step.

        Call it after `apply` and `cancel`.
        """
        return self._departures.completion({}, 0, (), {})

    def _deliver(
        self, sequence: Sequence, row: ScheduledRow, result: StepResult, tokens: dict[SequenceId, tuple[int, ...]]
    ) -> None:
        """Accept the tokens of a step up to a stop; drop them if the sequence has ended, but not if it is preempted."""
        if sequence.ended:
            return
        sequence_id, config = row.sequence, self.config
        sampled = result.sampled[sequence_id]
        if sequence_id in result.ended:
            self._departures.end(sequence, result.ended[sequence_id])
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
            self._departures.end(sequence, ending)
        elif config.new_drafter is not None:
            sequence.follow(sampled, config.new_drafter)
            sequence.expect(sampled, result.forced.get(sequence_id, ()))

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
    def stalled(self) -> tuple[SequenceId, ...]:
        """The running sequences for which the last plan found no block."""
        return self._report.stalled

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
    table, count = sequence.blocks(), sequence.preemptions
    return InventorySequence(sequence.reserve(), sequence.phase, sequence.arrival, table, count)
