"""The worker's side of the lease protocol: it runs steps on granted blocks and reports what each block holds.

Three rules keep the worker safe. It touches only blocks in its block tables and its pool. It sends a report that frees
blocks of a sequence only when no step in flight contains the sequence. After every break, undelivered messages are
void: the next session starts from an inventory.

This file has the life of a step and of a session. `GrantApplier` has the effects of grants, `BlockCloser` those of
completed steps on blocks, `Departures` how sequences end and are preempted, and `ReportBuilder` the next report.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items

from common.contracts.errors import AlreadyExists, FieldViolation, InvalidRequest, NotFound, ProtocolViolation
from common.contracts.lease import (
    Admit,
    Copy,
    GrantBatch,
    Inventory,
    InventorySequence,
    Report,
    TierCopy,
    blocks_before_window,
    blocks_needed,
    unread_blocks,
)
from common.contracts.transfers import ImageName, Medium, Place, Transfer, TransferCosts, TransferEnd
from common.contracts.types import (
    TRIMMED,
    BlockHash,
    BlockId,
    FinishReason,
    KvGroup,
    KvGroupKind,
    SequenceId,
    SequencePhase,
    Usage,
)
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan, StepResult
from gpuworker.scheduling.block_states import BlockStates, Content, PageBlocks
from gpuworker.scheduling.claims_by_hash import ClaimsByHash
from gpuworker.scheduling.departures import Departures
from gpuworker.scheduling.draft_tally import DraftKind, DraftTally, added
from gpuworker.scheduling.drafting import NO_PRICES, DraftPrices
from gpuworker.scheduling.frame_claims import Claims, FrameClaims, LoadedBlock, find_loads
from gpuworker.scheduling.group_grants import check_groups, fresh_blocks, leading_empty
from gpuworker.scheduling.group_table import GroupTable, Tail
from gpuworker.scheduling.kv_events import CacheWatch, Origin, WatchedClaims
from gpuworker.scheduling.outcomes import AgentConfig, Applied, Completion, Counts, Loaded
from gpuworker.scheduling.partial_copies import PartialCopies
from gpuworker.scheduling.report_builder import ReportBuilder, SessionState
from gpuworker.scheduling.sequence import NewSequence, Sequence
from gpuworker.scheduling.step_scheduler import StepScheduler
from gpuworker.scheduling.stopping import LENGTH
from gpuworker.scheduling.transfer_book import TransferBook, filled_by


class LeaseAgent:
    """The sequences, blocks, steps in flight and the report of one worker. Only the engine's thread may use it."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self._partly = config.block_size >= config.min_partial_block and not config.slides
        # Where every layer has a window, each prompt begins with that, and decodes come first in a step alone.
        self._kept_slots = 0 if config.window else config.runway_slots
        self._block_shift = config.block_size.bit_length() - 1
        self._blocks = BlockStates(config.num_blocks, not config.window, config.block_pages, config.block_size)
        self._frames = FrameClaims(config.host_frames, config.block_pages)
        self._transfers = TransferBook(config.disk_frames, config.serves_peers, config.block_pages)
        if config.watch is not None:
            self._watch_claims(config.watch)
        elif config.serves_peers:
            self._blocks.content, self._frames.held = ClaimsByHash(), ClaimsByHash()
        # A transfer waits for copies that no step has run yet.
        self._transfer_waits = False
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
        # Copies that the next step runs before its rows, in the order in which they were granted.
        self._copies: list[Copy | TierCopy] = []
        # Blocks that these load, and copies of that, by the sequence that they are for.
        self._loaded: list[tuple[SequenceId, int, int]] = []
        self._partial_copies = PartialCopies()
        self._grants = GrantApplier(
            config,
            self._sequences,
            self._blocks,
            self._frames,
            self._transfers,
            self._scheduler,
            self._partial_copies,
        )
        self._closer = BlockCloser(config, self._blocks, self._report)
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

    def _watch_claims(self, watch: CacheWatch) -> None:
        """Let subscribers of KV events know of every claim, of those that an agent follows too."""
        watch.begin(self._find_origin)
        self._blocks.content = WatchedClaims(watch, Medium.BLOCK)
        self._frames.held = WatchedClaims(watch, Medium.HOST)
        self._transfers.saved.held = WatchedClaims(watch, Medium.DISK)

    def _find_origin(self, block_hash: BlockHash, depth: int) -> Origin | None:
        """Return what a hash stands for, if a live sequence has the block; None: nobody knows."""
        for each in self._sequences.values():
            if each.block_hashes[depth : depth + 1] == [block_hash]:
                return each.origin_of(depth, self.config.block_size)
        return None

    def _describe_unknown(self, sequence: Sequence) -> None:
        """Tell what claims stand for that came, without tokens, before a sequence that has them."""
        watch = self.config.watch
        if watch is None or not watch.unknown:
            return
        for index, block_hash in enumerate(sequence.block_hashes):
            if block_hash in watch.unknown:
                watch.describe(block_hash, sequence.origin_of(index, self.config.block_size))

    # ------------------------------------------------------------ requests of clients

    def submit_sequence(self, new: NewSequence) -> None:
        """Queue a sequence for blocks. Raises InvalidRequest with the numbers when it could never run."""
        self._check_id(new.sequence)
        hashed = self.config.prefix_caching and not new.no_cache
        groups = self.config.groups
        sequence = Sequence(new, self._arrivals, hashed, self._partly, self.config.keeps_states, groups)
        check_request(sequence, self.config)
        self._arrivals += 1
        self._last_sequence = new.sequence
        self._sequences[new.sequence] = sequence
        self._describe_unknown(sequence)
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

    def cancel_sequence(self, sequence: SequenceId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence in any phase; nothing when it is unknown or has ended already."""
        self._departures.cancel(sequence, reason, self._next_step - 1)

    def hand_over(self, sequence: SequenceId) -> None:
        """End a sequence that goes on elsewhere, behind what the steps in flight sample for it. Idempotent."""
        self._departures.hand_over(sequence, self._next_step - 1)

    # ------------------------------------------------------------ what the manager grants and orders

    def apply_grant(self, batch: GrantBatch) -> Applied:
        """Apply a batch of the current session by columns. Raises ProtocolViolation, with nothing applied, when a grant
        names a block that the worker still holds, or leaves a sequence nothing to compute.
        """
        admitted = self._grants.apply(batch)
        self._lease_target = batch.lease_target
        self._note_loads(batch.tier, admitted)
        self._copies += batch.tier
        self._copies += batch.copy
        if batch.reset:
            self._reset_cache(batch.reset)
        if batch.transfers:
            self._order_transfers(batch.transfers)
        planned = self._next_step - 1
        preempting = tuple([order for order in batch.preempt if self._departures.preempt(order.sequence, planned)])
        for sequence in batch.cancel:
            self.cancel_sequence(sequence)
        self._report.applied()
        if admitted:
            self._want = self._scheduler.lease_want(self.config.runway_slots)
        taken = {admit.sequence for admit in admitted}
        dropped = tuple([admit.sequence for admit in batch.admit if admit.sequence not in taken])
        return Applied(admitted, preempting, dropped, len(batch.lease))

    def _note_loads(self, copies: Items[TierCopy], admitted: Items[Admit]) -> None:
        """Note for whom blocks are loaded from host memory, and which of them were fetched before."""
        size, fetched = self.config.block_size, dict[SequenceId, int]()
        for admit in admitted:
            if admit.fetched is not None:
                first = fetched[admit.sequence] = max(0, admit.n_shared - admit.fetched.blocks)
                self._sequences[admit.sequence].note_fetched(first * size, admit.n_shared * size, admit.fetched.source)
        for sequence, first, end, count in find_loads(copies, admitted, self._blocks.made):
            self._sequences[sequence].note_loaded(first * size, min(end, fetched.get(sequence, end)) * size)
            self._loaded.append((sequence, end - first, count))

    def _reset_cache(self, number: int) -> None:
        """Forget cached content, and confirm that: the next inventory must not bring it back."""
        self._blocks.forget_unheld()
        self._frames.forget_all()
        self._transfers.void()
        self._transfers.forget_saved()
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
        if step.bound_groups:
            self._report.bind_pages(step.bound_groups, step.bound_pages)
        self._report.stalled = tuple(sorted(step.stalled))
        self._deferred = step.deferred
        self._departures.recounted.update(step.recounted)
        self._return_excess()
        # Copies run without a row if that is what a transfer waits for.
        if not step.rows and not (self._transfer_waits and self._copies):
            return None
        copies, scored = tuple(self._copies), tuple(step.scored)
        states, loaded = (tuple(step.loads), tuple(step.saves)), tuple(self._loaded)
        rows, number = tuple(step.rows), self._next_step
        plan = StepPlan(number, rows, copies, scored, step.drafts, step.guessing, *states, loaded=loaded)
        self._copies.clear()
        self._loaded.clear()
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
            sequence_id, start, length, blocks, samples, drafted, _ = row
            sequence, end = sequences[sequence_id], start + length
            sequence.in_flight -= 1
            if samples:
                sequence.sampling -= 1
                self._deliver(sequence, row, result, tokens)
                if drafted:
                    right = sequence.advance(end, len(result.sampled[sequence_id]) - 1)
                    self._fill_up(sequence, blocks, end, end + right)
                    end, tally = end + right, DraftTally(len(drafted), right)
                    drafts = added(drafts, {sequence.draft_kind: tally})
            elif end == sequence.limit and not sequence.ended:
                self._departures.end(sequence, LENGTH)  # nothing is sampled after its prompt
            if end >> shift != start >> shift:
                self._closer.close(sequence, row, end, planned)
            if sequence.phase is not SequencePhase.RUNNING:
                self._departures.leave_if_idle(sequence, planned)
        self._report.computed(plan)
        loaded = _share_of_copies(plan, result.copy_seconds) if plan.loaded else None
        return self._departures.completion(tokens, plan.scheduled_tokens, scored, drafts, loaded)

    def _fill_up(self, sequence: Sequence, blocks: tuple[BlockId, ...], start: int, end: int) -> None:
        """Count slots as filled that right drafts wrote, in every group that keeps K and V."""
        self._blocks.fill_up(blocks, start, end, self._block_shift)
        for table in sequence.tables[1:]:
            if not table.checkpoints:
                self._blocks.fill_up(table.blocks(), start, end, self._block_shift)

    def _score(self, plan: StepPlan) -> tuple[SequenceId, ...]:
        """Count the scored positions of a step, and return the sequences that still want them."""
        found = [(self._sequences[plan.rows[part.row].sequence], part.end) for part in plan.scored]
        live = [each for each in found if not each[0].ended]
        for sequence, end in live:
            sequence.scored = end
        return tuple([sequence.id for sequence, _ in live])

    # ------------------------------------------------------------ transfers beside the steps

    @property
    def disk_frames(self) -> int:
        """Blocks that the disk keeps; 0 once it is given up."""
        return 0 if self._transfers.closed else self._transfers.disk_frames

    def restore_saved(self, saved: Claims, reset: int) -> None:
        """Take over, before the first session, what the disk has, and the id of the reset that it has carried out."""
        self._transfers.restore(saved)
        self.reset = reset

    @property
    def saved_claims(self) -> Claims:
        """What the disk has, for an agent that follows this one."""
        return self._transfers.saved.claims()

    def _order_transfers(self, transfers: Items[Transfer]) -> None:
        self._transfers.apply(transfers, self._frames)
        self._fail_transfers()

    def _fail_transfers(self) -> None:
        """End what is ordered of a disk that was given up."""
        for transfer in self._transfers.take_failed():
            self.end_transfer(transfer, TransferEnd.FAILED)

    def take_reads(self) -> list[Transfer]:
        """Return the fetches that were ordered since the last call: they are to be read, from disk or from peers.

        Like saves, those of several pages are returned page by page, and end so.
        """
        return self._transfers.take_reads()

    def take_saves(self, most: int) -> list[Transfer]:
        """Return saves whose images are to be taken now, before anything else; `most` at once."""
        copies = self._copies_under_way() if self._transfers.open else []
        ready, stale = self._transfers.take_saves(self._blocks, self._frames, copies, most)
        self._transfer_waits = self._transfers.waits_to_take
        for transfer in stale:
            self.end_transfer(transfer, TransferEnd.STALE)
        return ready

    def may_land(self, transfer: Transfer) -> bool:
        """Return whether the image of an open fetch may be put into its frame now; else it may once a step is over."""
        may = self._transfers.may_land(transfer, self._copies_under_way())
        self._transfer_waits |= not may
        return may

    def find_images(self, names: Items[ImageName]) -> list[Place | None]:
        """Return from where these images can be taken now; None: the worker does not have one."""
        blocks, frames = self._blocks, self._frames
        if not (isinstance(blocks.content, ClaimsByHash) and isinstance(frames.held, ClaimsByHash)):
            return [None] * len(names)
        filled, found = filled_by(self._copies_under_way()), list[Place | None]()
        for key, page in names:
            places = [
                _page_at(Medium.BLOCK, blocks.content.find(key), page, blocks.made),
                _page_at(Medium.HOST, frames.held.find(key), page, frames.made),
            ]
            found.append(next((place for place in places if place is not None and place not in filled), None))
        return found

    def is_open(self, transfer: Transfer) -> bool:
        """Return whether a transfer counts; what comes of one that is void is dropped."""
        return self._transfers.is_open(transfer)

    def end_transfer(self, transfer: Transfer, end: TransferEnd) -> None:
        """Account for the end of a transfer, or of a page of one, and report it once it is over, unless it is void."""
        ended = self._transfers.end(transfer, end, self._frames, self._next_step - 1)
        if ended is not None:
            self._report.ended(transfer.id, ended, urgent=not transfer.saves)

    def close_disk(self) -> None:
        """Give up the disk: every transfer of it fails, and no frame on it holds anything."""
        self._transfers.close_disk()
        self._fail_transfers()
        self._report.disk_closed()

    def note_drain(self) -> None:
        """Tell the manager, now and in each session, that nothing is to come here ahead of need any more."""
        self._report.draining = True

    def note_costs(self, costs: TransferCosts) -> None:
        """Let the next report say what a block costs, if that is not what was said."""
        self._report.costs = costs

    def _copies_under_way(self) -> list[Copy | TierCopy]:
        """Return the copies that wait for a step or are in one."""
        return [*self._copies, *(copy for plan in self._in_flight for copy in plan.copies)]

    def departures(self) -> Completion:
        """Return the sequences that ended since the last completion without a step.

        Call it after `apply_grant` and `cancel_sequence`.
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
        self._transfers.void()

    def inventory(self) -> Inventory:
        """Open a session: return everything held at this instant. Content is recorded from now on.

        Draining sequences are in it. Otherwise the manager would grant their blocks again while a step writes them.
        """
        self.detach()
        self._report.state = SessionState.OPENING
        sequences = tuple(map(_inventory_of, self._sequences.values()))
        cached, made = self._blocks.cached_blocks(), self._blocks.made
        frames, saved = self._frames.claims(), self.saved_claims
        pool = tuple(self._blocks.pool)
        if made is None:
            return Inventory(sequences, pool, cached, frames=frames.contents, saved=saved.contents)
        held = (block for each in self._sequences.values() for block in each.held_blocks() if block != TRIMMED)
        named = dict.fromkeys([*held, *(each.block for each in cached)])
        groups = tuple([made.group[block] for block in named])
        pages = tuple([page for block in named for page in made.pages[block]])
        below = frames.contents, saved.contents, *frames[1:], *saved[1:]
        return Inventory(sequences, pool, cached, groups, pages, *below)

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
        return self._report.take_report(self._want)

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


# Closes blocks once a step has computed them: seals those that are full, frees those that no layer reads any more.
class BlockCloser:
    """The rules by which completed steps change the content of blocks. It has no state of its own.

    A `step` is that of the last plan: it may have used the blocks too.
    """

    def __init__(self, config: AgentConfig, blocks: BlockStates, report: ReportBuilder) -> None:
        self._block_size, self._window, self._groups = config.block_size, config.window, config.groups
        self._shift = config.block_size.bit_length() - 1
        self._blocks = blocks
        self._report = report
        self._watch = config.watch

    def close(self, sequence: Sequence, row: ScheduledRow, end: int, step: int) -> None:
        """Seal each block whose last slot before position `end` a row wrote, by its id in the row's snapshot.

        None is sealed past the accepted tokens.
        """
        if sequence.hashed:
            for index in range(row.start >> self._shift, min(end, len(sequence.tokens)) >> self._shift):
                self._seal(row.blocks[index], sequence, index, step)
                if row.tables:
                    self._seal_runs(row, sequence, index, step)
            if sequence.tail is not None:
                self._note_saved(sequence.tail, sequence, row.start + row.length)
        if self._window:
            self._trim(sequence, end, step)
        elif row.tables:
            self._trim_runs(sequence, end, step)

    def _seal(self, block: BlockId, sequence: Sequence, index: int, step: int) -> None:
        block_hashes, parts = sequence.block_hashes, sequence.parts_of(index) if sequence.partly else ()
        parent = block_hashes[index - 1] if index else None
        if self._watch is not None:
            self._watch.describe(block_hashes[index], sequence.origin_of(index, self._block_size))
        self._blocks.content[block] = Content(block_hashes[index], parent, index, step)
        self._report.seal(block, block_hashes[index], parts)

    def _seal_runs(self, row: ScheduledRow, sequence: Sequence, index: int, step: int) -> None:
        """Seal the blocks of a place in every group behind the first: a checkpoint where the row left one."""
        block_hash, end = sequence.block_hashes[index], row.start + row.length
        for group in range(1, len(self._groups)):
            table, states = row.tables[group], self._groups[group].kind is KvGroupKind.STATE
            at = index if states else index * self._groups[group].pages
            if states and (end != (index + 1) * self._block_size or at >= len(table) or table[at] == TRIMMED):
                continue
            block = table[at]
            if states:
                self._blocks.fill[block] = self._block_size
            self._blocks.content[block] = Content(block_hash, None, index, step, group)
            self._report.seal(block, block_hash)

    def _note_saved(self, tail: Tail, sequence: Sequence, end: int) -> None:
        """Note that the states behind a row that ends at a position are in the tail, if these are accepted tokens."""
        if end == (tail.place + 1) << self._shift <= len(sequence.tokens):
            tail.saved, self._blocks.fill[tail.block] = True, self._block_size

    def _trim_runs(self, sequence: Sequence, next_position: int, step: int) -> None:
        """Do what `_trim` does in every group behind the first."""
        if sequence.phase is not SequencePhase.RUNNING:
            return
        for group in range(1, len(self._groups)):
            table = sequence.tables[group]
            if table.checkpoints:
                gone = min(next_position // self._block_size, len(table))  # a checkpoint was loaded, or is saved
            else:
                gone = unread_blocks(self._groups[group], next_position, self._block_size)
            if gone > table.trimmed:
                self._blocks.let_go(table.trim(gone), step)
                self._report.trim_run(sequence.id, group, gone)

    def _trim(self, sequence: Sequence, next_position: int, step: int) -> None:
        """Free leading blocks that no position from `next_position` on reads; steps in flight start there or later."""
        gone = blocks_before_window(next_position, self._window, self._block_size)
        if gone <= sequence.trimmed or sequence.phase is not SequencePhase.RUNNING:
            return
        self._blocks.let_go(sequence.block_table[sequence.trimmed : gone], step)
        sequence.block_table[sequence.trimmed : gone] = [TRIMMED] * (gone - sequence.trimmed)
        sequence.snapshot = None
        sequence.trimmed = gone
        self._report.trim(sequence.id, gone)


def _share_of_copies(plan: StepPlan, seconds: float) -> dict[SequenceId, Loaded]:
    """Return what a step copied from host memory, by sequence: its copies are of one size, and take equally long."""
    return {sequence: Loaded(blocks, seconds * copies / len(plan.copies)) for sequence, blocks, copies in plan.loaded}


# Checks a batch of grants before any of it is applied: kernels and copies use block ids as they are.
def check_grants(
    batch: GrantBatch,
    blocks: BlockStates,
    sequences: Mapping[SequenceId, Sequence],
    block_size: int,
    window: int = 0,
    groups: Items[KvGroup] = (),
    frames: FrameClaims | None = None,
) -> None:
    """Raise ProtocolViolation when a grant names a block that there is not, or that the worker still holds.

    Raises it also for a block table that is too long for its sequence, that leaves nothing to compute, or that lacks a
    block which the sequence reads.
    """
    blocks.refuse_unknown(batch.lease)
    for admit in batch.admit:
        empty = leading_empty(admit.block_table)
        blocks.refuse_unknown(admit.block_table[empty:])
        if empty:
            _check_window(admit, empty, blocks, sequences.get(admit.sequence), block_size, window)
        _check_table(admit, sequences.get(admit.sequence), block_size)
    granted = [block for admit in batch.admit for block in admit.block_table[admit.n_shared :]]
    loaded = dict[BlockId, LoadedBlock]()
    if batch.tier:
        loaded = (frames or FrameClaims(0)).check(batch.tier, batch.admit, blocks, sequences)
    if blocks.made is not None:
        granted = check_groups(batch, blocks, blocks.made, sequences, block_size, groups, loaded)
    granted += [page for each in loaded.values() for page in each.pages]
    blocks.refuse_held([*granted, *batch.lease])
    if batch.copy:
        blocks.refuse_unknown([copy.src for copy in batch.copy])
        _check_targets([copy.dst for copy in batch.copy], frozenset(granted))


def _check_window(
    admit: Admit, empty: int, blocks: BlockStates, sequence: Sequence | None, block_size: int, window: int
) -> None:
    """Check that no token behind the shared blocks reads an empty place, and that all they read is there already."""
    shared = admit.block_table[empty : admit.n_shared]
    most = blocks_before_window(admit.n_shared * block_size, window, block_size)
    if not shared or empty > most:
        what = f"a block table without its first {empty} blocks, of {admit.n_shared} shared; it may lack {most}"
        raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")
    for place, block in enumerate(shared, start=empty):
        content = blocks.content.get(block)
        wanted = sequence.block_hashes[place : place + 1] if sequence is not None else None
        other = content is not None and wanted is not None and wanted != [content.hash]
        if blocks.fill[block] != block_size or other:
            what = f"block {block}, which is not the full block {place} of it, behind {empty} that it lacks"
            raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")


def _check_table(admit: Admit, sequence: Sequence | None, block_size: int) -> None:
    length, shared = len(admit.block_table), admit.n_shared
    if shared > length:
        raise ProtocolViolation(f"sequence {admit.sequence} shares {shared} blocks of a block table of {length}")
    if sequence is None:
        return
    if shared * block_size >= len(sequence.tokens):
        raise ProtocolViolation(f"sequence {sequence.id} shares {shared} blocks: all of its tokens")
    if shared and sequence.computes_all:
        raise ProtocolViolation(f"sequence {sequence.id} shares {shared} blocks, and computes all its tokens")
    most = -(-sequence.limit // block_size)
    if length > most:
        raise ProtocolViolation(f"sequence {sequence.id} was granted {length} blocks; at most {most} fit")


def _check_targets(targets: Collection[BlockId], granted: frozenset[BlockId]) -> None:
    for block in targets:
        if block not in granted:
            raise ProtocolViolation(f"block {block} is the target of a copy, and no admission grants it")


# Applies what the manager grants: copies of blocks, block tables of waiting sequences, and leases for the pool.
class GrantApplier:
    """The rules by which grants change blocks and sequences. It has no state of its own."""

    def __init__(
        self,
        config: AgentConfig,
        sequences: dict[SequenceId, Sequence],
        blocks: BlockStates,
        frames: FrameClaims,
        transfers: TransferBook,
        scheduler: StepScheduler,
        partial_copies: PartialCopies,
    ) -> None:
        self._frames, self._transfers = frames, transfers
        self._block_size, self._window, self._groups = config.block_size, config.window, config.groups
        self._sequences = sequences
        self._blocks = blocks
        self._scheduler = scheduler
        self._partial_copies = partial_copies

    def apply(self, batch: GrantBatch) -> tuple[Admit, ...]:
        """Apply the grants of a batch, and return the admissions of sequences that still waited.

        Raises ProtocolViolation, with nothing applied, as `check_grants` does, and where a transfer is impossible.
        """
        check_grants(batch, self._blocks, self._sequences, self._block_size, self._window, self._groups, self._frames)
        if batch.transfers:
            sizes = len(self._blocks.fill), self._frames.num_frames
            self._transfers.check(batch.transfers, *sizes, anew=bool(batch.reset))
        self._frames.apply(batch.tier, self._blocks)
        for copy in batch.copy:
            slots = copy.length % self._block_size or self._block_size
            self._blocks.copy(copy.src, copy.dst, slots)
        copied = frozenset(copy.dst for copy in batch.copy)
        admitted = tuple([admit for admit in batch.admit if self._admit(admit, copied)])
        if batch.copy:
            self._partial_copies.granted(admitted, batch.copy, self._block_size)
        for block in batch.lease:
            self._blocks.lease(block)
        return admitted

    def _admit(self, admit: Admit, copied: frozenset[BlockId]) -> bool:
        """Empty the granted blocks; give the block table to the sequence if it still waits.

        The blocks of a dropped admission are emptied too: a second sharer may already be admitted on them.
        """
        sequence = self._sequences.get(admit.sequence)
        if self._groups:
            for group, pages in fresh_blocks(admit, self._groups):
                self._blocks.make_block(group, pages)
        else:
            self._blocks.reset_fresh(admit.block_table[admit.n_shared :], copied)
        if sequence is None or sequence.phase is not SequencePhase.WAITING:
            return False
        sequence.start(admit.block_table, admit.cached_tokens)
        for table, named in zip(sequence.tables, (admit.block_table, *admit.runs), strict=bool(self._groups)):
            self._give_table(table, named)
        if sequence.checkpoints is not None and admit.n_shared:
            sequence.loads = self._pages_of(sequence.checkpoints.block(admit.n_shared - 1))
        self._blocks.hold([block for table in sequence.tables[1:] for block in table.blocks()])
        self._take_tail(sequence)
        if empty := leading_empty(admit.block_table):
            sequence.trimmed = empty
            sequence.skip(empty * self._block_size, self._block_size)
        self._blocks.hold(admit.block_table)
        self._uncover_last_known(sequence, admit.n_shared)
        self._scheduler.add_sequence(sequence)
        return True

    def _give_table(self, table: GroupTable, named: Iterable[BlockId]) -> None:
        """Fill a table with the pages of the blocks that a grant names."""
        for block in named:
            table.trimmed += block == TRIMMED and table.trimmed == len(table)
            if table.checkpoints:
                table.append((block,))
            else:
                table.append([TRIMMED] * table.size if block == TRIMMED else self._pages_of(block))

    def _take_tail(self, sequence: Sequence) -> None:
        """Take the block at the place of the last known token out of the checkpoints: no chunk ends there."""
        place = (len(sequence.tokens) - 1) // self._block_size
        block = sequence.checkpoints.pop_tail(place) if sequence.checkpoints is not None else None
        if block is not None:
            sequence.tail = Tail(self._pages_of(block), place)

    def _pages_of(self, block: BlockId) -> tuple[BlockId, ...]:
        assert self._blocks.made is not None
        return self._blocks.made.pages[block]

    def _uncover_last_known(self, sequence: Sequence, n_shared: int) -> None:
        """Leave the slot of the last token unfilled in a copied block: its logits must be computed."""
        index, offset = divmod(len(sequence.tokens) - 1, self._block_size)
        if n_shared <= index < len(sequence.block_table):
            block = sequence.block_table[index]
            self._blocks.fill[block] = min(self._blocks.fill[block], offset)


# Audits the worker's own bookkeeping: the holders of each block, its fill, and the content of steps in flight.
def violations(
    sequences: Mapping[SequenceId, Sequence], blocks: BlockStates, in_flight: Iterable[StepPlan], block_size: int
) -> list[str]:
    """Return every rule that does not hold, in words; empty when all is well."""
    return [
        *_holders(sequences, blocks),
        *_claims(blocks, block_size),
        *(text for sequence in sequences.values() for text in _progress(sequence, blocks)),
        *_flights(sequences, in_flight),
    ]


def _holders(sequences: Mapping[SequenceId, Sequence], blocks: BlockStates) -> list[str]:
    held = Counter(block for s in sequences.values() for block in s.held_blocks() if block != TRIMMED)
    found = [f"block {block} is in the pool and in a row" for block in blocks.pool if held[block]]
    if len(set(blocks.pool)) != len(blocks.pool):
        found.append("a block is in the pool twice")
    counted = {block: n for block, n in enumerate(blocks.holders) if n}
    if counted != dict(held):
        found.append(f"holders are counted as {counted}, the rows say {dict(held)}")
    return found


def _claims(blocks: BlockStates, block_size: int) -> list[str]:
    found = [f"block {block} is claimed while in the pool" for block in blocks.pool if block in blocks.content]
    found += [f"block {block} is claimed and not full" for block in blocks.content if blocks.fill[block] != block_size]
    return found


def _progress(sequence: Sequence, blocks: BlockStates) -> list[str]:
    name, found = f"sequence {sequence.id}", []
    if sequence.phase is SequencePhase.WAITING:
        if sequence.block_table or sequence.in_flight or sequence.sampling:
            found.append(f"{name} waits and has a row or a step")
        return found
    if sequence.snapshot is not None and list(sequence.snapshot) != sequence.block_table:
        found.append(f"{name} has a stale snapshot of its row")
    if sequence.num_computed_tokens > len(sequence.tokens) + sequence.sampling:
        found.append(f"{name} computes position {sequence.num_computed_tokens} of unknown tokens")
    if not sequence.in_flight and sequence.sampling:
        found.append(f"{name} awaits a token from no step")
    return found


def _flights(sequences: Mapping[SequenceId, Sequence], in_flight: Iterable[StepPlan]) -> list[str]:
    flights = Counter(row.sequence for plan in in_flight for row in plan.rows)
    found = [f"sequence {s} is in a step and forgotten" for s in flights if s not in sequences]
    found += [
        f"sequence {s.id} counts {s.in_flight} steps in flight, there are {flights[s.id]}"
        for s in sequences.values()
        if s.in_flight != flights[s.id]
    ]
    return found


# Checks a new sequence: one that could never run is refused at once, with the numbers.
def check_request(sequence: Sequence, config: AgentConfig) -> None:
    """Raise InvalidRequest when a sequence has no token or no room for one more, or needs more blocks than there are.

    A sequence that samples nothing needs no room.
    """
    prompt, limit = sequence.prompt_tokens, sequence.limit
    sampled = int(sequence.new.stop.max_tokens != 0)
    if not 0 < prompt <= limit - sampled:
        text = f"{prompt} tokens, with room for {limit} in all: at least one is needed, and room to sample one"
        raise InvalidRequest(FieldViolation("prompt", text))
    needed = blocks_needed(prompt, limit, config.block_size, config.window, config.groups)
    if needed > config.num_blocks:
        what = "pages" if config.groups else f"blocks of {config.block_size}"
        text = (
            f"{limit} tokens (prompt {prompt}) need {needed} {what}; "
            f"the worker has {config.num_blocks}: shorten the prompt or lower max_tokens"
        )
        raise InvalidRequest(FieldViolation("sampling.max_tokens", text))


MAX_STEPS_IN_FLIGHT = 2


def _page_at(medium: Medium, first: BlockId | None, page: int, made: PageBlocks | None) -> Place | None:
    """Return where a page of a content is, whose first page is given; None: there is none."""
    if first is None:
        return None
    if made is None:
        return Place(medium, first) if not page else None
    pages = made.pages[first]
    return Place(medium, pages[page]) if page < len(pages) else None


def _inventory_of(sequence: Sequence) -> InventorySequence:
    table, count = sequence.blocks(), sequence.preemptions
    return InventorySequence(sequence.reserve(), sequence.phase, sequence.arrival, table, count, sequence.runs())
