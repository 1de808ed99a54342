"""Asks the router's own HTTP application, without a connection: a line of a batch is a request like any other."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message

from router.tenants.tenancy import Caller

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answer:
    """What the application answered; a status of 500 where it failed before it could."""

    status: int = 500
    headers: dict[bytes, bytes] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    async def take(self, message: Message) -> None:
        """Take a part, as a server would send it."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        elif message.get("body"):
            self.parts.append(bytes(message["body"]))


async def asked(app: ASGIApp, caller: Caller, path: str, body: bytes, correlation: str) -> Answer:
    """Return the answer to a POST of JSON by a caller who was recognised before. A cancellation ends the request."""
    headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": correlation}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": {"caller": caller},
    }
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if not whole:
            await gone.wait()  # this client stays until it has its answer
        return whole.pop()

    answer = Answer()
    try:
        await app(scope, receive, answer.take)
    except Exception:  # the application has answered before it raises
        log.exception("a request of a batch failed")
    return answer
