"""One worker's ledger: the commands and queries over its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial

from common.contracts.clock import Clock
from common.contracts.lease import Admit, Copy, GrantBatch, Inventory, Preempt, Report
from common.contracts.types import BlockHash, BlockId, Decision, DecisionKind, SequenceId
from kvmanager.cache.pins import Pin, fitting
from kvmanager.cache.prefix_cache import PrefixMatch
from kvmanager.cache.window_match import settled
from kvmanager.contracts.block import ROOT
from kvmanager.contracts.counts import PoolCounts
from kvmanager.contracts.index_events import IndexEvent, IndexSnapshot
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import BlockTable, Sequence, table_of
from kvmanager.ledger import (
    ahead,
    block_granter,
    chunked_grants,
    evicting,
    grant_order,
    grant_plan,
    preemption,
    rebuild,
    report_applier,
    runway,
    transfers,
)
from kvmanager.ledger.ahead_table import AheadKind, Answer
from kvmanager.ledger.audit import audit
from kvmanager.ledger.block_map import BlockMap, BlockView, map_of, uses_of_groups, view_of
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.preemption import Shortage


class Ledger:
    """Block tables, prefix cache, queue and lease of one worker. Not thread-safe; no method blocks."""

    __slots__ = ("state",)

    def __init__(
        self,
        config: LedgerConfig,
        clock: Clock,
        decision_ids: Callable[[], str],
        worker: str = "",
    ) -> None:
        """`worker` is the worker's id, for records."""
        self.state = LedgerState(config, clock, decision_ids, worker)

    # ------------------------------------------------------------ W -> M

    def rebuild(self, inventory: Inventory) -> None:
        """Replace the state by the worker's inventory. Raises ProtocolViolation if the inventory contradicts itself."""
        for _ in self.rebuild_in_steps(inventory):
            pass

    def rebuild_in_steps(self, inventory: Inventory) -> Iterator[None]:
        """Rebuild in steps of some milliseconds; between them nothing else may be called. Raises as `rebuild` does."""
        return rebuild.load_inventory(self.state, inventory)

    def apply_report(self, report: Report) -> None:
        """Apply a report. Raises ProtocolViolation; the ledger is then void until the next rebuild."""
        report_applier.apply_report(self.state, report)

    # ------------------------------------------------------------ M -> W

    def schedule(self, most: int | None = None) -> GrantBatch | None:
        """Decide what to grant and order; None when there is nothing to send. Call it after each report and rebuild.

            report --> apply_report --> schedule --> GrantBatch
                                         1 lease     blocks ahead of need, for those that run
                                         2 preempt   where a stalled sequence finds no block
                                         3 admit     the next sequences that fit; or preempt for the next one
                                         4 lease     what a begun prompt lacks
                                         5 admit     those that pass the next one (`backfill.py`)
                                         6 target    how many leased blocks the worker keeps

        With `most`, a batch has so many admissions at most, and `has_more` says whether the next batch can follow.
        """
        state = self.state
        pool, sequences, worker = state.store.pool, state.sequences, state.worker
        grant_order.take_turn_by_age(state)
        terms, stalled = self._runway_terms()
        refill = runway.is_short(terms, pool.leased, stalled)
        lease = block_granter.lease_blocks(state, terms.want - pool.leased) if refill else []
        copies, admits, preempt = self._admit_or_preempt(most, bool(lease))
        if admits or preempt:
            terms, _ = self._runway_terms()
        begun = sequences.find_begun_prompt()
        if begun is not None and not sequences.preempting and not self.has_more:
            terms = self._terms_of_begun(begun)
            if runway.is_short(terms, pool.leased, stalled + (begun.id in sequences.stalled)):
                lease += block_granter.lease_blocks(state, terms.want - pool.leased)
        if sequences.queue:
            if not preempt:
                block_granter.begin_prompt(state, copies, admits)
                block_granter.backfill_sequences(state, copies, admits)
            block_granter.explain_waits(state)
        target = self._target(terms, refill)
        if refill:
            lease += block_granter.lease_free_blocks(state.store, target)
        cancel, worker.refused = tuple(worker.refused), []
        reset, tier = worker.resets.take_reset(), state.take_tier_copies() if state.tier_copies else ()
        if state.transfers.to_save:
            transfers.order_saves(state)
        if state.ahead.wishes:
            ahead.order_part(state)
        moves = state.transfers.take_orders() if state.transfers.orders else ()
        if target == worker.last_sent_target and not (lease or preempt or admits or cancel or reset or tier or moves):
            return None
        worker.last_sent_target = target
        return GrantBatch(target, tuple(copies), tuple(admits), tuple(lease), reset, preempt, cancel, tier, moves)

    @property
    def has_more(self) -> bool:
        """Whether the last batch had enough admissions before the queue was looked through."""
        return self.state.admission.blocked_by == "batch"

    def _admit_or_preempt(self, most: int | None, leases: bool) -> tuple[list[Copy], list[Admit], tuple[Preempt, ...]]:
        """Grant what the sequences that wait and those that are stalled need. After most reports there are none.

        Where the batch `leases` blocks, the stalled sequences may find what they lack.
        """
        state = self.state
        if not state.sequences.queue and not state.sequences.stalled:
            state.admission.blocked_by = ""
            return [], [], ()
        preempt = () if leases else preemption.preempt_for_stalled(state)
        copies, admits = block_granter.admit_sequences(state, most)
        return copies, admits, preempt or self._preempt_for_next()

    def _preempt_for_next(self) -> tuple[Preempt, ...]:
        """Order a preemption for the sequence that is next and cannot be admitted, if it is entitled to one."""
        state = self.state
        if state.admission.blocked_by not in ("capacity", "places"):
            return ()
        sequence = grant_order.next_turn(state).sequence
        return preemption.preempt_for_waiting(state, sequence, partial(self._shortage, sequence))

    def _shortage(self, sequence: Sequence) -> Shortage:
        """Return what a waiting sequence lacks, where those that run get their runway first."""
        short = grant_plan.measure_shortage(self.state, sequence)
        due = max(0, self._runway_terms()[0].want - self.state.store.pool.leased)
        return Shortage(short.missing + due, short.slack + due, short.hits)

    def lease_target(self, refill: bool) -> int:
        return self._target(self._runway_terms()[0], refill)

    def _target(self, terms: runway.RunwayTerms, refill: bool) -> int:
        state = self.state
        pressed = state.admission.blocked_by == "capacity"
        return runway.next_target(terms, state.worker.last_sent_target, refill, pressed, state.store.pool.leased)

    def _runway_terms(self) -> tuple[runway.RunwayTerms, int]:
        """Return the bounds of the lease pool, and how many sequences are stalled."""
        state = self.state
        stalled = len(state.sequences.find_stalled())
        if (begun := state.sequences.find_begun_prompt()) is not None:
            stalls = stalled * state.config.stall_pages
            want = min(max(chunked_grants.left_to_others(state, begun), stalls), state.sequences.growth)
            return runway.RunwayTerms(want, want), stalled
        growth, pressed = state.sequences.growth, state.admission.blocked_by == "capacity"
        return runway.runway_terms(
            state.config, state.worker.lease_want, stalled, growth, state.sequences.running, pressed
        ), stalled

    def _terms_of_begun(self, begun: Sequence) -> runway.RunwayTerms:
        """Return the bounds of the lease pool with what a begun prompt may take now."""
        stalled, growth = len(self.state.sequences.find_stalled()), self.state.sequences.growth
        stalls = stalled * self.state.config.stall_pages
        want = min(max(chunked_grants.lease_want(self.state, begun), stalls), growth)
        return runway.RunwayTerms(want, want)

    # ------------------------------------------------------------ work that stands still

    def _lacking(self) -> list[SequenceId]:
        """Return the running sequences that can compute nothing before they get a block."""
        state = self.state
        begun = state.sequences.find_begun_prompt()
        waits = begun is not None and begun.id in state.sequences.stalled
        return [*state.sequences.find_stalled(), *([begun.id] if begun is not None and waits else [])]

    def break_stall(self, why: str) -> GrantBatch | None:
        """Order the preemption of one sequence that holds blocks and lacks others, because nothing goes on.

        That is the begun prompt, or else the one that any other preemption would take first. None: none of those that
        run lacks a block, so that no preemption helps.
        """
        state = self.state
        victims = [state.sequences.live[each] for each in self._lacking()]
        if not victims or state.sequences.preempting:
            return None
        preempt = preemption.preempt_to_break_stall(state, victims, why)
        state.totals.broken_stalls += 1
        state.worker.last_sent_target = self.lease_target(refill=False)
        return GrantBatch(state.worker.last_sent_target, preempt=preempt)

    # ------------------------------------------------------------ operators

    def reset(self) -> bool:
        """Forget all cached content and publish that. Refused (False) while a sequence holds a block.

        Only this ledger forgets. The worker's next inventory brings back the content that the worker still holds.
        """
        if self.state.store.pool.in_use:
            return False
        evicting.drop_cached_blocks(self.state)
        return True

    def reset_cache(self, number: int) -> int:
        """Drop every cached block that no sequence uses; return how many. Call `schedule` next.

        `number` is the id of the reset, which no other one of this manager has. The worker gets it in the next batch.
        """
        self.state.worker.resets.wanted = number
        return evicting.drop_cached_blocks(self.state)

    def pin(self, pins: Items[Pin], share: float, why: str = "") -> None:
        """Pin as `pin_in_steps` does, in one step."""
        for _ in self.pin_in_steps(pins, share, why):
            pass

    def pin_in_steps(self, pins: Items[Pin], share: float, why: str = "") -> Iterator[None]:
        """Pin what these pins name, as far as it fits, and nothing else; `why` begins the record, "" makes none.

        A content that is not cached now is kept once a sequence has computed it. Between two steps anything but another
        change of the pins may happen.
        """
        config = self.state.config
        found = fitting(pins, config.num_blocks, share, config.groups, config.block_size)
        retention = self.state.store.retention
        if found.contents:
            yield
        yield from retention.pin_in_steps(found.contents if self.state.config.prefix_caching else {})
        if why:
            figures = {"pins": float(len(pins)), "pinned": float(len(found.contents))}
            figures["cached"] = float(retention.pinned_cached)
            reasons = (
                "an operator pins prefixes",
                *(f"{name} is left out: {what}" for name, what in found.left_out.items()),
            )
            self.state.decisions.record(DecisionKind.PIN, why, None, reasons, figures)

    def wish_prefix(self, kind: AheadKind, block_hashes: Items[BlockHash], why: str) -> Answer:
        """Let a prefix come into the worker's host memory although nobody waits for it. Call `schedule` next."""
        return ahead.wish_prefix(self.state, kind, block_hashes, why)

    @property
    def part_due(self) -> bool:
        """Whether `schedule` would order something that nobody waits for, or might."""
        return bool(self.state.ahead.wishes) and ahead.may_order(self.state, self.state.clock.monotonic())

    @property
    def reset_pending(self) -> bool:
        """Whether the worker has still to confirm the latest reset."""
        return self.state.worker.resets.pending

    def look_up_prompt(self, block_hashes: Items[BlockHash], num_tokens: int) -> PrefixMatch:
        """Return the hits that a prompt of `num_tokens` tokens would have now, and why there are no more."""
        cacheable = bool(block_hashes) or num_tokens < self.state.config.block_size
        cache, config = self.state.store.cache, self.state.config
        match = grant_plan.match_prefix(self.state.store, block_hashes, num_tokens, cacheable).match
        return settled(cache, config, block_hashes, num_tokens, match)

    @property
    def asked_of_peers(self) -> Mapping[str, int]:
        """The images that the worker is to have from each other one, and that have not come yet."""
        return self.state.transfers.asked

    def find_run(self, block_hashes: Items[BlockHash], first: int, end: int) -> int:
        """Return how many leading blocks of block_hashes[first:end] the worker has in the pool or in host memory."""
        return transfers.count_run(self.state, block_hashes, first, end)

    def has_content(self, key: BlockHash, parent: BlockHash, depth: int) -> bool:
        """Return whether the worker has a content in the pool or in host memory."""
        return transfers.has_content(self.state, key, parent, depth)

    def has_any(self, keys: frozenset[BlockHash]) -> bool:
        """Return whether the worker has something with one of these keys in the pool or in host memory."""
        return transfers.has_any(self.state, keys)

    def leading_blocks(self, block_hashes: Items[BlockHash], first: int = 0, end: int | None = None) -> int:
        """Return how many leading blocks of block_hashes[first:end] are registered, at these places of a prompt."""
        find = self.state.store.cache.find_registered_block
        places = range(len(block_hashes))[first:end]
        for place in places:
            if find(block_hashes[place], block_hashes[place - 1] if place else ROOT, place) is None:
                return place - first
        return len(places)

    def block_table(self, sequence_id: SequenceId) -> BlockTable | None:
        """Return a sequence's block table; None when the sequence is unknown."""
        sequence = self.state.sequences.live.get(sequence_id)
        return table_of(sequence, self.state.store.blocks) if sequence else None

    def block_tables(self) -> tuple[BlockTable, ...]:
        """Return the block table of every live sequence, by arrival."""
        ordered = sorted(self.state.sequences.live.values(), key=lambda sequence: sequence.arrival)
        return tuple(table_of(sequence, self.state.store.blocks) for sequence in ordered)

    def block_map(self, first_block: int, limit: int, most_sequences: int) -> BlockMap:
        """Return how `limit` blocks are used, and the sequences with the most blocks."""
        return map_of(self.state.store, self.state.sequences, first_block, limit, most_sequences)

    def block_view(self, block: BlockId, most_holders: int) -> BlockView | None:
        """Return everything about one block; None when the pool has no such block."""
        if not 0 <= block < self.state.config.num_blocks:
            return None
        return view_of(self.state.store, self.state.sequences, block, most_holders)

    def pool_counts(self) -> PoolCounts:
        state, sequences = self.state, self.state.sequences
        pool, retention, waiting = state.store.pool, state.store.retention, sequences.waiting
        retention.expire_terms()
        fetching, closed = len(sequences.fetching), state.transfers.closed
        capacity = 1 if state.admission.blocked_by == "capacity" and sequences.queue else 0
        return PoolCounts(
            state.config.num_blocks, len(pool.free), pool.leased, pool.in_use, pool.cached_pages, 0, sequences.running,
            waiting, len(sequences.preempting), state.worker.last_sent_target or 0, waiting - capacity - fetching,
            capacity,
            state.totals.clone(), retention.count_retained(), retention.pinned_cached, len(self._lacking()),
            uses_of_groups(state.store) if state.config.groups else (), state.config.frames,
            0 if state.store.tier is None else state.store.tier.held, 0 if closed else state.config.saved_frames,
            len(state.store.cache.saved),
            fetching, closed, len(state.ahead.wishes),
        )  # fmt: skip

    def drain_index_events(self) -> tuple[IndexEvent, ...]:
        """Return the changes of membership since the last call, in their order."""
        return self.state.store.cache.drain_events()

    def index_snapshot(self) -> IndexSnapshot:
        """Return the whole membership, parents first, and the number of the last event that it contains."""
        return self.state.store.cache.take_snapshot()

    def drain_decisions(self) -> tuple[Decision, ...]:
        return self.state.decisions.drain()

    def check_invariants(self) -> None:
        """Compare every running total and index with a count from scratch. Raises InvariantBroken with the reason."""
        audit(self.state)
