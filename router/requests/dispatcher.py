"""Places sequences: looks up their prefix, queues them for a worker, chooses it, and reserves their load there."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.contracts.clock import Clock
from common.contracts.errors import NoWorker, QueueExpired, QuireError, Unavailable
from common.contracts.turns import BY_AGE, DEFAULT_MAX_WAIT
from common.contracts.types import BlockHash, Decision, DecisionKind, PoolIdentity
from router.contracts.identity import is_complete
from router.contracts.index_answer import NOTHING_ASKED, IndexAnswer
from router.contracts.ports import DecisionSink, PrefixIndex
from router.contracts.refusals import too_large, waiting_record
from router.placement.admission import ANY_WORKER, check_deadline, too_late_words
from router.placement.fair_queue import ONE_FLOW, FairQueue, Flow, Ticket, due_at
from router.placement.fetches import Held, find_held, passes_blocks
from router.placement.first_tokens import FirstTokens, Foretold
from router.placement.placement_request import (
    PlacementOutcome,
    PlacementRequest,
    must_wait,
    slots_of,
    verdict,
    waits_for_a_slot,
)
from router.placement.remote_prefill import (
    Elsewhere,
    Mode,
    compare_ways,
    for_prompts,
    full_blocks,
    has_workers_for_prompts,
    is_worth_it,
    prompt_alone,
    serving,
)
from router.placement.routed_prefixes import BURST_SECONDS, MEMORY_SECONDS, RoutedPrefixes
from router.placement.routing import Choice, Router
from router.placement.run_rule import most_unfinished
from router.placement.slot_shares import Shares, SlotShares
from router.placement.worker_model import WorkerModel
from router.workers.client import WorkerClient
from router.workers.pool import WorkerPool


# The load that the router counts for sequences at a worker, from their placement until they leave.
class LoadReservation:
    """One sequence, its prefill tokens and its blocks, counted in a worker's model until `release`."""

    __slots__ = (
        "_blocks", "_clock", "_held", "_measured", "_model", "_most_output", "_on_release", "_placed_at",
        "_prefill_tokens",
    )  # fmt: skip

    def __init__(
        self,
        model: WorkerModel,
        prefill_tokens: int,
        blocks: int,
        clock: Clock,
        on_release: Callable[[], None],
        measured: bool = True,
        most_output: int = 0,
    ) -> None:
        """Count the load at once. `on_release` is called when the load no longer counts.

        A sequence that began elsewhere is not `measured`: its duration here tells nothing. `most_output` is how many
        tokens it may sample; 0: that is not known.
        """
        self._model, self._clock, self._on_release = model, clock, on_release
        self._prefill_tokens, self._blocks, self._measured = prefill_tokens, blocks, measured
        self._placed_at, self._held, self._most_output = clock.monotonic(), True, most_output
        model.placed(1, prefill_tokens, blocks, most_output)

    @property
    def model(self) -> WorkerModel:
        """The worker at which the load counts, as of the connection of that time."""
        return self._model

    def prefilled(self) -> None:
        """Stop counting the prefill tokens: the prompt is computed. Idempotent."""
        if self._held and self._prefill_tokens:
            self._model.placed(0, -self._prefill_tokens, 0)
            self._prefill_tokens = 0

    def complete(self, output_tokens: int) -> None:
        """Release the load of a sequence that ran to its end; its duration and length enter the worker's rates."""
        if self._held and self._measured:
            now = self._clock.monotonic()
            self._model.rates.finished(now - self._placed_at, output_tokens, now)
        self.release()

    def release(self) -> None:
        """Stop counting the load: the sequence has left the worker. Idempotent."""
        if self._held:
            self._held = False
            self._model.placed(-1, -self._prefill_tokens, -self._blocks, -self._most_output)
            self._on_release()


class Reserver:
    """Reserves load at workers, and counts the slots of each tenant there.

    `on_release` is called for each sequence that leaves.
    """

    def __init__(self, clock: Clock, on_release: Callable[[], None]) -> None:
        self._clock, self._on_release = clock, on_release
        self.in_use = SlotShares()

    def reserve(
        self, worker: WorkerModel, request: PlacementRequest, hit_blocks: int, flow: Flow, fetched_blocks: int = 0
    ) -> tuple[LoadReservation, ...]:
        """Count the sequences of a request at a worker that has so many blocks of its prompt, and fetches others."""
        capacity = worker.capacity
        uncached = request.uncached(capacity, hit_blocks + fetched_blocks)
        blocks = capacity.fresh_blocks(request.prompt_tokens, hit_blocks)
        fork = capacity.fork_load(request.prompt_tokens, hit_blocks)
        loads = [(uncached, blocks), *[fork] * (request.sequences - 1)]
        most, released = request.max_tokens, self._taken(flow, len(loads))
        return tuple([LoadReservation(worker, *load, self._clock, released, most_output=most) for load in loads])

    def adopt(self, worker: WorkerModel, flow: Flow) -> LoadReservation:
        """Count a sequence that runs at a worker already, whose heartbeats show its load."""
        return LoadReservation(worker, 0, 0, self._clock, self._taken(flow, 1), measured=False)

    def _taken(self, flow: Flow, slots: int) -> Callable[[], None]:
        """Count slots of a tenant; return what takes back one of them."""

        def released() -> None:
            self.in_use.release_slot(flow)
            self._on_release()

        for _ in range(slots):
            self.in_use.take_slot(flow)
        return released


# Sequences that want a worker: what they ask for, how they wait, and the place that they get.
@dataclass(frozen=True, slots=True)
class Job:
    """Sequences with the same tokens, to be placed at one worker.

    `moved_because` says why they left their previous worker; it is empty for a new request. `owner` is that of the
    caller. `notes` and `figures` stand in the record of the placement.
    """

    request: PlacementRequest
    block_hashes: Sequence[BlockHash]
    priority: int
    deadline: float | None
    moved_because: str = ""
    owner: str = ""
    notes: tuple[str, ...] = ()
    figures: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """A worker that computes a prompt for another one, with the load reserved there; None: none is better.

    `ways` is what both ways are predicted to take.
    """

    ways: Elsewhere
    client: WorkerClient | None = None
    reservation: LoadReservation | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker for a job, with the load of each sequence reserved there; the caller submits them at once.

    Every reservation must be released. `foretold` is to learn when the first token comes. `looked_up_ns` is when the
    prefix lookup ended, and `index` what it said.
    """

    worker_id: str
    client: WorkerClient
    reservations: tuple[LoadReservation, ...]
    decision: Decision
    looked_up_ns: int
    index: IndexAnswer = NOTHING_ASKED
    foretold: Foretold | None = None


@dataclass(frozen=True, slots=True)
class Foresight:
    """What would happen to a job that came now. It `leads` if it is served before the `before` jobs that wait.

    `soonest_s` are predicted seconds to its first token that may refuse it for its deadline where it has to wait.
    """

    choice: Choice
    leads: bool
    before: int
    index_answered: bool
    soonest_s: float = 0.0


@dataclass(slots=True, eq=False)
class WaitingJob:
    """A job in the queue, what the prefix index said of it, and the future of its placement.

    `foretold` is the prediction at its arrival, if it had one. It is `tried` although it is predicted to be late.
    """

    job: Job
    index: IndexAnswer
    looked_up_ns: int
    foretold: Foretold | None = None
    tried: bool = False
    placed: asyncio.Future[Placement] = field(init=False)

    def __post_init__(self) -> None:
        self.placed = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.placed.done():
            self.placed.set_exception(error)

    def discard(self) -> None:
        """Release the placement; the caller is gone."""
        if self.placed.done() and not self.placed.cancelled() and self.placed.exception() is None:
            for reservation in self.placed.result().reservations:
                reservation.release()


log = logging.getLogger(__name__)

# Seconds that a request waits while no worker is usable; a supervisor restarts a worker in less.
PATIENCE_SECONDS = 10.0
# Seconds between two predictions of when a waiting job is hopeless.
_LEAST_WAIT_S = 0.01
# The id of a decision that is not taken.
_FORESEEN = "foreseen"


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
        max_wait: float = DEFAULT_MAX_WAIT,
    ) -> None:
        self.pool = self._pool = pool
        self._router, self._index, self._decisions = router, index, decisions
        self._clock, self._patience = clock, patience
        self._memory = RoutedPrefixes()
        self.first_tokens = FirstTokens()
        self._queue: FairQueue[WaitingJob] = FairQueue(clock, max_wait)
        self._reserver = Reserver(clock, self._serve_queue)
        self._patience_timer: asyncio.TimerHandle | None = None
        # Out of the queue: jobs whose adapter no worker knows with its content, and what ends their patience.
        self._aside: dict[Ticket, tuple[WaitingJob, asyncio.TimerHandle]] = {}
        # The last choice by which a job had to wait: no worker could take it.
        self._blocked: Choice | None = None
        # What has to wait at the head of the queue, as of the last attempt, where the workers are full.
        self._head: PlacementRequest | None = None
        self._counted: Sequence[WorkerModel] = ()
        self._slots_of_all = 0
        # The last list of workers, and whether some of them compute prompts for others.
        self._looked_at: Sequence[WorkerModel] = ()
        self._has_workers_for_prompts = False
        # Of that list, those from which others can fetch blocks.
        self._sources: dict[str, WorkerModel] = {}
        self._settled = 0
        # Jobs that got a worker, by priority.
        self._placed: Counter[int] = Counter()
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

    def ticket(
        self,
        priority: int,
        flow: Flow = ONE_FLOW,
        sequences: int = 1,
        deadline: float | None = None,
        session: str = "",
    ) -> Ticket:
        """Return a place in the order of waiting requests; a request keeps it for all its jobs."""
        return self._queue.ticket(priority, flow, sequences, due_at(self._clock.monotonic(), deadline), session)

    def refuse_job(self, ticket: Ticket, error: QuireError) -> None:
        """Let `place_job` raise an error for a request that waits; nothing happens when it does not wait."""
        waiting = self._queue.leave_queue(ticket) or self._leave_aside(ticket)
        if waiting is not None:
            waiting.fail(error)

    async def place_job(self, job: Job, ticket: Ticket) -> Placement:
        """Return a placement whose load is reserved.

        Raises InvalidRequest when no pool can hold the job, DeadlineExceeded when its deadline cannot be met, and
        Unavailable when no worker has been usable for a while.
        """
        index = await self._index.lookup(job.block_hashes) if job.block_hashes else NOTHING_ASKED
        waiting = WaitingJob(job, index, self._clock.time_ns())
        ticket.sequences = job.request.sequences
        self._queue.join_queue(ticket, waiting)
        self._serve_queue()
        try:
            if not waiting.placed.done():
                self._check_wait(waiting, ticket)
                self._record_wait(job, ticket)
            return await self._placed_in_time(waiting)
        except BaseException:
            self._queue.leave_queue(ticket)
            self._leave_aside(ticket)
            if waiting.foretold is not None:
                waiting.foretold.ended(self._clock.monotonic())
            # A placement may have come together with the timeout or the cancellation.
            waiting.discard()
            self._serve_queue()
            raise

    def _check_wait(self, waiting: WaitingJob, ticket: Ticket) -> None:
        """Raise DeadlineExceeded for a new job that has to wait, if its first token is predicted to come too late.

        The prediction has what is at the workers by now where their sequences were measured lately: it goes first
        unless the job has a higher priority than most, or its tenant less than its share. A worker that is away may
        come back at any moment, without anything before the job. A wait in the queue is not in it, and under load it
        is too short: what it refuses would hardly have been in time (docs/decisions/0015).
        """
        job = waiting.job
        if job.deadline is None or job.moved_because:
            return
        soonest = self._soonest(waiting, self._may_have_room(ticket, self._shares()))
        waiting.foretold = self._foretold(job, soonest)
        self._check_deadline(waiting, soonest)

    def _foretold(self, job: Job, seconds: float) -> Foretold:
        return Foretold(self.first_tokens, seconds, self._clock.monotonic(), job.deadline)

    def _check_deadline(self, waiting: WaitingJob, predicted_s: float) -> None:
        """Raise QueueExpired for a job that is predicted to be late, unless it is tried."""
        now, deadline = self._clock.monotonic(), waiting.job.deadline
        try:
            check_deadline(now, deadline, self.first_tokens.about(predicted_s))
        except QueueExpired:
            if deadline is None or now >= deadline or not self._tries(waiting, predicted_s):
                raise

    def _tries(self, waiting: WaitingJob, predicted_s: float) -> bool:
        """Return whether a job that is predicted to be late is tried, so that something is measured."""
        waiting.tried = waiting.tried or self.first_tokens.may_try(predicted_s, self._clock.monotonic())
        return waiting.tried

    def _may_have_room(self, ticket: Ticket, shares: Shares) -> bool:
        """Return whether a waiting job may not have to wait for the sequences that are at the workers."""
        return ticket.priority > 0 or not shares.exceeded_by(ticket) or bool(self._pool.absent())

    def _soonest(self, waiting: WaitingJob, has_room: bool) -> float:
        job, published = waiting.job, waiting.index.hits
        workers, hits, held = self._serving(), self._hits(job, published), self._held(published)
        return self._router.soonest_s(job.request, workers, hits, has_room, held)

    async def _placed_in_time(self, waiting: WaitingJob) -> Placement:
        """Return the placement. Raises QueueExpired once even a worker that is free would be too late."""
        deadline = waiting.job.deadline
        if deadline is None:
            return await waiting.placed
        while not waiting.placed.done():
            left = deadline - self._clock.monotonic()
            if left <= 0.0:
                raise QueueExpired("deadline exceeded while the request waited for a worker")
            soonest = self.first_tokens.about(self._soonest(waiting, has_room=True))
            late = soonest.seconds > left
            if late and not self._tries(waiting, soonest.predicted_s):
                raise QueueExpired(too_late_words(left, soonest, ANY_WORKER))
            await asyncio.wait([waiting.placed], timeout=left if late else max(left - soonest.seconds, _LEAST_WAIT_S))
        return waiting.placed.result()

    async def foresee_job(self, job: Job, flow: Flow, session: str = "") -> Foresight:
        """Return what `place_job` would do with a job now. Nothing is queued, reserved, remembered or recorded."""
        index = await self._index.lookup(job.block_hashes) if job.block_hashes else NOTHING_ASKED
        due = due_at(self._clock.monotonic(), job.deadline)
        ticket = Ticket(job.priority, 0, flow, job.request.sequences, due, session)
        shares = self._shares(flow)
        choice = self._choose(job, _in_share(job.request, shares, ticket), index.hits, _FORESEEN)
        leads, before = self._queue.leads(ticket, shares), self._queue.before(job.priority)
        waiting = WaitingJob(job, index, 0)
        return Foresight(
            choice, leads, before, index.answered, self._soonest(waiting, self._may_have_room(ticket, shares))
        )

    def computes_prompts(self) -> bool:
        """Return whether some worker computes prompts for others."""
        return self._serving() is not (workers := self._pool.models()) and bool(for_prompts(workers))

    async def book_prompt_place(self, job: Job, ticket: Ticket, mode: Mode) -> PromptPlace | None:
        """Reserve a place for the prompt of a job at a worker that computes it for another one.

        The place has no client where the prompt is better computed where its tokens are sampled. Return None where
        no worker could take it, or none could fetch it. Nothing is queued or recorded.
        """
        index = await self._index.lookup(job.block_hashes)
        workers, request = self._pool.models(), _in_share(job.request, self._shares(), ticket)
        size = self._pool.identity.block_size
        prompt = prompt_alone(request, full_blocks(request.prompt_tokens, size), size)
        hits, published = self._hits(job, index.hits), index.hits or {}
        fetchable = [published.get(each.worker_id, 0) for each in workers if each.capacity.fetches_blocks]
        prefill = self._router.price_workers(prompt, for_prompts(workers), hits)
        decode = self._router.price_workers(request, self._serving(), hits, later=True)
        ways = compare_ways(request, prefill, decode, max(fetchable, default=0))
        if ways is None:
            return None
        left = None if job.deadline is None else job.deadline - self._clock.monotonic()
        if not is_worth_it(ways, mode, left):
            return PromptPlace(ways)
        worker = ways.prefill.worker
        client = self._pool.client(worker)
        self._memory.remember(worker.worker_id, job.block_hashes[: ways.blocks], self._clock.monotonic())
        (reservation,) = self._reserver.reserve(worker, prompt, ways.prefill.hit_blocks, ticket.flow)
        return PromptPlace(ways, client, reservation)

    def _serving(self) -> Sequence[WorkerModel]:
        """Return the workers that take whole requests. What a list of workers has is looked for once."""
        workers = self._look_at_workers()
        return serving(workers) if self._has_workers_for_prompts else workers

    def _look_at_workers(self) -> Sequence[WorkerModel]:
        workers = self._pool.models()
        if workers is not self._looked_at:
            self._looked_at, self._has_workers_for_prompts = workers, has_workers_for_prompts(workers)
            self._sources = {each.worker_id: each for each in workers if passes_blocks(each)}
        return workers

    def _held(self, published: Mapping[str, int] | None) -> Held | None:
        """Return the most of a prompt that workers can fetch. What is still being computed somewhere is not in it."""
        self._look_at_workers()
        if not published or not self._sources:
            return None
        return find_held(self._sources, published, self._clock.monotonic())

    def placed_above(self, priority: int) -> int:
        """Return how many jobs of a higher priority have got a worker so far."""
        return sum(count for each, count in self._placed.items() if each > priority)

    def waits(self) -> tuple[str, object]:
        """Return in words what waits for a place that is free, and what differs after each placement."""
        shares = self._shares()
        head = self._queue.head(shares)[1].job.request if self._queue else None
        words = waits_for_a_slot(head, len(self._queue), self._serving(), self._clock.monotonic())
        return words, self._settled

    # ------------------------------------------------------------ PoolListener

    def capacity_changed(self, reported: WorkerModel | None = None) -> None:
        """Try the head of the queue again, unless the only news is that a full worker is still full.

        Of 1000 workers 10 000 heartbeats come a second, and an attempt looks at all workers where most are full.
        """
        if is_complete(self._pool.identity):
            self._identity_known.set()
        else:
            self._identity_known.clear()
        if reported is None or self._head is None or not must_wait(reported, self._head, self._clock.monotonic()):
            self._serve_queue()

    def cache_lost(self, worker_id: str) -> None:
        self._memory.forget(worker_id)

    # ------------------------------------------------------------ the queue

    def _serve_queue(self) -> None:
        """Place jobs in order, up to the first that has to wait: a later one must not take its place.

        A tenant below its share does not wait for slots that others hold: the KV manager takes blocks from those, and
        the queue says who may pass a head that lacks slots.
        """
        self._head = None
        self._rejoin()
        while self._queue:
            shares = self._shares()
            entry = self._queue.head(shares)
            if self._attempt(entry, shares):
                continue
            if entry[0].by_age and self._head is None:
                # No worker may take it now: that keeps nobody else from those that are there.
                entry = self._queue.head(shares, by_age=False)
                if self._attempt(entry, shares):
                    continue
            head = self._head
            passing = self._queue.passing(entry[0], shares) if head is not None else None
            if passing is None or not self._attempt(passing, shares):
                self._head = head
                return
            self._head = None
        self._end_patience()

    def _attempt(self, entry: tuple[Ticket, WaitingJob], shares: Shares) -> bool:
        """Place one job, or end it; return False when it has to wait."""
        ticket, waiting = entry
        try:
            return self._serve(ticket, waiting, _in_share(waiting.job.request, shares, ticket))
        # Broad: this runs for other requests too, and a job that fails by a bug must neither stop them nor wait on.
        except Exception as error:
            log.exception("unexpected error while a request was placed")
            self._queue.leave_queue(ticket)
            waiting.fail(error)
            return True

    def _serve(self, ticket: Ticket, waiting: WaitingJob, request: PlacementRequest) -> bool:
        """Place one job; return False when it has to wait."""
        choice = self._choose(waiting.job, request, waiting.index.hits)
        if choice.outcome is PlacementOutcome.NO_WORKER:
            self._blocked = choice
            if self._lacks_adapter(request):
                self._set_aside(ticket, waiting)
                return True
            self._begin_patience()
            return False
        self._end_patience()
        if choice.outcome is PlacementOutcome.WAIT:
            self._blocked, self._head = choice, request
            return False
        refused = self._refusal(waiting, choice)
        if refused is None:
            self._queue.serve_ticket(ticket)
        else:  # it takes no place, so its tenant pays for none
            self._queue.leave_queue(ticket)
        self._settle(waiting, choice, ticket, refused)
        return True

    def _refusal(self, waiting: WaitingJob, choice: Choice) -> QuireError | None:
        """Return why a job gets no place although it is its turn."""
        if choice.worker is None:
            return too_large(choice.decision)
        try:
            self._check_deadline(waiting, choice.least_s)
        except QueueExpired as late:
            return late
        return None

    def _record_wait(self, job: Job, ticket: Ticket) -> None:
        """Record that a job has to wait, and why no worker could take the head of the queue."""
        ticket.waited = True
        if self._blocked is not None:
            blocked, ahead, now_ns = self._blocked.decision, max(0, len(self._queue) - 1), self._clock.time_ns()
            self._decisions.record(waiting_record(blocked, job.request, job.owner, ticket.arrival, ahead, now_ns))

    def _shares(self, *more: Flow) -> Shares:
        return self._reserver.in_use.among(self._places(), self._queue.flows().union(more))

    def _places(self) -> int:
        """Return the slots of all workers, counted once for each list of them."""
        workers = self._pool.models()
        if workers is not self._counted:
            self._counted, self._slots_of_all = workers, sum(slots_of(worker) for worker in workers)
        return self._slots_of_all

    def _choose(
        self,
        job: Job,
        request: PlacementRequest,
        published: Mapping[str, int] | None,
        decision_id: str = "",
        among: Sequence[WorkerModel] | None = None,
    ) -> Choice:
        workers = self._serving() if among is None else among
        if job.deadline is not None:
            left = job.deadline - self._clock.monotonic()
            passes = request.passes or job.priority > 0 or bool(job.moved_because)
            request = replace(request, left=left, passes=passes)
        hits, held = self._hits(job, published), self._held(published)
        return self._router.route(request, workers, hits, self._pool.absent(), decision_id, held)

    def _hits(self, job: Job, published: Mapping[str, int] | None) -> dict[str, int]:
        """Return the leading blocks that each worker has, as the index or the router's own memory says.

        Beside an index, the memory is of blocks that are being computed: of windows, few of these are shared.
        """
        now = self._clock.monotonic()
        if published is None:
            return self._memory.lookup(job.block_hashes, now, MEMORY_SECONDS)
        identity = self._pool.identity
        most = most_unfinished(identity.kv_geometry, identity.block_size)
        hits = self._memory.lookup(job.block_hashes[:most], now, BURST_SECONDS)
        for name, blocks in published.items():
            hits[name] = max(blocks, hits.get(name, 0))
        return hits

    def _settle(self, waiting: WaitingJob, choice: Choice, ticket: Ticket, refused: QuireError | None) -> None:
        """Record the decision; set the placement, or the error that refuses the job."""
        self._settled += 1
        job = waiting.job
        reasons = (*job.notes, *((BY_AGE,) if ticket.by_age else ()), *choice.decision.reasons)
        figures = (*choice.decision.figures, *job.figures)
        decision = replace(choice.decision, tenant=job.owner, reasons=reasons, figures=figures)
        if job.moved_because:
            decision = replace(decision, kind=DecisionKind.MIGRATION, reasons=(job.moved_because, *reasons))
        self._decisions.record(decision)
        if waiting.placed.done():
            return
        if refused is not None or choice.worker is None:
            waiting.fail(refused or too_large(decision))
            return
        try:
            client = self._pool.client(choice.worker)
        except QuireError as gone:
            waiting.fail(gone)
            return
        self._placed[job.priority] += 1
        placement = self._placement(job, choice.worker, client, choice, ticket.flow)
        waiting.placed.set_result(
            replace(
                placement,
                decision=decision,
                looked_up_ns=waiting.looked_up_ns,
                index=waiting.index,
                foretold=waiting.foretold or self._foretold(job, choice.least_s),
            )
        )

    def _placement(self, job: Job, worker: WorkerModel, client: WorkerClient, choice: Choice, flow: Flow) -> Placement:
        if worker.capacity.prefix_caching:
            self._memory.remember(worker.worker_id, job.block_hashes, self._clock.monotonic())
        fetched_blocks = 0
        if (fetch := choice.fetch) is not None:
            fetched_blocks = fetch.blocks
            fetch.source.serve_fetch(fetch.served_s, self._clock.monotonic())
        reservations = self._reserver.reserve(worker, job.request, choice.hit_blocks, flow, fetched_blocks)
        return Placement(worker.worker_id, client, reservations, choice.decision, self._clock.time_ns())

    # ------------------------------------------------------------ sequences of draining workers

    def book_place(self, job: Job, flow: Flow) -> Placement | None:
        """Reserve a place for sequences that run elsewhere; None where they would have to wait for it.

        Nothing is looked up or recorded: `take_booked_place` does that, because the sequences may end before they move.
        """
        choice = self._choose(job, job.request, None, among=self._with_batch_place(job.request))
        if choice.worker is None:
            return None
        return self._placement(job, choice.worker, self._pool.client(choice.worker), choice, flow)

    def has_batch_slot(self, request: PlacementRequest) -> bool:
        """Return whether `book_place` would find a place."""
        return bool(self._with_batch_place(request))

    def _with_batch_place(self, request: PlacementRequest) -> list[WorkerModel]:
        """Return the workers in whose batch the sequences have room now; a cached prefix elsewhere does not count."""
        now = self._clock.monotonic()
        roomy = [each for each in self._serving() if each.has_batch_slot(request.sequences)]
        return [each for each in roomy if verdict(each, request, now)[0] is PlacementOutcome.PLACED]

    def take_booked_place(self, placement: Placement, job: Job) -> Placement | None:
        """Record the move to a booked place; None, with the place released, where its worker may not get it."""
        if not self.may_take(placement):
            for reservation in placement.reservations:
                reservation.release()
            return None
        decision = replace(
            placement.decision,
            kind=DecisionKind.MIGRATION,
            time_ns=self._clock.time_ns(),
            reasons=(job.moved_because,),
            tenant=job.owner,
        )
        self._decisions.record(decision)
        return replace(placement, decision=decision, looked_up_ns=decision.time_ns)

    def may_take(self, placement: Placement) -> bool:
        """Return whether a placement's worker is the same process, and well: it may have restarted, or drain by now."""
        model = self._pool.model_of(placement.client)
        if model is None or any(each.model is not model for each in placement.reservations):
            return False
        return placement.client.ready and model.trouble(self._clock.monotonic()) is None

    def count_running(self, client: WorkerClient, flow: Flow) -> LoadReservation | None:
        """Count a sequence that runs at a worker already, whose heartbeats show its load; None without the worker."""
        model = self._pool.model_of(client)
        return None if model is None else self._reserver.adopt(model, flow)

    # ------------------------------------------------------------ without a worker

    def _begin_patience(self) -> None:
        if self._patience_timer is None:
            self._patience_timer = asyncio.get_running_loop().call_later(self._patience, self._give_up)

    def _end_patience(self) -> None:
        if self._patience_timer is not None:
            self._patience_timer.cancel()
            self._patience_timer = None

    def _give_up(self) -> None:
        """Fail the jobs in the queue that no worker may take: none has been usable for too long."""
        self._patience_timer = None
        for ticket, waiting in list(self._queue):
            choice = self._choose(waiting.job, waiting.job.request, waiting.index.hits)
            if choice.outcome is PlacementOutcome.NO_WORKER:
                self.refuse_job(ticket, self._no_worker())
        self._serve_queue()

    def _lacks_adapter(self, request: PlacementRequest) -> bool:
        wanted = request.adapter
        return wanted is not None and not any(model.adapters.knows(wanted) for model in self._pool.models())

    def _set_aside(self, ticket: Ticket, waiting: WaitingJob) -> None:
        """Let a job wait beside the queue for a worker that knows its adapter: one that starts again, say.

        One that nobody has served yet ends where the adapter's name has got another content.
        """
        self._queue.leave_queue(ticket)
        wanted = waiting.job.request.adapter
        assert wanted is not None
        replaced = any(wanted.name in model.adapters.by_name for model in self._pool.models())
        if replaced and not waiting.job.moved_because:
            what = f"adapter {wanted.name!r} got another content while the request waited; send the request again"
            waiting.fail(Unavailable(what))
            return
        timer = asyncio.get_running_loop().call_later(self._patience, self._give_up_aside, ticket)
        self._aside[ticket] = waiting, timer

    def _rejoin(self) -> None:
        """Queue the jobs whose adapter a worker knows by now, each at its old place."""
        for ticket, (waiting, _) in [*self._aside.items()]:
            if not self._lacks_adapter(waiting.job.request):
                self._leave_aside(ticket)
                self._queue.join_queue(ticket, waiting)

    def _leave_aside(self, ticket: Ticket) -> WaitingJob | None:
        waiting, timer = self._aside.pop(ticket, (None, None))
        if timer is not None:
            timer.cancel()
        return waiting

    def _give_up_aside(self, ticket: Ticket) -> None:
        waiting = self._leave_aside(ticket)
        if waiting is not None and (wanted := waiting.job.request.adapter) is not None:
            what = f"knows adapter {wanted.name!r} with the content that the request is for; send the request again"
            waiting.fail(NoWorker(f"no worker for {self._patience:g} s {what}"))

    def _no_worker(self) -> NoWorker:
        now = self._clock.monotonic()
        known = [f"{name} is {reason}" for name, reason in self._pool.absent()]
        troubles = [(model.worker_id, model.trouble(now)) for model in self._pool.models()]
        known += [f"{name} is {trouble[0].value}: {trouble[1]}" for name, trouble in troubles if trouble]
        return NoWorker(f"no worker for {self._patience:g} s: {'; '.join(known) or 'none is known'}")


def _in_share(request: PlacementRequest, shares: Shares, ticket: Ticket) -> PlacementRequest:
    """Return the request with what the share of its tenant allows."""
    entitled = not shares.exceeded_by(ticket)
    return replace(request, entitled=entitled, passes=entitled and shares.exceeded_beside(ticket.flow))
