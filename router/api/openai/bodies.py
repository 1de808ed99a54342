"""Reads the bodies of requests, within bounds, before anything parses them.

The application gets a body that is whole, in UTF-8, and of a shape that takes at most 20 ms to parse, or 60 with
images (docs/decisions/0048). All other bodies are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.contracts import limits
from common.contracts.clock import Clock, SystemClock
from common.contracts.errors import MALFORMED, FieldViolation, InvalidRequest, Overloaded, QuireError, QuotaViolation
from common.untrusted import json_shape
from router.api.http.content_coding import SERVED, decoded
from router.api.openai import errors

_RETRY_S: Final = 1.0
# Clients send the images of a conversation with each of its turns.
_CHATS: Final = frozenset(
    {"/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"}
)
# Paths whose handlers read the body as it comes, within bounds of their own.
_STREAMED: Final = frozenset({"/v1/files"})


class BodyBudget:
    """Counts the bytes of bodies whose requests are not answered yet. Small bodies do not count."""

    def __init__(self, most: int = limits.MAX_HTTP_BODIES_BYTES) -> None:
        self._most = most
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.held -= share.held

    def take(self, more: int) -> None:
        """Count more bytes. Raises Overloaded."""
        if self.held + more > self._most:
            what = f"bodies of {self.held} bytes are being served, and at most {self._most} fit"
            raise Overloaded(QuotaViolation("router.http.bodies", what), _RETRY_S)
        self.held += more


class BodyShare:
    """What one body has of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self.held = budget, 0

    def grow(self, size: int) -> None:
        """Count a body of so many bytes so far. Raises Overloaded."""
        if size > limits.SMALL_HTTP_BODY_BYTES:
            self._budget.take(size - self.held)
            self.held = size


class BodyGate:
    """An ASGI middleware. A client that goes away before its body has come gets no further than this.

    The request's state says by `clock` when the body was there (`received`): what comes then is the router's work.
    """

    def __init__(self, app: ASGIApp, budget: BodyBudget | None = None, clock: Clock | None = None) -> None:
        self._app, self._budget, self._clock = app, budget or BodyBudget(), clock or SystemClock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in _STREAMED:
            await self._app(scope, receive, send)
            return
        with self._budget.share() as share:
            try:
                whole = await self._received(scope, receive, share)
            except QuireError as refused:
                await errors.response_to(refused, scope)(scope, receive, send)
                return
            if whole is not None:
                await self._app(scope, whole, send)

    async def _received(self, scope: Scope, receive: Receive, share: BodyShare) -> Receive | None:
        """Return a `receive` that gives the whole body first; None when the client went away. Raises QuireErrors."""
        coding, most = _coding(scope), _most(scope)
        body = await _read(scope, receive, share, most)
        if body is None:
            return None
        scope.setdefault("state", {})["received"] = self._clock.monotonic()
        if coding:
            body = await _without_coding(body, coding, share, most)
        _check(scope, body)
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return whole.pop() if whole else await receive()

        return replayed


def _most(scope: Scope) -> int:
    """Return the most bytes of a body."""
    return limits.MAX_HTTP_CHAT_BYTES if scope["path"] in _CHATS else limits.MAX_HTTP_BODY_BYTES


async def _read(scope: Scope, receive: Receive, share: BodyShare, most: int) -> bytes | None:
    """Return the whole body; None when the client goes away. Raises BodyTooLarge and Overloaded."""
    _check_size(int(_header(scope, b"content-length") or 0), most)  # the parser has checked that it is a number
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        _check_size(size, most)
        share.grow(size)
        if not message.get("more_body", False):
            return b"".join(parts)


def _coding(scope: Scope) -> str:
    """Return the coding of a body; "" for none. Raises CodingNotServed."""
    given = _header(scope, b"content-encoding").decode("latin-1").strip().lower()
    coding = given.removeprefix("x-")
    if coding in ("", "identity"):
        return ""
    if coding not in SERVED:
        what = f"the content-encoding is {given[:40]!r}; expected {', '.join(SERVED)} or none"
        raise errors.CodingNotServed(what)
    return coding


async def _without_coding(body: bytes, coding: str, share: BodyShare, most: int) -> bytes:
    """Return what a client has compressed. Raises InvalidRequest, BodyTooLarge and Overloaded."""
    whole = await asyncio.to_thread(decoded, body, coding, most)
    if whole is None:
        what = f"is not whole, or not in {coding} as its content-encoding says"
        raise InvalidRequest(FieldViolation("body", what, MALFORMED))
    _check_size(len(whole), most)
    share.grow(max(len(whole), len(body)))
    return whole


def _check_size(size: int, most: int) -> None:
    if size > most:
        what = f"the body is larger than the router takes; expected at most {most} bytes"
        raise errors.BodyTooLarge(what)


def _check(scope: Scope, body: bytes) -> None:
    """Raise InvalidRequest for a JSON body that would cost too much."""
    if b"json" not in _header(scope, b"content-type").lower():
        return  # nothing parses it
    if b"\0" in body:
        raise InvalidRequest(FieldViolation("body", "has a zero byte; expected JSON in UTF-8", MALFORMED))
    if excess := json_shape.BODY.excess(body):
        raise InvalidRequest(FieldViolation("body", excess))


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name == wanted), b"")
