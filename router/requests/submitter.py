"""Places the sequences of a request at workers: at the beginning, and again where a worker is lost."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from common.contracts.adapters import AdapterRef
from common.contracts.errors import DeadlineExceeded, EngineFailure, Unavailable
from router.contracts.embedding import check_kind
from router.observe.recorder import Recorder
from router.placement.admission import AdmissionLimiter
from router.placement.domains_seen import DomainsSeen
from router.placement.fair_queue import Ticket
from router.placement.prompt_heads import PromptHeads
from router.placement.remote_prefill import Mode
from router.requests.adapter_loads import AdapterLoads
from router.requests.dispatcher import Dispatcher, Job, Placement
from router.requests.output_stream import EXPIRED
from router.requests.probation import Probation
from router.requests.remote_prefill import RemotePrefill
from router.requests.run import (
    DRAINED,
    Phase,
    Prefix,
    RequestRun,
    Running,
    of_sequence,
    placement_request_of,
    submission_of,
)
from router.workers.worker_events import Lost

# Moves of one sequence; after these it fails, even if it sampled tokens at each worker before that was lost.
MAX_MOVES = 3


class Submitter:
    """Sends sequences to workers; from then on their run owns the reservations."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: AdmissionLimiter,
        recorder: Recorder,
        eos_token_ids: tuple[int, ...],
        remote_prefill: Mode = "auto",
    ) -> None:
        self._dispatcher, self._admission, self._recorder = dispatcher, admission, recorder
        self._eos_token_ids, self._clock = eos_token_ids, recorder.clock
        self._probation, self._domains = Probation(), DomainsSeen(secrets.token_bytes(16))
        self._heads = PromptHeads()
        self._loads = AdapterLoads(self._clock.monotonic)
        self._prompts = RemotePrefill(dispatcher, recorder.clock, remote_prefill, self._loads)

    async def submit_sequences(self, run: RequestRun, sequences: Sequence[Running], moved_because: str = "") -> None:
        """Place sequences with the same tokens at one worker. Raises as `Dispatcher.place_job` does.

        A request that is interrupted while it is suspected, or while another worker computes its prompt, is not
        placed: its stream finds the reason in its inbox.
        """
        identity = await self._dispatcher.known_identity()
        check_kind(run.request.embeds, identity.pooling)
        began, began_ns = self._clock.monotonic(), self._clock.time_ns()
        request, prefix = run.request, Prefix.of(run.request, identity, sequences[0].output.tokens)
        if run.ticket is None:
            given = request.priority, request.flow, len(sequences), request.deadline
            run.ticket = self._dispatcher.ticket(*given, request.session)
        wanted = placement_request_of(run, len(prefix.tokens), len(sequences))
        owner = request.caller.owner
        shared = prefix.block_hashes if request.takes_hits else ()
        job = Job(wanted, shared, request.priority, request.deadline, moved_because, owner)
        run.log.sent(self._domains, self._heads, prefix.cache_domain, identity)
        if not moved_because:
            job = await self._prompts.compute_elsewhere(run, job, identity, run.ticket)
            if run.inbox.interrupted.is_set():
                return
        placement = self._take_up(sequences, job) or await self._place(run, job, run.ticket)
        while not await self._is_ready(run, placement):
            if run.inbox.interrupted.is_set():
                return
            placement = await self._place(run, job, run.ticket)
        run.identity = identity
        if not moved_because:
            run.foretold = placement.foretold
        run.log.placed(placement.index)
        run.trace.placed(placement.decision, began_ns, placement.looked_up_ns, placement.index)
        self._submit(run, sequences, prefix, placement)
        self._admission.start_request(run.request_id, self._clock.monotonic(), request.tenant)
        self._recorder.metrics.routing.observe(self._clock.monotonic() - began)
        run.decision_id = placement.decision.decision_id

    async def _place(self, run: RequestRun, job: Job, ticket: Ticket) -> Placement:
        """Place a job, and count who goes first meanwhile, also where the job is given up."""
        before = self._dispatcher.placed_above(job.priority)
        try:
            return await self._dispatcher.place_job(job, ticket)
        finally:
            run.log.passed_by += self._dispatcher.placed_above(job.priority) - before

    def _take_up(self, sequences: Sequence[Running], job: Job) -> Placement | None:
        """Return the place that was booked for a sequence which leaves a draining worker, if it is still there."""
        booked, sequences[0].booked = sequences[0].booked, None
        if booked is None:
            return None
        sequences[0].drained += 1
        return self._dispatcher.take_booked_place(booked, job)

    def book_place(self, run: RequestRun, running: Running) -> Placement | None:
        """Reserve a place for a sequence that runs; None without room, and while the pool is unknown."""
        request, output = run.request, running.output.tokens
        wanted = placement_request_of(run, len(request.prompt) + len(output), 1)
        # Room is looked for before the blocks are hashed: 100,000 tokens take 4 ms.
        if run.identity is None or not self._dispatcher.has_batch_slot(wanted):
            return None
        hashes = Prefix.of(request, run.identity, output).block_hashes if request.takes_hits else ()
        job = Job(wanted, hashes, request.priority, request.deadline, DRAINED)
        return self._dispatcher.book_place(job, request.flow)

    async def _is_ready(self, run: RequestRun, placement: Placement) -> bool:
        """Let a request wait for what its worker lacks; return False where it may not go there any more.

        Then its reservation is released.
        """
        if run.waits and not await self._may_be_tried(run, placement):
            return False
        wanted = run.request.adapter
        if wanted is None or not placement.reservations[0].model.adapters.seconds_until(wanted):
            return True
        return await self._has_adapter(run, placement, wanted)

    async def _has_adapter(self, run: RequestRun, placement: Placement, wanted: AdapterRef) -> bool:
        """Let a request wait until its worker has loaded its adapter. Raises as `AdapterLoads.load` does.

        Where the adapter finds no room, others get the place meanwhile, and the request looks for another one then.
        """
        there, held = False, [*placement.reservations]

        def release_places() -> None:
            while held:
                held.pop().release()

        def give_way(why: str) -> None:
            run.log.adapter_found_no_room(why)
            release_places()

        run.log.loads_adapter(wanted.name, placement.worker_id)
        deadline, interrupted = run.request.deadline, run.inbox.interrupted
        try:
            share = self._dispatcher.pool.adapter_share(wanted.name, run.request.flow.tenant)
            await self._loads.load(placement.client, wanted, deadline, interrupted, give_way, share)
            there = bool(held) and self._dispatcher.may_take(placement) and not run.inbox.interrupted.is_set()
        except Unavailable:
            pass  # the worker was lost: another one is looked for
        finally:
            run.log.adapter_left()
            if not there:
                release_places()
        return there

    async def _may_be_tried(self, run: RequestRun, placement: Placement) -> bool:
        """Let a suspected request wait; return False when its worker may not get it any more, or it was interrupted.

        Then its reservation is released. While it waits, the worker may begin to drain.
        """
        there, interrupted = False, run.inbox.interrupted
        try:
            run.take_turn(await self._probation.wait(run.suspicion, interrupted))
            there = self._dispatcher.may_take(placement) and not interrupted.is_set()
        finally:
            if not there:
                for reservation in placement.reservations:
                    reservation.release()
        return there

    def _submit(self, run: RequestRun, sequences: Sequence[Running], prefix: Prefix, placement: Placement) -> None:
        """Send sequences to their worker. From here on the run owns the reservations, whatever goes wrong."""
        run.worker_id = placement.worker_id
        run.suspicion.placed()
        for running, reservation in zip(sequences, placement.reservations, strict=True):
            running.reservation = reservation
        first: int | None = None
        submission = submission_of(run, prefix, self._clock.monotonic(), self._eos_token_ids)
        for running in sequences:
            sink = run.sink(running)
            try:
                handle = placement.client.submit_sequence(of_sequence(submission, running.output), sink, first)
            except Unavailable as gone:
                # The worker was lost after it was chosen: the sequence moves on like any other of that worker.
                sink(Lost(str(gone)))
                continue
            running.assign_worker(placement.client, handle)
            first = handle if first is None else first

    async def move_lost_sequences(self, run: RequestRun) -> None:
        """Send sequences that lost their worker to another one.

        Return early when the request is interrupted: its stream then finds the reason in its inbox.

        Raises EngineFailure when that happens too often, or when the request may have broken its workers itself.
        """
        for running in [each for each in run.sequences if each.phase is Phase.LOST]:
            reason = running.take_loss()
            blamed = await self._probation.is_blamed(run.suspicion, run.inbox.interrupted)
            if run.inbox.interrupted.is_set():
                return
            if blamed:
                what = f"{run.suspicion.breaks} workers broke with this request, which got no further each time"
                raise EngineFailure(f"{what}; it is not tried again; the last one: {reason}")
            losses = running.attempt - running.drained
            if losses > MAX_MOVES:
                raise EngineFailure(f"the request lost {losses} workers; the last one: {reason}")
            self._admission.requeue(run.request_id, run.request.tenant)
            self._recorder.metrics.migrations.inc()
            run.trace.lost()
            try:
                await self.submit_sequences(run, [running], moved_because=reason)
            except DeadlineExceeded:
                if not run.admitted:
                    raise
                # The sequence ends with the tokens it has; those of its siblings are still to be sent.
                run.inbox.put_event(running.output.index, running.attempt, EXPIRED)
