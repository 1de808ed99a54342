"""The router of the model: the real frontend, dispatcher, mover, pool and connections, over streams in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

from prometheus_client import CollectorRegistry

from common.backoff import Backoff
from common.contracts.clock import ManualClock
from common.contracts.errors import QuireError
from common.contracts.types import PoolIdentity, SamplingParams
from common.decisions.ring import DecisionRing
from router.contracts.events import Finished, GenerateEvent, Tokens, ValidatedRequest
from router.contracts.identity import UNKNOWN_GEOMETRY
from router.observe.metrics import RouterMetrics
from router.observe.recorder import Recorder
from router.placement.admission import AdmissionLimiter, AdmissionLimits
from router.placement.routing import Router
from router.placement.worker_model import WorkerModel
from router.requests.dispatcher import Dispatcher
from router.requests.frontend import RouterFrontend
from router.requests.run import Phase, RequestRun
from router.workers.client import Pacing, RouterIdentity
from router.workers.pool import WorkerPool
from tests.suites.protocol.scenario import EOS, Request
from tests.support.router.fake_worker import IDENTITY
from tests.support.router.frontend_harness import FixedIndex, WordAssemblers
from tests.support.spans import CollectedSpans

_PACING = Pacing(Backoff(first=0.5, longest=0.5, jitter=0.0), hello=1000.0)


class Metrics(RouterMetrics):
    """Metrics of all routers of a process: they decide nothing, and take longest to make."""

    def watch(self, running: Callable[[], float], queued: Callable[[], float]) -> None:
        """Watch no router: the next one would do it again."""


_METRICS, _TRACER = Metrics(CollectorRegistry()), CollectedSpans().tracer


class Client:
    """One client of the router; it reads at once, or all together once `reads` is set."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.request = number, request
        self.reads = asyncio.Event()
        self.tokens: list[int] = []
        self.end: Finished | None = None
        self.error: QuireError | None = None
        self.task: asyncio.Task[None] | None = None

    def start(self, frontend: RouterFrontend, arrived: float) -> None:
        """Send the request; the router's loop must run."""
        sampling = SamplingParams(max_tokens=self.request.max_tokens, seed=0)
        wanted = ValidatedRequest(self.request.prompt, sampling, arrived, request_id=str(self.number))
        self.task = asyncio.create_task(self._read(frontend, wanted))

    @property
    def over(self) -> bool:
        return self.task is not None and self.task.done()

    async def _read(self, frontend: RouterFrontend, wanted: ValidatedRequest) -> None:
        with suppress(asyncio.CancelledError):
            try:
                async with aclosing(frontend.generate(wanted)) as events:
                    async for event in events:
                        self._take(event)
                        await self.reads.wait()
            except QuireError as error:
                self.error = error

    def _take(self, event: GenerateEvent) -> None:
        if isinstance(event, Tokens):
            self.tokens += event.token_ids
        elif isinstance(event, Finished):
            self.end = event


class RouterSide:
    """One router process and its clients."""

    def __init__(self, requests: tuple[Request, ...], dial: Any) -> None:
        self.clock = ManualClock(1000.0)
        identity = PoolIdentity("", IDENTITY.tokenizer_fingerprint, IDENTITY.block_size, UNKNOWN_GEOMETRY)
        self.pool = WorkerPool(RouterIdentity("router", b"i" * 16), identity, self.clock, _PACING, dial)
        numbers = itertools.count(1)
        new_id = lambda: f"id-{next(numbers)}"  # noqa: E731
        ring = DecisionRing(10)
        self.dispatcher = Dispatcher(
            self.pool, Router(self.clock, new_id, seed=1), FixedIndex(), ring, self.clock, float("1e6")
        )
        recorder = Recorder(_METRICS, ring, _TRACER, self.clock, new_id, None, "model")
        self.admission = AdmissionLimiter(AdmissionLimits())
        self.frontend = RouterFrontend(self.dispatcher, self.admission, WordAssemblers(), recorder, (EOS,))
        self.clients = [Client(number, request) for number, request in enumerate(requests)]

    def model_at(self, address: str) -> WorkerModel | None:
        return next((each.model for each in self.pool.members() if each.client.address == address), None)

    def runs(self) -> list[RequestRun]:
        return sorted(self.frontend._runs, key=lambda run: run.request_id)

    def reserved_at(self, model: WorkerModel) -> int:
        """Return how many sequences have a place at a worker, booked places included."""
        places = [each.reservation for run in self.runs() for each in run.sequences]
        places += [
            each for run in self.runs() for one in run.sequences if one.booked for each in one.booked.reservations
        ]
        return sum(place is not None and place._held and place.model is model for place in places)

    def booked_for(self, address: str, handle: int) -> WorkerModel | None:
        """Return the worker at which a sequence of another one has a booked place."""
        places = [each for run in self.runs() for each in run.unfinished() if each.booked is not None]
        here = [each for each in places if each.client and (each.client.address, each.handle) == (address, handle)]
        return here[0].booked.reservations[0].model if here and here[0].booked else None

    def tries_suspects(self) -> bool:
        """Return whether a request may have its place in hand until it is its turn (`probation.py`)."""
        return any(run.suspicion.apart or run.suspicion.waits_for is not None for run in self.runs())

    def may_move(self) -> bool:
        """Return whether the mover may find a place for a sequence at its next chance."""
        leaving = self.pool.migrating()
        places = [each for run in self.runs() for each in run.unfinished()]
        return any(each.client in leaving and each.phase is Phase.AT_WORKER for each in places)

    def waiting(self) -> list[str]:
        """Return why each job in the queue left its worker, "" for a new one."""
        return [waiting.job.moved_because for waiting in _jobs(self.dispatcher)]

    def state_key(self) -> tuple[object, ...]:
        """Return what decides the future, hashable; times and figures of speed decide only which place is cheaper."""
        return (
            tuple([_member_key(each) for each in self.pool.members()]),
            tuple([_run_key(run) for run in self.runs()]),
            tuple(self.waiting()),
            tuple(
                [(tuple(c.tokens), c.end is not None, c.task is None, c.over, c.reads.is_set()) for c in self.clients]
            ),
        )


def _jobs(dispatcher: Dispatcher) -> list[Any]:
    lines = [line for lines in dispatcher._queue._rounds.values() for line in lines.values()]
    return [waiting for line in lines for _, waiting in line]


def _member_key(member: Any) -> tuple[object, ...]:
    client, model = member.client, member.model
    known = (model.load, model.outstanding, model.sequences) if model is not None else ()
    return client.ready, known, tuple(client._in_flight), frozenset(client._given_up)


def _run_key(run: RequestRun) -> tuple[object, ...]:
    places = [
        (
            each.client.address if each.client else "",
            each.handle,
            (each.attempt, each.drained, each.phase, each.loss),
            each.booked.worker_id if each.booked else "",
            tuple(each.output.tokens),
        )
        for each in run.sequences
    ]
    inbox = [(a.index, a.attempt, repr(a.other), tuple(a.token_ids)) for a in run.inbox._arrivals]
    return run.request_id, tuple(places), tuple(inbox), run.waits
