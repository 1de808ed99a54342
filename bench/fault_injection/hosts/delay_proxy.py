"""Passes on, later, each TCP connection that the kernel redirects to it: `delay_proxy.py PORT SECONDS`.

It finds where a connection was meant to go by SO_ORIGINAL_DST (Linux, netfilter).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from contextlib import suppress
from typing import Final

_SO_ORIGINAL_DST: Final = 80
_CHUNK: Final = 1 << 16


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Write what comes, each piece so many seconds after it came, in order."""
    loop, waiting = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

    async def read() -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_CHUNK):
                waiting.put_nowait((loop.time() + seconds, data))
        waiting.put_nowait((loop.time() + seconds, b""))

    reading = asyncio.create_task(read())
    with suppress(ConnectionError):
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
    writer.close()
    await reading


async def serve(port: int, seconds: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = writer.get_extra_info("socket").getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
        target_port, host = struct.unpack("!2xH4s8x", raw)
        try:
            there, back = await asyncio.open_connection(socket.inet_ntoa(host), target_port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_pass_on(reader, back, seconds), _pass_on(there, writer, seconds))

    server = await asyncio.start_server(connected, "0.0.0.0", port)
    print("READY", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
