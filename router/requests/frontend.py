"""Serves one validated request from admission to its last token, for every client API.

    enter -> hash the prompt -> look it up -> wait for a worker -> submit n sequences -> stream their tokens

A sequence whose worker is lost continues at another one, from its prompt and its tokens so far; the client sees a
pause.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from itertools import islice
from typing import Final

from common.contracts.clock import Clock
from common.contracts.errors import Cancelled, DeadlineExceeded, Draining, Overloaded, QuireError, Unavailable
from common.contracts.types import DecisionKind, FinishReason, SamplingParams
from common.process.standstill import Standstill
from common.rpc.deadline import is_expiry
from router.contracts.events import GenerateEvent, ValidatedRequest
from router.contracts.ports import CallContext, TextAssemblers
from router.contracts.session_ids import session_name
from router.observe.recorder import Recorder
from router.observe.request_trace import RequestTrace
from router.placement.admission import AdmissionLimiter
from router.placement.remote_prefill import Mode
from router.placement.worker_model import WorkerModel
from router.requests.client_events import ClientEvents, error_of
from router.requests.dispatcher import Dispatcher
from router.requests.inbox import Aborted, Revoked, Stopped, Turns, work_of
from router.requests.output_stream import EXPIRED, OutputStream, StopTokens
from router.requests.request_ids import automatic_id
from router.requests.resumption import Resumable
from router.requests.run import Phase, RequestRun, Running
from router.requests.run_log import DEADLINE_WORDS, GONE_WORDS
from router.requests.submitter import Submitter
from router.tenants.tenancy import Caller
from router.workers.pool import WorkerPool

LOST_WORDS = "its router was lost, and its client resumed it here"
# Seconds that a worker has for the answer to an adoption. A worker of an earlier version gives none.
CONFIRM_SECONDS = 5.0


# Takes over the sequences of a request that another router began, where they run.
class RouterFrontend:
    """The Frontend over a dispatcher and its workers."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: AdmissionLimiter,
        assemblers: TextAssemblers,
        recorder: Recorder,
        eos_token_ids: tuple[int, ...],
        new_id: Callable[[], str] = automatic_id,
        remote_prefill: Mode = "auto",
    ) -> None:
        self._dispatcher, self._admission, self._new_id = dispatcher, admission, new_id
        self._assemblers, self._recorder, self._eos_token_ids = assemblers, recorder, eos_token_ids
        self._clock = recorder.clock
        self._submitter = Submitter(dispatcher, admission, recorder, eos_token_ids, remote_prefill)
        self._turns = Turns()
        self._adopter, self._events = Adopter(dispatcher, admission, recorder), ClientEvents(recorder)
        self._runs: set[RequestRun] = set()
        self.standstill = Standstill(lambda: bool(self._runs))
        """When this router did not run."""
        dispatcher.pool.listen(DrainMover(dispatcher.pool, self._submitter, self._runs, self._clock))
        self.leaving = self.draining = False
        """A router that is leaving takes no new clients. One that drains takes no new requests either."""
        self._idle = asyncio.Event()
        recorder.metrics.watch(lambda: admission.running, lambda: admission.queued)

    def generate(self, request: ValidatedRequest) -> AsyncGenerator[GenerateEvent, None]:
        return self._serve(request)

    def resume(self, resumable: Resumable) -> AsyncGenerator[GenerateEvent, None]:
        """Go on with a request that another router began, as `generate` does with a new one."""
        return self._serve(resumable.request, resumable)

    async def _serve(
        self, request: ValidatedRequest, resumable: Resumable | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        request_id = request.request_id or self._new_id()
        trace = self._recorder.trace(request, request_id, begins=resumable is None)
        try:
            self._enter(request, request_id, trace)
        except QuireError as refused:
            self._recorder.refused(trace, request_id, refused)
            raise
        run = RequestRun(request, request_id, trace, self._turns, self._clock, self.standstill)
        self._runs.add(run)
        self.standstill.begin()
        failure = "internal error"
        try:
            await self._begin(run, resumable)
            for event in self._events.earlier(run, resumable):
                yield event
            while run.live:
                for arrival in await run.inbox.take_arrivals():
                    for part in arrival.parts():
                        for event in self._events.of(run, arrival, part):
                            run.log.hands_over()
                            yield event
                            run.log.taken()
                        await self._turns.pace(work_of(part))
                run.inbox.sent()
                await self._submitter.move_lost_sequences(run)
            failure = DEADLINE_WORDS if run.expired else ""
        except (asyncio.CancelledError, GeneratorExit):
            failure = self._interrupted(run)
            raise
        except QuireError as error:
            failure = str(error)
            run.log.failed(error)
            self._recorder.metrics.of(run.trace.owner).refused(error)
            raise
        finally:
            self._leave(run, failure)
        if run.expired:
            raise DeadlineExceeded(f"{DEADLINE_WORDS} before every sequence had finished")

    def _leave(self, run: RequestRun, failure: str) -> None:
        """Give up everything that the request holds, even if a part of that fails: a drain waits for its admission."""
        try:
            run.close(FinishReason.CANCELLED)
        finally:
            self._runs.discard(run)
            self._admission.release_request(run.request_id, run.request.tenant, run.used_tokens)
            if self.draining and not self._admission.inside:
                self._idle.set()
            outcome = run.outcome(failure)
            run.trace.end(outcome.failure, outcome.ended)
            self._recorder.ended(run.trace, run.request_id, outcome)
            self._recorder.tap.ended(run.ended_sequences)

    def _interrupted(self, run: RequestRun) -> str:
        """End the sequences that still run after a cancellation or the deadline; return the failure for the spans."""
        request, now = run.request, self._clock.monotonic()
        deadline = request.deadline
        if run.live and deadline is not None and is_expiry(deadline - request.arrived, deadline - now):
            if run.admitted:
                for running in run.unfinished():
                    self._events.finish(run, running, EXPIRED, now)
            else:
                self._recorder.metrics.of(run.trace.owner).refused(DeadlineExceeded(DEADLINE_WORDS))
                run.close(FinishReason.DEADLINE)
            return DEADLINE_WORDS
        if run.live:
            self._recorder.metrics.of(run.trace.owner).refused(Cancelled(GONE_WORDS))
            return GONE_WORDS
        return DEADLINE_WORDS if run.expired else ""

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens that each sequence with blocks has, and those that it may grow to."""
        for run in self._runs:
            for each in run.unfinished():
                if each.client is not None and each.output.admitted_at is not None:
                    prompt = len(run.request.prompt)
                    yield prompt + len(each.output.tokens), prompt + run.request.sampling.max_tokens

    def sequences(self) -> tuple[int, int]:
        """Return how many sequences have had blocks, and how many wait for their first."""
        inside = [each.output.admitted_at is not None for run in self._runs for each in run.unfinished()]
        return sum(inside), len(inside) - sum(inside)

    def adapters(self) -> tuple[set[str], set[str]]:
        """Return the adapters of sequences that have had blocks, and of those that wait for their first."""
        running, waiting = set[str](), set[str]()
        for run in self._runs:
            if run.request.adapter is not None:
                for each in run.unfinished():
                    (waiting if each.output.admitted_at is None else running).add(run.request.adapter.name)
        return running, waiting

    def end_revoked(self, is_live: Callable[[Caller], bool]) -> None:
        """End every request whose caller `is_live` refuses, those that wait for a worker included."""
        for run in list(self._runs):
            if not is_live(run.request.caller):
                self._end(run, Revoked())

    def abort_request(self, request_id: str, tenant: str = "") -> int:
        """End the requests with an id, of one tenant or ("") of any; return how many there were."""
        named = [run for run in self._runs if run.request_id == request_id and tenant in ("", run.request.tenant)]
        for run in named:
            self._end(run, Aborted())
        return len(named)

    def _end(self, run: RequestRun, why: Revoked | Aborted | Stopped) -> None:
        run.interrupt(why)
        if run.ticket is not None:
            self._dispatcher.refuse_job(run.ticket, error_of(why))

    async def drain_requests(self, seconds: float) -> bool:
        """Refuse new requests; return whether all requests inside have ended within so many seconds.

        Those that have not are ended then with the reason: their calls would only be cancelled.
        """
        self.leaving = self.draining = True
        if not self._admission.inside:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for run in list(self._runs):
                self._end(run, Stopped())
            return False
        return True

    # ------------------------------------------------------------ the beginning

    def _enter(self, request: ValidatedRequest, request_id: str, trace: RequestTrace) -> None:
        if self.draining:
            raise Draining("the router is draining; another one takes new requests")
        limiter, now, figures = self._admission, self._clock.monotonic(), self._figures(request.tokens)
        try:
            given = request_id, request.tokens, request.caller.tenant, now, request.sampling.n, request.paid
            limiter.admit_request(*given, request.session)
        except Overloaded as refused:
            self._reject(trace, request_id, refused, figures)
            raise
        self._recorder.decided(trace, DecisionKind.ADMISSION, request_id, "admitted", figures, request.notes)

    def refuse_unread(self, call: CallContext, request_id: str, tokens: int, refused: Overloaded) -> None:
        """Record a request of about so many tokens that was refused before it was read."""
        unread = ValidatedRequest(
            prompt=(),
            sampling=SamplingParams(),
            arrived=call.arrived,
            caller=call.caller,
            traceparent=call.traceparent,
            trace_id=call.trace_id,
            correlation_id=call.correlation_id,
            session=session_name(call.caller.owner, call.session_id),
            model=call.model,
        )
        request_id = request_id or self._new_id()
        trace = self._recorder.trace(unread, request_id)
        self._reject(trace, request_id, refused, self._figures(tokens))
        self._recorder.refused(trace, request_id, refused)

    def _figures(self, tokens: int) -> Figures:
        limiter = self._admission
        counts = ("queued", limiter.queued), ("tokens_in_flight", limiter.tokens_in_flight), ("tokens", tokens)
        return tuple([(name, float(count)) for name, count in counts])

    def _reject(self, trace: RequestTrace, request_id: str, refused: Overloaded, figures: Figures) -> None:
        subject, words = str(refused.violation.subject), (refused.violation.description,)
        self._recorder.decided(trace, DecisionKind.REJECTION, request_id, subject, figures, words)

    async def _begin(self, run: RequestRun, resumable: Resumable | None) -> None:
        """Place all sequences at one worker: the first computes the prompt, the others share its blocks."""
        request = run.request
        stops = StopTokens.of(request, self._eos_token_ids)
        for index in range(request.sampling.n):
            parser = None if request.new_parser is None else request.new_parser()
            assembler = self._assemblers.assembler(
                request.sampling, request.kept_special_tokens, request.skip_special_tokens, request.prompt, parser
            )
            run.sequences.append(Running(OutputStream(index, request, assembler, stops)))
        if request.deadline is not None:
            run.expire_in(request.deadline - self._clock.monotonic())
        if resumable is None:
            run.log.read()
            await self._submitter.submit_sequences(run, run.sequences)
        else:
            await self._adopter.adopt(run, resumable)


class Adopter:
    """Puts orphans in the place of sequences that a worker would be chosen for."""

    def __init__(self, dispatcher: Dispatcher, admission: AdmissionLimiter, recorder: Recorder) -> None:
        self._dispatcher, self._admission, self._recorder = dispatcher, admission, recorder
        self._clock = recorder.clock

    async def adopt(self, run: RequestRun, resumable: Resumable) -> None:
        """Go on with every sequence, one after the other in the order of their indices.

        Of two routers that take over one request, only one gets the first sequence; the other one then has taken none.
        Return early when the request is interrupted: its stream then finds the reason in its inbox.

        Raises AlreadyExists for the router that came second, and NotFound when a sequence has ended meanwhile. Raises
        Unavailable when a worker has just gone, or when it does not answer.
        """
        now = self._clock.monotonic()
        run.received, run.hits_counted = resumable.received, True
        run.worker_id = resumable.sequences[0].worker_id
        self._record(run, resumable)
        run.log.resumed(resumable.sequences[0].orphan, now)
        run.suspicion.placed()
        if not all(found.client.ready for found in resumable.sequences):
            raise Unavailable("a worker of this request has just gone; resume again")
        deadline = run.request.deadline
        left = None if deadline is None else max(0.0, deadline - now)
        places = list(zip(run.sequences, resumable.sequences, strict=True))
        for running, found in places:
            running.received = resumable.received.of(found.orphan.index)
            running.output.resume(found.orphan, now)
        for running, found in places:
            running.reservation = self._dispatcher.count_running(found.client, run.request.flow)
            handle, confirmed = found.client.adopt(found.orphan.sequence, run.sink(running), left)
            running.assign_worker(found.client, handle)
            if not await _confirmed(confirmed, run):
                return
        # From here on a worker that drains may hand the sequences over.
        run.identity = self._dispatcher.pool.identity
        self._admission.start_request(run.request_id, now, run.request.tenant)
        self._recorder.metrics.resumed.inc()

    def _record(self, run: RequestRun, resumable: Resumable) -> None:
        output = sum(found.orphan.total for found in resumable.sequences)
        figures = (
            ("orphaned_seconds", resumable.orphaned_seconds),
            ("output_tokens", float(output)),
            ("received_tokens", float(sum(resumable.received.tokens))),
        )
        reasons = (LOST_WORDS,)
        run.decision_id = self._recorder.decided(
            run.trace, DecisionKind.MIGRATION, run.request_id, run.worker_id, figures, reasons
        )
        run.trace.called()


async def _confirmed(answer: asyncio.Future[None], run: RequestRun) -> bool:
    """Wait until a worker has given a sequence; return False when the request was interrupted.

    Raises the worker's refusal, and Unavailable when no answer comes in time.
    """
    interrupted = asyncio.ensure_future(run.inbox.interrupted.wait())
    try:
        await asyncio.wait((answer, interrupted), timeout=CONFIRM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        interrupted.cancel()
    if run.inbox.interrupted.is_set():
        return False
    if not answer.done():
        what = f"a worker of this request did not answer within {CONFIRM_SECONDS:g} s"
        raise Unavailable(f"{what}; resume again, or send the request again")
    answer.result()
    return True


# Attempts of one pass: each hashes the blocks of a sequence, 4 ms for 100,000 tokens.
_AT_ONCE: Final = 8


# Seconds between two passes: 1000 workers send 10,000 heartbeats a second. Those of the draining worker itself come
# until its last sequence has left, so a chance that is passed over comes again.
_PERIOD_S: Final = 0.1


# Moves sequences away from workers that drain with `--drain migrate`.
# A place at another worker is booked first. Then the draining worker ends the sequence, and what it sampled until
# then reaches the client. From there the sequence goes on at the booked place as one that lost its worker does:
# from its prompt and its output so far. So no token is computed twice, and a sequence without another place runs on
# where it is.
class DrainMover:
    """Implements PoolListener over the requests inside."""

    def __init__(self, pool: WorkerPool, submitter: Submitter, runs: Collection[RequestRun], clock: Clock) -> None:
        self._pool, self._submitter, self._runs, self._clock = pool, submitter, runs, clock
        self._tried, self._next = 0, float("-inf")

    def cache_lost(self, worker_id: str) -> None:
        """Nothing moves for that."""

    def capacity_changed(self, reported: WorkerModel | None = None) -> None:
        """Begin to move what another worker has room for now; no sequence keeps the others from their attempt.

        A heartbeat of a full worker gives no room. The others count once in `_PERIOD_S` all together.
        """
        if not self._pool.migrating() or not _matters(reported) or self._clock.monotonic() < self._next:
            return
        self._next = self._clock.monotonic() + _PERIOD_S
        if any(_takes(each) for each in self._pool.models()):
            self._move()

    def _move(self) -> None:
        waiting = deque(self._waiting())
        waiting.rotate(-self._tried)
        for run, running in islice(waiting, _AT_ONCE):
            place = self._submitter.book_place(run, running)
            if place is not None:
                running.move_to(place)
            else:
                self._tried += 1

    def _waiting(self) -> Iterator[tuple[RequestRun, Running]]:
        """Yield the sequences at draining workers that have no other place yet."""
        leaving = self._pool.migrating()
        for run in tuple(self._runs):
            for running in run.unfinished():
                if running.client in leaving and running.phase is Phase.AT_WORKER:
                    yield run, running


def _takes(worker: WorkerModel) -> bool:
    return worker.has_batch_slot() and not worker.drains


def _matters(reported: WorkerModel | None) -> bool:
    """Return whether news may let a sequence move: of the pool, of a worker that drains, or of one with room."""
    return reported is None or reported.drains or reported.has_batch_slot()


Figures = tuple[tuple[str, float], ...]
