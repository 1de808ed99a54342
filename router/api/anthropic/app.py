"""The routes of Anthropic's Messages API. Validation and admission are those of all APIs."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from common.contracts.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest, Overloaded, QuireError, RateLimited
from common.contracts.limits import MAX_ANSWER_BYTES
from router.api.anthropic.answer import (
    PING,
    Json,
    Stop,
    WholeMessage,
    closing_events,
    error_event,
    head,
    opening_event,
    step_events,
    stop_of,
    usage_of,
)
from router.api.anthropic.content_blocks import ContentBlocks, Step
from router.api.anthropic.request import Asked, asked
from router.api.anthropic.types import CountRequest, MessagesRequest
from router.api.http.event_stream import EventStream
from router.api.openai import errors, schema
from router.api.openai.answer import Answer, Form, Piece
from router.api.openai.errors import body_of, status_of
from router.api.openai.response import WholeResponse
from router.api.openai.schema import REFUSALS
from router.api.openai.service import Events, HttpParts, Service, answer_headers, in_words_of, unless_gone
from router.api.shared.answer_size import AnswerPlace
from router.contracts.answer_parts import Words
from router.contracts.events import ValidatedRequest
from router.contracts.ports import CallContext
from router.tenants.tenancy import Charge

# Not 503: clients of this API know a server that is busy or not ready by this status.
OVERLOADED: Final = 529
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


# Errors in the form of Anthropic's API, for the paths of this API.
def in_this_form(status: int, body: Json, error: QuireError | None) -> tuple[int, Json]:
    """Return status and body for those of the OpenAI-compatible API; `error` is what they were made of, if anything."""
    if status == 503 or (isinstance(error, Overloaded) and not isinstance(error, RateLimited)):
        status = OVERLOADED
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": _message(body, error)}}


def error_body(error: QuireError) -> Json:
    return in_this_form(status_of(error), body_of(error), error)[1]


def _message(body: Json, error: QuireError | None) -> str:
    """Return the message; that of a prompt which the context cannot hold begins as clients know it."""
    message = str(body["error"]["message"])
    violations = error.violations if isinstance(error, InvalidRequest) else ()
    too_long = any(each.reason == CONTEXT_LENGTH_EXCEEDED for each in violations)
    return f"prompt is too long: {message}" if too_long else message


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


# The answers of the Messages API as /openapi.json describes them; tests compare them with real ones.
class _Exact(BaseModel):
    """A body without undescribed fields."""

    model_config = ConfigDict(extra="forbid")


class MessagesErrorDetail(_Exact):
    """What went wrong."""

    type: str = Field(..., description="invalid_request_error, authentication_error, overloaded_error, ...")
    message: str


class MessagesError(_Exact):
    """Body of every answer that is not 2xx, and of an event `error`."""

    type: Literal["error"]
    error: MessagesErrorDetail


class TextBlock(_Exact):
    """A part of the answer that the user reads."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(_Exact):
    """A thought. Clients send it back with its signature, which is not verified."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(_Exact):
    """A tool that the client is to run."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(_Exact):
    """Token counts; the tokens of the prompt are input_tokens and cache_read_input_tokens together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnswerMessage(_Exact):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageEvent(BaseModel):
    """One event of a streamed message; `type` is the name of the event and says which other fields it has."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: AnswerMessage | None = Field(None, description="of message_start")
    index: int | None = Field(None, description="the place of the block")
    content_block: TextBlock | ThinkingBlock | ToolUseBlock | None = None
    delta: dict[str, Any] | None = Field(None, description="text_delta, thinking_delta, signature_delta, ...")
    usage: MessagesUsage | None = Field(None, description="of message_delta")
    error: MessagesErrorDetail | None = None


class TokenCount(_Exact):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


# What the statuses of a refusal mean, where they differ from OpenAI's.
_REFUSALS: Final = {
    **{status: what for status, what in REFUSALS.items() if status != "503"},
    "429": "a limit of the key is reached; Retry-After says when to try again",
    "529": "the queue is full, no worker is there, or the router drains; Retry-After says when to try again",
}


def answers(whole: type[BaseModel], event: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """Return what a route may answer, for FastAPI's `responses`; `event` is one event of its stream."""
    return schema.answers(whole, event, MessagesError, _REFUSALS)


PATH: Final = "/v1/messages"
_END_TURN: Final = Stop("end_turn")


def add_messages(app: FastAPI, parts: HttpParts) -> None:
    """Add the routes to an application, and let it answer errors of their paths in their form."""
    router, api = APIRouter(tags=["Messages"]), Messages(Service(parts))
    post: dict[str, Any] = {"methods": ["POST"], "response_model": None}
    router.add_api_route(PATH, api.create, responses=answers(AnswerMessage, MessageEvent), **post)
    router.add_api_route(f"{PATH}/count_tokens", api.count_tokens, responses=answers(TokenCount), **post)
    app.include_router(router)
    errors.speak(app, PATH, in_this_form, "anthropic")
    schema.describe(app, MessageEvent, MessagesError)


@dataclass(slots=True)
class _Turn:
    """One answer. `lowered`: the context holds fewer tokens than were asked for."""

    request: ValidatedRequest
    answer: Answer
    blocks: ContentBlocks
    lowered: bool
    stop: Stop = _END_TURN

    @property
    def opening(self) -> Json:
        return head(self.answer.id, self.answer.form.model)

    def usage(self) -> Json:
        return usage_of(self.answer.bill, self.answer.bill.output_tokens)

    def steps(self, piece: Piece) -> Iterator[Step]:
        parts = [Words(piece.text)] if piece.text else piece.parts
        yield from self.blocks.take(parts)
        if piece.finish_reason is not None:
            self.stop = stop_of(piece, self.lowered)
            yield from self.blocks.finish()


class Messages:
    """The handlers of the routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, rendered with the checkpoint's own template."""
        self._service.begin_with(None, body.model, request, body.session_id)
        given = asked(body, request.headers)
        with given.in_its_words(), in_words_of(given.order):
            return await self._answered(body, given, request)

    async def _answered(self, body: MessagesRequest, given: Asked, request: Request) -> Response:
        call = self._service.call(request)
        turn = await unless_gone(request, self._turn(body, given, call))
        if body.stream:
            events = await unless_gone(request, self._service.start_streams([turn.request], turn.answer))
            return EventStream(_lines(turn, events), events, answer_headers(turn.answer), PING)
        place = self._service.room.place(MAX_ANSWER_BYTES)
        try:
            parts = await unless_gone(request, self._collected(turn, place))
            return WholeResponse(parts, answer_headers(turn.answer), place.leave)
        except BaseException:  # broad: an answer that is not sent, for whatever reason, takes no room
            place.leave()
            raise

    async def count_tokens(self, body: CountRequest, request: Request) -> Json:
        """Count the tokens of a conversation, of its tools and of the template around them."""
        self._service.check_model(body.model)
        given = asked(body, request.headers)
        with given.in_its_words(), in_words_of(given.order):
            meter, tenant = self._service.parts.meter, request.state.caller.tenant
            self._service.check_chat(given.order)
            (prompt,) = given.order.prompts
            request.state.charge = Charge.of()
            ids = await unless_gone(request, meter.encoded(self._service.parts.codec, prompt, True, tenant))
        return {"input_tokens": len(ids)}

    async def _turn(self, body: MessagesRequest, given: Asked, call: CallContext) -> _Turn:
        reading = await self._service.reading(given.order, call)
        order = given.order if reading is None else given.order.read_by(reading)
        with in_words_of(order):
            # Clients of this API ask for tens of thousands of tokens, whatever the model.
            (validated,) = await self._service.validated(order, replace(call, lowers_max_tokens=True))
        form = Form(
            chat=True,
            model=self._service.shown_model(body.model),
            fingerprint=self._service.fingerprint,
            created=int(time.time()),
            codec=self._service.parts.codec,
            streamed=bool(body.stream),
            reading=reading,
            eos_token_ids=self._service.parts.card.eos_token_ids,
        )
        blocks = ContentBlocks(_new_call_id, given.shows_thoughts)
        answer = Answer(form, 1, f"msg_{call.request_id}")
        return _Turn(validated, answer, blocks, validated.sampling.max_tokens < body.max_tokens)

    async def _collected(self, turn: _Turn, place: AnswerPlace) -> list[bytes]:
        whole = WholeMessage(place.grow)
        async with aclosing(await self._service.start_streams([turn.request], turn.answer)) as events:
            async for prompt, event in events:
                if (piece := turn.answer.take(prompt, event)) is not None:
                    whole.add(turn.steps(piece))
        return list(whole.parts(turn.opening, turn.stop, turn.usage()))


async def _lines(turn: _Turn, events: Events) -> AsyncGenerator[str, None]:
    yield opening_event(turn.opening, turn.usage())
    try:
        async for prompt, event in events:
            piece = turn.answer.take(prompt, event)
            if piece is not None and (lines := step_events(turn.steps(piece))):
                yield lines
        yield closing_events(turn.stop, turn.usage())
    except QuireError as error:
        # The status line was sent before.
        yield error_event(error_body(error))


def _new_call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"
