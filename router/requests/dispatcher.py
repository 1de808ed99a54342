"""Gives sequences to workers: looks their prefix up, lets them wait in line for a worker, routes and submits them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.clock import Clock
from common.errors import DeadlineExceeded, FieldViolation, InvalidRequest, QuireError, Unavailable
from common.types import BlockHash, Decision, DecisionKind, PoolIdentity
from router.core.admission import check_deadline
from router.core.identity import is_complete
from router.core.optimistic import BURST_SECONDS, MEMORY_SECONDS, OptimisticIndex
from router.core.routing import Choice, Outcome, Placement, Router
from router.core.waiting_line import Ticket, WaitingLine
from router.core.worker_model import WorkerModel
from router.ports import DecisionSink, PrefixIndex
from router.workers.client import WorkerClient
from router.workers.pool import WorkerPool

# How long a request waits for any worker at all: a supervisor restarts one in less.
PATIENCE_SECONDS = 10.0


class Claim:
    """What one sequence takes up at a worker, in the router's own books; given back once."""

    def __init__(self, model: WorkerModel, prefill_tokens: int, blocks: int, now: float) -> None:
        self.model, self.placed_at = model, now
        self._prefill_tokens, self._blocks = prefill_tokens, blocks
        self._held = True
        model.placed(1, prefill_tokens, blocks)

    def prefilled(self) -> None:
        """The prompt is computed; the second and later calls do nothing."""
        if self._held and self._prefill_tokens:
            self.model.placed(0, -self._prefill_tokens, 0)
            self._prefill_tokens = 0

    def release(self) -> None:
        """The sequence has left; the second and later calls do nothing."""
        if self._held:
            self.model.placed(-1, -self._prefill_tokens, -self._blocks)
            self._held = False


@dataclass(slots=True, eq=False)
class Job:
    """One or more sequences with the same tokens that go to one worker together.

    `submit` is called, once and at once, with the choice and the worker's connection. `moved` says why they left the
    worker before, if they did.
    """

    placement: Placement
    block_hashes: Sequence[BlockHash]
    priority: int
    deadline: float | None
    submit: Callable[[Choice, WorkerClient], None]
    moved: str = ""
    hits: Mapping[str, int] | None = None
    looked_up_ns: int = 0
    placed: asyncio.Future[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.placed = asyncio.get_running_loop().create_future()


class Dispatcher:
    """Implements PoolListener: whenever the workers' capacity changes, whoever is next in line is tried again."""

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
        self._line: WaitingLine[Job] = WaitingLine()
        self._starving: asyncio.TimerHandle | None = None
        self._identity_known = asyncio.Event()
        pool.listen(self)

    async def known_identity(self) -> PoolIdentity:
        """Return the pool's identity once a worker has told it. Raises Unavailable when none does for a while."""
        if self._identity_known.is_set():
            return self._pool.identity
        try:
            async with asyncio.timeout(self._patience):
                while not is_complete(self._pool.identity):
                    await self._identity_known.wait()
        except TimeoutError:
            raise self._no_worker() from None
        return self._pool.identity

    def ticket(self, job: Job) -> Ticket[Job]:
        """Return the job's right to stand in line; keep it for the request's later jobs."""
        return self._line.ticket(job, job.priority)

    async def place(self, job: Job, ticket: Ticket[Job]) -> Choice:
        """Return the choice once the job is submitted.

        Raises InvalidRequest when no pool can hold it, DeadlineExceeded when a deadline cannot be met, and Unavailable
        when there has been no worker for a while.
        """
        ticket.item = job
        if job.block_hashes:
            job.hits = await self._index.lookup(job.block_hashes)
        job.looked_up_ns = self._clock.time_ns()
        self._line.join(ticket)
        self._serve_line()
        try:
            async with asyncio.timeout(self._seconds_left(job)):
                return await job.placed
        except TimeoutError:
            raise DeadlineExceeded("deadline exceeded while the request waited for a worker") from None
        finally:
            self._line.leave(ticket)

    def released(self) -> None:
        """A sequence left its worker: somebody may take its place."""
        self._serve_line()

    # ------------------------------------------------------------ PoolListener

    def capacity_changed(self) -> None:
        """Try whoever is next."""
        if is_complete(self._pool.identity):
            self._identity_known.set()
        else:
            self._identity_known.clear()
        self._serve_line()

    def cache_lost(self, worker_id: str) -> None:
        """Expect no hits there."""
        self._memory.forget(worker_id)

    # ------------------------------------------------------------ the line

    def _serve_line(self) -> None:
        """Place jobs in order until one has to wait: those behind it would take its place for ever."""
        while ticket := self._line.head():
            job = ticket.item
            choice = self._choose(job)
            if choice.outcome is Outcome.NO_WORKER:
                self._starve()
                return
            self._fed()
            if choice.outcome is Outcome.WAIT:
                return
            self._line.leave(ticket)
            self._settle(job, choice)
        self._fed()

    def _choose(self, job: Job) -> Choice:
        workers = self._pool.models()
        names = [worker.worker_id for worker in workers]
        age = MEMORY_SECONDS if job.hits is None else BURST_SECONDS
        hits = self._memory.lookup(job.block_hashes, names, self._clock.monotonic(), age)
        for name, blocks in (job.hits or {}).items():
            hits[name] = max(blocks, hits.get(name, 0))
        return self._router.route(job.placement, workers, hits, self._pool.absent())

    def _settle(self, job: Job, choice: Choice) -> None:
        """Submit the job, or tell it why not; either way the decision is recorded."""
        if job.moved:
            decision = replace(choice.decision, kind=DecisionKind.MIGRATION, reasons=(job.moved,))
            choice = replace(choice, decision=decision)
        self._decisions.record(choice.decision)
        if job.placed.done():
            return
        try:
            if choice.worker is None:
                raise _too_large(choice.decision)
            now = self._clock.monotonic()
            check_deadline(now, job.deadline, choice.first_token_s)
            job.submit(choice, self._pool.client(choice.worker))
        except QuireError as refused:
            job.placed.set_exception(refused)
        else:
            self._memory.remember(choice.worker.worker_id, job.block_hashes, now)
            job.placed.set_result(choice)

    def _starve(self) -> None:
        if self._starving is None:
            self._starving = asyncio.get_running_loop().call_later(self._patience, self._give_up)

    def _fed(self) -> None:
        if self._starving is not None:
            self._starving.cancel()
            self._starving = None

    def _give_up(self) -> None:
        """There has been no worker for too long: nobody in the line is kept waiting any longer."""
        self._starving = None
        while ticket := self._line.head():
            self._line.leave(ticket)
            if not ticket.item.placed.done():
                ticket.item.placed.set_exception(self._no_worker())

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
