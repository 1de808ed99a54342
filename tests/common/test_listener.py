"""The TCP server of tests leaves no connection open, whenever the last one comes."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys

import pytest

from tests.support.listener import Listener
from tests.support.turns import take_turn


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)


async def test_a_connection_is_served_and_counted() -> None:
    async with Listener(echo) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"words")
        assert await reader.readexactly(5) == b"words"
    assert await reader.read() == b""
    assert listener.connections == 1
    writer.close()


def test_the_end_may_come_at_each_moment_of_an_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", left.append)

    async def end_after(turns: int) -> None:
        async with Listener(echo) as listener:
            with socket.create_connection(("127.0.0.1", listener.port)):
                for _ in range(turns):
                    await take_turn()
                await listener.close()

    for turns in range(6):
        asyncio.run(end_after(turns))
    gc.collect()
    assert left == []
