"""Signs of life in a stream of server-sent events."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from common.contracts import limits
from router.api.http.event_stream import COMMENT, EventStream
from tests.support.turns import until_idle
from tests.support.waiting import until

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}
GONE: Message = {"type": "http.disconnect"}


class Connection:
    """The two ends of one request; `written` is set by the first body, `commented` by the second comment."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.written, self.commented, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ended = False

    async def receive(self) -> Message:
        await self.gone.wait()
        return GONE

    async def send(self, message: Message) -> None:
        assert not self.ended, "nothing may follow the last message"
        self.bodies += [message["body"]] if "body" in message else []
        if self.bodies:
            self.written.set()
        self.ended = not message.get("more_body", True)
        if self.bodies.count(COMMENT) >= 2:
            self.commented.set()


async def source() -> AsyncGenerator[int, None]:
    yield 1


async def test_silence_is_broken_by_comments_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVENT_SILENCE_SECONDS", 0.001)
    connection = Connection()

    async def lines() -> AsyncGenerator[str, None]:
        yield "data: 1\n\n"
        await connection.commented.wait()
        yield "data: 2\n\n"

    await EventStream(lines(), source(), {})(SCOPE, connection.receive, connection.send)
    first, last = connection.bodies.index(b"data: 1\n\n"), connection.bodies.index(b"data: 2\n\n")
    assert connection.bodies[first + 1 : last].count(COMMENT) >= 2
    assert connection.ended


async def test_a_stream_that_says_something_has_no_comment() -> None:
    connection = Connection()

    async def lines() -> AsyncGenerator[str, None]:
        yield "data: 1\n\n"
        yield "data: 2\n\n"

    await EventStream(lines(), source(), {})(SCOPE, connection.receive, connection.send)
    assert connection.bodies == [b"data: 1\n\n", b"data: 2\n\n", b""]


async def test_a_client_that_goes_away_ends_comments_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVENT_SILENCE_SECONDS", 0.001)
    connection, closed = Connection(), asyncio.Event()

    async def asked() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            closed.set()

    async def lines() -> AsyncGenerator[str, None]:
        yield "data: 1\n\n"
        await asyncio.Event().wait()

    held = asked()
    await anext(held)
    answering = asyncio.create_task(EventStream(lines(), held, {})(SCOPE, connection.receive, connection.send))
    await connection.commented.wait()
    connection.gone.set()
    await answering
    assert closed.is_set()
    sent = len(connection.bodies)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody is left who could send"
    await until_idle()
    assert len(connection.bodies) == sent


class Left:
    """What a stream's lines hold."""


async def test_a_client_that_goes_away_leaves_nothing_to_the_collector() -> None:
    """A stream that was long enough there is in the oldest generation, and services do not walk that one for hours."""

    async def lines(held: Left) -> AsyncGenerator[str, None]:
        yield "data: 1\n\n"
        await asyncio.Event().wait()

    async def stream() -> weakref.ref[Left]:
        connection, held = Connection(), Left()
        answering = asyncio.create_task(
            EventStream(lines(held), source(), {})(SCOPE, connection.receive, connection.send)
        )
        await connection.written.wait()
        connection.gone.set()
        await answering
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        left = await stream()
        await until(lambda: left() is None)
    finally:
        gc.enable()


async def test_an_error_of_the_lines_ends_the_stream_and_is_raised() -> None:
    connection = Connection()

    async def lines() -> AsyncGenerator[str, None]:
        yield "data: 1\n\n"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await EventStream(lines(), source(), {})(SCOPE, connection.receive, connection.send)
    assert connection.bodies == [b"data: 1\n\n"]


async def test_a_stream_that_is_cancelled_ends_its_lines_first() -> None:
    connection, ended = Connection(), asyncio.Event()

    async def lines() -> AsyncGenerator[str, None]:
        try:
            yield "data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            ended.set()

    answering = asyncio.create_task(EventStream(lines(), source(), {})(SCOPE, connection.receive, connection.send))
    await connection.written.wait()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert ended.is_set()
