"""Messages that wait for a worker: their order, their bytes, and what is withdrawn."""

from __future__ import annotations

import asyncio

import pytest

from common.contracts.errors import InvalidRequest, Overloaded
from common.contracts.limits import MAX_OUTBOX_BYTES, MAX_SUBMIT_BYTES
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from router.workers.outbox import Outbox
from tests.support.turns import until_blocked


def submit(handle: int, size: int = 0) -> pb.StreamRequest:
    return pb.StreamRequest(submit=pb.Submit(handle=handle, prompt_token_ids=bytes(size)))


def cancel(handle: int) -> pb.StreamRequest:
    return pb.StreamRequest(cancel=pb.Cancel(handle=handle))


async def take(outbox: Outbox) -> pb.StreamRequest:
    """Return the next message of an outbox that is open."""
    message = await outbox.take()
    assert message is not None
    return message


async def taken(outbox: Outbox) -> list[int]:
    return [(await take(outbox)).submit.handle for _ in range(len(outbox))]


async def test_messages_leave_in_order_and_their_bytes_with_them() -> None:
    outbox = Outbox()
    for handle in (3, 1, 2):
        outbox.submit(submit(handle, 100))
    assert outbox.bytes > 300
    assert await taken(outbox) == [3, 1, 2]
    assert outbox.bytes == 0


async def test_who_waits_gets_the_next_message() -> None:
    outbox = Outbox()
    waiting = asyncio.create_task(take(outbox))
    await until_blocked(waiting)
    outbox.submit(submit(5))
    assert (await waiting).submit.handle == 5


async def test_submissions_that_are_cancelled_leave_no_trace() -> None:
    """A client that submits and cancels again and again fills nothing, although the worker does not read."""
    outbox = Outbox()
    for handle in range(1000):
        outbox.submit(submit(handle, 1000))
        assert not outbox.cancel(cancel(handle))
    assert (len(outbox), outbox.bytes) == (0, 0)


async def test_the_cancel_of_a_submission_that_was_sent_is_a_message() -> None:
    outbox = Outbox()
    outbox.submit(submit(1))
    await outbox.take()
    assert outbox.cancel(cancel(1))
    assert (await take(outbox)).cancel.handle == 1


async def test_a_submission_above_the_limit_is_refused_and_the_next_one_goes() -> None:
    outbox = Outbox()
    with pytest.raises(InvalidRequest, match=f"expected at most {MAX_SUBMIT_BYTES}; shorten the request"):
        outbox.submit(submit(1, MAX_SUBMIT_BYTES))
    outbox.submit(submit(2))
    assert await taken(outbox) == [2]


async def test_a_worker_that_does_not_read_makes_the_outbox_full_and_not_large() -> None:
    outbox, size = Outbox(), MAX_SUBMIT_BYTES - 100
    for handle in range(MAX_OUTBOX_BYTES // MAX_SUBMIT_BYTES):
        outbox.submit(submit(handle, size))
    with pytest.raises(Overloaded, match=r"router\.outbox: .* wait for the worker, which does not read"):
        outbox.submit(submit(99, size))
    assert outbox.bytes <= MAX_OUTBOX_BYTES


async def test_pulses_come_first_and_whenever_nothing_else_does() -> None:
    outbox = Outbox(silence=0.06)
    outbox.submit(submit(1))
    kinds = [(await take(outbox)).WhichOneof("message") for _ in range(4)]
    assert kinds == ["pulse", "submit", "pulse", "pulse"]
    assert outbox.bytes == 0


async def test_a_worker_that_bounds_no_silence_gets_no_pulse() -> None:
    outbox = Outbox(silence=0.0)
    outbox.submit(submit(1))
    assert (await take(outbox)).HasField("submit")
    assert not len(outbox)


async def test_the_end_comes_at_once_although_pulses_do() -> None:
    outbox = Outbox(silence=3600.0)
    assert (await take(outbox)).HasField("pulse")
    waiting = asyncio.create_task(outbox.take())
    await until_blocked(waiting)
    outbox.close()
    assert await waiting is None
