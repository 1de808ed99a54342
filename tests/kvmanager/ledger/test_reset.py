"""A reset of the prefix cache: what goes, what stays, and that the worker's claims do not bring it back."""

from __future__ import annotations

from common.contracts.clock import ManualClock
from common.contracts.lease import Attach, Inventory, Report
from common.contracts.types import DecisionKind, KvGeometry, PoolIdentity
from kvmanager.contracts.index_events import Cleared, Removed
from kvmanager.contracts.ledger_config import ManagerConfig
from kvmanager.ledger.registry import WorkerRegistration, WorkerRegistry
from tests.support.kvmanager.fake_worker import FakeWorker
from tests.support.kvmanager.ledgers import (
    admit,
    counted_ids,
    finish,
    hashes,
    make_ledger,
    play,
    prompt,
    reserve,
    run_through,
    seal,
)  # fmt: skip

IDENTITY = PoolIdentity("model", "tokenizer", 4, KvGeometry(1, 1, 1, 1, "float32"))


def test_cached_blocks_go_and_those_in_use_stay() -> None:
    ledger = make_ledger(8)
    run_through(ledger, 1, prompt(48))
    admit(ledger, reserve(2, prompt(33, start=500), max_len=40))
    seal(ledger, 2, hashes(prompt(33, start=500)))
    ledger.drain_index_events()
    assert ledger.reset_cache(7) == 3
    ledger.check_invariants()
    assert (ledger.pool_counts().cached, ledger.pool_counts().in_use) == (0, 3)
    gone = hashes(prompt(48))
    assert ledger.drain_index_events() == tuple(Removed(6 + n, gone[2 - n], 2 - n) for n in range(3))
    # The running sequence's blocks are shared and cached as before.
    assert ledger.look_up_prompt(hashes(prompt(33, start=500)), 33).hit_blocks == 2
    finish(ledger, 2)
    assert ledger.pool_counts().cached == 2


def test_an_idle_pool_is_cleared_with_one_event() -> None:
    ledger = make_ledger(8)
    run_through(ledger, 1, prompt(48))
    ledger.drain_index_events()
    assert ledger.reset_cache(7) == 3
    assert [type(event) for event in ledger.drain_index_events()] == [Cleared]
    ledger.check_invariants()


def test_the_order_is_sent_once_and_stands_open_until_it_is_confirmed() -> None:
    ledger = make_ledger(8)
    run_through(ledger, 1, prompt(48))
    ledger.reset_cache(7)
    batch = ledger.schedule()
    assert batch is not None
    assert batch.reset == 7
    assert ledger.schedule() is None
    assert ledger.reset_pending
    play(ledger, reset=6)
    assert ledger.reset_pending
    play(ledger, reset=7)
    assert not ledger.reset_pending


def test_the_decision_is_recorded_with_its_numbers() -> None:
    ledger = make_ledger(8)
    run_through(ledger, 1, prompt(48))
    ledger.drain_decisions()
    ledger.reset_cache(7)
    (decision,) = ledger.drain_decisions()
    assert decision.kind is DecisionKind.RESET
    assert decision.chosen == "3 cached blocks"
    assert dict(decision.figures) == {"dropped": 3.0, "in_use": 0.0}
    assert ledger.pool_counts().totals.reset_blocks == 3
    assert ledger.pool_counts().totals.evictions == 0


def new_manager() -> WorkerRegistry:
    return WorkerRegistry(ManagerConfig(), ManualClock(), counted_ids(), epoch=1)


def attached(manager: WorkerRegistry, worker: FakeWorker, session: int) -> WorkerRegistration:
    """Attach a worker that names the last reset that it carried out."""
    attach = Attach("w", b"i" * 16, session, 0, IDENTITY, len(worker.content), reset=worker.reset)
    registration = manager.attach(attach)
    assert isinstance(registration, WorkerRegistration)
    manager.complete(registration, worker.inventory())
    return registration


def worker_with_cached_blocks(manager: WorkerRegistry) -> tuple[FakeWorker, WorkerRegistration]:
    """Return a worker of 8 blocks whose only request has ended and left two cached blocks."""
    worker = FakeWorker(8, 4)
    registration = attached(manager, worker, 1)
    worker.submit([0, 1, 1, 0, 1, 0, 0, 1, 1], 9)
    while worker.live or worker.ended or worker.pool:
        worker.step()
        registration.ledger.apply_report(worker.report())
        worker.deliver(registration.ledger.schedule())
    assert registration.ledger.pool_counts().cached == 2
    return worker, registration


def test_an_order_that_is_lost_with_its_stream_is_repeated_at_the_next_attach() -> None:
    manager = new_manager()
    worker, registration = worker_with_cached_blocks(manager)
    assert manager.reset_cache(5) == {"w": 2}
    manager.detach(registration)  # the batch never arrives
    again = attached(manager, worker, 2)
    assert again.ledger.pool_counts().cached == 0
    assert again.ledger.reset_pending
    worker.deliver(again.ledger.schedule())
    again.ledger.apply_report(worker.report())
    assert not again.ledger.reset_pending
    manager.detach(again)
    assert len(worker.inventory().cached_blocks) == 0


def test_a_worker_that_is_away_is_reset_when_it_attaches_and_one_that_confirmed_is_not() -> None:
    manager = new_manager()
    worker, registration = worker_with_cached_blocks(manager)
    manager.detach(registration)
    assert manager.reset_cache(5) == {}
    registration = attached(manager, worker, 2)
    assert registration.ledger.pool_counts().cached == 0
    worker.deliver(registration.ledger.schedule())
    registration.ledger.apply_report(worker.report())
    worker.submit([0, 0, 0, 0, 1], 5)
    while worker.live or worker.ended:
        worker.step()
        registration.ledger.apply_report(worker.report())
        worker.deliver(registration.ledger.schedule())
    manager.detach(registration)
    assert attached(manager, worker, 3).ledger.pool_counts().cached == 1


def test_a_worker_without_cached_blocks_has_nothing_to_lose() -> None:
    manager = new_manager()
    registration = manager.attach(Attach("w", b"i" * 16, 1, 0, IDENTITY, 8))
    assert isinstance(registration, WorkerRegistration)
    manager.reset_cache(5)
    manager.complete(registration, Inventory())
    registration.ledger.apply_report(Report(reset=5))
    assert not registration.ledger.reset_pending
