"""Serves one validated request from admission to its last token, for every client API.

    enter -> hash the prompt -> look it up -> wait for a worker -> submit n sequences -> stream their tokens

A sequence whose worker is lost continues at another one, from its prompt and its tokens so far; the client sees a
pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence

from common.errors import Cancelled, DeadlineExceeded, EngineFailure, Overloaded, QuireError, Unavailable
from common.rpc.deadline import is_expiry
from common.types import DecisionKind, FinishReason
from router.core.admission import AdmissionLimiter
from router.core.events import Admitted, Finished, GenerateEvent, ValidatedRequest
from router.core.worker_events import Lost, Preempted, Refused, SequenceAdmitted, SequenceFinished, TokensSampled
from router.observe.recorder import Recorder
from router.observe.request_trace import RequestTrace
from router.ports import TextAssemblers
from router.requests.dispatcher import Dispatcher, Job, Placement
from router.requests.inbox import Arrival, Expired, Turns
from router.requests.output_stream import EXPIRED, STOPPED, OutputStream, StopTokens
from router.requests.run import Prefix, RequestRun, Running, placement_request_of, submission_of

# Moves of one sequence; after these it fails, because the request itself may be what stops its workers.
MAX_MOVES = 3
# The failure in the spans of a request that did not end by itself.
DEADLINE_WORDS, GONE_WORDS = "deadline exceeded", "the client went away"


class RouterFrontend:
    """The Frontend over a dispatcher and its workers."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: AdmissionLimiter,
        assemblers: TextAssemblers,
        recorder: Recorder,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._dispatcher, self._admission = dispatcher, admission
        self._assemblers, self._recorder, self._eos_token_ids = assemblers, recorder, eos_token_ids
        self._clock = recorder.clock
        self._turns = Turns()
        self.draining = False
        self._idle = asyncio.Event()
        recorder.metrics.watch(lambda: admission.running, lambda: admission.queued)

    async def generate(self, request: ValidatedRequest) -> AsyncGenerator[GenerateEvent, None]:
        request_id = request.request_id or self._recorder.new_id()
        trace = self._recorder.trace(request, request_id)
        try:
            self._enter(request, request_id, trace)
        except QuireError as refused:
            self._recorder.metrics.refused(refused)
            trace.end(str(refused))
            raise
        run = RequestRun(request, request_id, trace, self._turns)
        failure = "internal error"
        try:
            await self._begin(run)
            while run.live:
                for arrival in await run.inbox.take():
                    for event in self._step(run, arrival):
                        yield event
                await self._move_lost(run)
            failure = DEADLINE_WORDS if run.expired else ""
        except (asyncio.CancelledError, GeneratorExit):
            failure = self._interrupted(run)
            raise
        except QuireError as error:
            failure = str(error)
            self._recorder.metrics.refused(error)
            raise
        finally:
            run.close(FinishReason.CANCELLED)
            self._admission.leave(request_id)
            if self.draining and not self._admission.inside:
                self._idle.set()
            trace.end(failure)
        if run.expired:
            raise DeadlineExceeded(f"{DEADLINE_WORDS} before every sequence had finished")

    def _interrupted(self, run: RequestRun) -> str:
        """End the sequences that still run after a cancellation or the deadline; return the failure for the spans."""
        request, now = run.request, self._clock.monotonic()
        deadline = request.deadline
        if run.live and deadline is not None and is_expiry(deadline - request.arrived, deadline - now):
            if run.admitted:
                for running in run.unfinished():
                    self._finish(run, running, EXPIRED, now)
            else:
                self._recorder.metrics.refused(DeadlineExceeded(DEADLINE_WORDS))
                run.close(FinishReason.DEADLINE)
            return DEADLINE_WORDS
        if run.live:
            self._recorder.metrics.refused(Cancelled(GONE_WORDS))
            return GONE_WORDS
        return DEADLINE_WORDS if run.expired else ""

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests; return whether all requests inside have ended within so many seconds."""
        self.draining = True
        if not self._admission.inside:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    # ------------------------------------------------------------ the beginning

    def _enter(self, request: ValidatedRequest, request_id: str, trace: RequestTrace) -> None:
        if self.draining:
            raise Unavailable("the router is draining; another one takes new requests")
        limiter, now = self._admission, self._clock.monotonic()
        figures = (
            ("queued", float(limiter.queued)),
            ("tokens_in_flight", float(limiter.tokens_in_flight)),
            ("tokens", float(request.tokens)),
        )
        try:
            limiter.enter(request_id, request.tokens, request.tenant, now)
        except Overloaded as refused:
            self._recorder.decided(trace, DecisionKind.REJECTION, request_id, str(refused.violation.subject), figures)
            raise
        self._recorder.decided(trace, DecisionKind.ADMISSION, request_id, "admitted", figures)

    async def _begin(self, run: RequestRun) -> None:
        """Place all sequences at one worker: the first computes the prompt, the others share its blocks."""
        request = run.request
        stops = StopTokens.of(request, self._eos_token_ids)
        for index in range(request.sampling.n):
            assembler = self._assemblers.assembler(request.sampling)
            run.sequences.append(Running(OutputStream(index, request, assembler, stops)))
        if request.deadline is not None:
            run.expire_in(request.deadline - self._clock.monotonic())
        await self._place(run, run.sequences)

    async def _place(self, run: RequestRun, sequences: Sequence[Running], moved_because: str = "") -> None:
        identity = await self._dispatcher.known_identity()
        began, began_ns = self._clock.monotonic(), self._clock.time_ns()
        request, prefix = run.request, Prefix.of(run.request, identity, sequences[0].output.tokens)
        if run.ticket is None:
            run.ticket = self._dispatcher.ticket(request.priority)
        wanted = placement_request_of(run, prefix, len(sequences))
        job = Job(wanted, prefix.block_hashes, request.priority, request.deadline, moved_because)
        placement = await self._dispatcher.place(job, run.ticket)
        self._submit(run, sequences, prefix, placement)
        self._admission.start(run.request_id, self._clock.monotonic())
        self._recorder.metrics.routing.observe(self._clock.monotonic() - began)
        run.trace.placed(placement.decision, began_ns, placement.looked_up_ns)
        run.decision_id = placement.decision.decision_id

    def _submit(self, run: RequestRun, sequences: Sequence[Running], prefix: Prefix, placement: Placement) -> None:
        """Send sequences to their worker. From here on the run owns the reservations, whatever goes wrong."""
        run.worker_id = placement.worker_id
        for running, reservation in zip(sequences, placement.reservations, strict=True):
            running.reservation = reservation
        deadline = run.request.deadline
        left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
        first: int | None = None
        for running in sequences:
            submission = submission_of(run, running, prefix, left, self._eos_token_ids)
            sink = run.sink(running)
            try:
                running.handle = placement.client.submit(submission, sink, first)
            except Unavailable as gone:
                # The worker was lost after it was chosen: the sequence moves on like any other of that worker.
                sink(Lost(str(gone)))
                continue
            running.client = placement.client
            first = running.handle if first is None else first

    # ------------------------------------------------------------ the stream

    def _step(self, run: RequestRun, arrival: Arrival) -> Iterator[GenerateEvent]:
        event = arrival.event
        if isinstance(event, Expired):
            yield from self._expire(run)
            return
        running = run.sequences[arrival.index]
        if arrival.attempt != running.attempt or running.done:
            return
        now = self._clock.monotonic()
        match event:
            case TokensSampled() as sampled:
                yield from self._sampled(run, running, sampled, now)
            case SequenceAdmitted() as admitted:
                running.output.admitted(admitted, running.attempt, now)
                if not run.admitted:
                    yield self._admitted(run, admitted, now)
            case Preempted():
                running.output.preempted()
            case SequenceFinished() as ended:
                yield from self._finished(run, running, ended, now)
            case Refused(error):
                running.lose(_words_of(error))
            case Lost(reason):
                running.lose(reason)

    def _admitted(self, run: RequestRun, admitted: SequenceAdmitted, now: float) -> Admitted:
        request, metrics = run.request, self._recorder.metrics
        run.admitted = True
        metrics.queue_time.observe(now - request.arrived)
        metrics.request_prompt.observe(len(request.prompt))
        metrics.prompt_tokens.inc(len(request.prompt))
        metrics.cached_tokens.inc(admitted.cached_tokens)
        return Admitted(
            request_id=run.request_id,
            worker_id=run.worker_id,
            prompt_tokens=len(request.prompt),
            cached_tokens=admitted.cached_tokens,
            queue_seconds=now - request.arrived,
            decision_id=run.decision_id,
            trace_id=run.trace.trace_id,
            seed=request.sampling.seed,
            miss_reason=admitted.miss_reason,
            diverged_at=admitted.diverged_at,
        )

    def _sampled(
        self, run: RequestRun, running: Running, sampled: TokensSampled, now: float
    ) -> Iterator[GenerateEvent]:
        output, metrics = running.output, self._recorder.metrics
        if output.first_token_at is None:
            metrics.first_token(now - run.request.arrived, run.trace.trace_id)
            run.trace.first_token()
        elif not run.request.whole:
            metrics.inter_token_latency.observe(now - output.last_token_at)
        if running.reservation is not None:
            running.reservation.prefilled()
        event = output.sampled(sampled, now)
        if event is not None:
            metrics.generation_tokens.inc(len(event.token_ids))
            yield event
        if output.stop_string is not None:
            yield self._finish(run, running, STOPPED, now)

    def _finished(
        self, run: RequestRun, running: Running, ended: SequenceFinished, now: float
    ) -> Iterator[GenerateEvent]:
        if ended.reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            # The worker ended the sequence: its step failed, or it shuts down.
            running.lose(ended.message or f"the worker ended it: {ended.reason.value}")
            return
        rest = running.output.rest()
        if rest is not None:
            yield rest
        yield self._finish(run, running, ended, now)

    def _expire(self, run: RequestRun) -> Iterator[GenerateEvent]:
        if not run.live:  # the last sequence finished together with the deadline
            return
        if not run.admitted:
            run.close(FinishReason.DEADLINE)
            raise DeadlineExceeded(f"{DEADLINE_WORDS} before the request got blocks at its worker")
        now = self._clock.monotonic()
        for running in run.unfinished():
            rest = running.output.rest()
            if rest is not None:
                yield rest
            yield self._finish(run, running, EXPIRED, now)

    def _finish(self, run: RequestRun, running: Running, ended: SequenceFinished, now: float) -> Finished:
        running.leave(ended.reason)
        running.done = True
        run.expired |= ended.reason is FinishReason.DEADLINE
        event = running.output.finished(ended, now)
        self._recorder.finished(run.request_id, event, run.trace.trace_id)
        run.trace.finished(event)
        return event

    # ------------------------------------------------------------ another worker

    async def _move_lost(self, run: RequestRun) -> None:
        """Send sequences that lost their worker to another one. Raises EngineFailure when that happens too often."""
        for running in run.sequences:
            if not running.lost or running.done:
                continue
            reason, running.lost = running.lost, ""
            if running.attempt > MAX_MOVES:
                raise EngineFailure(f"the request lost {running.attempt} workers; the last one: {reason}")
            self._admission.requeue(run.request_id)
            self._recorder.metrics.migrations.inc()
            run.trace.lost()
            try:
                await self._place(run, [running], moved_because=reason)
            except DeadlineExceeded:
                if not run.admitted:
                    raise
                # The sequence ends with the tokens it has; those of its siblings are still to be sent.
                run.inbox.put(running.output.index, running.attempt, EXPIRED)


def _words_of(refusal: QuireError) -> str:
    """Return why a worker refused a sequence; raises the error when every other worker would refuse it too."""
    if not isinstance(refusal, Unavailable | Overloaded):
        raise refusal
    return str(refusal)
