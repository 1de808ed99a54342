"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from common.contracts.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    QuireError,
    Unavailable,
)
from common.contracts.limits import BACKGROUND_SECONDS, MAX_ANSWER_BYTES, MAX_RESPONSE_BYTES
from common.contracts.types import FinishReason
from common.process.supervised import cancel_and_wait
from router.api.http.event_stream import EventStream
from router.api.openai.answer import Answer, Bill, Form, Piece
from router.api.openai.logprobs import ChoiceLogprobs
from router.api.openai.request import Order
from router.api.openai.response import WholeResponse
from router.api.openai.responses.background import Job, ResponseParts
from router.api.openai.responses.conversations import SHORTER, Conversations, conversation_routes, with_referenced
from router.api.openai.responses.events import (
    CANCELLED,
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    QUEUED,
    RUNNING,
    ResponseBuilder,
)
from router.api.openai.responses.items import Item, as_texts, items_of
from router.api.openai.responses.listing import ItemPage, page_of
from router.api.openai.responses.records import (
    Record,
    check_id,
    check_size,
    check_text,
    new_id,
    new_item_ids,
    no_previous,
    not_found,
    with_ids,
)
from router.api.openai.responses.request import check, conversation, format_body, in_its_words, order_of, tool_bodies
from router.api.openai.responses.schema import Deleted, InputTokens, ItemList, ResponseBody, StreamEvent
from router.api.openai.responses.tool_kinds import ToolKinds, tool_kinds
from router.api.openai.responses.types import Json, ResponsesRequest
from router.api.openai.schema import answers, refused
from router.api.openai.service import Events, Service, answer_headers, in_words_of, unless_gone
from router.api.shared.answer_size import AnswerPlace
from router.contracts.answer_parts import CallBegun, Part, Words
from router.contracts.events import ValidatedRequest
from router.contracts.ports import CallContext


# The tokens of a response, those of its thought apart.
def usage_body(bill: Bill) -> Json:
    output = bill.output_tokens
    return {
        "input_tokens": bill.prompt_tokens,
        # Writing to the cache costs nothing here, so it is not counted.
        "input_tokens_details": {"cached_tokens": bill.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": min(bill.reasoning_tokens or 0, output)},
        "total_tokens": bill.prompt_tokens + output,
    }


_SYSTEM = ("system", "developer")


# One response from its body to its end: what was asked, how its answer is read, and what is kept of it.
@dataclass(slots=True)
class Asked:
    """A validated response that is to be made, or is being made. `given` are the items of its own input."""

    tenant: str
    name: str
    store: bool
    # The conversation that gets its items.
    conversation: str | None
    earlier: list[Item]
    given: list[Item]
    order: Order
    request: ValidatedRequest
    answer: Answer
    builder: ResponseBuilder
    kinds: ToolKinds
    # The room that a whole answer takes, or the log-probabilities of a streamed one.
    place: AnswerPlace
    _ran_out: bool = False
    _logprobs: ChoiceLogprobs = field(init=False)

    def __post_init__(self) -> None:
        self._logprobs = ChoiceLogprobs(self.answer.form.codec, chat=True)

    def take(self, piece: Piece) -> str:
        """Take an addition to the answer; return the lines of its events."""
        self._ran_out |= piece.finish_reason == FinishReason.LENGTH
        entries = self._logprobs.columns(piece.logprobs)["content"] if piece.logprobs else ""
        self.place.grow(len(entries))
        return self.builder.add(parts_of(piece), entries)

    def finish(self) -> str:
        return self.builder.finish(usage_body(self.answer.bill), self._ran_out)

    def fail(self, error: QuireError) -> str:
        code = "server_error"
        if isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        elif isinstance(error, InvalidRequest):
            code = "invalid_prompt"
        return self.builder.fail(code, str(error))

    def record(self) -> Record:
        return Record(self.builder.body(), [*self.earlier, *self.given])

    @property
    def own_items(self) -> list[Item]:
        """The items that a conversation gets: what was asked and what is answered."""
        return [*self.given, *self.builder.body()["output"]]


def parts_of(piece: Piece) -> Sequence[Part]:
    return piece.parts or ([Words(piece.text)] if piece.text else ())


def size_of(piece: Piece) -> int:
    """Return the bytes of an addition, about."""
    return sum(len(part.name if isinstance(part, CallBegun) else part.text) for part in parts_of(piece))


def first_body(body: ResponsesRequest, name: str, model: str, created: int, request: ValidatedRequest) -> Json:
    """Return the fields of a response that are known before its answer; `created` is in Unix seconds."""
    sampling, options = request.sampling, body.reasoning
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "conversation": {"id": body.conversation_id} if body.conversation_id else None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": options.effort if options else None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": format_body(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": tool_bodies(body),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def is_too_long(error: InvalidRequest) -> bool:
    return any(each.reason == CONTEXT_LENGTH_EXCEEDED for each in error.violations)


def without_oldest(items: Sequence[Item]) -> list[Item] | None:
    """Return the conversation without about the older half of it; None where nothing is left to leave out.

    Leading system messages stay, and the rest begins with a user's message, so that no call loses its output.
    """
    first = next((place for place, each in enumerate(items) if each.get("role") not in _SYSTEM), len(items))
    turns = [place for place, each in enumerate(items) if place > first and each.get("role") == "user"]
    if not turns:
        return None
    middle = (first + len(items)) // 2
    cut = next((place for place in turns if place >= middle), turns[-1])
    return [*items[:first], *items[cut:]]


# Seconds between two looks for the wish, expressed at another router, to cancel a background response.
LOOK_S: Final = 1.0
_STOPPED: Final = "the router stopped before the response was done; ask again"


def response_routes(service: Service, parts: ResponseParts) -> APIRouter:
    """Return the routes of the Responses API."""
    router, api = APIRouter(tags=["Responses"]), Responses(service, parts)
    missing = refused({"404": "no such response is stored"})
    whole: dict[str, Any] = {"response_model": None, "responses": answers(ResponseBody, StreamEvent) | missing}
    one = "/v1/responses/{response_id}"
    router.add_api_route("/v1/responses", api.create, methods=["POST"], **whole)
    counted: dict[str, Any] = {"response_model": None, "responses": answers(InputTokens)}
    router.add_api_route("/v1/responses/input_tokens", api.input_tokens, methods=["POST"], **counted)
    router.add_api_route(one, api.retrieve, methods=["GET"], **whole)
    router.add_api_route(f"{one}/cancel", api.cancel, methods=["POST"], **whole)
    deleted = answers(Deleted) | missing
    router.add_api_route(one, api.delete, methods=["DELETE"], response_model=None, responses=deleted)
    listed = answers(ItemList) | missing
    router.add_api_route(f"{one}/input_items", api.input_items, methods=["GET"], response_model=None, responses=listed)
    router.include_router(conversation_routes(service, parts.store))
    return router


class Responses:
    """The handlers of the routes."""

    def __init__(self, service: Service, parts: ResponseParts) -> None:
        self._service, self._store, self._background = service, parts.store, parts.background
        self._conversations = Conversations(parts.store)

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer an input, which may continue a stored response."""
        check(body)
        self._service.begin_with(body.request_id, body.model, request, body.session_id or body.conversation_id)
        call = self._service.call(request, BACKGROUND_SECONDS if body.background else None)
        if body.background:
            self._background.check_room(_tenant(request))
        asked = await unless_gone(request, self._asked(body, request, call))
        with in_its_words(asked.kinds), in_words_of(asked.order):
            return await self._answered(asked, body, request)

    async def _answered(self, asked: Asked, body: ResponsesRequest, request: Request) -> Response:
        if body.background:
            return await self._in_background(asked, bool(body.stream))
        if body.stream:
            events = await unless_gone(request, self._service.start_streams([asked.request], asked.answer))
            return EventStream(self._lines(asked, events), events, answer_headers(asked.answer))
        try:
            whole = await unless_gone(request, self._collected(asked))
            return WholeResponse([whole], answer_headers(asked.answer), asked.place.leave)
        except BaseException:  # broad: an answer that is not sent, for whatever reason, takes no room
            asked.place.leave()
            raise

    async def retrieve(
        self,
        response_id: str,
        request: Request,
        stream: Annotated[bool, Query(description="the events of a background response, from any place on")] = False,
        starting_after: Annotated[int | None, Query(description="the sequence_number of the last event seen")] = None,
    ) -> Response:
        """Return a stored response, or go on with the stream of a background response."""
        job, record = await self._found(response_id, request)
        if stream:
            return _events_of(job, -1 if starting_after is None else starting_after)
        if job is not None and (job.runs or record is None):
            return JSONResponse(job.body())
        assert record is not None
        return JSONResponse(record.seen_at(time.time()))

    async def delete(self, response_id: str, request: Request) -> Response:
        """Forget a response; one that is in progress is cancelled first."""
        check_id(response_id)
        tenant = _tenant(request)
        if (job := self._background.find(tenant, response_id)) is not None:
            await job.cancel()
            self._background.forget(job)
        if not await self._store.delete(tenant, response_id) and job is None:
            raise not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str, request: Request) -> Response:
        """Cancel a background response; one that has ended stays as it is."""
        job, record = await self._found(response_id, request)
        if job is not None:
            await job.cancel()
            return JSONResponse(job.body())
        assert record is not None
        body = record.seen_at(time.time())
        if not body["background"]:
            what = "is not a background response; only these can be cancelled"
            raise InvalidRequest(FieldViolation("response_id", what))
        if body["status"] in RUNNING:
            await self._store.put(_tenant(request), _wish(response_id), b"cancel")
            body |= {"status": CANCELLED}
        return JSONResponse(body)

    async def input_items(self, response_id: str, request: Request, page: Annotated[ItemPage, Query()]) -> Response:
        """List the items of a response's conversation before its output."""
        _, record = await self._found(response_id, request)
        if record is None:
            raise not_found(response_id)
        return JSONResponse(page_of(record.items, page))

    async def input_tokens(self, body: ResponsesRequest, request: Request) -> Response:
        """Count the tokens of an input, with what it continues, without answering it."""
        check(body)
        self._service.begin_with(body.request_id, body.model, request)
        call = self._service.call(request)
        call.charge.answers = False
        asked = await unless_gone(request, self._asked(body, request, call))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(asked.request.prompt)})

    # ------------------------------------------------------------ before the answer

    async def _asked(self, body: ResponsesRequest, request: Request, call: CallContext) -> Asked:
        tenant = _tenant(request)
        given = await with_referenced(self._store, tenant, items_of(body.input))
        earlier = await self._earlier(body, tenant)
        store, conversation = body.store is not False, body.conversation_id
        order, validated, answer = await self._fitted(body, earlier, given, call)
        if conversation is not None:
            given = with_ids(as_texts(given), earlier)
            check_size([*earlier, *given], instead=SHORTER)
        elif store:
            given = with_ids(as_texts(given))
            check_size([*earlier, *given])
        name, created = new_id("resp_"), answer.form.created
        first = first_body(body, name, answer.form.model, created, validated)
        check_text(first)
        kinds = tool_kinds(body.tools or ())
        builder = ResponseBuilder(first, new_item_ids(name), lambda: int(time.time()), bool(body.stream), kinds)
        place = self._service.room.place(MAX_ANSWER_BYTES)
        answer.id = name
        return Asked(
            *(tenant, name, store, conversation, [*earlier], [*given]),
            *(order, validated, answer, builder, kinds, place),
        )

    async def _earlier(self, body: ResponsesRequest, tenant: str) -> Sequence[Item]:
        """Return the items so far. Raises InvalidRequest, NotFound, and Unavailable while the store does not answer."""
        if (name := body.conversation_id) is not None:
            return (await self._conversations.find(tenant, name)).items
        if (previous := body.previous_response_id) is None:
            return []
        entry = await self._store.get(tenant, previous)
        record = Record.of(entry) if entry is not None else None
        if record is None:
            raise no_previous(previous)
        if record.body["status"] in RUNNING:
            what = f"is {previous!r}, which is still in progress; wait for its end"
            raise InvalidRequest(FieldViolation("previous_response_id", what))
        return record.conversation

    async def _fitted(
        self,
        body: ResponsesRequest,
        earlier: Sequence[Item],
        given: Sequence[Item],
        call: CallContext,
    ) -> tuple[Order, ValidatedRequest, Answer]:
        """Return the request of a conversation; with truncation, that of as much of its end as the context holds."""
        while True:
            try:
                return await self._validated(body, earlier, given, call)
            except InvalidRequest as error:
                shorter = without_oldest([*earlier, *given])
                if body.truncation != "auto" or shorter is None or not is_too_long(error):
                    raise
                earlier, given = shorter, []

    async def _validated(
        self,
        body: ResponsesRequest,
        earlier: Sequence[Item],
        given: Sequence[Item],
        call: CallContext,
    ) -> tuple[Order, ValidatedRequest, Answer]:
        service, kinds = self._service, tool_kinds(body.tools or ())
        order = order_of(body, kinds, conversation(body, earlier, given))
        with in_its_words(kinds), in_words_of(order):
            reading = await service.reading(order, call)
        order = order if reading is None else order.read_by(reading)
        with in_its_words(kinds), in_words_of(order):
            (validated,) = await service.validated(order, replace(call, lowers_max_tokens=True))
        form = Form(
            chat=True,
            model=service.shown_model(body.model),
            fingerprint=service.fingerprint,
            created=int(time.time()),
            codec=service.parts.codec,
            streamed=bool(body.stream),
            reading=reading,
            eos_token_ids=service.parts.card.eos_token_ids,
        )
        return order, validated, Answer(form, 1, form.id_prefix + call.request_id)

    # ------------------------------------------------------------ the answer

    async def _collected(self, asked: Asked) -> bytes:
        async with aclosing(await self._service.start_streams([asked.request], asked.answer)) as events:
            asked.builder.begin()
            async for prompt, event in events:
                if (piece := asked.answer.take(prompt, event)) is not None:
                    asked.place.grow(size_of(piece))
                    asked.take(piece)
        asked.finish()
        await self._keep(asked)
        return _dumps(asked.builder.body())

    async def _lines(self, asked: Asked, events: Events) -> AsyncGenerator[str, None]:
        yield asked.builder.begin()
        async for lines in self._rest(asked, events):
            yield lines

    async def _rest(self, asked: Asked, events: Events) -> AsyncGenerator[str, None]:
        """Yield the events of an answer. A response is stored before its last event, so that it can be continued."""
        try:
            async for prompt, event in events:
                piece = asked.answer.take(prompt, event)
                if piece is not None and (lines := asked.take(piece)):
                    yield lines
            last = asked.finish()
        except QuireError as error:
            # The status line was sent before.
            last = asked.fail(error)
        await self._keep(asked)
        yield last

    async def _keep(self, asked: Asked) -> None:
        """Store the response as it is now; one that is too large is not stored. A conversation gets what is done."""
        if asked.store and len(entry := asked.record().entry()) <= MAX_RESPONSE_BYTES:
            await self._store.put(asked.tenant, asked.name, entry)
        if asked.conversation is not None and asked.builder.status in (COMPLETED, INCOMPLETE):
            await self._conversations.lengthen(asked.tenant, asked.conversation, asked.own_items)

    # ------------------------------------------------------------ in the background

    async def _in_background(self, asked: Asked, streamed: bool) -> Response:
        self._background.check_room(asked.tenant)
        job = Job(asked.tenant, asked.name, asked.builder.body, streamed)
        await self._background.start(job, self._work(asked, job))
        return _events_of(job, -1) if streamed else JSONResponse(asked.builder.body())

    async def _work(self, asked: Asked, job: Job) -> None:
        try:
            job.write(asked.builder.begin(QUEUED))
            await self._keep(asked)
            job.kept.set()
            await self._answer(asked, job)
        except QuireError as error:
            job.write(asked.fail(error))
            await self._keep(asked)
        except asyncio.CancelledError:
            if asked.builder.status in RUNNING:
                job.write(asked.fail(Unavailable(_STOPPED)) if job.stopped else asked.builder.cancel())
            await self._keep(asked)
        finally:
            job.end()

    async def _answer(self, asked: Asked, job: Job) -> None:
        looking = asyncio.create_task(self._look(job))
        try:
            async with aclosing(await self._service.start_streams([asked.request], asked.answer)) as events:
                job.write(asked.builder.begin(IN_PROGRESS))
                async for lines in self._rest(asked, events):
                    job.write(lines)
        finally:
            await cancel_and_wait(looking)

    async def _look(self, job: Job) -> None:
        """Cancel a job when its client asked another router for that."""
        while self._store.is_shared:
            await asyncio.sleep(LOOK_S)
            with suppress(Unavailable):
                if await self._store.get(job.tenant, _wish(job.name)) and job.task is not None:
                    job.task.cancel()
                    return

    # ------------------------------------------------------------ what is stored

    async def _found(self, name: str, request: Request) -> tuple[Job | None, Record | None]:
        """Return a response of the caller's, of which one is there. Raises NotFound, and Unavailable."""
        check_id(name)
        tenant = _tenant(request)
        job = self._background.find(tenant, name)
        entry = await self._store.get(tenant, name)
        record = Record.of(entry) if entry is not None else None
        if job is None and record is None:
            raise not_found(name)
        return job, record


def _events_of(job: Job | None, after: int) -> EventStream:
    """Return the events of a background response after this one."""
    if job is None or job.log is None:
        what = "is offered only for background responses that were created with stream, at their own router"
        raise InvalidRequest(FieldViolation("stream", f"{what}; leave it out"))
    job.log.check(after)
    lines = job.log.after(after)
    return EventStream(lines, lines, {})


def _tenant(request: Request) -> str:
    return str(request.state.caller.tenant.name)


def _wish(name: str) -> str:
    """Return the name of the entry by which a router hears that a response is to be cancelled."""
    return f"{name}.cancel"


def _dumps(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
