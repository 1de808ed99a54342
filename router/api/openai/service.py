"""What the routes of all kinds of answers share: the served model, and a request from its body to its first event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from fastapi import Request
from opentelemetry.trace import NoOpTracer, Tracer

from common.contracts.clock import Clock
from common.contracts.errors import Cancelled, InvalidRequest, ModelNotFound, Overloaded, QuireError, Unsupported
from common.contracts.limits import MAX_HTTP_BODY_BYTES
from common.version import quire_version
from quire.inference.v1 import inference_pb2 as pb
from router.answers.reading import AnswerReader, Reading
from router.answers.requested_tools import NOTE_HEADER
from router.api.openai import errors
from router.api.openai.answer import Answer
from router.api.openai.batches.runner import BatchParts
from router.api.openai.identification import Ids
from router.api.openai.request import Order, of_conversation
from router.api.openai.responses.background import ResponseParts
from router.api.shared.answer_size import AnswerRoom
from router.api.shared.metering import UNLIMITED, Meter
from router.contracts.events import GenerateEvent, ValidatedRequest
from router.contracts.ports import (
    UNWATCHED,
    AdapterSource,
    Authenticator,
    CallContext,
    Frontend,
    ModelCard,
    NoAdapters,
    RefusalWatch,
    RequestValidator,
    Resumer,
    TextCodec,
)
from router.requests.request_ids import correlation_id
from router.tenants.tenancy import Charge

T = TypeVar("T")

# Events that wait for the reader. Further ones wait in their streams, whose own bounds then count.
_MOST_WAITING: Final = 16


# Merges several streams of events, for requests of several prompts. All end when one fails or the reader stops.
async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (number of the stream, event) as events come. Raises the error of the first failing stream."""
    if len(streams) == 1:
        # The common case: without a task, and without reading ahead of the client.
        async with aclosing(streams[0]) as stream:
            async for event in stream:
                yield 0, event
        return
    ready: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    places = asyncio.Semaphore(_MOST_WAITING)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for event in stream:
                await places.acquire()
                ready.put_nowait((number, event))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    for task in pumps:
        task.add_done_callback(ready.put_nowait)
    try:
        running = len(pumps)
        while running:
            item = await ready.get()
            if isinstance(item, asyncio.Task):
                item.result()
                running -= 1
            else:
                places.release()
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


Events = AsyncGenerator[tuple[int, GenerateEvent], None]


@dataclass(frozen=True, slots=True)
class HttpParts:
    """The parts that the application uses. `ready` is false until a worker is usable, and while draining."""

    frontend: Frontend
    validator: RequestValidator
    codec: TextCodec
    card: ModelCard
    why_not_ready: Callable[[], str]
    clock: Clock
    authenticator: Authenticator
    reader: AnswerReader
    responses: ResponseParts
    model: Callable[[], ModelCard]
    """Returns `card` with what workers have reported since."""
    resumer: Resumer
    # Whether a conversation with images, files, audio or video is refused; else a text stands in for each.
    refuses_media: bool = False
    # Whether streams end with their usage, whatever clients ask for.
    forces_usage: bool = False
    meter: Meter = UNLIMITED
    batches: BatchParts | None = None
    """Where files and batches of clients lie; None where they are off."""
    refusals: RefusalWatch = UNWATCHED
    tracer: Tracer = field(default_factory=NoOpTracer)
    adapters: AdapterSource = field(default_factory=NoAdapters)


class Service:
    """Validates orders and begins their answers."""

    def __init__(self, parts: HttpParts) -> None:
        self.parts, self.room = parts, AnswerRoom()
        self.fingerprint = _fingerprint(parts.card)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound for a model that is not served here."""
        card = self.parts.card
        if name and name not in card.names and self.parts.adapters.find_adapter(name) is None:
            raise ModelNotFound(f"model {name!r} is not served here; {card.name!r} is", name)

    def shown_model(self, name: str | None) -> str:
        """Return what an answer calls its model: an adapter by its name, and the base by its first name."""
        return name if name and self.parts.adapters.find_adapter(name) is not None else self.parts.card.name

    def begin_with(
        self, correlation: str | None, model: str | None, request: Request, session: str | None = None
    ) -> None:
        """Take over the ids that a body names. Raises ModelNotFound."""
        ids: Ids = request.state.ids
        ids.correlation = correlation_id(correlation or "") or ids.correlation
        ids.session = session or ids.session
        self.named(model, request)

    def named(self, model: str | None, request: Request) -> None:
        """Take over the model's name, for traces. Raises ModelNotFound."""
        self.check_model(model)
        request.state.ids.model = model or ""

    def call(self, request: Request, seconds: float | None = None) -> CallContext:
        """Return the context of a call that came with its body, and ends after so many seconds from now on."""
        now, ids = self.parts.clock.monotonic(), request.state.ids
        if not hasattr(request.state, "charge"):
            request.state.charge = Charge()
        return CallContext(
            arrived=getattr(request.state, "received", now),
            deadline=None if seconds is None else now + seconds,
            traceparent=ids.traceparent,
            tracestate=ids.tracestate,
            caller=request.state.caller,
            request_id=ids.request,
            trace_id=ids.trace,
            correlation_id=ids.recorded,
            session_id=ids.session,
            model=ids.model,
            charge=request.state.charge,
        )

    def check_chat(self, order: Order) -> None:
        """Raise BodyTooLarge for too much text, and Unsupported for more than text where the operator refuses that."""
        if (size := sum([prompt.ByteSize() for prompt in order.prompts])) > MAX_HTTP_BODY_BYTES:
            what = f"the conversation has {size} bytes without its images; expected at most {MAX_HTTP_BODY_BYTES}"
            raise errors.BodyTooLarge(what)
        self.check_media(order.media)

    def check_media(self, media: Iterable[str]) -> None:
        """Raise Unsupported for more than text where the operator refuses that."""
        if self.parts.refuses_media and (found := ", ".join(sorted({*media}))):
            raise Unsupported(f"the conversation has {found}, which this server refuses; send only text")

    async def reading(self, order: Order, call: CallContext) -> Reading | None:
        """Return how the answers to a chat are read, if not as they are.

        Raises InvalidRequest, Unsupported, and Overloaded where a rate of the tenant has no room for the chat.
        """
        self.check_chat(order)
        tools, reader = order.tools, self.parts.reader
        if tools is None or not reader.reads(tools.use):
            return None
        self.parts.meter.begin(order.prompts, order.common, call)
        try:
            return await reader.reading(order.prompts[0].chat, tools.use, order.asked, order.thinking_budget)
        except Overloaded:
            self.parts.meter.give_back(call)
            raise

    async def validated(self, order: Order, call: CallContext) -> list[ValidatedRequest]:
        """Return the requests of an order, all of which are charged first. Raises Overloaded and InvalidRequest."""
        self.parts.meter.begin(order.prompts, order.common, call)
        call = replace(call, notes=order.notes)
        calls = [call]
        if (count := len(order.prompts)) > 1:
            calls = [replace(call, request_id=f"{call.request_id}-{place}") for place in range(count)]
        try:
            requests = enumerate(zip(order.requests(), calls, strict=True))
            return [await self._validated(*each, place if count > 1 else None) for place, each in requests]
        finally:
            self.parts.meter.give_back(call)

    async def _validated(self, request: pb.GenerateRequest, call: CallContext, place: int | None) -> ValidatedRequest:
        """Return one request of an order; errors name its conversation where it is at a place among several."""
        try:
            return await self.parts.validator.validate(request, call)
        except InvalidRequest as error:
            if place is None or request.prompt.WhichOneof("content") != "chat":
                raise
            raise InvalidRequest(*(of_conversation(each, place) for each in error.violations)) from None

    async def start_streams(self, requests: Iterable[ValidatedRequest], answer: Answer) -> Events:
        """Return the events after the first, which shows that the request is not refused and a status can be sent."""
        return await start_streams([self.parts.frontend.generate(as_read(each, answer)) for each in requests], answer)


def as_read(request: ValidatedRequest, answer: Answer) -> ValidatedRequest:
    """Return a request whose output is read as its answer is, which gets the request's stop texts."""
    answer.stop, answer.include_stop = request.sampling.stop, request.sampling.include_stop
    answer.notes = request.notes
    reading = answer.form.reading
    new_parser = None if reading is None else reading.new_parser
    return replace(request, whole=not answer.form.streamed, new_parser=new_parser, response_id=answer.id)


async def start_streams(streams: Sequence[AsyncGenerator[GenerateEvent, None]], answer: Answer) -> Events:
    """Return the events of several requests after the first, which the answer takes."""
    events = merged(streams)
    try:
        answer.take(*await anext(events))
    except BaseException:  # broad: a cancellation must close the events too; all errors go on
        await events.aclose()
        raise
    return events


@contextmanager
def in_words_of(order: Order) -> Iterator[None]:
    """Let errors about Quire's own fields name those of the body."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(*map(order.in_its_words, error.violations)) from None


def answer_headers(answer: Answer) -> dict[str, str]:
    """Return the id of the trace, and the notes where there are some; `Identified` adds what every answer has."""
    named = {"x-trace-id": answer.trace_id, NOTE_HEADER: "; ".join(answer.notes)}
    return {name: value for name, value in named.items() if value}


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


def _fingerprint(card: ModelCard) -> str:
    """Return a text that changes with the version and the checkpoint, and so with possible answers."""
    model = card.identity.model_fingerprint[:12]
    return f"quire-{quire_version()}-{model}" if model else f"quire-{quire_version()}"
