"""The HTTP application: an OpenAI-compatible API over the same validation and admission as gRPC, health and metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from common.clock import Clock
from common.errors import Cancelled, NotFound, QuireError
from common.metrics import exposed
from quire.inference.v1 import inference_pb2
from router import http_errors
from router.core.events import GenerateEvent
from router.merge import merged
from router.openai_request import chat_requests, completion_requests
from router.openai_response import Answer, Form, Json
from router.openai_types import ChatRequest, CompletionRequest
from router.ports import CallContext, Frontend, ModelCard, RequestValidator, TextCodec

T = TypeVar("T")
Events = AsyncGenerator[tuple[int, GenerateEvent], None]


@dataclass(frozen=True, slots=True)
class HttpParts:
    """What the application is made of. `ready` is false until requests can be served, and while draining."""

    frontend: Frontend
    validator: RequestValidator
    codec: TextCodec
    card: ModelCard
    registry: CollectorRegistry
    ready: Callable[[], bool]
    clock: Clock


def create_app(parts: HttpParts) -> FastAPI:
    """Return the application."""
    app = FastAPI(title="Quire", docs_url=None, redoc_url=None)
    http_errors.install(app)
    api = _Api(parts)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", api.models)
    app.add_api_route("/v1/models/{name:path}", api.model)
    app.add_api_route("/health", api.health)
    app.add_api_route("/metrics", api.metrics)
    return app


class _Api:
    """The routes."""

    def __init__(self, parts: HttpParts) -> None:
        self._parts = parts
        self._started = int(time.time())

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        requests = completion_requests(body, request.headers)
        return await self._serve(requests, self._form(body, chat=False), body.stream, request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self._check_model(body.model)
        requests = chat_requests(body, request.headers)
        return await self._serve(requests, self._form(body, chat=True), body.stream, request)

    async def models(self) -> Json:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> Json:
        self._check_model(name)
        return self._model()

    async def health(self) -> Response:
        ready = self._parts.ready()
        return JSONResponse({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        content_type, body = exposed(self._parts.registry, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    def _model(self) -> Json:
        card = self._parts.card
        kind = {"id": card.name, "object": "model", "owned_by": "quire", "root": card.name}
        return kind | {"created": self._started, "max_model_len": card.max_model_len}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self._parts.card.name):
            raise NotFound(f"model {name!r} is not served here; {self._parts.card.name!r} is")

    def _form(self, body: CompletionRequest | ChatRequest, chat: bool) -> Form:
        return Form(
            chat=chat,
            model=self._parts.card.name,
            created=int(time.time()),
            codec=self._parts.codec,
            sequences=1 if body.n is None else max(1, body.n),
            return_token_ids=body.return_token_ids,
            include_usage=body.include_usage,
        )

    async def _serve(
        self, requests: Sequence[inference_pb2.GenerateRequest], form: Form, stream: bool, request: Request
    ) -> Response:
        call = CallContext(arrived=self._parts.clock.monotonic())
        answer = Answer(form, len(requests))
        if not stream:
            await _unless_gone(request, self._collect(requests, call, answer))
            return JSONResponse(answer.whole(), headers=_headers(answer))
        events = await _unless_gone(request, self._begin(requests, call, answer))
        return _EventStream(events, answer)

    async def _collect(
        self, requests: Sequence[inference_pb2.GenerateRequest], call: CallContext, answer: Answer
    ) -> None:
        async with aclosing(await self._begin(requests, call, answer)) as events:
            async for prompt, event in events:
                answer.take(prompt, event)

    async def _begin(
        self, requests: Sequence[inference_pb2.GenerateRequest], call: CallContext, answer: Answer
    ) -> Events:
        """Return the events after the first: when that has come, no refusal does, and a status can be sent."""
        validated = [await self._parts.validator.validate(request, call) for request in requests]
        events = merged([self._parts.frontend.generate(each) for each in validated])
        try:
            answer.take(*await anext(events))
        except BaseException:  # broad: a cancellation too must close what has begun; all go on
            await events.aclose()
            raise
        return events


class _EventStream(StreamingResponse):
    """Chunks as server-sent events. However it ends, the events are closed, and with them the request."""

    def __init__(self, events: Events, answer: Answer) -> None:
        super().__init__(_lines(events, answer), headers=_headers(answer), media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _lines(events: Events, answer: Answer) -> AsyncGenerator[str, None]:
    for chunk in answer.openings():
        yield _line(chunk)
    try:
        async for prompt, event in events:
            added = answer.take(prompt, event)
            if added is not None:
                yield _line(answer.chunk(added))
        for chunk in answer.closing():
            yield _line(chunk)
    except QuireError as error:
        # The status is long sent; clients look for an `error` in the stream.
        yield _line(http_errors.body_of(error))
    yield "data: [DONE]\n\n"


def _line(chunk: Json) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _headers(answer: Answer) -> dict[str, str]:
    """Both lead to the trace: `quire trace ID`."""
    return {"x-request-id": answer.id.partition("-")[2], "x-trace-id": answer.trace_id}


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it and raise Cancelled when the client goes away before that."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client went away")
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, QuireError):
                await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
