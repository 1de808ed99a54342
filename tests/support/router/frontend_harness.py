"""A frontend over fake workers, with everything real between admission and the workers' sockets."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from common.backoff import Backoff
from common.contracts.clock import SystemClock
from common.contracts.turns import DEFAULT_MAX_WAIT
from common.contracts.types import BlockHash, PoolIdentity, SamplingParams
from common.decisions.ring import DecisionRing
from common.telemetry.spans import RecordedSpan
from quire.decision.v1.decision_pb2 import ListDecisionsRequest, ListDecisionsResponse
from router.contracts.answer_parts import Parser
from router.contracts.events import Finished, GenerateEvent, Tokens, ValidatedRequest
from router.contracts.identity import UNKNOWN_GEOMETRY, UNKNOWN_POOLING
from router.contracts.index_answer import IndexAnswer, IndexSaid
from router.contracts.ports import TextAssembler, TextAssemblers, TextDelta
from router.observe.kept_records import KeptRecords
from router.observe.metrics import RouterMetrics
from router.observe.recorder import Recorder
from router.observe.tail_keeper import TailKeeper
from router.observe.tail_rules import Objective
from router.placement.admission import AdmissionLimiter, AdmissionLimits
from router.placement.remote_prefill import Mode
from router.placement.routing import Router
from router.requests.dispatcher import Dispatcher
from router.requests.frontend import RouterFrontend
from router.workers.client import Pacing, RouterIdentity
from router.workers.pool import WorkerPool
from tests.support.router.fake_worker import IDENTITY, PATIENCE_S
from tests.support.spans import CollectedSpans
from tests.support.waiting import until

QUICK = Pacing(Backoff(first=0.01, longest=0.05, jitter=0.5), hello=1.0)
CLOCK = SystemClock()
MODEL = "served"


class Words:
    """A TextAssembler that writes token 101 as "<101>" and stops at a string of that form, wherever it comes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        text = ""
        for taken, token in enumerate(token_ids, start=1):
            word = f"<{token}>"
            if word in self._stops:
                return TextDelta(text, taken, word)
            text += word
        return TextDelta(text, len(token_ids))

    def finish(self) -> str:
        return "."


class WordAssemblers:
    def assembler(
        self,
        sampling: SamplingParams,
        kept: Collection[str] = (),
        skip: bool = True,
        after: Sequence[int] = (),
        parser: Parser | None = None,
    ) -> TextAssembler:
        return Words(sampling.stop)


class FixedIndex:
    """A PrefixIndex that gives one answer."""

    def __init__(self, answer: Mapping[str, int] | None = None) -> None:
        self.answer, self.asked = answer, [()] * 0
        self.connected = answer is not None

    async def lookup(self, block_hashes: Sequence[BlockHash]) -> IndexAnswer:
        self.asked.append(tuple(block_hashes))  # type: ignore[arg-type]
        if self.answer is None:
            return IndexAnswer(None, IndexSaid.FAILED, "it could not be reached")
        return IndexAnswer(self.answer)


@dataclass
class Harness:
    """The frontend, and the parts of it that a test inspects."""

    frontend: RouterFrontend
    dispatcher: Dispatcher
    pool: WorkerPool
    admission: AdmissionLimiter
    index: FixedIndex
    decisions: DecisionRing
    spans: CollectedSpans
    registry: CollectorRegistry
    tracer: Tracer
    # What the latest request has yielded so far.
    seen: list[GenerateEvent] = field(default_factory=list)
    # The same of each request.
    seen_of_all: list[list[GenerateEvent]] = field(default_factory=list)

    def span(self, name: str) -> RecordedSpan:
        """Return the one span of this name that has ended."""
        return self.spans.named(name)

    def failure(self, name: str) -> str | None:
        """Return the error status of the one span of this name; None when it is ok."""
        status = self.span(name).status
        return None if status.is_ok else status.description

    async def events(self, request: ValidatedRequest) -> list[GenerateEvent]:
        """Return everything that a request yields."""
        async with asyncio.timeout(PATIENCE_S), aclosing(self.frontend.generate(request)) as events:
            seen = list[GenerateEvent]()
            self.seen = seen
            self.seen_of_all.append(seen)
            async for event in events:
                seen.append(event)
            return seen

    async def connected(self, count: int) -> None:
        """Wait until so many workers are connected."""
        await self.until(lambda: len(self.pool.models()) == count)

    async def until(self, true: Callable[[], bool]) -> None:
        """Let all other tasks run until `true` holds."""
        await until(true, every=0, seconds=PATIENCE_S)


class Worker(Protocol):
    """A worker that a frontend connects to."""

    @property
    def address(self) -> str: ...

    async def start(self) -> None: ...

    async def kill(self) -> None: ...


@asynccontextmanager
async def frontend_over(
    *workers: Worker,
    limits: AdmissionLimits | None = None,
    index: FixedIndex | None = None,
    patience: float = PATIENCE_S,
    eos: tuple[int, ...] = (),
    pooling: str = UNKNOWN_POOLING,
    identity: PoolIdentity | None = None,
    assemblers: TextAssemblers | None = None,
    incarnation: bytes = b"i" * 16,
    manager_patience: float = math.inf,
    objective: Objective | None = None,
    max_wait: float = DEFAULT_MAX_WAIT,
    remote_prefill: Mode = "auto",
) -> AsyncIterator[Harness]:
    """Start workers and a frontend that is connected to all of them; with an objective it keeps bad requests."""
    identity = identity or PoolIdentity(
        "", IDENTITY.tokenizer_fingerprint, IDENTITY.block_size, UNKNOWN_GEOMETRY, pooling=pooling
    )
    pool = WorkerPool(RouterIdentity("router", incarnation), identity, CLOCK, QUICK, manager_patience=manager_patience)
    index, decisions, registry, spans = index or FixedIndex(), DecisionRing(1000), CollectorRegistry(), CollectedSpans()
    numbers = itertools.count(1)
    new_id = lambda: f"id-{next(numbers)}"  # noqa: E731
    dispatcher = Dispatcher(pool, Router(CLOCK, new_id, seed=1), index, decisions, CLOCK, patience, max_wait)
    metrics = RouterMetrics(registry, aliases=("alias",))
    tail = None if objective is None else _keeper(objective, decisions, metrics, spans)
    recorder = Recorder(metrics, decisions, spans.tracer, CLOCK, new_id, tail, MODEL)
    admission = AdmissionLimiter(limits or AdmissionLimits())
    words = assemblers or WordAssemblers()
    frontend = RouterFrontend(dispatcher, admission, words, recorder, eos, remote_prefill=remote_prefill)
    harness = Harness(frontend, dispatcher, pool, admission, index, decisions, spans, registry, spans.tracer)
    try:
        for worker in workers:
            await worker.start()
            pool.add_worker(worker.address)
        await harness.connected(len(workers))
        yield harness
    finally:
        await pool.aclose()
        for worker in workers:
            await worker.kill()


def _keeper(objective: Objective, ring: DecisionRing, metrics: RouterMetrics, spans: CollectedSpans) -> TailKeeper:
    """Return a keeper without a KV manager."""

    async def nothing(calls: Sequence[ListDecisionsRequest]) -> Sequence[ListDecisionsResponse]:
        return [ListDecisionsResponse()] * len(calls)

    return TailKeeper(objective, ring, KeptRecords(1 << 20), metrics, spans.add, nothing)


def request(prompt: int = 10, **fields: object) -> ValidatedRequest:
    """Return a request for a prompt of 1, 2, 3, ...; fields of SamplingParams go there, the others to the request."""
    names = set(SamplingParams.__dataclass_fields__)
    sampling = SamplingParams(**{"max_tokens": 3} | {key: fields.pop(key) for key in list(fields) if key in names})  # type: ignore[arg-type]
    return ValidatedRequest(tuple(range(1, prompt + 1)), sampling, CLOCK.monotonic(), **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def in_background(harness: Harness, wanted: ValidatedRequest) -> AsyncIterator[asyncio.Task[list[GenerateEvent]]]:
    """Run a request beside the test; it is cancelled at the end if it still runs."""
    task = asyncio.create_task(harness.events(wanted))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


def tokens_of(events: list[GenerateEvent], index: int = 0) -> list[int]:
    parts = [event.token_ids for event in events if isinstance(event, Tokens) and event.index == index]
    return [token for part in parts for token in part]


def text_of(events: list[GenerateEvent], index: int = 0) -> str:
    """Return the text of one sequence as a client received it."""
    return "".join(event.text for event in events if isinstance(event, Tokens) and event.index == index)


def ends_of(events: list[GenerateEvent]) -> dict[int, Finished]:
    """Return the end of each sequence."""
    return {event.index: event for event in events if isinstance(event, Finished)}


async def until_nothing_left(harness: Harness) -> None:
    """Wait until no request and no load is counted any more. A client may have its error before its request leaves."""
    limiter = harness.admission

    def left() -> tuple[int, ...]:
        outstanding = sum(model.outstanding for model in harness.pool.models())
        return limiter.queued, limiter.running, limiter.tokens_in_flight, outstanding

    await harness.until(lambda: left() == (0, 0, 0, 0))
