"""Serves an ASGI application with uvicorn inside the event loop that is running, without touching signals."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from common.errors import FieldViolation, InvalidConfig

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn's server, with an event for when it listens, and without signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A running server. `port` is the one it listens on."""

    def __init__(self, server: _Server, task: asyncio.Task[None], port: int) -> None:
        self._server, self._task = server, task
        self.port = port

    async def stop(self) -> None:
        """Take no new connection, let running requests finish within the grace period, then cancel them."""
        self._server.should_exit = True
        await self._task


async def serve_http(app: FastAPI, host: str, port: int, grace_s: float = 5.0, reuse_port: bool = False) -> HttpServer:
    """Listen and serve; port 0 takes a free one. Raises InvalidConfig when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)
    except OSError as error:
        what = f"cannot listen on {host}:{port} ({error.strerror}); expected a free port of this machine (0 takes one)"
        raise InvalidConfig(FieldViolation("--http-port", what)) from None
    grace = max(1, round(grace_s))  # uvicorn takes whole seconds
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=grace,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
    listening.cancel()
    if task.done():
        task.result()
    return HttpServer(server, task, listener.getsockname()[1])
