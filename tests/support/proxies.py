"""A proxy that counts who comes, and the variables that send everything there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.support.listener import Listener
from tests.support.relay import closed, joined

PROXY_NAMES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
NO_PROXY_NAMES = ("no_proxy", "no_grpc_proxy", "NO_PROXY")


@dataclass
class Proxy:
    """The first line that each connection sent. Tunnels lead to `behind`, whatever host they name."""

    port: int = 0
    behind: int | None = None
    asked: list[str] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        """The variables that name this proxy, with none that spares an address from it."""
        return dict.fromkeys(PROXY_NAMES, f"http://127.0.0.1:{self.port}") | dict.fromkeys(NO_PROXY_NAMES, "")


@asynccontextmanager
async def running_proxy(behind: int | None = None) -> AsyncIterator[Proxy]:
    """Run a proxy on loopback. Without a port `behind` it, every request is answered by 502."""
    proxy = Proxy(behind=behind)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            proxy.asked.append(head.split(b"\r\n", 1)[0].decode())
            if proxy.behind is None or not head.startswith(b"CONNECT "):
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await joined(reader, writer, proxy.behind)
        await closed(writer)

    async with Listener(serve) as listener:
        proxy.port = listener.port
        yield proxy
