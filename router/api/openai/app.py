"""The HTTP application: the OpenAI-compatible API and health. Validation and admission are those of gRPC."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from json.encoder import encode_basestring
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.telemetry import TelemetryConfig
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.contracts.errors import FieldViolation, InvalidRequest, Overloaded, QuireError
from common.contracts.limits import MAX_ANSWER_BYTES, MAX_REQUEST_ID_CHARS, MAX_SEQUENCES
from common.version import quire_version
from quire.inference.v1 import inference_pb2 as pb
from router.answers.requested_tools import NOTE_HEADER
from router.api.http.event_stream import EventStream
from router.api.openai import errors, schema
from router.api.openai.allowed_tokens import check_allowed, forbid_other_ends
from router.api.openai.answer import Answer, Form, Json, Piece, new_call_id
from router.api.openai.authentication import Authenticated, OwnNames
from router.api.openai.batches.routes import batch_routes
from router.api.openai.bodies import BodyGate
from router.api.openai.embeddings import embedding_routes
from router.api.openai.http_spans import HttpSpans
from router.api.openai.identification import Identified, WithoutPrefix
from router.api.openai.logprobs import lists
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
    begun,
    in_words_of,
    unless_gone,
)
from router.api.openai.tokens import token_routes
from router.api.openai.types import ChatBatchRequest, ChatOptions, ChatRequest, CompletionRequest, GenerationFields
from router.api.shared.answer_size import AnswerPlace, check_least_size
from router.api.shared.metering import Meter
from router.contracts.answer_parts import CallArguments, CallBegun, Part, Thought, Words
from router.contracts.events import Finished, GenerateEvent, Tokens, ValidatedRequest
from router.contracts.ports import CallContext
from router.tenants.tenancy import Tenant

HEADER: Final = "last-event-id"
_CHOICE: Final = r"\d{1,9}[re]?"
_ID: Final = rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}"
_FORM: Final = re.compile(rf"({_ID}):((?:{_CHOICE},){{0,{MAX_SEQUENCES - 1}}}{_CHOICE})")
_ALL: Final = (1 << 31) - 1


# Ids of the events of a stream, and what a client says with one: `Last-Event-ID`, with the body that it sent first.
# An id is `<request id>:<received>`. The second part has, for each choice, its tokens so far. `r` follows where the
# text has come that the output held back at its end, `e` where its last event has: `quire-4f..:12,7e`.
@dataclass(slots=True)
class _Choice:
    tokens: int = 0
    rested: bool = False
    ended: bool = False

    @staticmethod
    def of(part: str) -> _Choice:
        return _Choice(int(part.rstrip("re")), rested=part[-1] in "re", ended=part[-1] == "e")

    def __str__(self) -> str:
        return f"{self.tokens}{'e' if self.ended else 'r' if self.rested else ''}"


@dataclass(frozen=True, slots=True)
class LastEvent:
    """What a client has of a request."""

    request_id: str
    choices: Sequence[_Choice]

    @staticmethod
    def of(header: str) -> LastEvent:
        """Raises InvalidRequest for what is not an event id of this API."""
        found = _FORM.fullmatch(header)
        if found is None:
            what = "is not an event id of this API; send the last `id` of the stream that broke, or leave it out"
            raise InvalidRequest(FieldViolation("Last-Event-ID", what))
        parts = found[2].split(",")
        return LastEvent(
            found[1], [_Choice(int(part.rstrip("re")), part[-1] in "re", part[-1] == "e") for part in parts]
        )

    def check(self, choices: int) -> None:
        """Raise InvalidRequest where a body, or the request that is resumed, has other choices."""
        if len(self.choices) != choices:
            what = f"is of an answer with {len(self.choices)} choices, and the body asks for {choices}"
            raise InvalidRequest(FieldViolation("Last-Event-ID", f"{what}; send the body of the stream that broke"))

    def request(self, choices: int) -> pb.GenerateRequest:
        """Return what resumes the request. Raises InvalidRequest where the body asks for other choices."""
        self.check(choices)
        received = [choice.tokens for choice in self.choices]
        resume = pb.Resume(request_id=self.request_id, output_tokens_received=received, prompt_logprobs_received=_ALL)
        return pb.GenerateRequest(resume=resume)


class EventIds:
    """Follows one request's events: gives ids, and says which events the client has."""

    def __init__(self, request_id: str, choices: int, last: LastEvent | None = None) -> None:
        self._request_id, self._choices = request_id, [_Choice() for _ in range(choices)]
        self._last = last

    def take(self, event: GenerateEvent) -> bool:
        """Count an event; return whether the client has it already."""
        if not isinstance(event, Tokens | Finished):
            return False
        choice = self._choices[event.index]
        known = None if self._last is None else self._last.choices[event.index]
        if isinstance(event, Finished):
            choice.ended = True
            return known is not None and known.ended
        if not event.token_ids:
            choice.rested = True
            return known is not None and known.rested
        choice.tokens += len(event.token_ids)
        return known is not None and choice.tokens <= known.tokens

    def marked(self, lines: str) -> str:
        """Return one or several events, the last of them with the id of what has come by then."""
        before, _, last = lines.removesuffix("\n\n").rpartition("\n\n")
        mark = ",".join(map(str, self._choices))
        return f"{before}{'' if not before else chr(10) * 2}id: {self._request_id}:{mark}\n{last}\n\n"


class NoEventIds:
    """Without `stream_options.event_ids`, which some clients could not read, and for an answer to several prompts."""

    def take(self, event: GenerateEvent) -> bool:
        return False

    def marked(self, lines: str) -> str:
        return lines


DONE = "data: [DONE]\n\n"


# A streamed answer of the OpenAI-compatible API: each piece becomes one line of server-sent events.
# Every token of a stream passes here, so lines are written from a template. A chunk takes 0.3 microseconds, where
# `json.dumps` of the whole chunk took 3.2 (CPython 3.11).
class StreamedAnswer:
    """Writes the lines of one answer; the answer must have taken its first event."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._form = answer, answer.form
        kind = "chat.completion.chunk" if self._form.chat else "text_completion"
        # Without the closing brace of the object.
        self._head = f"data: {_dumps(answer.head(kind))[:-1]}"
        self._logprobs = answer.new_logprobs()
        self._prompts = answer.new_prompt_logprobs()

    def openings(self) -> Iterator[str]:
        """Yield the lines before the first token: the role of each choice in a chat, else its prompt if wanted."""
        for choice in self._form.choices(self._answer.prompts):
            ids = self._form.prompt_ids(choice.index)
            if self._form.chat:
                # Whether words or calls follow shows only later.
                content = encode_basestring(choice.text) if choice.text or self._form.reading is None else "null"
                yield self._line(choice, f'"delta":{{"role":"assistant","content":{content}}}', ids)
            elif self._form.echo or ids:
                text = f'"text":{encode_basestring(choice.text)}{ids}'
                yield self._line(choice, text, logprobs=self._first_logprobs(choice.index))

    def line(self, piece: Piece) -> str:
        """Return the line of a piece, "" for one without content. Each part that was read has a line of its own."""
        if piece.prompt_logprobs:
            return self._prompt_line(piece)
        if self._form.reading is not None:
            return self._lines(piece)
        ids = piece.token_ids if self._form.return_token_ids else ()
        if not (piece.text or piece.logprobs or piece.finish_reason or ids):
            return ""
        if not self._form.chat:
            return self._line(piece, f'"text":{encode_basestring(piece.text)}')
        content = f'"content":{encode_basestring(piece.text)}' if piece.text else ""
        return self._line(piece, f'"delta":{{{content}}}')

    def _first_logprobs(self, index: int) -> str:
        """Return the lists of a prompt's first token; "null" where they are not wanted."""
        if self._form.of_prompts.echoed is None:
            return "null"
        prompt = index // self._form.sequences
        return f"{{{lists(self._prompts[prompt].first(self._form.first_tokens[prompt]))}}}"

    def _prompt_line(self, piece: Piece) -> str:
        """Return a line with the next log-probabilities of an echoed prompt, whose text came first."""
        columns = self._prompts[piece.index // self._form.sequences].columns(piece.prompt_logprobs)
        return self._line(piece, '"text":""', logprobs=f"{{{lists(columns)}}}") if columns else ""

    def _lines(self, piece: Piece) -> str:
        """Return the lines of a piece that was read; its tokens and its end belong to the last one."""
        deltas = [delta_of(part, self._form.older_calls) for part in piece.parts]
        last = "{}" if piece.finish_reason or not deltas else deltas.pop()
        lines = [self._line(Piece(piece.index), f'"delta":{delta}') for delta in deltas]
        ids = piece.token_ids if self._form.return_token_ids else ()
        if last != "{}" or piece.logprobs or piece.finish_reason or ids:
            lines.append(self._line(piece, f'"delta":{last}'))
        return "".join(lines)

    def closing(self) -> str:
        """Return the line with the usage of the stream, "" if it is not wanted."""
        if not self._form.include_usage:
            return ""
        return f'{self._head},"choices":[],"usage":{_dumps(self._answer.bill.body())}}}\n\n'

    def _line(self, piece: Piece, text: str, more: str = "", logprobs: str = "") -> str:
        logprobs = logprobs or self._logprobs[piece.index].text(piece.logprobs)
        finish = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
        stop = "null" if piece.stop_reason is None else _dumps(piece.stop_reason)
        ids = f',"token_ids":{_dumps(list(piece.token_ids))}' if self._form.return_token_ids else ""
        choice = (
            f'"index":{piece.index},{text},"logprobs":{logprobs},"finish_reason":{finish},"stop_reason":{stop}{ids}'
        )
        return f'{self._head},"choices":[{{{choice}}}]{more}{self._usage()}}}\n\n'

    def _usage(self) -> str:
        if not self._form.include_usage:
            return ""
        return f',"usage":{_dumps(self._answer.bill.so_far())}' if self._form.continuous_usage else ',"usage":null'


def delta_of(part: Part, older: bool) -> str:
    """Return what a part adds to a message, in JSON. A call begins with its name; its arguments follow in pieces."""
    match part:
        case Thought(text):
            thought = encode_basestring(text)
            return f'{{"reasoning_content":{thought},"reasoning":{thought}}}'
        case Words(text):
            return f'{{"content":{encode_basestring(text)}}}'
        case CallBegun(index, name):
            function = f'{{"name":{encode_basestring(name)},"arguments":""}}'
            if older:
                return f'{{"function_call":{function}}}'
            call = f'"index":{index},"id":"{new_call_id()}","type":"function","function":{function}'
            return f'{{"tool_calls":[{{{call}}}]}}'
        case CallArguments(index, text):
            function = f'{{"arguments":{encode_basestring(text)}}}'
            if older:
                return f'{{"function_call":{function}}}'
            return f'{{"tool_calls":[{{"index":{index},"function":{function}}}]}}'


def error_line(body: Json) -> str:
    """Return the line of an error that comes after the status; clients look for `error` in each chunk."""
    return f"data: {_dumps(body)}\n\n"


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


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
_EXPOSED: Final = ("x-request-id", "x-quire-request-id", "x-trace-id", NOTE_HEADER, "retry-after", "retry-after-ms")


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
        self._begin_with(body, request)
        order = self._within_allowed(completion_order(body), body)
        return await self._serve(order, self._form(body, chat=False), request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat, rendered with the checkpoint's own template."""
        self._begin_with(body, request)
        echo = (body.messages[-1].text,) if body.echo and body.continue_final_message and body.messages else ()
        return await self._chat(chat_order(body), body, request, echo)

    async def chat_batch(self, body: ChatBatchRequest, request: Request) -> Response:
        """Answer several conversations, which share all options, with a choice each."""
        self._begin_with(body, request)
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

    async def models(self) -> Json:
        """List the served models."""
        return {"object": "list", "data": [self._model(name) for name in self._parts.card.names]}

    async def model(self, name: str) -> Json:
        """Describe one model."""
        self._service.check_model(name)
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
        kind = {"id": name, "object": "model", "owned_by": "quire", "root": card.name}
        pooling = identity.pooling if identity.embeds else None
        return kind | {"created": self._started, "max_model_len": card.max_model_len, "pooling": pooling}

    def _form(self, body: CompletionRequest | ChatOptions, chat: bool) -> Form:
        options = body.stream_options if body.stream else None
        return Form(
            chat=chat,
            model=self._parts.card.name,
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

    def _begin_with(self, body: GenerationFields, request: Request) -> None:
        """Take over the id that a body names; check what does not depend on its prompts."""
        self._service.begin_with(body.request_id, body.model, request)
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
        if (header := request.headers.get(HEADER)) is not None:
            return await self._resumed(order, form, request, header)
        call = self._service.call(request)
        answer = Answer(form, len(order.prompts), form.id_prefix + call.request_id)
        if form.streamed:
            events = await unless_gone(request, self._begin(order, call, answer))
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
        return await begun([resumed.events(as_read(resumed.request, answer))], answer)

    async def _collect(self, order: Order, call: CallContext, answer: Answer, place: AnswerPlace) -> Iterator[bytes]:
        async with aclosing(await self._begin(order, call, answer)) as events:
            whole = WholeAnswer(answer, place.grow)  # after validation: until then n may be any number
            async for prompt, event in events:
                piece = answer.take(prompt, event)
                if piece is not None:
                    whole.add(piece)
        return whole.parts()

    async def _begin(self, order: Order, call: CallContext, answer: Answer) -> Events:
        """Return the events after the first, which shows that the request is not refused and a status can be sent."""
        # Coding agents ask for tens of thousands of tokens in a chat, whatever the model.
        validated = await self._service.validated(order, replace(call, lowers_max_tokens=answer.form.chat))
        await self._add_prompts(order, validated, answer)
        whole = not answer.form.streamed
        if whole:
            entry = _LEAST_CHAT_ENTRY_BYTES if answer.form.chat else _LEAST_ENTRY_BYTES
            ranked = 0 if answer.form.of_prompts.ranked is None else LEAST_RANKED_BYTES
            check_least_size(validated, 0, entry, MAX_ANSWER_BYTES, ranked)
        return await self._service.begun(validated, answer)

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
