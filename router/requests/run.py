"""One running request: its sequences, their workers, and the events that wait for the client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from common.contracts.adapters import root_keys
from common.contracts.clock import Clock
from common.contracts.errors import Unavailable
from common.contracts.hashing import block_digests, block_hash_of, little_endian_int32, narrowed_domain, root_digest
from common.contracts.types import BlockHash, FinishReason, PoolIdentity
from common.process.standstill import Standstill
from router.contracts.events import ValidatedRequest
from router.observe.diagnosis.outcome import Outcome
from router.observe.request_tap import EndedSequence
from router.observe.request_trace import RequestTrace
from router.placement.fair_queue import Ticket
from router.placement.first_tokens import Foretold
from router.placement.placement_request import PlacementRequest
from router.requests.dispatcher import LoadReservation, Placement
from router.requests.inbox import Aborted, Expired, Inbox, Revoked, Stopped, Turns
from router.requests.output_stream import OutputStream
from router.requests.probation import Turn
from router.requests.run_log import RunLog
from router.workers.client import WorkerClient
from router.workers.codec import Submission
from router.workers.in_flight import Sink
from router.workers.resuming import Continuation, Received
from router.workers.suspicion import Suspicion
from router.workers.worker_events import (
    Lost,
    Preempted,
    PromptScored,
    Refused,
    SequenceAdmitted,
    SequenceDelayed,
    SequenceEvent,
    SequenceFinished,
    SequenceStarted,
    TokensSampled,
)

# Why a sequence moves from a worker that is well.
DRAINED = "drain: its worker hands its sequences over"
# Events after which a sequence keeps its place at the worker.
_GOES_ON = (SequenceAdmitted, SequenceStarted, SequenceDelayed, PromptScored, TokensSampled, Preempted)


class Phase(Enum):
    """Where a sequence is.

      WAITING --begin_run--> AT_WORKER --move_to--> LEAVING
         ^                       |                     |
         |                       +------ end_run ------+
         |                                  |
    take_loss                               v
         |                                ENDED    the worker is done with it; the client may not have read that
         |                                  |
         +------------- LOST <- note_loss --+
                                            |
                     FINISHED <-- finish ---+      also from every other phase: a stop string, a deadline, a cancel
    """

    WAITING = "waiting for a place"
    AT_WORKER = "at a worker"
    LEAVING = "at a draining worker, with a place booked elsewhere"
    ENDED = "ended by its worker"
    LOST = "to be placed again"
    FINISHED = "finished"


@dataclass(slots=True)
class Running:
    """One sequence, its phase, and its place at a worker while it has one. `attempt` counts its runs."""

    output: OutputStream
    client: WorkerClient | None = None
    handle: int = 0
    reservation: LoadReservation | None = None
    phase: Phase = Phase.WAITING
    attempt: int = 0
    # Why the last run ended early, in the phase LOST.
    loss: str = ""
    # The place at which it goes on when its draining worker has ended it, and how often it went to one.
    booked: Placement | None = None
    drained: int = 0
    # Output tokens that the client had when the request was resumed here.
    received: int = 0
    # Worker and handle of this run and of those before it, which may still keep output of the sequence.
    _handles: list[tuple[WorkerClient, int]] = field(default_factory=list)

    def begin_run(self) -> int:
        """Begin the next run, at the worker that gets the sequence now; return its number."""
        self.attempt += 1
        self.phase = Phase.AT_WORKER
        return self.attempt

    def assign_worker(self, client: WorkerClient, handle: int) -> None:
        """Note the worker that runs the sequence now, and its handle there."""
        self.client, self.handle = client, handle
        self._handles.append((client, handle))

    def forget_earlier_runs(self) -> None:
        """Let the workers of earlier runs forget the sequence: the present one has it."""
        self._acknowledge(self._handles[:-1])

    def forget_all_runs(self) -> None:
        """Let all workers forget the sequence: its request leaves the router."""
        self._acknowledge(self._handles)

    def _acknowledge(self, handles: list[tuple[WorkerClient, int]]) -> None:
        for client, handle in handles:
            client.acknowledge(handle)
        self._handles = self._handles[len(handles) :]

    def leave_worker(self, reason: FinishReason | None) -> None:
        """Give up the place at the worker; with a reason, cancel the sequence there."""
        client, reservation = self.client, self.reservation
        self.client, self.reservation = None, None
        if reason is not None:
            if client is not None:
                client.cancel_sequence(self.handle, reason)
            self._unbook()
        if reservation is not None:
            reservation.release()

    def _unbook(self) -> None:
        if self.booked is not None:
            for each in self.booked.reservations:
                each.release()
            self.booked = None

    def end_run(self, event: SequenceEvent) -> None:
        """Free the place after the last event of a run, and the booked one unless the worker hands the sequence over.

        The client may not have read the earlier events.
        """
        if self.phase is not Phase.FINISHED:
            self.phase = Phase.ENDED
        _release(self.reservation, event)
        if not _hands_over(event):
            self._unbook()

    def note_loss(self, reason: str) -> None:
        """Give up the place after the worker ended the sequence; one that was booked is kept."""
        self.leave_worker(None)
        self.phase, self.loss = Phase.LOST, reason

    def take_loss(self) -> str:
        """Return why the sequence was lost; it waits for its next place from now on."""
        self.phase = Phase.WAITING
        return self.loss

    def move_to(self, booked: Placement) -> None:
        """Let the worker end the sequence, to go on at another place."""
        assert self.client is not None
        self.phase, self.booked = Phase.LEAVING, booked
        self.client.take_back(self.handle, DRAINED)

    def finish(self, reason: FinishReason) -> None:
        """End the sequence for its client: give up its worker."""
        self.leave_worker(reason)
        self.phase = Phase.FINISHED


class RequestRun:
    """A request's sequences and the inbox that their workers fill."""

    def __init__(
        self,
        request: ValidatedRequest,
        request_id: str,
        trace: RequestTrace,
        turns: Turns,
        clock: Clock,
        standstill: Standstill | None = None,
    ) -> None:
        self.request, self.request_id, self.trace = request, request_id, trace
        self.log, self._clock = RunLog(request, clock, standstill), clock
        self.sequences: list[Running] = []
        # A request with stop strings needs its tokens at once, because the worker has no stop strings.
        patient = request.whole and not request.sampling.stop
        self.inbox = Inbox(turns, patient, too_slow=self._leave, whole=request.whole)
        self.admitted = False
        # What the client had when it resumed the request here; None for a request that began here.
        self.received: Received | None = None
        # Whether the metrics have the prompt's cached tokens.
        self.hits_counted = False
        # Whether a sequence was ended by the deadline.
        self.expired = False
        self.worker_id = ""
        # That of the pool at the last placement.
        self.identity: PoolIdentity | None = None
        self.decision_id = ""
        self.ticket: Ticket | None = None
        # The prediction of the first token, until that comes.
        self.foretold: Foretold | None = None
        self.suspicion = Suspicion()
        self._turn: Turn | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def used_tokens(self) -> int:
        """Tokens that the request has used so far: the prompt, and the output of every sequence."""
        return len(self.request.prompt) + sum(len(each.output.tokens) for each in self.sequences)

    @property
    def live(self) -> bool:
        return bool(self.unfinished())

    def unfinished(self) -> list[Running]:
        return [each for each in self.sequences if each.phase is not Phase.FINISHED]

    def sink(self, running: Running) -> Sink:
        """Return the sink for a worker's events of the next run of a sequence. The last event releases the load."""
        index, attempt = running.output.index, running.begin_run()
        self.log.submitted(index)

        def sink(event: SequenceEvent) -> None:
            if not isinstance(event, _GOES_ON) and attempt == running.attempt:
                running.end_run(event)
            if attempt == running.attempt:
                if isinstance(event, SequenceAdmitted):
                    running.forget_earlier_runs()
                elif isinstance(event, SequenceStarted) and event.loaded_blocks:
                    running.output.started(event.loaded_blocks * self.log.block_size)
                self.log.follow(index, event)
                self._follow(event)
            if not isinstance(event, SequenceStarted | SequenceDelayed):  # nothing that the stream sends
                self.inbox.put_event(index, attempt, event)

        return sink

    def _follow(self, event: SequenceEvent) -> None:
        """Count what clears or incriminates the request; end its turn once it is cleared or gone."""
        if isinstance(event, TokensSampled | PromptScored):
            if self.foretold is not None:
                self.foretold.came(self._clock.monotonic())
                self.foretold = None
            further = event.token_ids if isinstance(event, TokensSampled) else event.logprobs
            if self.suspicion.sampled(len(further)):
                self.take_turn(None)
        elif not isinstance(event, SequenceAdmitted | SequenceStarted | SequenceDelayed | Preempted):
            if isinstance(event, Lost) and event.breakdown is not None:
                self.suspicion.add_break(event.breakdown, self._holds_turn)
            self.take_turn(None)

    def note_prompt_lost(self, event: Lost) -> None:
        """Note that a worker was lost that computed the prompt for another one."""
        if event.breakdown is not None:
            self.suspicion.add_break(event.breakdown, self._holds_turn)

    @property
    def waits(self) -> bool:
        """Whether the request is suspected and other requests go before it."""
        return not self._holds_turn and (self.suspicion.apart or self.suspicion.waits_for is not None)

    @property
    def _holds_turn(self) -> bool:
        return self._turn is not None and not self._turn.ended

    def take_turn(self, turn: Turn | None) -> None:
        """Hold the turn of a suspected request until it is cleared or gone; None ends the turn."""
        if self._turn is not None:
            self._turn.end()
        self._turn = turn

    def expire_in(self, seconds: float) -> None:
        """Let Expired arrive after so many seconds."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, seconds), self.inbox.put_event, -1, 0, Expired())

    def interrupt(self, why: Revoked | Aborted | Stopped) -> None:
        """End the sequences at their workers at once, and let `why` arrive, however slowly the client reads."""
        self.inbox.put_event(-1, 0, why)
        self._leave()

    def outcome(self, failure: str) -> Outcome:
        """Return the last record of the request; `failure` is "" for one that ended by itself."""
        if self.ticket is not None:
            self.log.queued = self.ticket.waited
        outputs = [each.output for each in self.sequences]
        return replace(
            self.log.outcome(failure, self.worker_id, sum(len(each.tokens) for each in outputs)),
            gaps=sum(each.gaps for each in outputs),
            late_gaps=sum(each.late_gaps for each in outputs),
            longest_gap=max((each.longest_gap for each in outputs), default=0.0),
        )

    def ended_sequences(self) -> Iterator[EndedSequence]:
        """Yield what a recording keeps of each sequence; nothing of a request that was never placed."""
        if self.identity is None:
            return
        request = self.request
        for output in [each.output for each in self.sequences]:
            yield EndedSequence(
                arrived=request.arrived,
                ended=output.last_token_at,
                first_token_at=output.first_token_at,
                prompt_tokens=len(request.prompt),
                output_tokens=len(output.tokens),
                cached_tokens=output.cached_tokens,
                block_size=self.identity.block_size,
                block_hashes=Prefix.of(request, self.identity, output.tokens).block_hashes,
                worker_id=self.worker_id,
                tenant=request.tenant,
                priority=request.priority,
            )

    def close(self, reason: FinishReason) -> None:
        """End all sequences that still run."""
        self.take_turn(None)
        self.suspicion.leave()
        if self.foretold is not None:
            self.foretold.ended(self._clock.monotonic())
            self.foretold = None
        if self._timer is not None:
            self._timer.cancel()
        self.inbox.close()
        self._leave(reason)
        for running in self.sequences:
            running.forget_all_runs()

    def _leave(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        heard = [each.client.heard_at(each.handle) for each in self.sequences if each.client is not None]
        if latest := max(heard, default=0.0):
            self.log.silent_since(latest)
        for running in self.sequences:
            running.leave_worker(reason)


def _hands_over(event: SequenceEvent) -> bool:
    """Return whether a worker ended a sequence that is to go on elsewhere. A broken stream is a loss all the same."""
    match event:
        case SequenceFinished():
            return event.reason is FinishReason.CANCELLED
        case Lost():
            return event.reason == DRAINED
        case Refused():  # it drained already when the sequence came
            return isinstance(event.error, Unavailable)
    return False


def _release(reservation: LoadReservation | None, event: SequenceEvent) -> None:
    if reservation is None:
        return
    if isinstance(event, SequenceFinished) and event.reason in (FinishReason.STOP, FinishReason.LENGTH):
        reservation.complete(event.usage.output_tokens)
    else:
        reservation.release()


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens of a sequence so far, prompt first, and the hashes of their full blocks."""

    tokens: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    parent_digest: bytes
    cache_domain: bytes

    @staticmethod
    def of(request: ValidatedRequest, identity: PoolIdentity, output: list[int]) -> Prefix:
        """Hash the full blocks, in about 0.6 microseconds each. A request with `no_cache` has no block hashes."""
        tokens = (*request.prompt, *output)
        domain = narrowed_domain(request.cache_domain, request.salt)
        root = root_digest(
            identity.model_fingerprint,
            identity.tokenizer_fingerprint,
            identity.block_size,
            domain,
            root_keys(request.adapter.fingerprint if request.adapter is not None else ""),
        )
        if request.no_cache:
            return Prefix(tokens, (), root, domain)
        digests = block_digests(root, tokens, identity.block_size)
        hashes = tuple([block_hash_of(each) for each in digests])
        return Prefix(tokens, hashes, digests[-1] if digests else root, domain)


def placement_request_of(run: RequestRun, tokens: int, sequences: int) -> PlacementRequest:
    """Return the placement request for so many sequences that continue so many tokens, the prompt's included."""
    return placement_of(run.request, tokens, sequences, run.request_id, run.trace.traceparent)


def placement_of(
    request: ValidatedRequest, tokens: int, sequences: int, request_id: str = "", traceparent: str = ""
) -> PlacementRequest:
    return PlacementRequest(
        request_id=request_id,
        prompt_tokens=tokens,
        max_len=request.max_len,
        max_tokens=request.max_len - tokens,
        sequences=sequences,
        traceparent=traceparent,
        avoids=request.avoids,
        adapter=request.adapter,
    )


def of_sequence(submission: Submission, output: OutputStream) -> Submission:
    """Return the submission of one sequence. The first alone gets log-probabilities of the prompt."""
    scored = 0
    submission = replace(submission, continuation=output.continuation(submission.continuation))
    if submission.sampling.prompt_logprobs is not None:
        scored = output.scored if not output.index else len(submission.tokens) - submission.output_before - 1
    return replace(submission, index=output.index, prompt_logprobs_before=scored)


def submission_of(run: RequestRun, prefix: Prefix, now: float, eos_token_ids: tuple[int, ...]) -> Submission:
    """Return the first sequence of a request for a worker; see `of_sequence`."""
    request = run.request
    timeout = None if request.deadline is None else max(0.0, request.deadline - now)
    return Submission(
        request_id=run.request_id,
        index=0,
        tokens=prefix.tokens,
        block_hashes=prefix.block_hashes,
        parent_digest=prefix.parent_digest,
        cache_domain=prefix.cache_domain,
        tenant=request.flow.tenant,
        weight=request.flow.weight,
        sampling=request.sampling,
        priority=request.priority,
        timeout=timeout,
        traceparent=run.trace.parent,
        tracestate=run.trace.tracestate,
        output_before=len(prefix.tokens) - len(request.prompt),
        no_cache=request.no_cache,
        eos_token_ids=eos_token_ids,
        embeds=request.embeds,
        packed_tokens=little_endian_int32(prefix.tokens),
        prediction=request.prediction,
        retention=request.retention,
        continuation=_continuation(request, now),
        adapter=request.adapter,
    )


def _continuation(request: ValidatedRequest, now: float) -> Continuation | None:
    """Return what another router needs to go on with the request; a vector is made again as quickly."""
    if request.embeds:
        return None
    return Continuation(
        request.sampling.stop,
        request.kept_special_tokens,
        request.skip_special_tokens,
        request.salt,
        submitted_seconds=now - request.arrived,
    )
