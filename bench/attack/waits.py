"""How long others wait for small answers beside an attack: GetStatus over gRPC and /health over HTTP, over and over.

Each question over HTTP opens a connection of its own; those over gRPC share one, as a client's do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from grpc import aio

from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc

# Between two questions, and until one counts as not answered.
_EVERY_S, _PATIENCE_S = 0.1, 60.0
_HEALTH: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass
class Waits:
    """Seconds that each question waited for its answer, and how many got none."""

    status: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    failed: int = 0


async def ask(host: str, grpc_port: int, http_port: int, key: str, over: asyncio.Event) -> Waits:
    """Ask both questions until `over` is set."""
    waits = Waits()
    metadata = [("authorization", f"Bearer {key}")] if key else []
    async with open_channel(f"{host}:{grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def status() -> None:
            await stub.GetStatus(pb.GetStatusRequest(), metadata=metadata)

        async def health() -> None:
            reader, writer = await asyncio.open_connection(host, http_port)
            try:
                writer.write(_HEALTH)
                if (await reader.readline()).split()[1] != b"200":
                    raise ConnectionError("the router is not healthy")
            finally:
                writer.close()

        await asyncio.gather(
            _over_and_over(status, waits.status, waits, over), _over_and_over(health, waits.health, waits, over)
        )
    return waits


async def _over_and_over(
    question: Callable[[], Awaitable[None]], found: list[float], waits: Waits, over: asyncio.Event
) -> None:
    while not over.is_set():
        began = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await question()
        except (aio.AioRpcError, OSError, TimeoutError, IndexError):
            waits.failed += 1
        found.append(time.monotonic() - began)
        await asyncio.sleep(_EVERY_S)
