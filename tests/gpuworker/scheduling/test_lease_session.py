"""Sessions and epochs: what counts as said, and which manager is obeyed."""

from __future__ import annotations

import pytest

from common.contracts.lease import Attach, AttachOk, GrantBatch, highest_plausible_epoch
from common.contracts.types import BlockId, KvGeometry, PoolIdentity
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.lease_session import LeaseSession
from gpuworker.scheduling.outcomes import AgentConfig
from tests.support.gpuworker.agent_harness import Driver

IDENTITY = PoolIdentity("m", "t", 4, KvGeometry(1, 1, 8, 8, "float32"))


@pytest.fixture
def session() -> LeaseSession:
    agent = LeaseAgent(AgentConfig(8, 4))
    return LeaseSession(agent, Attach("w", bytes(16), 0, 0, IDENTITY, 8))


def test_sessions_are_numbered_from_one(session: LeaseSession) -> None:
    assert [session.connect()[0].session for _ in range(3)] == [1, 2, 3]


def test_a_batch_counts_only_in_its_own_open_session(session: LeaseSession) -> None:
    session.connect()
    lease = GrantBatch(2, lease=(BlockId(1), BlockId(2)))
    assert session.receive(1, lease) is None, "not open yet"
    assert session.accept(1, AttachOk(5, 0))
    session.connect()
    assert session.receive(1, lease) is None, "buffered before the break"
    assert session.accept(2, AttachOk(5, 0))
    assert session.receive(1, lease) is None
    applied = session.receive(2, lease)
    assert applied is not None
    assert applied.leased == 2


def test_a_lower_epoch_is_refused_and_the_highest_is_reported(session: LeaseSession) -> None:
    session.connect()
    assert session.accept(1, AttachOk(5, 0))
    assert session.connect()[0].epoch_seen == 5
    assert not session.accept(2, AttachOk(4, 0))
    assert session.receive(2, GrantBatch(1, lease=(BlockId(1),))) is None
    assert session.connect()[0].epoch_seen == 5
    assert session.accept(3, AttachOk(6, 0))


def test_an_answer_to_an_old_session_is_void(session: LeaseSession) -> None:
    session.connect()
    session.connect()
    assert not session.accept(1, AttachOk(5, 0))
    assert not session.open


def test_reports_carry_their_session_and_stop_when_it_is_lost(session: LeaseSession) -> None:
    session.connect()
    assert session.take_report() is None
    session.accept(1, AttachOk(5, 0))
    taken = session.take_report()
    assert taken is not None
    assert taken[0] == 1
    session.note_loss(0)
    assert session.open, "an older session's loss changes nothing"
    session.note_loss(1)
    assert session.take_report() is None


def test_a_reattached_worker_goes_on_with_its_rows() -> None:
    worker = Driver()
    session = LeaseSession(worker.agent, Attach("w", bytes(16), 0, 0, IDENTITY, 8))
    worker.submit(0, range(6))
    worker.admit(0, [0, 1])
    plan = worker.plan()
    _, inventory = session.connect()
    assert inventory.sequences[0].block_table == (0, 1)
    session.accept(1, AttachOk(1, 0))
    worker.complete(plan)
    assert worker.rows() == [(0, 6, 1, (0, 1), True)]


def test_an_epoch_that_no_manager_can_have_is_refused(session: LeaseSession) -> None:
    """If it were accepted, every later manager would be refused for ever."""
    session.connect()
    assert not session.accept(1, AttachOk(highest_plausible_epoch(0) + 1, 0))
    assert session.connect()[0].epoch_seen == 0
    assert session.accept(2, AttachOk(5, 0))
