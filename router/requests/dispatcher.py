"""Places sequences: looks up their prefix, queues them for a worker, chooses it, and reserves their load there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.clock import Clock
from common.errors import DeadlineExceeded, FieldViolation, InvalidRequest, QuireError, Unavailable
from common.types import BlockHash, Decision, DecisionKind, PoolIdentity
from router.core.admission import check_deadline
from router.core.identity import is_complete
from router.core.optimistic import BURST_SECONDS, MEMORY_SECONDS, OptimisticIndex
from router.core.routing import Choice, Outcome, PlacementRequest, Router
from router.core.waiting_queue import Ticket, WaitingQueue
from router.core.worker_model import WorkerModel
from router.ports import DecisionSink, PrefixIndex
from router.requests.reservation import LoadReservation
from router.workers.client import WorkerClient
from router.workers.pool import WorkerPool

# Seconds that a request waits while no worker is usable; a supervisor restarts a worker in less.
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Job:
    """Sequences with the same tokens, to be placed at one worker.

    `moved_because` says why they left their previous worker; it is empty for a new request.
    """

    request: PlacementRequest
    block_hashes: Sequence[BlockHash]
    priority: int
    deadline: float | None
    moved_because: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker for a job, with the load of each sequence reserved there; the caller submits them at once.

    Every reservation must be released. `looked_up_ns` is when the prefix lookup ended.
    """

    worker_id: str
    client: WorkerClient
    reservations: tuple[LoadReservation, ...]
    decision: Decision
    looked_up_ns: int


@dataclass(slots=True, eq=False)
class _Waiting:
    """A job in the queue, the prefix hits that the index returned, and the future of its placement."""

    job: Job
    hits: Mapping[str, int] | None
    looked_up_ns: int
    placed: asyncio.Future[Placement] = field(init=False)

    def __post_init__(self) -> None:
        self.placed = asyncio.get_running_loop().create_future()

    def discard(self) -> None:
        """Release the placement; the caller is gone."""
        if self.placed.done() and not self.placed.cancelled() and self.placed.exception() is None:
            for reservation in self.placed.result().reservations:
                reservation.release()


class Dispatcher:
    """Implements PoolListener: when capacity changes or a reservation is released, it tries the queue's head again."""

    def __init__(
        self,
        pool: WorkerPool,
        router: Router,
        index: PrefixIndex,
        decisions: DecisionSink,
        clock: Clock,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._pool, self._router, self._index, self._decisions = pool, router, index, decisions
        self._clock, self._patience = clock, patience
        self._memory = OptimisticIndex()
        self._queue: WaitingQueue[_Waiting] = WaitingQueue()
        self._starving: asyncio.TimerHandle | None = None
        self._identity_known = asyncio.Event()
        pool.listen(self)

    async def known_identity(self) -> PoolIdentity:
        """Return the pool's identity once a worker has reported it. Raises Unavailable when none does for a while."""
        if self._identity_known.is_set():
            return self._pool.identity
        try:
            async with asyncio.timeout(self._patience):
                while not is_complete(self._pool.identity):
                    await self._identity_known.wait()
        except TimeoutError:
            raise self._no_worker() from None
        return self._pool.identity

    def ticket(self, priority: int) -> Ticket:
        """Return a place in the order of waiting requests; a request keeps it for all its jobs."""
        return self._queue.ticket(priority)

    async def place(self, job: Job, ticket: Ticket) -> Placement:
        """Return a placement whose load is reserved.

        Raises InvalidRequest when no pool can hold the job, DeadlineExceeded when its deadline cannot be met, and
        Unavailable when no worker has been usable for a while.
        """
        hits = await self._index.lookup(job.block_hashes) if job.block_hashes else None
        waiting = _Waiting(job, hits, self._clock.time_ns())
        self._queue.join(ticket, waiting)
        self._serve_queue()
        try:
            async with asyncio.timeout(self._seconds_left(job)):
                return await waiting.placed
        except BaseException as error:
            self._queue.leave(ticket)
            # A placement may have come together with the timeout or the cancellation.
            waiting.discard()
            self._serve_queue()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("deadline exceeded while the request waited for a worker") from None
            raise

    # ------------------------------------------------------------ PoolListener

    def capacity_changed(self) -> None:
        if is_complete(self._pool.identity):
            self._identity_known.set()
        else:
            self._identity_known.clear()
        self._serve_queue()

    def cache_lost(self, worker_id: str) -> None:
        self._memory.forget(worker_id)

    # ------------------------------------------------------------ the queue

    def _serve_queue(self) -> None:
        """Place jobs in order, up to the first that has to wait: a later one must not take its place."""
        while head := self._queue.head():
            ticket, waiting = head
            choice = self._choose(waiting)
            if choice.outcome is Outcome.NO_WORKER:
                self._starve()
                return
            self._fed()
            if choice.outcome is Outcome.WAIT:
                return
            self._queue.leave(ticket)
            self._settle(waiting, choice)
        self._fed()

    def _choose(self, waiting: _Waiting) -> Choice:
        job, workers = waiting.job, self._pool.models()
        names = [worker.worker_id for worker in workers]
        age = MEMORY_SECONDS if waiting.hits is None else BURST_SECONDS
        hits = self._memory.lookup(job.block_hashes, names, self._clock.monotonic(), age)
        for name, blocks in (waiting.hits or {}).items():
            hits[name] = max(blocks, hits.get(name, 0))
        return self._router.route(job.request, workers, hits, self._pool.absent())

    def _settle(self, waiting: _Waiting, choice: Choice) -> None:
        """Record the decision; set the placement, or the error that refuses the job."""
        job, decision = waiting.job, choice.decision
        if job.moved_because:
            decision = replace(decision, kind=DecisionKind.MIGRATION, reasons=(job.moved_because,))
        self._decisions.record(decision)
        if waiting.placed.done():
            return
        try:
            if choice.worker is None:
                raise _too_large(decision)
            now = self._clock.monotonic()
            check_deadline(now, job.deadline, choice.first_token_s)
            client = self._pool.client(choice.worker)
        except QuireError as refused:
            waiting.placed.set_exception(refused)
            return
        worker_id = choice.worker.worker_id
        self._memory.remember(worker_id, job.block_hashes, now)
        reservations = self._reserve(choice.worker, job.request, choice.hit_blocks)
        waiting.placed.set_result(Placement(worker_id, client, reservations, decision, waiting.looked_up_ns))

    def _reserve(self, worker: WorkerModel, request: PlacementRequest, hit_blocks: int) -> tuple[LoadReservation, ...]:
        capacity = worker.capacity
        uncached = request.prompt_tokens - hit_blocks * capacity.block_size
        blocks = capacity.blocks(request.prompt_tokens) - hit_blocks
        # The other sequences share all blocks of the first but the last, which each may have to compute again.
        loads = [(uncached, blocks), *[(1, 1)] * (request.sequences - 1)]
        return tuple(LoadReservation(worker, *load, self._clock, self._serve_queue) for load in loads)

    def _starve(self) -> None:
        if self._starving is None:
            self._starving = asyncio.get_running_loop().call_later(self._patience, self._give_up)

    def _fed(self) -> None:
        if self._starving is not None:
            self._starving.cancel()
            self._starving = None

    def _give_up(self) -> None:
        """Fail every job in the queue: no worker has been usable for too long."""
        self._starving = None
        while head := self._queue.head():
            ticket, waiting = head
            self._queue.leave(ticket)
            if not waiting.placed.done():
                waiting.placed.set_exception(self._no_worker())

    def _no_worker(self) -> Unavailable:
        now = self._clock.monotonic()
        known = [f"{name} is {reason}" for name, reason in self._pool.absent()]
        troubles = [(model.worker_id, model.trouble(now)) for model in self._pool.models()]
        known += [f"{name} is {trouble[0].value}: {trouble[1]}" for name, trouble in troubles if trouble]
        return Unavailable(f"no worker for {self._patience:g} s: {'; '.join(known) or 'none is known'}")

    def _seconds_left(self, job: Job) -> float | None:
        return None if job.deadline is None else max(0.0, job.deadline - self._clock.monotonic())


def _too_large(decision: Decision) -> InvalidRequest:
    reasons = "; ".join(f"{each.name}: {each.rejected}" for each in decision.candidates if each.rejected)
    return InvalidRequest(FieldViolation("sampling.max_tokens", f"prompt and output fit no worker: {reasons}"))
