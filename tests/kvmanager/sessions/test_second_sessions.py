"""Two sessions of one worker, and sessions that fall silent, over real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc import aio

from common.contracts.lease import Report, public_incarnation
from common.contracts.types import SequenceId
from quire.kvmanager.v1 import kvmanager_pb2
from tests.kvmanager.conftest import Connect, Running, Start
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.kvmanager.sessions import attach_message, ended_with, reserve, until_left
from tests.support.lost_status import ENDED

S0 = SequenceId(0)


async def test_second_worker_of_a_live_id_is_refused_for_now(manager: Running, connect: Connect) -> None:
    await connect(manager).attached()
    answer = await connect(manager, incarnation=b"another".ljust(16)).refused()
    assert answer.attach_rejected.retry
    assert "w0 is live" in answer.attach_rejected.reason


async def test_worker_whose_stream_broke_attaches_again(manager: Running, connect: Connect) -> None:
    first = connect(manager)
    await first.attached()
    first.call.cancel()
    await until_left(manager)
    assert (await connect(manager, incarnation=b"another".ljust(16)).attach()).WhichOneof("message") == "attach_ok"


async def test_later_session_of_the_same_worker_replaces_one_whose_end_was_not_seen(
    manager: Running, connect: Connect
) -> None:
    first = connect(manager)
    await first.attached()
    await first.exchange(Report(reserve=(reserve(S0),)))
    second = connect(manager, session=2)
    await second.attached()
    assert await ended_with(first) is grpc.StatusCode.UNAVAILABLE
    assert manager.attachments.manager.ledger("w0").pool_counts().in_use == 0


async def test_earlier_session_of_the_same_worker_does_not_replace_a_later_one(
    manager: Running, connect: Connect
) -> None:
    await connect(manager, session=2).attached()
    assert (await connect(manager, session=1).refused()).attach_rejected.retry


async def test_an_attach_without_the_secret_of_a_live_session_changes_nothing(
    manager: Running, connect: Connect
) -> None:
    """Not even the epoch: the refusal comes before anything else."""
    first = connect(manager)
    await first.attached()
    before = manager.process.index.epoch
    secret = first.worker.incarnation
    for guess in (public_incarnation(secret), secret[::-1], bytes(16)):
        thief = connect(manager, incarnation=guess, session=2**31, epoch_seen=before + 1000)
        assert (await thief.refused()).attach_rejected.retry
    assert manager.process.index.epoch == before
    assert (await first.exchange(Report(reserve=(reserve(S0),)))).admit


@pytest.mark.parametrize("begins", [False, True], ids=["no attach", "no inventory"])
async def test_a_session_that_begins_and_falls_silent_ends(
    start_manager: Start, connect: Connect, begins: bool
) -> None:
    async def attempt(seconds: float) -> None:
        worker = connect(await start_manager(attach_timeout=seconds))
        if begins:
            try:
                await worker.send(kvmanager_pb2.SessionRequest(attach=attach_message(worker)))
            except (aio.AioRpcError, asyncio.InvalidStateError):
                raise TooSlow from None
        code, details = await ended_with(worker), str(await worker.call.details())
        if begins and details == ENDED:  # the manager had ended the stream before the write
            raise TooSlow
        assert code is grpc.StatusCode.INTERNAL
        assert f"no message for {seconds:g} s" in details

    await with_enough_time(attempt, 0.05)


async def test_a_session_that_is_open_may_be_silent(start_manager: Start, connect: Connect) -> None:
    async def attempt(seconds: float) -> None:
        running = await start_manager(attach_timeout=seconds)
        worker = connect(running)
        try:
            await worker.attached()
        except (aio.AioRpcError, EOFError, asyncio.InvalidStateError):
            raise TooSlow from None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5 * seconds):
                await worker.receive()
        assert running.attachments.manager.workers() == ("w0",)

    await with_enough_time(attempt, 0.1)


async def test_report_of_a_replaced_session_is_dropped(manager: Running, connect: Connect) -> None:
    first = connect(manager)
    await first.attached()
    # Written before the replacement is, and read by the manager at any time: whenever that is, it must not count.
    second = connect(manager, session=2)
    await second.send(kvmanager_pb2.SessionRequest(attach=attach_message(second)))
    await asyncio.gather(
        first.report(Report(reserve=(reserve(S0),))),
        second.send(kvmanager_pb2.SessionRequest(inventory=kvmanager_pb2.Inventory(last=True))),
        return_exceptions=True,
    )
    assert (await second.receive()).WhichOneof("message") == "attach_ok"
    # A report that finds the stream ended gets a status of the client's own, which hides that of the manager.
    code = await ended_with(first)
    assert code is grpc.StatusCode.UNAVAILABLE or await first.call.details() == ENDED
    assert manager.attachments.manager.ledger("w0").pool_counts().running == 0
