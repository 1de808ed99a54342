"""Bytes that are not HTTP: a connection is answered or closed, without effect on others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.attack import wire
from tests.fuzz.harness import ANY, PATIENCE, Fuzzed, again_and_again

MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "http1": wire.http1_garbage,
    "http2": wire.http2_garbage,
    "noise": wire.garbage,
}
PORTS = ("grpc", "http", "admin", "admin_http", "manager", "worker")
LONGEST = 1 << 20


async def send(host: str, port: int, content: bytes) -> bytes:
    """Send bytes, close our side, and return what comes until the server closes its own. Fails if it does not."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(PATIENCE):
            writer.write(content)
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            return await reader.read(LONGEST)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("maker", MAKERS)
def test_garbage_is_answered_or_ends_its_connection(fuzzed: Fuzzed, maker: str, port: str) -> None:
    options = fuzzed.suite.stack.options
    public, admin = (options.grpc_port, options.port), (options.admin_port, options.admin_http_port)
    numbers = (*public, *admin, options.manager_port, options.worker_ports[0])
    number = dict(zip(PORTS, numbers, strict=True))[port]
    assert number is not None, "the suite chooses each port"

    @ANY
    @given(seed=st.integers(0, 2**64))
    def send_any(seed: int) -> None:
        content = MAKERS[maker](random.Random(seed))
        fuzzed.recent.append(f"{port} {content!r}")
        answer = fuzzed.run(send(options.host, number, content))
        if answer.startswith(b"HTTP/1."):
            assert int(answer.split()[1]) < 500, answer

    again_and_again(send_any, 0.1 / len(MAKERS) / len(PORTS))
    fuzzed.check()
