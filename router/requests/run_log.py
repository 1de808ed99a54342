"""What a request's last record says: its phases, and counts of what happened to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from common.contracts.clock import Clock
from common.contracts.errors import Cancelled, DeadlineExceeded, QuireError
from common.contracts.hashing import little_endian_int32
from common.contracts.transfers import Fetched
from common.contracts.types import FinishReason, PoolIdentity
from common.process.standstill import Standstill
from router.contracts.events import Finished, ValidatedRequest
from router.contracts.index_answer import NOTHING_ASKED, IndexAnswer
from router.observe.diagnosis.ends import CLIENT_LEFT
from router.observe.diagnosis.outcome import Outcome, Phase
from router.observe.diagnosis.phase_clock import PhaseClock
from router.placement.domains_seen import NOWHERE, DomainsSeen, SeenElsewhere, SentBy
from router.placement.prompt_heads import PromptHeads
from router.workers.resuming import Orphan
from router.workers.worker_events import (
    Preempted,
    PromptScored,
    SequenceAdmitted,
    SequenceDelayed,
    SequenceEvent,
    SequenceFinished,
    SequenceStarted,
    TokensSampled,
    WorkerTime,
)

# The failure in the records of a request that did not end by itself.
DEADLINE_WORDS: Final = "deadline exceeded"
GONE_WORDS: Final = CLIENT_LEFT
_TOKEN_BYTES: Final = 4
# Characters of a failure in a record, whose bytes the ring bounds.
_MAX_FAILURE: Final = 500
# Seconds without output that no ordinary step takes.
_SILENT_S: Final = 1.0
# Phases in which sequences wait for blocks.
_WAITS: Final = (Phase.BLOCKS, Phase.PREEMPTED, Phase.MOVED)
_NOTHING_FETCHED: Final = Fetched(0, 0, 0.0, "")
_INTERNAL: Final = "INTERNAL"
_REASONS: Final = {DEADLINE_WORDS: DeadlineExceeded.reason, GONE_WORDS: Cancelled.reason}


@dataclass(slots=True)
class _Run:
    """A sequence's run at a worker: when it was submitted, what to add to a time of the worker for one of the router
    (None: not known), what the worker had lost at its last event, and when it sampled the last tokens of a stream."""

    submitted: float
    ahead: float | None = None
    lost: float = 0.0
    latest: WorkerTime | None = None


class RunLog:
    """Follows the events of a request's sequences as they arrive from workers, whenever the client reads them."""

    def __init__(self, request: ValidatedRequest, clock: Clock, standstill: Standstill | None = None) -> None:
        """`standstill` knows when this router did not run."""
        self._request, self._clock, self._standstill = request, clock, standstill or Standstill()
        self._phases = PhaseClock(request.arrived, self._standstill.between)
        self._phases.spent(Phase.CONSTRAINT, request.constraint_seconds)
        # By sequence: its present run, and delays that came before its admission.
        self._runs: dict[int, _Run] = {}
        self._untold: dict[int, SequenceDelayed] = {}
        # Until when seconds that a worker lost were counted: those of several sequences may be the same ones.
        self._lost_until = 0.0
        # Sequences that lost their blocks or their worker, and have sampled nothing since; whether they have blocks
        # again. Tokens of the last step before come in one message with the loss, and after it.
        self._interrupted: dict[int, bool] = {}
        self._interruption = Phase.MOVED
        # Until when seconds without a block were counted: those of several sequences may be the same ones.
        self._stalled_until = 0.0
        # Seconds of the present wait that were counted as those of another phase.
        self._counted: dict[Phase, float] = {}
        self._ended = set[int]()
        # Whether tokens change nothing: the first one came, and no sequence is interrupted.
        self._streams = False
        self._handed_over: float | None = None
        self._admitted: SequenceAdmitted | None = None
        self._admitted_index = 0
        self._started: SequenceStarted | None = None
        # What workers loaded from host memory: blocks, seconds, and the seconds that computing them would have taken.
        self._loaded, self._loading, self._spared = 0, 0.0, 0.0
        # All fetches that sequences waited for, as one; None: there was none.
        self._fetched: Fetched | None = None
        self._reason, self._last = "", ""
        # The worker that computed the prompt for another one, how many tokens of it, and why it did not.
        self._prompt_worker, self._prompt_end, self._prompt_tokens = "", "", 0
        self._failure = self._adapter = self._adapter_worker = self._adapter_wait = ""
        self._admissions = self._placements = self._preemptions = self._moves = 0
        self._elsewhere: SeenElsewhere = NOWHERE
        self._index = NOTHING_ASKED
        self._shared_tokens = 0
        self.block_size, self.counts_pages, self.queued, self.passed_by = 0, False, False, 0

    # ------------------------------------------------------------ what happens

    def read(self) -> None:
        """Note that the request was read, made into tokens and checked: it waits for a worker from now on."""
        self._phases.enter(Phase.QUEUE, self._clock.monotonic())

    def sends_prompt(self, worker_id: str) -> None:
        """Note that a worker begins to compute the prompt for another one."""
        self._prompt_worker = worker_id
        self._phases.enter(Phase.PREFILL_ELSEWHERE, self._clock.monotonic())

    def prompt_left(self, tokens: int, why_not: str) -> None:
        """Note that this is over: so many tokens are computed, or why none are. It waits for a worker again."""
        self._prompt_tokens, self._prompt_end = tokens, why_not
        self._phases.enter(Phase.QUEUE, self._clock.monotonic())

    def loads_adapter(self, name: str, worker_id: str) -> None:
        """Note that the request waits until its worker has loaded its adapter."""
        self._adapter, self._adapter_worker, self._adapter_wait = name, worker_id, ""
        if not self._phases.has_first_token:
            self._phases.enter(Phase.ADAPTER, self._clock.monotonic())

    def adapter_found_no_room(self, why: str) -> None:
        """Note the worker's reason why the adapter is not loaded at once."""
        self._adapter_wait = why

    def adapter_left(self) -> None:
        """Note that this is over: it is in memory, or the request waits for another worker."""
        if not self._phases.has_first_token:
            self._phases.enter(Phase.QUEUE, self._clock.monotonic())

    def submitted(self, index: int) -> None:
        """Note that a run of a sequence begins."""
        self._runs[index] = _Run(self._clock.monotonic())
        self._untold.pop(index, None)

    def placed(self, index: IndexAnswer) -> None:
        """Note that a worker was chosen, and what the prefix index said."""
        self._placements += 1
        if self._placements > 1:
            if self._admitted is None and not self._phases.has_first_token:
                self._phases.enter(Phase.BLOCKS, self._clock.monotonic())
            return
        self._index = index
        self._phases.enter(Phase.BLOCKS, self._clock.monotonic())
        self._phases.shift(Phase.QUEUE, Phase.LOOKUP, index.seconds)

    def resumed(self, orphan: Orphan, now: float) -> None:
        """Take over the times of a request that another router began; it is being moved since that one was lost."""
        self._placements = self._moves = 1
        self._phases.enter(Phase.QUEUE, self._request.arrived)
        self._phases.enter(Phase.BLOCKS, now - orphan.submitted_seconds)
        if orphan.admitted_seconds is not None:
            self._phases.enter(Phase.PREFILL, now - orphan.admitted_seconds)
        if orphan.first_token_seconds is not None:
            self._phases.enter(Phase.DECODE, now - orphan.first_token_seconds)
            self._phases.first_token()
        self._phases.enter(Phase.MOVED, now - orphan.orphaned_seconds)
        self._interrupted = dict.fromkeys(range(self._request.sampling.n), True)

    def follow(self, index: int, event: SequenceEvent) -> None:
        """Note an event of a sequence's present run."""
        if isinstance(event, TokensSampled):
            if not self._streams:
                self._sampled(index, event)
            elif (run := self._runs.get(index)) is not None:
                run.latest = event.when
        elif isinstance(event, SequenceAdmitted):
            self._take_admission(index, event)
        elif isinstance(event, SequenceStarted):
            self._take_start(index, event)
        elif isinstance(event, SequenceDelayed):
            self._take_delay(index, event)
        elif isinstance(event, Preempted):
            self._preemptions += 1
            self._tell(index, event.when)
            self._interrupt(index, Phase.PREEMPTED)
        elif isinstance(event, SequenceFinished) and event.reason is not FinishReason.CANCELLED:
            self._tell(index, event.when)
            self._finish(index)
        elif not isinstance(event, PromptScored):  # refused, lost, or ended because its worker stops
            self._moves += 1
            self._tell(index, None)
            self._interrupt(index, Phase.MOVED)

    def _tell(self, index: int, when: WorkerTime | None) -> None:
        """Give the time until now to the present phase, as far as the worker says that it was at work on that."""
        now, phase, run = self._clock.monotonic(), self._phases.phase, self._runs.get(index)
        if when is None or run is None or run.ahead is None:
            self._phases.enter(phase, now)
        else:
            self._phases.enter(phase, now, when.at + run.ahead)
            self._lose(when.lost - run.lost, now)
            run.lost = when.lost
        if (delay := self._untold.pop(index, None)) is not None:
            self._hold_up(delay, now)

    def _lose(self, seconds: float, now: float) -> None:
        """Take off the present phase what its worker lost."""
        lost = min(seconds, now - self._lost_until)
        if lost > 0.0:
            self._phases.shift(self._phases.phase, Phase.WORKER_STILL, lost)
            self._lost_until = now

    def _align(self, index: int, event: SequenceAdmitted) -> None:
        """Learn what the worker's clock says when a sequence's run has begun there."""
        run, when = self._runs.get(index), event.when
        if run is not None and when is not None and run.ahead is None:
            run.ahead = run.submitted - when.at + event.reserve_seconds
            run.lost = when.lost - event.lost_seconds

    def _take_admission(self, index: int, event: SequenceAdmitted) -> None:
        if event.recounted:
            self._recount(index, event.cached_tokens)
            return
        self._align(index, event)
        self._tell(index, event.when)
        self._phases.shift(Phase.ON_THE_WAY, Phase.WORKER_STILL, event.unread_seconds)
        if event.fetched is not None:
            self._take_fetch(event.fetched)
        self._admissions += 1
        self._counted.clear()
        if index in self._interrupted:
            self._interrupted[index] = True
        if self._admitted is None:
            self._admitted, self._admitted_index = event, index
            if self._phases.phase is Phase.BLOCKS:
                self._phases.become(Phase.PREFILL)

    def _take_fetch(self, fetched: Fetched) -> None:
        """Take off a wait what blocks took to come that were fetched."""
        if self._phases.phase in _WAITS:
            self._phases.shift(self._phases.phase, Phase.FETCH, fetched.seconds)
        if (before := self._fetched) is not None:
            blocks, asked = before.blocks + fetched.blocks, before.asked + fetched.asked
            fetched = Fetched(blocks, asked, before.seconds + fetched.seconds, fetched.source)
        self._fetched = fetched

    def _recount(self, index: int, cached_tokens: int) -> None:
        """Correct what the first admission promised; a later run of its sequence promises nothing anew."""
        if self._admitted is not None and index == self._admitted_index and not self._moves:
            self._admitted = replace(self._admitted, cached_tokens=cached_tokens)

    def _take_start(self, index: int, event: SequenceStarted) -> None:
        """Take off the prefill what the worker computed for others first, and what it copied from host memory.

        Only the first start has both. What a sequence loads after a preemption is taken off that.
        """
        phase = self._phases.phase
        self._loaded += event.loaded_blocks
        self._loading += event.load_seconds
        self._spared += event.spared_seconds
        if self._started is None and phase is Phase.PREFILL:
            self._started = event
            self._tell(index, event.when)
            self._phases.shift(Phase.PREFILL, Phase.PREFILL_WAIT, event.wait_seconds)
            self._phases.shift(Phase.PREFILL, Phase.LOADING, event.load_seconds)
        elif phase is Phase.PREEMPTED and event.load_seconds:
            self._tell(index, event.when)
            self._phases.shift(phase, Phase.LOADING, event.load_seconds)

    def _take_delay(self, index: int, event: SequenceDelayed) -> None:
        """Note what held a sequence up; before its admission, the worker's time is not known yet."""
        run = self._runs.get(index)
        if event.when is not None and run is not None and run.ahead is None:
            before = self._untold.get(index, SequenceDelayed())
            self._untold[index] = SequenceDelayed(
                before.compile_seconds + event.compile_seconds,
                before.stalled_seconds + event.stalled_seconds,
                before.manager_away_seconds + event.manager_away_seconds,
            )
        else:
            self._tell(index, event.when)
            self._hold_up(event, self._clock.monotonic())

    def _hold_up(self, event: SequenceDelayed, now: float) -> None:
        """Give seconds of the present phase to what held the sequence up in them.

        Sequences of a request that wait at once are held up by the same thing, so the longest counts.
        """
        phase = self._phases.phase
        if event.stalled_seconds:
            stalled = min(event.stalled_seconds, now - self._stalled_until)
            away, self._stalled_until = min(event.manager_away_seconds, stalled), now
            self._phases.shift(phase, Phase.MANAGER_AWAY, away)
            self._phases.shift(phase, Phase.STALLED, stalled - away)
        elif phase in _WAITS:
            held_up = ((Phase.CONSTRAINT, event.compile_seconds), (Phase.MANAGER_AWAY, event.manager_away_seconds))
            for to, seconds in held_up:
                self._phases.shift(phase, to, seconds - self._counted.get(to, 0.0))
                self._counted[to] = max(seconds, self._counted.get(to, 0.0))

    def _sampled(self, index: int, event: TokensSampled) -> None:
        self._tell(index, event.when)
        if self._interrupted.get(index):
            del self._interrupted[index]
        if not self._phases.has_first_token:
            self._phases.first_token()
            if self._interrupted:
                self._phases.become(self._interruption)
        elif not self._interrupted:
            self._phases.become(Phase.DECODE)
        self._streams = not self._interrupted

    def _interrupt(self, index: int, phase: Phase) -> None:
        """Begin an interruption. What a sequence waited for at a worker that it loses before its grant was in vain."""
        self._interrupted[index] = False
        self._streams = False
        waited = self._phases.phase
        self._interruption = phase
        self._counted.clear()
        self._phases.become(phase)
        if waited is Phase.BLOCKS and phase is Phase.MOVED:
            self._phases.shift(waited, phase, math.inf)

    def _finish(self, index: int) -> None:
        """After the last sequence's end, output goes to the client, as fast as that reads it."""
        self._ended.add(index)
        self._interrupted.pop(index, None)
        if len(self._ended) == self._request.sampling.n:
            self._phases.become(Phase.SENDING)

    def sent(self, domains: DomainsSeen, heads: PromptHeads, domain: bytes, identity: PoolIdentity) -> None:
        """Remember who sends this prompt, and note who else has sent it, and what it shares with an earlier one."""
        self.block_size, self.counts_pages = identity.block_size, bool(identity.kv_geometry.groups)
        if not self._placements and not self._request.no_cache:
            packed = little_endian_int32(self._request.prompt)
            self._shared_tokens = heads.send(packed, _TOKEN_BYTES, domain)
            self._elsewhere = domains.send(packed, _TOKEN_BYTES * self.block_size, SentBy(domain, self._request.tenant))

    # ------------------------------------------------------------ the client

    def hands_over(self) -> None:
        """Note that an event goes to the client."""
        self._handed_over = self._clock.monotonic()

    def taken(self) -> None:
        """Note that the client has taken it. While this router stood still, nothing was the client's to read."""
        if self._handed_over is not None:
            now = self._clock.monotonic()
            unread = now - self._handed_over - self._standstill.between(self._handed_over, now)
            self._phases.left_unread(unread)
            if self._phases.phase is Phase.SENDING:
                self._phases.enter(Phase.SENDING, now)
                self._phases.shift(Phase.SENDING, Phase.CLIENT, unread)
            self._handed_over = None

    # ------------------------------------------------------------ the end

    def sequence_ended(self, event: Finished) -> None:
        """Note how a sequence ended for the client: the router ends those that reach a stop text, or their deadline."""
        self._last = event.reason.value
        self._failure = event.message or self._failure
        if event.index not in self._ended:
            run = self._runs.get(event.index)
            self._tell(event.index, run.latest if run is not None and event.reason is FinishReason.STOP else None)
            self._finish(event.index)

    def failed(self, error: QuireError) -> None:
        self._reason = error.reason

    def silent_since(self, last_output: float) -> None:
        """Note that the request leaves its workers, and that the last output came at this time.

        A worker says what held a sequence up once it goes on. So a long silence before the end has no cause yet.
        """
        now = self._clock.monotonic()
        if self._phases.phase is Phase.DECODE and now - last_output > _SILENT_S:
            self._phases.enter(Phase.DECODE, now)
            self._phases.shift(Phase.DECODE, Phase.SILENT, now - last_output)

    def outcome(self, failure: str, worker: str, output_tokens: int) -> Outcome:
        """Return the record of the end; `failure` is "" for a request that ended by itself."""
        self.taken()
        for index in tuple(self._untold):
            self._tell(index, None)
        before, after = self._phases.parts(self._clock.monotonic())
        admitted, started, elsewhere = self._admitted, self._started, self._elsewhere
        failure, fetched = failure or self._failure, self._fetched or _NOTHING_FETCHED
        return Outcome(
            ended=self._reason_of(failure) if failure else self._last,
            failure=failure[:_MAX_FAILURE],
            worker=worker,
            miss=admitted.miss_reason.value if admitted else "",
            other_domain=_whose(elsewhere),
            ahead_of=started.ahead_of if started else "",
            prompt_worker=self._prompt_worker,
            adapter=self._adapter,
            adapter_worker=self._adapter_worker,
            adapter_wait=self._adapter_wait,
            prompt_end=self._prompt_end[:_MAX_FAILURE],
            computed_elsewhere=self._prompt_tokens,
            before=before,
            after=after,
            has_first_token=self._phases.has_first_token,
            started=started is not None,
            queued=self.queued,
            index=self._index.words,
            index_answered=self._index.answered,
            counts_pages=self.counts_pages,
            prompt_tokens=len(self._request.prompt),
            cached_tokens=admitted.cached_tokens if admitted else 0,
            output_tokens=output_tokens,
            block_size=self.block_size,
            admissions=self._admissions,
            placements=self._placements,
            sequences=self._request.sampling.n,
            passed_by=self.passed_by,
            shared_tokens=self._shared_tokens,
            preemptions=self._preemptions,
            moves=self._moves,
            ahead_tokens=started.ahead_tokens if started else 0,
            loaded_blocks=self._loaded,
            load_seconds=self._loading,
            spared_seconds=self._spared,
            fetched_blocks=fetched.blocks,
            fetch_asked=fetched.asked,
            fetch_seconds=fetched.seconds,
            fetch_source=fetched.source,
            other_domain_tokens=elsewhere.blocks * self.block_size,
            diverged_at=admitted.diverged_at if admitted else 0,
            client_longest=self._phases.client_longest,
            unread_before=0.0 if self._moves else self._standstill.just_before(self._request.arrived),
        )

    def _reason_of(self, failure: str) -> str:
        """Return the reason of an end that no error announced: the deadline, a client that left, or a defect."""
        if self._reason or failure == self._failure:
            return self._reason or self._last
        return _REASONS.get(failure, _INTERNAL)


def _whose(elsewhere: SeenElsewhere) -> str:
    return f"of tenant {elsewhere.sender.tenant}" if elsewhere.sender is not None else ""
