"""Lets a prefill worker compute a prompt before its request is submitted to a worker that decodes.

    router --submit, max_tokens 0--> P --LENGTH--> router --submit--> D --fetch--> P
                                     |                                ^
                                     +-- an error, a loss, too long --+   D computes what it cannot fetch

The prompt is a request of its own at P: its full blocks, and nothing of what comes after them. It leaves cached blocks
there, as any request does. P holds nothing for D, and waits for nobody. Where the way ends early, nothing is lost but
time: D fetches what P has sealed by then. A router that goes on with the request of another one finds nothing of it.

P first loads the request's adapter, where it does not have it in memory. Where it has no room, D computes the prompt.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import Final

from common.contracts.clock import Clock
from common.contracts.errors import Unavailable
from common.contracts.limits import MAX_REQUEST_ID_CHARS
from common.contracts.types import FinishReason, PoolIdentity, SamplingParams
from router.placement.fair_queue import Ticket
from router.placement.remote_prefill import Elsewhere, Mode
from router.requests.adapter_loads import AdapterLoads
from router.requests.dispatcher import Dispatcher, Job, PromptPlace
from router.requests.run import Prefix, RequestRun, submission_of
from router.workers.client import WorkerClient
from router.workers.codec import Submission
from router.workers.worker_events import Lost, Refused, SequenceEvent, SequenceFinished

log = logging.getLogger(__name__)

SUFFIX: Final = ".prompt"
"""Of the id that a prompt has at the worker that computes it: its records are not those of the request."""
_INTERRUPTED: Final = "the request was interrupted"


@dataclass(slots=True)
class _AtWorker:
    """The sink of a prompt; `end` gets why it was not computed, "" where it was."""

    run: RequestRun
    end: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __call__(self, event: SequenceEvent) -> None:
        if isinstance(event, Lost):
            self.run.note_prompt_lost(event)
            self._set(event.reason)
        elif isinstance(event, Refused):
            self._set(str(event.error))
        elif isinstance(event, SequenceFinished):
            done = event.reason is FinishReason.LENGTH
            self._set("" if done else event.message or f"the worker ended it: {event.reason.value}")

    def _set(self, why_not: str) -> None:
        if not self.end.done():
            self.end.set_result(why_not)


class RemotePrefill:
    """Computes prompts of new requests elsewhere, as `mode` says."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock, mode: Mode, loads: AdapterLoads) -> None:
        self._dispatcher, self._clock, self._mode, self._loads = dispatcher, clock, mode, loads

    async def compute_elsewhere(self, run: RequestRun, job: Job, identity: PoolIdentity, ticket: Ticket) -> Job:
        """Return the job, with what a prefill worker has computed of its prompt.

        Return at once where no worker computes prompts, where that does not pay, and where all of the prompt is
        computed for its log-probabilities or its vector. The caller asks whether the request was interrupted.
        """
        if self._mode == "off" or not job.block_hashes or run.request.embeds or not self._dispatcher.computes_prompts():
            return job
        try:
            place = await self._dispatcher.book_prompt_place(job, ticket, self._mode)
        except Unavailable:  # the worker has just gone
            return job
        if place is None:
            return job
        if place.client is None:
            return replace(job, figures=place.ways.figures)
        try:
            return await self._compute(run, job, identity, place, place.client)
        finally:
            if place.reservation is not None:
                place.reservation.release()

    async def _compute(
        self, run: RequestRun, job: Job, identity: PoolIdentity, place: PromptPlace, client: WorkerClient
    ) -> Job:
        ways, began = place.ways, self._clock.monotonic()
        worker_id, tokens = ways.prefill.worker.worker_id, ways.blocks * identity.block_size
        run.suspicion.placed()
        run.log.sends_prompt(worker_id)
        why_not = _INTERRUPTED
        try:
            why_not = await self._load_adapter(run, place, client)
            if not why_not:
                why_not = await _computed(client, _submission(run, identity, tokens, began), run, ways.patience_s)
        finally:
            run.log.prompt_left(0 if why_not else tokens, why_not)
        if why_not:
            log.info("a prompt was not computed at %s", worker_id, extra={"reason": why_not})
        seconds = self._clock.monotonic() - began
        figures = (*job.figures, *ways.figures, ("prefill_s", seconds))
        noted = replace(job, notes=(_words(ways, tokens, seconds, why_not), *job.notes), figures=figures)
        if why_not:
            return noted
        return replace(noted, request=replace(job.request, computed_elsewhere=tokens))

    async def _load_adapter(self, run: RequestRun, place: PromptPlace, client: WorkerClient) -> str:
        """Have the worker load the request's adapter, if it is not in memory there; return why it has not, or ""."""
        wanted, ways = run.request.adapter, place.ways
        if wanted is None or not ways.prefill.worker.adapters.seconds_until(wanted):
            return ""
        share = self._dispatcher.pool.adapter_share(wanted.name, run.request.flow.tenant)
        return await self._loads.load_at_once(client, wanted, share, run.inbox.interrupted, ways.patience_s)


def _words(ways: Elsewhere, tokens: int, seconds: float, why_not: str) -> str:
    """Return what the record of the placement says."""
    there, here = f"{ways.there_s:.3f} s predicted in all", f"{ways.here_s:.3f} s at {ways.decode.worker.worker_id}"
    where = ways.prefill.worker.worker_id
    if why_not:
        return f"prefill: {where} did not compute {tokens} tokens of its prompt, in {seconds:.3f} s: {why_not}"
    return f"prefill: {where} computed {tokens} tokens of its prompt in {seconds:.3f} s; {there}, {here}"


def _submission(run: RequestRun, identity: PoolIdentity, tokens: int, now: float) -> Submission:
    """Return the submission of a prompt's first tokens: nothing is sampled, and no other router goes on with it."""
    request = replace(run.request, prompt=run.request.prompt[:tokens])
    submission = submission_of(run, Prefix.of(request, identity, []), now, ())
    return replace(
        submission,
        request_id=f"{run.request_id[: MAX_REQUEST_ID_CHARS - len(SUFFIX)]}{SUFFIX}",
        sampling=SamplingParams(max_tokens=0),
        output_before=0,
        prediction=(),
        retention=(),
        continuation=None,
    )


async def _computed(client: WorkerClient, submission: Submission, run: RequestRun, patience: float) -> str:
    """Let a worker compute a prompt; return why it did not, or "". Whatever ends the wait ends the sequence."""
    at_worker = _AtWorker(run)
    try:
        handle = client.submit_sequence(submission, at_worker)
    except Unavailable as gone:
        return str(gone)
    interrupted = asyncio.ensure_future(run.inbox.interrupted.wait())
    try:
        await asyncio.wait((at_worker.end, interrupted), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    finally:
        interrupted.cancel()
        if not at_worker.end.done():
            client.cancel_sequence(handle, FinishReason.CANCELLED)
        client.acknowledge(handle)
    if at_worker.end.done():
        return at_worker.end.result()
    return _INTERRUPTED if run.inbox.interrupted.is_set() else f"it took longer than {patience:.1f} s"
