"""Floods of HTTP/2 frames to the public gRPC port: what they leave in the router's memory, and who is served meanwhile.

Each flood is so many bytes, and not so many seconds: what a router may keep of them does not depend on its speed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from bench.attack.floods import (
    ACK,
    END_HEADERS,
    FLOODS,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Flood,
    frame,
    opening,
    request_head,
)
from bench.attack.nginx import nginx, program
from common.contracts.limits import CALLS_PER_CONNECTION
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.router_process import (
    RouterUnderAttack,
    raw_connection,
    router_under_attack,
    whole_answer,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONNECTIONS = 4
# Of each flood, on all connections.
MOST_BYTES = 48 << 20
# Before the bounds, eight of the floods left more. Headers of 4 x 128 calls, and 64 KiB of a message each, are 90 MiB.
MOST_GROWTH_MIB = 160.0
# Nothing of a flood comes through but calls, at the rate of the documents.
MOST_GROWTH_BEHIND_NGINX_MIB = 32.0
_GENERATE = b"/quire.inference.v1.InferenceService/Generate"
_REFUSED = (7).to_bytes(4, "big")
_HEADER_TABLE_SIZE, _MAX_CONCURRENT_STREAMS = 1, 3
# A peer that acknowledges no settings is held to none of them: gRPC reads its header lists, whatever they have.
UNBOUNDED = {"hpack_references_before_settings"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked() -> AsyncIterator[RouterUnderAttack]:
    async with router_under_attack(FakeWorker(automatic=True)) as router:
        yield router


async def status(router: RouterUnderAttack, address: str = "") -> pb.GetStatusResponse:
    """Ask for the status on a connection of its own, to the router or to this address."""
    async with open_channel(address or router.grpc) as channel:
        call = rpc.InferenceServiceStub(channel).GetStatus(
            pb.GetStatusRequest(), timeout=PATIENCE_S, wait_for_ready=True
        )
        answer: pb.GetStatusResponse = await call
        return answer


def port_of(router: RouterUnderAttack) -> int:
    return int(router.grpc.rpartition(":")[2])


async def flooded(port: int, flood: Flood, most: int, opened: asyncio.Semaphore, source: str = "127.0.0.1") -> None:
    """Send a flood until the server closes the connection or takes no more, or so many bytes are sent."""
    async with raw_connection(port, source) as (reader, writer):
        taking = asyncio.create_task(take(reader)) if flood.reads else None
        try:
            writer.write(opening(flood))
            opened.release()
            for chunk in flood.chunks():
                writer.write(chunk)
                async with asyncio.timeout(5.0):  # a router that takes no more has bounded the flood by itself
                    await writer.drain()
                most -= len(chunk)
                if most <= 0:
                    break
        except (TimeoutError, OSError):
            pass
        finally:
            if taking is not None:
                taking.cancel()


async def take(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


@pytest.mark.parametrize("name", sorted(FLOODS.keys() - UNBOUNDED))
async def test_a_flood_leaves_little_in_memory_and_others_are_served(name: str) -> None:
    async with router_under_attack(FakeWorker(automatic=True)) as attacked, asyncio.timeout(4 * PATIENCE_S):
        before, opened = attacked.rss_mib, asyncio.Semaphore(0)
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                most = MOST_BYTES // CONNECTIONS
                group.create_task(flooded(port_of(attacked), FLOODS[name], most, opened))
            for _ in range(CONNECTIONS):
                await opened.acquire()
            await status(attacked)
        await status(attacked)
        assert attacked.rss_mib - before < MOST_GROWTH_MIB
        assert not attacked.tracebacks


# The router bounds the others by itself.
BEHIND_NGINX = [
    name if name in UNBOUNDED else pytest.param(name, marks=pytest.mark.exhaustive) for name in sorted(FLOODS)
]


@pytest.mark.skipif(program() is None, reason="nginx is not installed")
@pytest.mark.parametrize("name", BEHIND_NGINX)
async def test_nginx_as_the_documents_have_it_keeps_floods_from_the_router(
    attacked: RouterUnderAttack, name: str
) -> None:
    """It keeps off what gRPC's core does not bound, too."""
    async with nginx((port_of(attacked), attacked.http_port)) as (port, _), asyncio.timeout(4 * PATIENCE_S):
        before, opened = attacked.rss_mib, asyncio.Semaphore(0)
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                most = MOST_BYTES // CONNECTIONS
                group.create_task(flooded(port, FLOODS[name], most, opened, source="127.0.0.2"))
            for _ in range(CONNECTIONS):
                await opened.acquire()
            await status(attacked, f"127.0.0.1:{port}")
        assert attacked.rss_mib - before < MOST_GROWTH_BEHIND_NGINX_MIB
        assert not attacked.tracebacks


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, int, bytes]]:
    """Yield the kind, the flags, the stream and the payload of each frame."""
    while True:
        head = await reader.readexactly(9)
        yield (
            head[3],
            head[4],
            int.from_bytes(head[5:], "big"),
            await reader.readexactly(int.from_bytes(head[:3], "big")),
        )


async def settings_in(received: AsyncIterator[tuple[int, int, int, bytes]]) -> dict[int, int]:
    """Return the settings that the router announces, by their numbers."""
    async for kind, flags, _, payload in received:
        if kind == SETTINGS and not flags & ACK:
            pairs = [payload[at : at + 6] for at in range(0, len(payload), 6)]
            return {int.from_bytes(each[:2], "big"): int.from_bytes(each[2:], "big") for each in pairs}
    raise AssertionError("no settings came")


@pytest.mark.parametrize("acknowledges", [False, True])
async def test_the_calls_of_one_connection_are_bounded_whether_or_not_it_takes_settings(
    attacked: RouterUnderAttack, acknowledges: bool
) -> None:
    """A stream beyond the bound is refused, which tells a client that it may send the call again."""
    more = 5
    call = request_head(_GENERATE)
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        reader, writer = await stack.enter_async_context(raw_connection(port_of(attacked)))
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        received = frames(reader)
        assert (await settings_in(received))[_MAX_CONCURRENT_STREAMS] == CALLS_PER_CONNECTION
        if acknowledges:
            writer.write(frame(SETTINGS, ACK, 0))
        ids = [2 * index + 1 for index in range(CALLS_PER_CONNECTION + more)]
        writer.write(b"".join(frame(HEADERS, END_HEADERS, stream, call) for stream in ids))
        refused = Counter[int]()
        async for kind, _, stream, payload in received:
            if kind == RST_STREAM:
                assert payload == _REFUSED or not acknowledges
                refused[stream] += 1
                if refused.total() == more:
                    break
    assert [*refused] == ids[-more:]
    await status(attacked)


async def test_an_operator_chooses_how_many_calls_a_connection_may_have() -> None:
    async with AsyncExitStack() as stack:
        flags = ("--grpc-calls-per-connection", "7")
        router = await stack.enter_async_context(router_under_attack(FakeWorker(automatic=True), *flags))
        reader, writer = await stack.enter_async_context(raw_connection(port_of(router)))
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        async with asyncio.timeout(PATIENCE_S):
            assert (await settings_in(frames(reader)))[_MAX_CONCURRENT_STREAMS] == 7


async def test_the_http_port_speaks_no_http2(attacked: RouterUnderAttack) -> None:
    async with asyncio.timeout(PATIENCE_S), raw_connection(attacked.http_port) as (reader, writer):
        writer.write(opening(FLOODS["rapid_reset"]) + next(FLOODS["rapid_reset"].chunks()))
        answer = await whole_answer(reader)
    assert not answer or answer.startswith(b"HTTP/1.1 400")
    await status(attacked)


async def test_a_connection_that_refers_to_kept_headers_is_closed_and_keeps_nothing(
    attacked: RouterUnderAttack,
) -> None:
    """The router announces that it keeps none. A reference of one byte would stand for the kilobytes of a header."""
    kept = b"\x40\x01x\x7f\x81\x01" + b"a" * 256  # a header of 256 characters, to be kept
    async with asyncio.timeout(PATIENCE_S), raw_connection(port_of(attacked)) as (reader, writer):
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        received = frames(reader)
        assert (await settings_in(received))[_HEADER_TABLE_SIZE] == 0
        writer.write(frame(SETTINGS, ACK, 0))
        writer.write(frame(HEADERS, END_HEADERS, 1, request_head(_GENERATE) + kept + b"\xbe"))
        with pytest.raises(asyncio.IncompleteReadError):
            async for _ in received:
                pass
    await status(attacked)
