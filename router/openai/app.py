"""The HTTP application: the OpenAI-compatible API, health and metrics. Validation and admission are those of gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from common.clock import Clock
from common.errors import Cancelled, InvalidRequest, QuireError
from common.process.metrics import exposed
from router.core.events import GenerateEvent, ValidatedRequest
from router.observe.status import quire_version
from router.openai import errors, schema
from router.openai.answer import Answer, Form, Json
from router.openai.merge import merged
from router.openai.request import Order, chat_order, completion_order
from router.openai.response import WholeAnswer
from router.openai.stream import DONE, StreamedAnswer, error_line
from router.openai.tokens import token_routes
from router.openai.types import ChatRequest, CompletionRequest
from router.ports import CallContext, Frontend, ModelCard, RequestValidator, TextCodec

MAX_BODY_BYTES = 16 * 1024 * 1024
# The router traces requests itself; the framework would write parts of a wrong body into logs.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
T = TypeVar("T")
Events = AsyncGenerator[tuple[int, GenerateEvent], None]


@dataclass(frozen=True, slots=True)
class HttpParts:
    """The parts that the application uses. `ready` is false until a worker is usable, and while draining."""

    frontend: Frontend
    validator: RequestValidator
    codec: TextCodec
    card: ModelCard
    registry: CollectorRegistry
    ready: Callable[[], bool]
    clock: Clock


def create_app(parts: HttpParts) -> FastAPI:
    about = "The OpenAI-compatible API of Quire. The gRPC API, protos/quire/inference/v1, offers the same and more."
    app = FastAPI(
        title="Quire",
        version=quire_version(),
        description=about,
        docs_url=None,
        redoc_url=None,
        max_body_size=MAX_BODY_BYTES,
        telemetry=_NO_TELEMETRY,
    )
    errors.install(app)
    api = _Api(parts)
    post: dict[str, Any] = {"methods": ["POST"], "response_model": None, "tags": ["OpenAI"]}
    whole, chunk = schema.Completion, schema.CompletionChunk
    app.add_api_route("/v1/completions", api.completions, responses=schema.answers(whole, chunk), **post)
    answers = schema.answers(schema.ChatCompletion, schema.ChatChunk)
    app.add_api_route("/v1/chat/completions", api.chat, responses=answers, **post)
    app.add_api_route("/v1/models", api.models, response_model=schema.Models, tags=["OpenAI"])
    answers = {404: {"model": schema.ErrorBody}}
    app.add_api_route(
        "/v1/models/{name:path}", api.model, response_model=schema.Model, responses=answers, tags=["OpenAI"]
    )
    app.include_router(token_routes(parts.codec, parts.validator, parts.card, api.check_model))
    answers = {503: {"model": schema.Health}}
    app.add_api_route("/health", api.health, response_model=schema.Health, responses=answers, tags=["state"])
    app.add_api_route("/ping", api.health, methods=["GET", "POST"], include_in_schema=False)
    app.add_api_route("/version", api.version, response_model=schema.Version, tags=["state"])
    app.add_api_route("/metrics", api.metrics, tags=["state"])
    schema.describe(app)
    return app


class _Api:
    """The handlers of the routes."""

    def __init__(self, parts: HttpParts) -> None:
        self._parts = parts
        self._started = int(time.time())
        self._fingerprint = _fingerprint(parts.card)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Complete one or several prompts."""
        self.check_model(body.model)
        form = self._form(body, chat=False)
        if body.echo:
            codec = self._parts.codec
            texts = [each if isinstance(each, str) else codec.decode(each) for each in body.prompts]
            form = replace(form, echo=tuple(texts))
        return await self._serve(completion_order(body, request.headers), form, request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat, rendered with the checkpoint's own template."""
        self.check_model(body.model)
        return await self._serve(chat_order(body, request.headers), self._form(body, chat=True), request)

    async def models(self) -> Json:
        """List the served models."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> Json:
        """Describe one model."""
        self.check_model(name)
        return self._model()

    async def health(self) -> Response:
        """Return 200 while requests can be served, else 503."""
        ready = self._parts.ready()
        return JSONResponse({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    async def version(self) -> Json:
        """Return the version."""
        return {"version": quire_version()}

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in the format of Prometheus."""
        content_type, body = exposed(self._parts.registry, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound for a model that is not served here."""
        if name not in (None, "", self._parts.card.name):
            raise errors.ModelNotFound(f"model {name!r} is not served here; {self._parts.card.name!r} is")

    def _model(self) -> Json:
        card = self._parts.card
        kind = {"id": card.name, "object": "model", "owned_by": "quire", "root": card.name}
        return kind | {"created": self._started, "max_model_len": card.max_model_len}

    def _form(self, body: CompletionRequest | ChatRequest, chat: bool) -> Form:
        options = body.stream_options if body.stream else None
        return Form(
            chat=chat,
            model=self._parts.card.name,
            fingerprint=self._fingerprint,
            created=int(time.time()),
            codec=self._parts.codec,
            streamed=bool(body.stream),
            sequences=1 if body.n is None else max(1, body.n),
            return_token_ids=bool(body.return_token_ids),
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
        )

    async def _serve(self, order: Order, form: Form, request: Request) -> Response:
        call = CallContext(arrived=self._parts.clock.monotonic())
        answer = Answer(form, len(order.requests))
        if form.streamed:
            events = await _unless_gone(request, self._begin(order, call, answer))
            return _EventStream(events, answer)
        body = await _unless_gone(request, self._collect(order, call, answer))
        return JSONResponse(body, headers=_headers(answer))

    async def _collect(self, order: Order, call: CallContext, answer: Answer) -> Json:
        async with aclosing(await self._begin(order, call, answer)) as events:
            whole = WholeAnswer(answer)  # after validation: until then n may be any number
            async for prompt, event in events:
                piece = answer.take(prompt, event)
                if piece is not None:
                    whole.add(piece)
        return whole.body()

    async def _begin(self, order: Order, call: CallContext, answer: Answer) -> Events:
        """Return the events after the first, which shows that the request is not refused and a status can be sent."""
        validated = await self._validated(order, call)
        whole = not answer.form.streamed
        events = merged([self._parts.frontend.generate(replace(each, whole=whole)) for each in validated])
        try:
            answer.take(*await anext(events))
        except BaseException:  # broad: a cancellation must close the events too; all errors go on
            await events.aclose()
            raise
        return events

    async def _validated(self, order: Order, call: CallContext) -> list[ValidatedRequest]:
        try:
            return [await self._parts.validator.validate(request, call) for request in order.requests]
        except InvalidRequest as error:
            names = order.names
            raise InvalidRequest(
                *(replace(each, field=names.get(each.field, each.field)) for each in error.violations)
            ) from None


class _EventStream(StreamingResponse):
    """Chunks as server-sent events. The end of the response closes the events, and so ends the request."""

    def __init__(self, events: Events, answer: Answer) -> None:
        super().__init__(_lines(events, answer), headers=_headers(answer), media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _lines(events: Events, answer: Answer) -> AsyncGenerator[str, None]:
    stream = StreamedAnswer(answer)
    for line in stream.openings():
        yield line
    try:
        async for prompt, event in events:
            piece = answer.take(prompt, event)
            if piece is not None and (line := stream.line(piece)):
                yield line
        if line := stream.closing():
            yield line
    except QuireError as error:
        # The status line was sent before.
        yield error_line(errors.body_of(error))
    yield DONE


def _fingerprint(card: ModelCard) -> str:
    """Return a text that changes with the version and the checkpoint, and so with possible answers."""
    model = card.identity.model_fingerprint[:12]
    return f"quire-{quire_version()}-{model}" if model else f"quire-{quire_version()}"


def _headers(answer: Answer) -> dict[str, str]:
    """Return the two ids by which `quire trace` finds the request."""
    return {"x-request-id": answer.id.partition("-")[2], "x-trace-id": answer.trace_id}


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancel it and raise Cancelled when the client disconnects first."""
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
