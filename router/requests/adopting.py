"""Takes over the sequences of a request that another router began, where they run."""

from __future__ import annotations

import asyncio

from common.contracts.errors import Unavailable
from common.contracts.types import DecisionKind
from router.observe.recorder import Recorder
from router.placement.admission import AdmissionLimiter
from router.requests.dispatcher import Dispatcher
from router.requests.resumption import Resumable
from router.requests.run import RequestRun

LOST_WORDS = "its router was lost, and its client resumed it here"
# Seconds that a worker has for the answer to an adoption. A worker of an earlier version gives none.
CONFIRM_SECONDS = 5.0


class Adopter:
    """Puts orphans in the place of sequences that a worker would be chosen for."""

    def __init__(self, dispatcher: Dispatcher, admission: AdmissionLimiter, recorder: Recorder) -> None:
        self._dispatcher, self._admission, self._recorder = dispatcher, admission, recorder
        self._clock = recorder.clock

    async def adopt(self, run: RequestRun, resumable: Resumable) -> None:
        """Go on with every sequence, one after the other in the order of their indices.

        Of two routers that adopt one request, only one gets the first sequence; the other one then has taken none.
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
            running.reservation = self._dispatcher.adopted(found.client, run.request.flow)
            handle, confirmed = found.client.adopt(found.orphan.sequence, run.sink(running), left)
            running.place(found.client, handle)
            if not await _confirmed(confirmed, run):
                return
        # From here on a worker that drains may hand the sequences over.
        run.identity = self._dispatcher.pool.identity
        self._admission.start(run.request_id, now, run.request.tenant)
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
