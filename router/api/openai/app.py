"""The HTTP application: the OpenAI-compatible API and health. Validation and admission are those of gRPC."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.telemetry import TelemetryConfig
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.contracts.errors import FieldViolation, InvalidRequest, Overloaded, QuireError
from common.contracts.limits import MAX_ANSWER_BYTES
from common.version import quire_version
from quire.inference.v1 import inference_pb2 as pb
from router.answers.requested_tools import NOTE_HEADER
from router.api.http.event_stream import EventStream
from router.api.openai import errors, schema
from router.api.openai.answer import Answer, Form, Json
from router.api.openai.authentication import Authenticated, OwnNames
from router.api.openai.batches.routes import batch_routes
from router.api.openai.bodies import BodyGate
from router.api.openai.embeddings import embedding_routes
from router.api.openai.http_spans import HttpSpans
from router.api.openai.identification import Identified, WithoutPrefix
from router.api.openai.prompt_logprobs import LEAST_RANKED_BYTES, WantedLogprobs
from router.api.openai.public_metrics import PublicMetrics
from router.api.openai.refused import RefusalsSeen
from router.api.openai.request import Order, chat_batch_order, chat_order, completion_order
from router.api.openai.response import WholeAnswer, WholeResponse
from router.api.openai.responses.routes import response_routes
from router.api.openai.responses.schema import StreamEvent
from router.api.openai.scores import score_routes
from router.api.openai.service import (
    Events,
    HttpParts,
    Service,
    answer_headers,
    as_read,
    in_words_of,
    start_streams,
    unless_gone,
)
from router.api.openai.streamed_answer import (
    DONE,
    LAST_EVENT_HEADER,
    EventIds,
    LastEvent,
    NoEventIds,
    StreamedAnswer,
    error_line,
)
from router.api.openai.tokens import token_routes
from router.api.openai.types import ChatBatchRequest, ChatOptions, ChatRequest, CompletionRequest, GenerationFields
from router.api.shared.answer_size import AnswerPlace, check_least_size
from router.api.shared.constraints import check_allowed, forbid_other_ends
from router.api.shared.metering import Meter
from router.contracts.events import ValidatedRequest
from router.contracts.ports import CallContext
from router.contracts.refusals import DROPPED_REASON_HEADER
from router.tenants.tenancy import Tenant

PATH: Final = "/invocations"
# The path of the first field that a body has.
_PATHS: Final = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "query": "/v1/rerank",
    "text_1": "/v1/score",
}


# POST /invocations, which SageMaker calls: the body says which of OpenAI's paths is meant. Its probe is GET /ping.
class Invocations:
    """Middleware that puts the path that is meant in place of /invocations. It gets bodies whole (BodyGate).

    All that stands around it, such as records and metrics, sees the path that is meant.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        message = await receive()
        # Whatever is not JSON by its type was not looked at before: it may be anything.
        is_json = "json" in Headers(scope=scope).get("content-type", "").lower()
        path = _path_of(message.get("body", b"")) if is_json else None
        if path is None:
            what = f"names no kind of request; expected an object of JSON with one of {', '.join(_PATHS)}"
            refused = errors.response_to(InvalidRequest(FieldViolation("body", what)), scope)
            await refused(scope, receive, send)
            return
        scope["path"], scope["raw_path"] = path, path.encode()
        whole = [message]

        async def replayed() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replayed, send)


def _path_of(body: bytes) -> str | None:
    try:
        read: Any = json.loads(body)
    except ValueError:
        return None
    named = (path for field, path in _PATHS.items() if isinstance(read, dict) and field in read)
    return next(named, None)


# Statuses of answers to a wrong body, model or path.
_WRONG: Final = frozenset({400, 404, 413, 415, 422})


# Charges tenants for requests that are refused as wrong before their prompts are looked at.
class WrongRequestsCharged:
    """Middleware that charges a wrong request which nothing has charged so far; 429 where the rate has no room for it.

    The request's state has its caller, and its `charge` from the moment that a handler made one.
    """

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app, self._meter = app, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get("state", {}).get("caller")
        if scope["type"] != "http" or scope["method"] != "POST" or caller is None or not caller.tenant.limits.are_set:
            await self._app(scope, receive, send)
            return
        instead: Overloaded | None = None

        async def charging(message: Message) -> None:
            nonlocal instead
            if message["type"] == "http.response.start" and message["status"] in _WRONG and not _is_charged(scope):
                instead = self._refusal(caller.tenant)
            if instead is None:
                await send(message)

        await self._app(scope, receive, charging)
        if instead is not None:
            await errors.response_to(instead, scope)(scope, receive, send)

    def _refusal(self, tenant: Tenant) -> Overloaded | None:
        try:
            self._meter.wrong(tenant)
        except Overloaded as refused:
            return refused
        return None


def _is_charged(scope: Scope) -> bool:
    charge = scope["state"].get("charge")
    return charge is not None and charge.begun


# The router traces requests itself; the framework would write parts of a wrong body into logs.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
# Bytes of the shortest log-probability in a completion, "":-1.5, and in a chat, {"token":"","logprob":-1.5,"bytes":[]}
_LEAST_ENTRY_BYTES: Final = 7
_LEAST_CHAT_ENTRY_BYTES: Final = 38
# Headers that a page may read beside those that every browser shows.
_EXPOSED: Final = (
    *("x-request-id", "x-quire-request-id", "x-trace-id", NOTE_HEADER, "retry-after", "retry-after-ms"),
    DROPPED_REASON_HEADER,
)


def create_app(
    parts: HttpParts,
    cors_origins: Sequence[str] = (),
    own_names: Sequence[str] | None = None,
    root_path: str = "",
    tokenizer_info: bytes | None = None,
    metrics: PublicMetrics | None = None,
) -> FastAPI:
    """Return the application; pages of `cors_origins` may call it from a browser.

    `own_names`: further names of this machine where callers need no key; None where they need one. `root_path` may
    stand before each path. `tokenizer_info` is what /tokenizer_info answers; without it there is no such path,
    and without `metrics` there is no /metrics.
    """
    about = "The OpenAI-compatible API of Quire. The gRPC API, protos/quire/inference/v1, offers the same and more."
    app = FastAPI(
        title="Quire",
        version=quire_version(),
        description=about,
        docs_url=None,
        redoc_url=None,
        telemetry=_NO_TELEMETRY,
        servers=[{"url": root_path}] if root_path else None,
    )
    app.add_middleware(Invocations)
    app.add_middleware(BodyGate, clock=parts.clock)
    errors.install(app)
    app.add_middleware(WrongRequestsCharged, meter=parts.meter)
    app.add_middleware(Authenticated, authenticator=parts.authenticator)
    if cors_origins:
        # Outside of authentication, as the question of a browser whether it may call carries no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    if own_names is not None:
        app.add_middleware(OwnNames, allowed=own_names)
    app.add_middleware(RefusalsSeen, refusals=parts.refusals)
    app.add_middleware(HttpSpans, tracer=parts.tracer)
    app.add_middleware(Identified)
    if root_path:
        app.add_middleware(WithoutPrefix, prefix=root_path)
    app.state.refusals = parts.refusals
    service = Service(parts)
    api = _Api(service)
    post: dict[str, Any] = {"methods": ["POST"], "response_model": None, "tags": ["OpenAI"]}
    whole, chunk = schema.Completion, schema.CompletionChunk
    app.add_api_route("/v1/completions", api.completions, responses=schema.answers(whole, chunk), **post)
    answers = schema.answers(schema.ChatCompletion, schema.ChatChunk)
    app.add_api_route("/v1/chat/completions", api.chat, responses=answers, **post)
    answers = schema.answers(schema.ChatCompletion)
    app.add_api_route("/v1/chat/completions/batch", api.chat_batch, responses=answers, **post)
    listed = schema.answers(schema.Models)
    app.add_api_route("/v1/models", api.models, response_model=schema.Models, responses=listed, tags=["OpenAI"])
    one = schema.answers(schema.Model)
    app.add_api_route("/v1/models/{name:path}", api.model, response_model=schema.Model, responses=one, tags=["OpenAI"])
    app.include_router(token_routes(parts.codec, parts.validator, parts.card, service.check_model, parts.meter))
    app.include_router(embedding_routes(service))
    app.include_router(score_routes(service))
    app.include_router(response_routes(service, parts.responses))
    app.include_router(batch_routes(service, parts.batches))
    answers = schema.answers(schema.Health, refusals=schema.ALWAYS) | {503: {"model": schema.Health}}
    app.add_api_route("/health", api.health, response_model=schema.Health, responses=answers, tags=["state"])
    app.add_api_route("/ping", api.health, methods=["GET", "HEAD", "POST"], include_in_schema=False)
    answers = schema.answers(schema.Version, refusals=schema.ALWAYS)
    app.add_api_route("/version", api.version, response_model=schema.Version, responses=answers, tags=["state"])
    if tokenizer_info is not None:
        whole_file = Response(tokenizer_info, media_type="application/json")
        app.add_api_route("/tokenizer_info", lambda: whole_file, response_model=None, tags=["tokens"])
    if metrics is not None:
        app.add_api_route("/metrics", metrics.answer, methods=["GET", "HEAD"], include_in_schema=False)
    unshown: dict[str, Any] = {"methods": ["HEAD"], "include_in_schema": False, "response_model": None}
    for path, handler in (("/health", api.health), ("/version", api.version), ("/v1/models", api.models)):
        app.add_api_route(path, handler, **unshown)  # probes and balancers ask for no body
    schema.describe(app, StreamEvent)
    return app


class _Api:
    """The handlers of the routes."""

    def __init__(self, service: Service) -> None:
        self._parts = service.parts
        self._started = int(time.time())
        self._service = service

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Complete one or several prompts."""
        self._check_body(body, request)
        order = self._within_allowed(completion_order(body), body)
        return await self._serve(order, self._form(body, chat=False), request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat, rendered with the checkpoint's own template."""
        self._check_body(body, request)
        echo = (body.messages[-1].text,) if body.echo and body.continue_final_message and body.messages else ()
        return await self._chat(chat_order(body), body, request, echo)

    async def chat_batch(self, body: ChatBatchRequest, request: Request) -> Response:
        """Answer several conversations, which share all options, with a choice each."""
        self._check_body(body, request)
        return await self._chat(chat_batch_order(body), body, request)

    async def _chat(self, order: Order, body: ChatOptions, request: Request, echo: tuple[str, ...] = ()) -> Response:
        """Answer chats, all of which are read as the first one is: one template made their prompts."""
        order, form = self._within_allowed(order, body), replace(self._form(body, chat=True), echo=echo)
        reading = await unless_gone(request, self._service.reading(order, self._service.call(request)))
        if reading is None or order.tools is None:
            return await self._serve(order, form, request)
        form = replace(
            form,
            reading=reading,
            named_tool=order.tools.use.named,
            older_calls=order.tools.older,
            include_reasoning=body.include_reasoning is not False,
        )
        return await self._serve(order.read_by(reading), form, request)

    async def models(self, request: Request) -> Json:
        """List the served models: the base under each of its names, then its adapters that the caller may use."""
        may_use = request.state.caller.tenant.may_use_adapter
        adapters = [name for name in self._parts.adapters.adapter_names() if may_use(name)]
        return {"object": "list", "data": [self._model(name) for name in (*self._parts.card.names, *adapters)]}

    async def model(self, name: str, request: Request) -> Json:
        """Describe one model that the caller may use."""
        self._service.check_model(name)
        if self._parts.adapters.find_adapter(name) is not None:
            request.state.caller.tenant.check_adapter(name)
        return self._model(name)

    async def health(self) -> Response:
        """Return 200 while requests can be served, else 503 with the reason."""
        if why := self._parts.why_not_ready():
            return JSONResponse({"status": "not ready", "reason": why}, 503)
        return JSONResponse({"status": "ok"})

    async def version(self) -> Json:
        """Return the version."""
        return {"version": quire_version()}

    def _model(self, name: str) -> Json:
        card, identity = self._parts.card, self._parts.model().identity
        found = self._parts.adapters.find_adapter(name)
        # As other servers have it, the root of an adapter is its content, and its parent the base.
        root, parent = (card.name, None) if found is None else (found.fingerprint, card.name)
        kind = {"id": name, "object": "model", "owned_by": "quire", "root": root, "parent": parent}
        pooling = identity.pooling if identity.embeds else None
        return kind | {"created": self._started, "max_model_len": card.max_model_len, "pooling": pooling}

    def _form(self, body: CompletionRequest | ChatOptions, chat: bool) -> Form:
        options = body.stream_options if body.stream else None
        return Form(
            chat=chat,
            model=self._service.shown_model(body.model),
            fingerprint=self._service.fingerprint,
            created=int(time.time()),
            codec=self._parts.codec,
            streamed=bool(body.stream),
            sequences=1 if body.n is None else max(1, body.n),
            return_token_ids=bool(body.return_token_ids),
            eos_token_ids=self._parts.card.eos_token_ids,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            of_prompts=_of_prompts(body),
            include_usage=self._parts.forces_usage or (options is not None and options.include_usage),
            event_ids=options is not None and options.event_ids,
            continuous_usage=options is not None and options.continuous_usage_stats,
        )

    def _check_body(self, body: GenerationFields, request: Request) -> None:
        """Take over the id that a body names; check what does not depend on its prompts."""
        self._service.begin_with(body.request_id, body.model, request, body.session_id)
        if body.stream_options is not None and not body.stream:
            what = "belongs to a stream, and stream is not set; set it to true, or leave stream_options out"
            raise InvalidRequest(FieldViolation("stream_options", what))

    def _within_allowed(self, order: Order, body: GenerationFields) -> Order:
        """Return the order, whose output ends with no token beside `allowed_token_ids` where there are any."""
        if (ids := body.allowed_token_ids) is not None:
            check_allowed(ids, self._parts.card.vocab_size)
            forbid_other_ends(order.common.sampling, ids, self._parts.card.eos_token_ids)
        return order

    async def _serve(self, order: Order, form: Form, request: Request) -> Response:
        with in_words_of(order):
            return await self._answered(order, form, request)

    async def _answered(self, order: Order, form: Form, request: Request) -> Response:
        if (header := request.headers.get(LAST_EVENT_HEADER)) is not None:
            return await self._resumed(order, form, request, header)
        call = self._service.call(request)
        answer = Answer(form, len(order.prompts), form.id_prefix + call.request_id)
        if form.streamed:
            events = await unless_gone(request, self._start(order, call, answer))
            has_ids = form.event_ids and len(order.prompts) == 1
            ids = EventIds(call.request_id, form.sequences) if has_ids else NoEventIds()
            return EventStream(_lines(events, answer, ids), events, answer_headers(answer))
        place = self._service.room.place(MAX_ANSWER_BYTES)
        try:
            parts = await unless_gone(request, self._collect(order, call, answer, place))
            return WholeResponse(parts, answer_headers(answer), place.leave)
        except BaseException:  # broad: an answer that is not sent, for whatever reason, takes no room
            place.leave()
            raise

    async def _resumed(self, order: Order, form: Form, request: Request, header: str) -> Response:
        """Go on with a stream after the event that the client has; the body is that of the first request."""
        last = LastEvent.of(header)
        if not form.streamed or len(order.prompts) != 1:
            what = "goes on with a stream of one prompt; send the body of the stream that broke, or leave it out"
            raise InvalidRequest(FieldViolation("Last-Event-ID", what))
        request.state.ids.request = last.request_id
        answer = Answer(form, 1, form.id_prefix + last.request_id)
        events = await unless_gone(request, self._go_on(order, last, self._service.call(request), answer))
        ids = EventIds(last.request_id, form.sequences, last)
        return EventStream(_lines(events, answer, ids, opened=True), events, answer_headers(answer))

    async def _go_on(self, order: Order, last: LastEvent, call: CallContext, answer: Answer) -> Events:
        resumed = await self._parts.resumer.resumed(last.request(answer.form.sequences), call, again=True)
        last.check(resumed.request.sampling.n)
        await self._add_prompts(order, [resumed.request], answer)
        return await start_streams([resumed.events(as_read(resumed.request, answer))], answer)

    async def _collect(self, order: Order, call: CallContext, answer: Answer, place: AnswerPlace) -> Iterator[bytes]:
        async with aclosing(await self._start(order, call, answer)) as events:
            whole = WholeAnswer(answer, place.grow)  # after validation: until then n may be any number
            async for prompt, event in events:
                piece = answer.take(prompt, event)
                if piece is not None:
                    whole.add(piece)
        return whole.parts()

    async def _start(self, order: Order, call: CallContext, answer: Answer) -> Events:
        """Return the events after the first, which shows that the request is not refused and a status can be sent."""
        # Coding agents ask for tens of thousands of tokens in a chat, whatever the model.
        validated = await self._service.validated(order, replace(call, lowers_max_tokens=answer.form.chat))
        await self._add_prompts(order, validated, answer)
        whole = not answer.form.streamed
        if whole:
            entry = _LEAST_CHAT_ENTRY_BYTES if answer.form.chat else _LEAST_ENTRY_BYTES
            ranked = 0 if answer.form.of_prompts.ranked is None else LEAST_RANKED_BYTES
            check_least_size(validated, 0, entry, MAX_ANSWER_BYTES, ranked)
        return await self._service.start_streams(validated, answer)

    async def _add_prompts(self, order: Order, validated: Sequence[ValidatedRequest], answer: Answer) -> None:
        """Add to the form what choices show of their prompts."""
        if order.echo:
            echo = [await self._echo(*each) for each in zip(order.requests(), validated, strict=True)]
            first = tuple([each.prompt[0] for each in validated])
            answer.form = replace(answer.form, echo=tuple(echo), first_tokens=first)
        if answer.form.return_token_ids and (len(validated) == 1 or not answer.form.chat):
            ids = tuple([json.dumps(each.prompt, separators=(",", ":")) for each in validated])
            answer.form = replace(answer.form, prompt_token_ids=ids)

    async def _echo(self, asked: pb.GenerateRequest, validated: ValidatedRequest) -> str:
        """Return the text of a valid prompt, or of what is kept of it."""
        whole = asked.prompt.text and not asked.HasField("truncate_prompt_tokens")
        return asked.prompt.text if whole else await self._parts.codec.text_of(validated.prompt)


def _of_prompts(body: CompletionRequest | ChatOptions) -> WantedLogprobs:
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    return WantedLogprobs(echoed, body.prompt_logprobs)


async def _lines(
    events: Events, answer: Answer, ids: EventIds | NoEventIds, opened: bool = False
) -> AsyncGenerator[str, None]:
    """Yield the events of an answer; those that the client has shape the others, and are not sent."""
    stream = StreamedAnswer(answer)
    for line in stream.openings():
        if not opened:
            yield line
    try:
        async for prompt, event in events:
            has, piece = ids.take(event), answer.take(prompt, event)
            if piece is not None and (line := stream.line(piece)) and not has:
                yield ids.marked(line) if not piece.prompt_logprobs else line
        if line := stream.closing():
            yield line
    except QuireError as error:
        # The status line was sent before.
        yield error_line(errors.body_of(error))
    yield DONE
