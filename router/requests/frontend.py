"""Serves one validated request from admission to its last token, for every client API.

    enter -> hash the prompt -> look it up -> wait for a worker -> submit n sequences -> stream their tokens

A sequence whose worker is lost continues at another one, from its prompt and its tokens so far; the client sees a
pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator

from common.contracts.errors import Cancelled, DeadlineExceeded, Overloaded, QuireError, Unavailable
from common.contracts.types import DecisionKind, FinishReason, SamplingParams
from common.process.standstill import Standstill
from common.rpc.deadline import is_expiry
from router.contracts.events import GenerateEvent, ValidatedRequest
from router.contracts.ports import CallContext, TextAssemblers
from router.observe.recorder import Recorder
from router.observe.request_trace import RequestTrace
from router.placement.admission import AdmissionLimiter
from router.requests.adopting import Adopter
from router.requests.client_events import ClientEvents, error_of
from router.requests.dispatcher import Dispatcher
from router.requests.drain_mover import DrainMover
from router.requests.inbox import Aborted, Revoked, Stopped, Turns, work_of
from router.requests.output_stream import EXPIRED, OutputStream, StopTokens
from router.requests.placing import Placer
from router.requests.request_ids import automatic_id
from router.requests.resumption import Resumable
from router.requests.run import RequestRun, Running
from router.requests.run_log import DEADLINE_WORDS, GONE_WORDS
from router.tenants.tenancy import Caller

Figures = tuple[tuple[str, float], ...]


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
    ) -> None:
        self._dispatcher, self._admission, self._new_id = dispatcher, admission, new_id
        self._assemblers, self._recorder, self._eos_token_ids = assemblers, recorder, eos_token_ids
        self._clock = recorder.clock
        self._turns, self._placer = Turns(), Placer(dispatcher, admission, recorder, eos_token_ids)
        self._adopter, self._events = Adopter(dispatcher, admission, recorder), ClientEvents(recorder)
        self._runs: set[RequestRun] = set()
        self.standstill = Standstill(lambda: bool(self._runs))
        """When this router did not run."""
        dispatcher.pool.listen(DrainMover(dispatcher.pool, self._placer, self._runs, self._clock))
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
                for arrival in await run.inbox.take():
                    for part in arrival.parts():
                        for event in self._events.of(run, arrival, part):
                            run.log.hands_over()
                            yield event
                            run.log.taken()
                        await self._turns.pace(work_of(part))
                run.inbox.sent()
                await self._placer.move_lost(run)
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
            self._admission.leave(run.request_id, run.request.tenant, run.used_tokens)
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

    def end_revoked(self, is_live: Callable[[Caller], bool]) -> None:
        """End every request whose caller `is_live` refuses, those that wait for a worker included."""
        for run in list(self._runs):
            if not is_live(run.request.caller):
                self._end(run, Revoked())

    def abort(self, request_id: str, tenant: str = "") -> int:
        """End the requests with an id, of one tenant or ("") of any; return how many there were."""
        named = [run for run in self._runs if run.request_id == request_id and tenant in ("", run.request.tenant)]
        for run in named:
            self._end(run, Aborted())
        return len(named)

    def _end(self, run: RequestRun, why: Revoked | Aborted | Stopped) -> None:
        run.interrupt(why)
        if run.ticket is not None:
            self._dispatcher.refuse(run.ticket, error_of(why))

    async def drain(self, seconds: float) -> bool:
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
            raise Unavailable("the router is draining; another one takes new requests")
        limiter, now, figures = self._admission, self._clock.monotonic(), self._figures(request.tokens)
        try:
            limiter.enter(request_id, request.tokens, request.caller.tenant, now, request.sampling.n, request.paid)
        except Overloaded as refused:
            self._reject(trace, request_id, refused, figures)
            raise
        self._recorder.decided(trace, DecisionKind.ADMISSION, request_id, "admitted", figures, request.notes)

    def refuse(self, call: CallContext, request_id: str, tokens: int, refused: Overloaded) -> None:
        """Record a request of about so many tokens that was refused before it was read."""
        unread = ValidatedRequest(
            prompt=(),
            sampling=SamplingParams(),
            arrived=call.arrived,
            caller=call.caller,
            traceparent=call.traceparent,
            trace_id=call.trace_id,
            correlation_id=call.correlation_id,
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
            await self._placer.place(run, run.sequences)
        else:
            await self._adopter.adopt(run, resumable)
