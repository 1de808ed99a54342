"""Server-sent events with a sign of life: a comment after some seconds in which nothing was sent.

Proxies and clients cut connections that say nothing for a minute or less; a long prompt takes longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from common.contracts import limits

COMMENT: Final = b": still here\n\n"


class EventStream(StreamingResponse):
    """Lines as server-sent events, each text made of whole events. The end of the response closes `source`.

    `source` is what the lines come from: a request that ends when it is closed. `sign` is sent in silence.
    """

    def __init__(
        self,
        lines: AsyncGenerator[str, None],
        source: AsyncGenerator[Any, None],
        headers: Mapping[str, str],
        sign: bytes = COMMENT,
    ) -> None:
        super().__init__(lines, headers={"cache-control": "no-store", **headers}, media_type="text/event-stream")
        self._source, self._sign = source, sign

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pulse = _Pulse(send, self._sign, limits.EVENT_SILENCE_SECONDS)
        async with aclosing(self._source):
            try:
                await self._until_gone(receive, pulse.send)
            finally:
                await pulse.stop()

    async def _until_gone(self, receive: Receive, send: Send) -> None:
        """Stream until the end, or until the client is gone.

        The framework's own way runs a group of tasks. When the client leaves, the group, its tasks and their errors
        are a cycle that keeps the request until the collector comes.
        """
        streaming = asyncio.create_task(self.stream_response(send))
        leaving = asyncio.create_task(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            streaming.cancel()
            leaving.cancel()
            await asyncio.gather(streaming, leaving, return_exceptions=True)
        for each in (streaming, leaving):
            if not each.cancelled():
                each.result()


class _Pulse:
    """Passes messages on, and sends a sign whenever so many seconds passed since the last one."""

    def __init__(self, send: Send, sign: bytes, silence_s: float) -> None:
        self._send, self._sign, self._silence_s = send, sign, silence_s
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._task: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        if not message.get("more_body", True):
            await self.stop()  # nothing may follow the last message
        await self._send(message)
        self._last = self._loop.time()
        if message["type"] == "http.response.start":
            self._task = self._loop.create_task(self._beat())

    async def stop(self) -> None:
        """Send no more signs. Idempotent."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # the connection broke, and the next send raises

    async def _beat(self) -> None:
        while True:
            left = self._last + self._silence_s - self._loop.time()
            if left <= 0:
                await self._send({"type": "http.response.body", "body": self._sign, "more_body": True})
                self._last = self._loop.time()
            else:
                await asyncio.sleep(left)
