"""Any order of what can happen to a ledger: Hypothesis picks it, with messages under way in both directions."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.contracts.lease import GrantBatch, Report
from common.contracts.transfers import TransferCosts, TransferEnd
from common.contracts.types import BlockId, SequencePhase
from kvmanager.contracts.ledger_config import EvictionName
from kvmanager.ledger.ledger import Ledger
from tests.suites.protocol.ledger_copies import copy_ledger, ledger_key
from tests.support.kvmanager.fake_worker import FakeWorker
from tests.support.kvmanager.index_replica import IndexReplica
from tests.support.kvmanager.ledgers import depths, make_ledger

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class LedgerLife(RuleBasedStateMachine):
    """One ledger and one worker; reports and batches wait in line until a rule delivers the first of them."""

    ledger: Ledger
    worker: FakeWorker

    @initialize(
        num_blocks=st.integers(5, 10),
        block_size=st.sampled_from([1, 2, 2, 4, 4]),
        prompts=st.lists(TOKENS, min_size=1, max_size=4),
        reach=st.sampled_from([32, 128]),
        runway=st.sampled_from(["auto", "auto", "max"]),
        window=st.sampled_from([0, 0, 0, 1, 4, 7]),
        max_num_seqs=st.integers(2, 5),
        eviction=st.sampled_from(get_args(EvictionName)),
        partly=st.booleans(),
        greedy=st.booleans(),
        first_part=st.sampled_from([1, 4, 256]),
        host_frames=st.sampled_from([0, 0, 1, 3, 12]),
        disk_frames=st.sampled_from([0, 1, 4, 12]),
        warm=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        window: int,
        prompts: list[list[int]],
        partly: bool,
        greedy: bool,
        warm: bool,
        **options: Any,
    ) -> None:
        options["runway_reach"] = options.pop("reach")
        self.ledger = make_ledger(num_blocks, block_size, window=window, **options)
        self.worker = FakeWorker(num_blocks, block_size, window=window, partly=partly, greedy=greedy)
        self.replica = IndexReplica()
        self.resets = 0
        # What the blocks held that the last reset dropped: a list of its own for each time that a block is emptied.
        self.dropped: dict[BlockId, list[int]] = {}
        self.reports: list[Report] = []
        self.batches: list[GrantBatch | None] = []
        if warm and options["host_frames"]:
            for tokens in prompts:
                self.worker.save(tokens, options["disk_frames"])
            self.stream_breaks()
        for tokens in prompts:
            self.submit(tokens, 8, 0, True)

    @rule(tokens=TOKENS, more=st.integers(0, 10), priority=st.integers(0, 1), cached=st.booleans())
    def submit(self, tokens: list[int], more: int, priority: int, cached: bool) -> None:
        self.worker.submit(tokens, len(tokens) + more, priority, cached=cached)

    @precondition(lambda self: self.worker.live)
    @rule(data=st.data(), more=st.integers(0, 8))
    def fork(self, data: st.DataObject, more: int) -> None:
        parent = data.draw(st.sampled_from(list(self.worker.live.values())))
        num_tokens, entry = parent.reserve.num_tokens, parent.reserve
        cached = bool(entry.block_hashes) or num_tokens < self.worker.block_size
        self.worker.submit(parent.tokens[:num_tokens], num_tokens + more, entry.priority, entry.sequence, cached)

    @precondition(lambda self: self.worker.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.worker.cancel(data.draw(st.sampled_from(list(self.worker.live))))

    @rule(budget=st.sampled_from([1, 3, 64]))
    def step(self, budget: int) -> None:
        self.worker.step(budget)
        self.reports.append(self.worker.report())

    @precondition(lambda self: self.reports)
    @rule()
    def report_arrives(self) -> None:
        self.ledger.apply_report(self.reports.pop(0))
        self.ledger.check_invariants()
        self.schedule()

    def schedule(self) -> None:
        """Make a batch. The blocks of its victims are for one sequence, which runs on or waits, and loses none."""
        self.ledger.drain_decisions()
        batch = self.ledger.schedule()
        orders = batch.preempt if batch else ()
        records = {each.decision_id: each for each in self.ledger.drain_decisions()}
        victims = {self.ledger.state.sequences.live[order.sequence].name for order in orders}
        assert victims == {records[order.decision_id].victim for order in orders}
        beneficiaries = {records[order.decision_id].beneficiary for order in orders}
        live = (SequencePhase.RUNNING, SequencePhase.WAITING)
        staying = {each.name for each in self.ledger.state.sequences.live.values() if each.phase in live}
        assert len(beneficiaries) == bool(orders)
        assert beneficiaries <= staying - victims
        self.batches.append(batch)

    @precondition(lambda self: self.batches)
    @rule()
    def batch_arrives(self) -> None:
        self.worker.deliver(self.batches.pop(0))

    @precondition(lambda self: self.worker.transfers)
    @rule(data=st.data(), end=st.sampled_from(TransferEnd))
    def transfer_ends(self, data: st.DataObject, end: TransferEnd) -> None:
        self.worker.end_transfer(data.draw(st.sampled_from(list(self.worker.transfers))), end)

    def end_transfers(self, most: int) -> None:
        """The oldest transfers end well."""
        for number in list(self.worker.transfers)[:most]:
            self.worker.end_transfer(number, TransferEnd.DONE)

    @rule(
        costs=st.builds(
            TransferCosts,
            st.sampled_from([0.0, 1.0]),
            st.sampled_from([0.0, 0.5, 0.9]),
            copy=st.sampled_from([0.0, 0.5, 2.0]),
        )
    )
    def costs_change(self, costs: TransferCosts) -> None:
        self.worker.costs = costs

    @precondition(lambda self: self.worker.saved)
    @rule()
    def the_disk_fails(self) -> None:
        self.worker.close_disk()

    @rule(rounds=st.integers(1, 6), budget=st.sampled_from([2, 64]))
    def round_trips(self, rounds: int, budget: int) -> None:
        for _ in range(rounds):
            self.end_transfers(3)
            self.step(budget)
            while self.reports:
                self.report_arrives()
            while self.batches:
                self.batch_arrives()

    @rule(rounds=st.integers(1, 3))
    def late_round_trips(self, rounds: int) -> None:
        """A batch arrives after the next step has been reported."""
        for _ in range(rounds):
            self.step(64)
            if self.batches:
                self.batch_arrives()
            self.report_arrives()

    @rule()
    def stream_breaks(self) -> None:
        self.reports.clear()
        self.batches.clear()
        self.ledger.rebuild(self.worker.inventory())
        self.replica.load(self.ledger.index_snapshot())
        if self.worker.reset != self.resets:  # as Manager.complete has it
            self.ledger.reset_cache(self.resets)
        self.ledger.check_invariants()
        self.schedule()

    @rule()
    def the_worker_restarts(self) -> None:
        """Another process begins with what the first one left on disk."""
        self.worker.restart()
        self.dropped.clear()
        self.stream_breaks()

    @rule()
    def all_leave_and_the_stream_breaks(self) -> None:
        for number in list(self.worker.live):
            self.worker.cancel(number)
        self.stream_breaks()

    @rule()
    def reset(self) -> None:
        assert self.ledger.reset() is (self.ledger.pool_counts().in_use == 0)

    @rule()
    def reset_the_cache(self) -> None:
        """An operator resets the prefix cache while sequences run. Sources that copies alone hold are dropped too."""
        self.resets += 1
        sequences, hash_of = self.ledger.state.sequences.live.values(), self.ledger.state.store.blocks.hash
        sources = {each.copy_source for each in sequences if each.copy_source is not None}
        held = {block for each in sequences for block in each.block_table}
        only_copied = [block for block in sources - held if hash_of[block] is not None]
        cached, in_use = list(self.ledger.state.store.pool.cached), self.ledger.pool_counts().in_use
        self.dropped = {block: self.worker.content[block] for block in cached}
        assert self.ledger.reset_cache(self.resets) == len(cached) + len(only_copied)
        assert (self.ledger.pool_counts().cached, self.ledger.pool_counts().in_use) == (0, in_use)
        self.schedule()

    @invariant()
    def nothing_that_was_dropped_comes_back(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for block, content in self.dropped.items():
            again = self.worker.content[block] is not content
            assert again or self.ledger.state.store.blocks.hash[block] is None

    @rule()
    def copy(self) -> None:
        """The model checker searches over copies, so a copy must behave like its original."""
        twin = copy_ledger(self.ledger)
        assert ledger_key(twin) == ledger_key(self.ledger)
        self.ledger = twin

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check_invariants()

    @invariant()
    def the_index_follows(self) -> None:
        assert self.replica.apply(self.ledger.drain_index_events())
        assert self.replica.depths == depths(self.ledger)

    @invariant()
    def both_sides_agree_when_nothing_is_under_way(self) -> None:
        if self.reports or self.batches or self.worker.reserved or self.worker.bound or self.worker.trimmed:
            return
        theirs = {number: live.block_table for number, live in self.worker.live.items() if live.block_table}
        draining = {live.phase for live in self.worker.live.values()} & {SequencePhase.DRAINING_FINISH}
        if not draining and not self.worker.ended:
            assert {
                number: each.block_table
                for number, each in self.ledger.state.sequences.live.items()
                if each.block_table
            } == theirs

    def teardown(self) -> None:
        """Whatever happened: when messages flow again, every request ends and every block is free or cached."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(3000):
            while self.reports or self.batches:
                while self.reports:
                    self.report_arrives()
                while self.batches:
                    self.batch_arrives()
            if not (self.worker.live or self.worker.ended or self.worker.pool or self.worker.confirms):
                break
            self.end_transfers(len(self.worker.transfers))
            self.step(64)
        pool = self.ledger.pool_counts()
        assert not self.worker.live, "a request never ended"
        assert not self.ledger.reset_pending, "the worker never confirmed a reset"
        assert (pool.in_use, pool.leased, pool.waiting, pool.free + pool.cached) == (0, 0, 0, pool.num_blocks)


LedgerLife.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLedgerLife = pytest.mark.searches(LedgerLife.TestCase)
