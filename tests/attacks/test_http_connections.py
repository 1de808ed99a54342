"""Raw connections to the HTTP port: headers without end, requests that stop half-way, too many, garbage.

Each test has an innocent client beside the attacker, which is served.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from cli.certificates.authority import make, wanted
from cli.certificates.folder import CertificateFolder, Leaf
from common.contracts import limits
from common.process.connections import Connections
from common.rpc.tls import PublicCertificate
from router.api.http.http_server import serve_http
from tests.support.router.fake_frontend import admitted, finished, tokens
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.http_harness import Api, served_api
from tests.support.router.router_process import (
    RouterUnderAttack,
    post,
    raw_connection,
    router_under_attack,
    whole_answer,
)
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 2**20
FLOOD = 96 * MIB
HALF = "POST /v1/completions HTTP/1.1\r\nHost: router\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked() -> AsyncIterator[RouterUnderAttack]:
    async with router_under_attack(FakeWorker(automatic=True)) as router:
        yield router


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    async with served_api() as running:
        yield running


@pytest.fixture
def api(served: Api) -> Api:
    served.reset()
    return served


async def innocent(port: int, local: str = "127.0.0.1") -> bytes:
    """Return the answer to a small request."""
    async with asyncio.timeout(PATIENCE_S), raw_connection(port, local) as (reader, writer):
        writer.write(post("/v1/completions", b'{"prompt": "Lyon is", "max_tokens": 2}', "Connection: close"))
        return await whole_answer(reader)


def port_of(api: Api) -> int:
    return int(api.url.rpartition(":")[2])


LETTERS = b"a" * 65536
FIELDS = b"".join(b"X-%d: %s\r\n" % (each, b"a" * 500) for each in range(128))
# How a request without end begins, and what it goes on with.
ENDLESS = {
    "one value": (b"GET /health HTTP/1.1\r\nX-Long: ", LETTERS),
    "many headers": (b"GET /health HTTP/1.1\r\n", FIELDS),
    "one target": (b"GET /", LETTERS),
    "trailers": (b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", FIELDS),
    "a chunk's extension": (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", LETTERS),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_headers_without_end_are_refused_and_cost_no_memory(attacked: RouterUnderAttack, kind: str) -> None:
    begins, goes_on = ENDLESS[kind]
    before, sent, answer = attacked.rss_mib, 0, b""
    async with asyncio.timeout(PATIENCE_S), raw_connection(attacked.http_port) as (reader, writer):
        reading = asyncio.create_task(whole_answer(reader))
        for part in itertools.chain([begins], itertools.repeat(goes_on)):
            if sent >= FLOOD or reading.done():
                break
            writer.write(part)
            sent += len(part)
            try:
                await writer.drain()
            except ConnectionError:
                break
        grown = attacked.rss_mib - before
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()
        answer = await reading
    assert grown < 48, f"{grown:.0f} MiB after {sent / MIB:.0f} MiB of headers"
    assert answer.startswith(b"HTTP/1.1 431 "), answer[:100]
    assert b"200 OK" in await innocent(attacked.http_port)


@pytest.mark.parametrize("kind", ["nothing", "blank lines", "half a head", "half a body", "an answered half"])
async def test_requests_that_stop_half_way_are_ended(api: Api, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    await api.http.get("/health")  # the innocent client's connection is older than the short limits
    if kind in ("nothing", "blank lines", "half a head"):  # the others have sent a head, however long that took
        monkeypatch.setattr(limits, "HTTP_HEAD_SECONDS", 0.2)
    monkeypatch.setattr(limits, "HTTP_BODY_SECONDS", 2.0)  # the innocent request needs a part of it
    part = {
        "nothing": b"",
        "blank lines": b"\r\n\r\n",
        "half a head": HALF.encode(),
        "half a body": f"{HALF}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode(),
        "an answered half": b"POST /nowhere HTTP/1.1\r\nContent-Length: 10000000000\r\n\r\n",
    }[kind]

    async def attack() -> bytes:
        async with raw_connection(port_of(api)) as (reader, writer):
            writer.write(part)
            return await whole_answer(reader)

    attackers = [asyncio.create_task(attack()) for _ in range(300)]
    assert (await api.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    answers = set(await asyncio.wait_for(asyncio.gather(*attackers), PATIENCE_S))
    wanted = b"HTTP/1.1 413 " if kind == "an answered half" else b"HTTP/1.1 408 "
    assert all(answer.startswith(wanted) for answer in answers), answers
    assert api.frontend.ended == 1


async def test_an_idle_connection_is_closed_between_requests(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_HEAD_SECONDS", 0.2)
    async with raw_connection(port_of(api)) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.write(b"\r\n")  # a byte that begins no request stops the clock of idle connections
        assert b"HTTP/1.1 408 " in await whole_answer(reader)


async def test_one_address_cannot_take_all_connections(api: Api) -> None:
    connections = Connections(most=6, most_a_peer=4)
    server = await serve_http(api.app, "127.0.0.1", 0, connections=connections)
    held = [raw_connection(server.port) for _ in range(4)]
    try:
        for each in held:
            await each.__aenter__()
        await until_counted(connections, 4)
        refused = await innocent(server.port)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nx-llm-d-request-dropped-reason: rejected-saturated\r\n" in refused
        assert b"200 OK" in await innocent(server.port, local="127.0.0.2")
    finally:
        for each in held:
            await each.__aexit__(None, None, None)
    await until_counted(connections, 0)
    assert b"200 OK" in await innocent(server.port)
    await server.stop()


@pytest.fixture
def certificate(tmp_path: Path) -> Leaf:
    """A certificate for the public ports."""
    folder = CertificateFolder(tmp_path)
    make(folder, wanted(folder, [], public=["localhost"]))
    return folder.public


async def until_counted(connections: Connections, wanted: int) -> None:
    await until(lambda: len(connections) == wanted, seconds=PATIENCE_S)


async def innocent_over_tls(port: int, certificate: Leaf, local: str) -> bytes:
    context = ssl.create_default_context(cafile=str(certificate.ca))
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost", local_addr=(local, 0)
        )
        writer.write(post("/v1/completions", b'{"prompt": "Lyon is", "max_tokens": 2}', "Connection: close"))
        answer = await whole_answer(reader)
        writer.close()
    return answer


async def test_handshakes_of_tls_that_never_end_count_as_connections(api: Api, certificate: Leaf) -> None:
    connections, tls = Connections(most=6, most_a_peer=4), PublicCertificate.of(certificate.cert, certificate.key)
    server = await serve_http(api.app, "127.0.0.1", 0, tls=tls, connections=connections)
    async with AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(raw_connection(server.port))
        await until_counted(connections, 4)
        async with raw_connection(server.port) as (reader, _):
            assert await whole_answer(reader) == b""
        assert b"200 OK" in await innocent_over_tls(server.port, certificate, "127.0.0.2")
    await until_counted(connections, 0)
    assert b"200 OK" in await innocent_over_tls(server.port, certificate, "127.0.0.1")
    await server.stop()


async def test_handshakes_of_tls_that_stop_half_way_are_ended(
    api: Api, certificate: Leaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections, tls = Connections(most=300, most_a_peer=300), PublicCertificate.of(certificate.cert, certificate.key)
    server = await serve_http(api.app, "127.0.0.1", 0, tls=tls, connections=connections)
    with monkeypatch.context() as short:
        short.setattr(limits, "HTTP_HEAD_SECONDS", 0.2)
        async with AsyncExitStack() as held:
            readers = []
            for part in (b"", GARBAGE["TLS"][:50], GARBAGE["noise"]) * 30:
                reader, writer = await held.enter_async_context(raw_connection(server.port))
                writer.write(part)
                readers.append(reader)
            answers = await asyncio.wait_for(asyncio.gather(*map(whole_answer, readers)), PATIENCE_S)
    assert not any(b"HTTP" in answer for answer in answers)
    await until_counted(connections, 0)
    assert b"200 OK" in await innocent_over_tls(server.port, certificate, "127.0.0.1")
    await server.stop()


async def test_requests_sent_ahead_are_bounded(api: Api) -> None:
    held = asyncio.Event()
    api.frontend.script = lambda request: [held, admitted(request), tokens("a"), finished(1)]
    async with raw_connection(port_of(api)) as (reader, writer):
        writer.write(post("/v1/completions", b'{"prompt": "a"}'))
        await asyncio.wait_for(api.frontend.reached.wait(), PATIENCE_S)
        writer.write(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n" * 10_000)
        answer = await whole_answer(reader)
    assert answer.startswith(b"HTTP/1.1 429 "), answer[:100]
    await asyncio.wait_for(api.frontend.closed.wait(), PATIENCE_S)
    api.reset()
    assert b"200 OK" in await innocent(port_of(api))


async def test_an_answer_that_nobody_reads_is_cut(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_STALL_SECONDS", 0.2)
    text = "a" * MIB
    api.frontend.script = lambda request: [admitted(request), *[tokens(text)] * 64, finished(64)]
    with socket.create_connection(("127.0.0.1", port_of(api))) as attacker:
        attacker.sendall(post("/v1/completions", b'{"prompt": "a", "stream": true}'))
        await asyncio.wait_for(api.frontend.closed.wait(), PATIENCE_S)
    assert api.frontend.ended == 1
    api.reset()
    assert b"200 OK" in await innocent(port_of(api))


NOISE = random.Random(7)
GARBAGE = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + NOISE.randbytes(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
    "noise": NOISE.randbytes(5000),
    "zeros": b"\0" * 5000,
    "no method": b"\r\nlet me in\r\n\r\n",
    "a later version": b"GET /health HTTP/9.9\r\n\r\n",
    "CONNECT": b"CONNECT :0 HTTP/1.1\r\n\r\n",
    "a target without a path": b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a bad header": b"GET /health HTTP/1.1\r\nHost router\r\n\r\n",
    "a header with a zero": b"GET /health HTTP/1.1\r\nHost: a\0b\r\n\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "an endless length": b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 60 + b"\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length and chunks": b"POST /ping HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    "a bad chunk": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "an endless chunk": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_what_is_no_http_is_refused_and_leaves_no_trace(
    api: Api, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO)
    async with raw_connection(port_of(api)) as (reader, writer):
        writer.write(GARBAGE[kind])
        answer = await whole_answer(reader)
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:100]
    assert [record for record in caplog.records if record.name.startswith(("uvicorn", "asyncio"))] == []
    assert b"200 OK" in await innocent(port_of(api))


async def test_garbage_after_a_request_ends_its_connection_alone(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    never = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), tokens("a"), never]
    async with raw_connection(port_of(api)) as (reader, writer):
        writer.write(post("/v1/completions", b'{"prompt": "a", "stream": true}'))
        await asyncio.wait_for(api.frontend.reached.wait(), PATIENCE_S)
        writer.write(b"\0\0\0\r\n\r\n")
        answer = await whole_answer(reader)
    assert b"HTTP/1.1 400 " not in answer  # the answer to the request had begun
    await asyncio.wait_for(api.frontend.closed.wait(), PATIENCE_S)
    assert not caplog.records
    api.reset()
    assert b"200 OK" in await innocent(port_of(api))


@pytest.mark.parametrize("at_once", [True, False], ids=["in one piece", "in two pieces"])
async def test_a_trailer_is_no_header(api: Api, at_once: bool) -> None:
    """A proxy that takes headers away, or sets them, may let trailers pass."""
    api.frontend.script = lambda request: [admitted(request), tokens("a"), finished(1)]
    body = b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\nTrailer: X-Request-Id\r\nConnection: close\r\n\r\n"
    pieces = [head, b"%x\r\n%s\r\n" % (len(body), body), b"0\r\nX-Request-Id: smuggled\r\n\r\n"]
    async with raw_connection(port_of(api)) as (reader, writer):
        for piece in [b"".join(pieces)] if at_once else [pieces[0] + pieces[1], pieces[2]]:
            writer.write(piece)
            await writer.drain()
        answer = await whole_answer(reader)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:100]
    assert b"smuggled" not in answer


async def test_headers_behind_a_request_with_trailers_are_those_of_the_next_one(api: Api) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Request-Id: smuggled\r\n\r\n"
    second = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\nConnection: close\r\n\r\n"
    async with raw_connection(port_of(api)) as (reader, writer):
        writer.write(first + second)
        answer = await whole_answer(reader)
    assert answer.count(b"HTTP/1.1 200 ") == 2, answer
    assert b"x-request-id: mine" in answer
    assert b"smuggled" not in answer


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_another_protocol_is_not_spoken(api: Api, caplog: pytest.LogCaptureFixture, protocol: str) -> None:
    async with raw_connection(port_of(api)) as (reader, writer):
        head = f"GET /health HTTP/1.1\r\nHost: router\r\nConnection: close, Upgrade\r\nUpgrade: {protocol}\r\n\r\n"
        writer.write(head.encode())
        assert (await whole_answer(reader)).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records
