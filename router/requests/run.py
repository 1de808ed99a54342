"""One running request: its sequences, their places at workers, and the events that wait for the client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from common.hashing import block_digests, block_hash_of, root_digest
from common.types import BlockHash, FinishReason, PoolIdentity
from router.core.events import ValidatedRequest
from router.core.routing import PlacementRequest
from router.core.waiting_queue import Ticket
from router.core.worker_events import Preempted, SequenceAdmitted, SequenceEvent, SequenceFinished, TokensSampled
from router.observe.request_trace import RequestTrace
from router.requests.inbox import Expired, Inbox, Turns
from router.requests.output_stream import OutputStream
from router.requests.reservation import LoadReservation
from router.workers.client import Sink, WorkerClient
from router.workers.codec import Submission

# Events after which a sequence keeps its place at the worker.
_GOES_ON = (SequenceAdmitted, TokensSampled, Preempted)


@dataclass(slots=True)
class Running:
    """One sequence, and its place at a worker while it has one. `attempt` counts its runs."""

    output: OutputStream
    client: WorkerClient | None = None
    handle: int = 0
    reservation: LoadReservation | None = None
    attempt: int = 0
    done: bool = False
    # Why the last run ended early, until the next one begins.
    lost: str = ""

    def leave(self, reason: FinishReason | None) -> None:
        """Give up the place at the worker; with a reason, cancel the sequence there."""
        client, reservation = self.client, self.reservation
        self.client, self.reservation = None, None
        if client is not None and reason is not None:
            client.cancel(self.handle, reason)
        if reservation is not None:
            reservation.release()

    def lose(self, reason: str) -> None:
        self.leave(None)
        self.lost = reason


class RequestRun:
    """A request's sequences and the inbox that their workers fill."""

    def __init__(self, request: ValidatedRequest, request_id: str, trace: RequestTrace, turns: Turns) -> None:
        self.request, self.request_id, self.trace = request, request_id, trace
        self.sequences: list[Running] = []
        # It fills up while the client reads slowly, at most with the tokens of the request. The AdmissionLimiter counts
        # these meanwhile: max_tokens_in_flight bounds all inboxes together. A request with stop strings needs its
        # tokens at once, because the worker has no stop strings.
        self.inbox = Inbox(turns, patient=request.whole and not request.sampling.stop)
        self.admitted = False
        # Whether a sequence was ended by the deadline.
        self.expired = False
        self.worker_id = ""
        self.decision_id = ""
        self.ticket: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def live(self) -> bool:
        return bool(self.unfinished())

    def unfinished(self) -> list[Running]:
        return [sequence for sequence in self.sequences if not sequence.done]

    def sink(self, running: Running) -> Sink:
        """Return the sink for a worker's events of the next run of a sequence. The last event releases the load."""
        running.attempt += 1
        index, attempt = running.output.index, running.attempt

        def sink(event: SequenceEvent) -> None:
            # The place is free at once, whether or not the client has read the earlier events.
            if not isinstance(event, _GOES_ON) and attempt == running.attempt:
                _release(running.reservation, event)
            self.inbox.put(index, attempt, event)

        return sink

    def expire_in(self, seconds: float) -> None:
        """Let Expired arrive after so many seconds."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, seconds), self.inbox.put, -1, 0, Expired())

    def close(self, reason: FinishReason) -> None:
        """Give up the places of all sequences that still run."""
        if self._timer is not None:
            self._timer.cancel()
        for running in self.sequences:
            running.leave(reason)


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

    @staticmethod
    def of(request: ValidatedRequest, identity: PoolIdentity, output: list[int]) -> Prefix:
        """Hash the full blocks, in about 0.6 microseconds each. A request with `no_cache` has no block hashes."""
        tokens = (*request.prompt, *output)
        extra = [("salt", request.salt)] if request.salt else []
        root = root_digest(
            identity.model_fingerprint,
            identity.tokenizer_fingerprint,
            identity.block_size,
            request.cache_domain,
            extra,
        )
        if request.no_cache:
            return Prefix(tokens, (), root)
        digests = block_digests(root, tokens, identity.block_size)
        return Prefix(tokens, tuple(map(block_hash_of, digests)), digests[-1] if digests else root)


def placement_request_of(run: RequestRun, prefix: Prefix, sequences: int) -> PlacementRequest:
    """Return the placement request for so many sequences that continue `prefix`."""
    request = run.request
    return PlacementRequest(
        request_id=run.request_id,
        prompt_tokens=len(prefix.tokens),
        max_len=request.max_len,
        max_tokens=request.max_len - len(prefix.tokens),
        sequences=sequences,
        traceparent=run.trace.traceparent,
    )


def submission_of(
    run: RequestRun, running: Running, prefix: Prefix, timeout: float | None, eos_token_ids: tuple[int, ...]
) -> Submission:
    """Return one sequence for a worker; `timeout` in seconds from now."""
    request = run.request
    return Submission(
        request_id=run.request_id,
        index=running.output.index,
        tokens=prefix.tokens,
        block_hashes=prefix.block_hashes,
        parent_digest=prefix.parent_digest,
        sampling=request.sampling,
        priority=request.priority,
        timeout=timeout,
        traceparent=run.trace.traceparent,
        output_before=len(prefix.tokens) - len(request.prompt),
        no_cache=request.no_cache,
        eos_token_ids=eos_token_ids,
    )
