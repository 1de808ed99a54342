"""`rediss://` for router and manager: the server's certificate is verified against the CA of the option.

The bundled server has no TLS. It stands behind a TLS listener here; test_redis_users.py has Debian's, which has TLS.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from cli.certificates.folder import Leaf
from common.process.local_redis import LocalRedis
from common.process.redis_client import open_redis
from tests.support.certificates import new_folder
from tests.support.debian_redis import redis_leaf

PATIENCE = 60.0


@pytest.fixture
def leaf(tmp_path: Path) -> Leaf:
    """The certificate of a Redis on this host."""
    return redis_leaf(tmp_path)


@asynccontextmanager
async def behind_tls(port: int, leaf: Leaf) -> AsyncIterator[int]:
    """Listen with TLS and pass everything on to a port; gives the port that it listens on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(leaf.cert, leaf.key)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, out = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, out), carry(inner, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_a_redis_with_the_right_certificate_is_used(redis_server: LocalRedis, leaf: Leaf) -> None:
    async with (
        behind_tls(redis_server.port, leaf) as port,
        open_redis(f"rediss://127.0.0.1:{port}/0", PATIENCE, leaf.ca) as client,
    ):
        assert await client.ping()


async def test_a_redis_of_another_ca_gets_no_word(redis_server: LocalRedis, leaf: Leaf, tmp_path: Path) -> None:
    other = new_folder(tmp_path / "other").ca_cert
    async with (
        behind_tls(redis_server.port, leaf) as port,
        open_redis(f"rediss://127.0.0.1:{port}/0", PATIENCE, other) as client,
    ):
        with pytest.raises(RedisConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.ping()
