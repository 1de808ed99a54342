"""Raw connections to the port of metrics and probes: too many, half requests, garbage, answers left unread."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client import Gauge

from common.contracts import limits
from common.process.metrics import MetricsServer, new_registry
from common.process.small_http import Reply, Request
from tests.support.kvmanager.manager_child import manager_process
from tests.support.router.fake_worker import PATIENCE_S
from tests.support.router.router_process import raw_connection, whole_answer
from tests.support.waiting import until

GET = b"GET /live HTTP/1.1\r\nHost: a\r\n"
LARGE = 8 << 20


@pytest.fixture
async def server() -> AsyncIterator[MetricsServer]:
    registry = new_registry()
    Gauge("quire:large", "Larger than what sockets hold.", ["name"], registry=registry).labels("x" * LARGE).set(1)
    running = MetricsServer(registry, lambda: True)
    await running.start("127.0.0.1", 0)
    yield running
    await running.stop()


async def answer_to(port: int, sent: bytes, local: str = "127.0.0.1", ends: bool = True) -> bytes:
    async with raw_connection(port, local) as (reader, writer):
        writer.write(sent)
        if ends:
            with suppress(OSError):  # a server that refuses may have closed the connection by now
                writer.write_eof()
        return await whole_answer(reader)


TOO_LARGE = {
    "a value": GET + b"X-Long: " + b"a" * (1 << 20),
    "headers": GET + b"".join(b"X-%d: a\r\n" % each for each in range(limits.MAX_HTTP_HEADERS)) + b"\r\n",
    "a target": b"GET /" + b"a" * (1 << 20),
}


@pytest.mark.parametrize("kind", TOO_LARGE)
async def test_heads_without_end_are_refused(server: MetricsServer, kind: str) -> None:
    assert (await answer_to(server.port, TOO_LARGE[kind])).startswith(b"HTTP/1.1 431 ")
    assert b" 200 OK" in await answer_to(server.port, GET + b"\r\n")


@pytest.mark.parametrize("part", [b"", GET, GET + b"\r"], ids=["nothing", "half a head", "all but a byte"])
async def test_requests_that_stop_half_way_are_ended(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(limits, "HTTP_HEAD_SECONDS", 0.2)
    attack = [answer_to(server.port, part, ends=False) for _ in range(limits.MAX_METRICS_CONNECTIONS_A_PEER)]
    answers = set(await asyncio.wait_for(asyncio.gather(*attack), PATIENCE_S))
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers), answers
    await until(lambda: not len(server.connections))


async def test_an_answer_that_nobody_reads_is_cut(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_STALL_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as attacker:
        attacker.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        await until(lambda: len(server.connections) == 1)
        await until(lambda: not len(server.connections))
    assert b" 200 OK" in await answer_to(server.port, GET + b"\r\n")


async def test_connections_that_are_open_do_not_hold_a_service_that_stops(server: MetricsServer) -> None:
    async with raw_connection(server.port) as (reader, writer):
        writer.write(GET)
        await until(lambda: len(server.connections) == 1)
        await asyncio.wait_for(server.stop(), PATIENCE_S)
        assert await whole_answer(reader) == b""
    await until(lambda: not len(server.connections))


async def test_a_large_answer_arrives_whole(server: MetricsServer) -> None:
    assert len(await answer_to(server.port, b"GET /metrics HTTP/1.1\r\n\r\n")) > LARGE


GARBAGE = {
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
    "no method": b"\r\nlet me in\r\n\r\n",
    "a later version": b"GET /live HTTP/9.9\r\n\r\n",
    "a bad header": GET + b"Host router\r\n\r\n",
    "a header with a zero": GET + b"X: a\0b\r\n\r\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_what_is_no_http_is_refused(server: MetricsServer, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    assert (await answer_to(server.port, GARBAGE[kind])).startswith(b"HTTP/1.1 400 ")
    assert not caplog.records


async def test_one_address_cannot_keep_probes_from_a_service(tmp_path: Path) -> None:
    """Of a real manager; all services have the same port of metrics."""
    async with manager_process(tmp_path) as manager, AsyncExitStack() as held:
        port = int(manager.ready.partition("metrics on ")[2].partition(",")[0])
        for _ in range(limits.MAX_METRICS_CONNECTIONS_A_PEER):
            _, writer = await held.enter_async_context(raw_connection(port, "127.0.0.2"))
            writer.write(GET)
        refusal = await answer_to(port, GET, "127.0.0.2")
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"32 connections, which is the limit of one address" in refusal
        assert b" 200 OK" in await answer_to(port, GET + b"\r\n", "127.0.0.1")


class HeldSite:
    """A site whose answers never come."""

    def __init__(self) -> None:
        self.asked = self.ended = 0

    async def answer(self, request: Request) -> Reply:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1
        raise AssertionError


async def test_readers_of_a_site_leave_places_to_probes(server: MetricsServer) -> None:
    site = HeldSite()
    server.add_site("/page", site.answer)
    ask = b"GET /page/data HTTP/1.1\r\nHost: a\r\n\r\n"
    async with AsyncExitStack() as held:
        for _ in range(limits.MAX_SITE_CONNECTIONS_A_PEER):
            _, writer = await held.enter_async_context(raw_connection(server.port))
            writer.write(ask)
        await until(lambda: site.asked == limits.MAX_SITE_CONNECTIONS_A_PEER)
        refusal = await answer_to(server.port, ask, ends=False)
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"24 connections" in refusal
        assert b" 200 OK" in await answer_to(server.port, GET + b"\r\n")
    # Who leaves takes no place, though the answer has not come.
    await until(lambda: not len(server.connections))
    assert site.ended == site.asked == limits.MAX_SITE_CONNECTIONS_A_PEER
    async with raw_connection(server.port) as (_, writer):
        writer.write(ask)
        await until(lambda: site.asked == limits.MAX_SITE_CONNECTIONS_A_PEER + 1)
