"""Serves requests for embeddings: each input is one request of the frontend, and a few of them run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from common.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    FieldViolation,
    InvalidRequest,
    QuireError,
)
from common.contracts.limits import MAX_EMBEDDING_INPUTS, MAX_EMBEDDINGS_AT_ONCE
from common.contracts.types import FinishReason, Usage
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.api.shared.metering import UNLIMITED, Meter
from router.contracts.embedding import shortened
from router.contracts.events import Admitted, Finished, Timings, ValidatedRequest
from router.contracts.ports import CallContext, Frontend, RequestValidator

T = TypeVar("T")
_FAILURES: Final[dict[FinishReason, type[QuireError]]] = {
    FinishReason.CANCELLED: Cancelled,
    FinishReason.DEADLINE: DeadlineExceeded,
}
_OPTIONAL: Final = ("add_special_tokens", "truncate_prompt_tokens")


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one input, in little-endian float32, and what it cost."""

    vector: bytes
    usage: Usage
    timings: Timings
    worker_id: str
    trace_id: str


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A whole request, validated. `dimensions` is None where vectors stay as the pool makes them."""

    inputs: Sequence[ValidatedRequest]
    dimensions: int | None

    def finished(self, vector: bytes) -> bytes:
        return vector if self.dimensions is None else shortened(vector, self.dimensions)


class Embedder:
    """Validates requests for embeddings and runs their inputs. `hidden_size` is that of the model, 0 for unknown."""

    def __init__(
        self, frontend: Frontend, validator: RequestValidator, hidden_size: int, meter: Meter = UNLIMITED
    ) -> None:
        self._frontend, self._validator, self.hidden_size, self._meter = frontend, validator, hidden_size, meter

    async def validated(self, request: pb.EmbedRequest, call: CallContext, number: int, most: int) -> Embeddings:
        """Return the request, all of which is charged first. Raises Overloaded and InvalidRequest.

        The fields of InvalidRequest are those of EmbedRequest.

        `number` is the least size in bytes of one number in an answer, which may have `most` bytes.
        """
        count, dimensions = len(request.inputs), request.dimensions if request.HasField("dimensions") else None
        if not 1 <= count <= MAX_EMBEDDING_INPUTS:
            what = f"has {count} inputs; expected 1 to {MAX_EMBEDDING_INPUTS}"
            raise InvalidRequest(FieldViolation("inputs", what))
        self._check_dimensions(dimensions)
        least = count * number * (dimensions or self.hidden_size)
        if least > most:
            what = f"make an answer of {least} bytes or more; at most {most}; send fewer inputs at once, or dimensions"
            raise InvalidRequest(FieldViolation("inputs", what))
        self._meter.begin(request.inputs, pb.GenerateRequest(request_id=request.request_id), call, embeds=True)
        inputs = list[ValidatedRequest]()
        try:
            for place, each in enumerate(_requests_of(request)):
                inputs.append(await self._input(place, each, call, count))
                if place + 1 < count:
                    await asyncio.sleep(0)  # token ids and short texts are validated without a wait
        finally:
            self._meter.give_back(call)
        return Embeddings(inputs, dimensions)

    def _check_dimensions(self, dimensions: int | None) -> None:
        most = self.hidden_size
        if dimensions is not None and (dimensions < 1 or dimensions > most > 0):
            what = f"is {dimensions}; expected 1 to {most or 'the numbers of a vector'}, as many as the model has"
            raise InvalidRequest(FieldViolation("dimensions", what))

    async def _input(self, place: int, request: pb.GenerateRequest, call: CallContext, count: int) -> ValidatedRequest:
        if count > 1:
            call = replace(call, request_id=f"{call.request_id}-{place}" if call.request_id else "")
            request.request_id = f"{request.request_id}-{place}" if request.request_id else ""
        try:
            return replace(await self._validator.validate(request, call, embeds=True), whole=True)
        except InvalidRequest as error:
            raise InvalidRequest(*(_of_input(each, place) for each in error.violations)) from None

    async def run(self, request: Embeddings, grow: Callable[[int], None]) -> list[Embedding]:
        """Return the embeddings in the order of the inputs; `grow` is called with the bytes of each vector.

        Raises the error of the first input that fails; the others are cancelled then.
        """

        async def work(place: int) -> Embedding:
            found = await self._one(request.inputs[place], request)
            grow(len(found.vector))
            return found

        return await each_of(len(request.inputs), MAX_EMBEDDINGS_AT_ONCE, work)

    async def _one(self, asked: ValidatedRequest, request: Embeddings) -> Embedding:
        worker_id, trace_id, found = "", "", None
        async with aclosing(self._frontend.generate(asked)) as events:
            async for event in events:
                if isinstance(event, Admitted):
                    worker_id, trace_id = event.worker_id, event.trace_id
                elif isinstance(event, Finished):
                    _check_end(event)
                    vector = request.finished(event.embedding)
                    found = Embedding(vector, event.usage, event.timings, worker_id, trace_id)
        if found is None:
            raise EngineFailure("the request ended without a vector")
        return found


async def each_of(count: int, at_once: int, work: Callable[[int], Awaitable[T]]) -> list[T]:
    """Return the results of work on each number below `count`, so many at once, in order.

    Raises the first error; what runs then is cancelled.
    """
    waiting, found = iter(range(count)), dict[int, T]()

    async def some() -> None:
        for place in waiting:
            found[place] = await work(place)

    tasks = [asyncio.create_task(some()) for _ in range(min(count, at_once))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [found[place] for place in range(count)]


def usage_of(embeddings: Sequence[Embedding]) -> Usage:
    """Return what all inputs cost together."""
    totals = {
        name: sum(getattr(each.usage, name) for each in embeddings)
        for name in ("prompt_tokens", "cached_tokens", "output_tokens", "recomputed_tokens", "preemptions")
    }
    return Usage(**totals)


def _requests_of(request: pb.EmbedRequest) -> Iterator[pb.GenerateRequest]:
    """Yield the request of each input; the token to sample counts for nothing."""
    for each in request.inputs:
        one = pb.GenerateRequest(
            request_id=request.request_id,
            prompt=each,
            sampling=types_pb2.SamplingParams(max_tokens=1, min_tokens=0, n=1),
            priority=request.priority,
            cache=request.cache,
            traceparent=request.traceparent,
            truncation_side=request.truncation_side,
        )
        for name in _OPTIONAL:
            if request.HasField(name):
                setattr(one, name, getattr(request, name))
        yield one


def _of_input(violation: FieldViolation, place: int) -> FieldViolation:
    """Return a violation of a prompt as one of its input; those of other fields stay as they are."""
    field = violation.field
    if field != "prompt" and not field.startswith("prompt."):
        return violation
    return replace(violation, field=f"inputs[{place}]{field.removeprefix('prompt')}")


def _check_end(event: Finished) -> None:
    if event.reason is not FinishReason.STOP:
        kind = _FAILURES.get(event.reason, EngineFailure)
        raise kind(event.message or f"the request ended early: {event.reason}")
    if not event.embedding:
        raise EngineFailure("the worker sent no vector; run the same Quire version on every service")
