"""What a client learns of its request: the events of workers, and interruptions, as events of the API or as errors."""

from __future__ import annotations

from collections.abc import Iterator

from common.contracts.errors import (
    Cancelled,
    Draining,
    Overloaded,
    QueueExpired,
    QuireError,
    Unauthenticated,
    Unavailable,
)
from common.contracts.types import FinishReason, MissReason, TokenLogprobs, Usage
from router.contracts.events import Admitted, Finished, GenerateEvent, PromptLogprobs
from router.observe.recorder import Recorder
from router.requests.inbox import Aborted, Arrival, Expired, Interruption, Revoked, Stopped
from router.requests.output_stream import EXPIRED, STOPPED, OutputStream
from router.requests.resumption import Resumable
from router.requests.run import DRAINED, Phase, RequestRun, Running
from router.requests.run_log import DEADLINE_WORDS
from router.workers.worker_events import (
    Lost,
    Preempted,
    PromptScored,
    Refused,
    SequenceAdmitted,
    SequenceEvent,
    SequenceFinished,
    TokensSampled,
)

# The failure in the spans of a request that did not end by itself.
REVOKED_WORDS = "the key of this request was revoked; ask the operator for another one"
ABORTED_WORDS = "the request was aborted by another call"
STOPPED_WORDS = "the router stops, and waits no longer for this request; send it again to another one"


class ClientEvents:
    """The events for the clients of all requests of a router. What each event means for the metrics is counted here."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._clock = recorder, recorder.clock

    def of(self, run: RequestRun, arrival: Arrival, event: SequenceEvent | Interruption) -> Iterator[GenerateEvent]:
        """Yield what one event of an arrival means for the client.

        An event of a run that the sequence has left means nothing. Raises the error of an interruption.
        """
        if isinstance(event, Expired | Revoked | Aborted | Stopped):
            yield from self._interrupt(run, event)
            return
        running = run.sequences[arrival.index]
        if arrival.attempt != running.attempt or running.phase is Phase.FINISHED:
            return
        now = self._clock.monotonic()
        match event:
            case TokensSampled() as sampled:
                yield from self._sampled(run, running, sampled, now)
            case PromptScored(logprobs):
                yield from _scored(run, running.output, logprobs)
            case SequenceAdmitted() as admitted:
                yield from self._admitted(run, running, admitted, now)
            case Preempted():
                running.output.preempted()
            case SequenceFinished() as ended:
                yield from self._finished(run, running, ended, now)
            case Refused(error):
                running.note_loss(_words_of(error))
            case Lost(reason):
                running.note_loss(reason)

    def earlier(self, run: RequestRun, resumable: Resumable | None) -> Iterator[GenerateEvent]:
        """Yield what resumed sequences put out at earlier workers, after the admission that came before it."""
        now = self._clock.monotonic()
        for running, found in zip(run.sequences, resumable.sequences if resumable is not None else (), strict=False):
            if found.orphan.earlier:
                usage = found.orphan.continuation.usage_before or Usage()
                hit = SequenceAdmitted(usage.cached_tokens, MissReason.DISABLED, 0, run.decision_id, 0.0)
                yield from self._announce(run, hit, running.output.admitted_at or now)
                yield from self._sampled(run, running, TokensSampled(found.orphan.earlier), now)

    def _admitted(
        self, run: RequestRun, running: Running, admitted: SequenceAdmitted, now: float
    ) -> Iterator[GenerateEvent]:
        running.output.admitted(admitted, running.attempt, now, run.log.block_size)
        yield from self._announce(run, admitted, running.output.admitted_at or now)

    def _announce(self, run: RequestRun, admitted: SequenceAdmitted, admitted_at: float) -> Iterator[GenerateEvent]:
        """Yield Admitted, once; a request is counted at the router where it began."""
        if run.admitted:
            return
        request, metrics = run.request, self._recorder.metrics.of(run.trace.owner)
        run.admitted = True
        if run.received is None:
            metrics.blocks_granted(admitted_at - request.arrived, run.trace.trace_id)
            metrics.request_prompt.observe(len(request.prompt))
            metrics.prompt_tokens.inc(len(request.prompt))
        yield Admitted(
            request_id=run.request_id,
            worker_id=run.worker_id,
            prompt_tokens=len(request.prompt),
            cached_tokens=admitted.cached_tokens,
            queue_seconds=admitted_at - request.arrived,
            decision_id=run.decision_id,
            trace_id=run.trace.trace_id,
            seed=request.sampling.seed,
            miss_reason=admitted.miss_reason,
            diverged_at=admitted.diverged_at,
        )

    def _count_hits(self, run: RequestRun, output: OutputStream) -> None:
        """Count the prompt's cached tokens once, when it is computed: the worker may correct them until then."""
        if run.hits_counted or not run.admitted:
            return
        run.hits_counted = True
        self._recorder.metrics.of(run.trace.owner).cached_tokens.inc(output.cached_tokens)

    def _sampled(
        self, run: RequestRun, running: Running, sampled: TokensSampled, now: float
    ) -> Iterator[GenerateEvent]:
        output, metrics = running.output, self._recorder.metrics.of(run.trace.owner)
        if (known := running.received - len(output.tokens)) > 0:
            yield from self._repeated(run, running, sampled.part(0, known), now)
            if running.phase is Phase.FINISHED or len(sampled.token_ids) <= known:
                return
            sampled = sampled.part(known, len(sampled.token_ids))
        if output.first_token_at is None:
            metrics.first_token(now - run.request.arrived, run.trace.trace_id)
            run.trace.first_token()
            self._count_hits(run, output)
        elif not output.replays:
            gap, count = now - output.last_token_at, len(sampled.token_ids)
            if run.request.whole:
                # Its worker gathers tokens, and no client waits for one of them. An arrival may have none.
                metrics.inter_token_latency.observe_each(gap / max(1, count), count)
            else:
                metrics.inter_token_latency.observe(gap)
                output.waited(gap, self._recorder.objective_itl)
        if running.reservation is not None:
            running.reservation.prefilled()
        event = output.sampled(sampled, now)
        if event is not None:
            metrics.generation_tokens.inc(len(event.token_ids))
            yield event
        if output.stop_string is not None:
            yield self.finish(run, running, STOPPED, now)

    def _repeated(
        self, run: RequestRun, running: Running, sampled: TokensSampled, now: float
    ) -> Iterator[GenerateEvent]:
        """Take tokens that the client of a resumed request has: text and stop strings go on after them."""
        event = running.output.sampled(sampled, now)
        if running.reservation is not None:
            running.reservation.prefilled()
        if event is not None and run.received is not None and run.received.again:
            yield event
        if running.output.stop_string is not None:
            yield self.finish(run, running, STOPPED, now)

    def _finished(
        self, run: RequestRun, running: Running, ended: SequenceFinished, now: float
    ) -> Iterator[GenerateEvent]:
        if ended.reason is FinishReason.CANCELLED:  # the worker shuts down
            running.note_loss(
                (DRAINED if running.booked else ended.message) or f"the worker ended it: {ended.reason.value}"
            )
            return
        rest = running.output.rest()
        if rest is not None:
            yield rest
        yield self.finish(run, running, ended, now)

    def _interrupt(self, run: RequestRun, event: Interruption) -> Iterator[GenerateEvent]:
        if not isinstance(event, Expired):
            raise error_of(event)
        if not run.live:  # the last sequence finished together with the deadline
            return
        if not run.admitted:
            run.close(FinishReason.DEADLINE)
            raise QueueExpired(f"{DEADLINE_WORDS} before the request got blocks at its worker")
        now = self._clock.monotonic()
        for running in run.unfinished():
            rest = running.output.rest()
            if rest is not None:
                yield rest
            yield self.finish(run, running, EXPIRED, now)

    def finish(self, run: RequestRun, running: Running, ended: SequenceFinished, now: float) -> Finished:
        """End a sequence for the client: give up its worker, and record what it cost."""
        running.finish(ended.reason)
        self._count_hits(run, running.output)
        run.expired |= ended.reason is FinishReason.DEADLINE
        event = running.output.finished(ended, now)
        run.log.sequence_ended(event)
        self._recorder.finished(run.trace, run.request_id, event)
        run.trace.finished(event)
        return event


def error_of(interruption: Revoked | Aborted | Stopped) -> QuireError:
    """Return the error with which an interrupted request ends."""
    match interruption:
        case Revoked():
            return Unauthenticated(REVOKED_WORDS)
        case Aborted():
            return Cancelled(ABORTED_WORDS)
        case Stopped():
            return Draining(STOPPED_WORDS)


def _scored(run: RequestRun, output: OutputStream, logprobs: tuple[TokenLogprobs, ...]) -> Iterator[GenerateEvent]:
    """Yield the log-probabilities of the prompt that the client lacks."""
    has = 0 if run.received is None else run.received.prompt_logprobs
    fresh = logprobs[max(0, has - output.scored) :]
    output.scored += len(logprobs)
    if fresh:
        yield PromptLogprobs(fresh)


def _words_of(refusal: QuireError) -> str:
    """Return why a worker refused a sequence; raises the error when every other worker would refuse it too."""
    if not isinstance(refusal, Unavailable | Overloaded):
        raise refusal
    return str(refusal)
