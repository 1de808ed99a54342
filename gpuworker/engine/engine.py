"""The engine: one thread that turns requests and grants into steps, and steps into tokens and reports.

One step runs, and the next one is planned and queued behind it. The lease agent (pure) decides everything. This file
moves data between the agent, the step runner, the channel to the KV manager and the sink of outputs.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from common.contracts.clock import Clock
from common.contracts.errors import EngineFailure, ProtocolViolation, QuireError
from common.contracts.lease import (
    Admit,
    Attach,
    Attached,
    Confirmed,
    Connected,
    Detached,
    Granted,
    LeaseChannel,
    LeaseEvent,
)
from common.contracts.transfer_tokens import ServeKeys
from common.contracts.types import FinishReason, SequenceId, SequencePhase, TokenLogprobs, Usage
from common.process.standstill import Standstill
from gpuworker.engine.image_requests import ImageRequests
from gpuworker.engine.ports import (
    Chunk,
    Delayed,
    EngineLoad,
    EngineOutputs,
    EngineRequest,
    KvEventSink,
    OutputSink,
    Started,
    StepRecord,
)
from gpuworker.engine.step_rates import StepRates, UsualSteps
from gpuworker.engine.transfers import Transfers
from gpuworker.scheduling.batch_plan import StepNotBuilt, StepPlan, StepResult, StepRunner
from gpuworker.scheduling.draft_tally import DraftKind, DraftTally, added
from gpuworker.scheduling.frame_claims import NOTHING_CLAIMED, Claims
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.lease_session import LeaseSession
from gpuworker.scheduling.outcomes import NOTHING_LOADED, Applied, Completion, Loaded, SequenceFinished

_NS = 1_000_000_000
_MOST_CHANGES: Final = 512
"""Changes of the cache that a turn tells: about 2 us each. A step with 2048 tokens in blocks of 16 makes 128."""
MOST_FAILED: Final = 8
"""Steps that may fail one after the other. A router tries a request at four workers at most."""


# A step between its submission and its result.
class Engine:
    """Runs sequences until it is stopped.

    Any thread may call `submit_request`, `cancel_request`, `hand_over`, `load` and `wake`.

    `new_agent` makes an empty lease agent and `new_attach` the identity part of an attach. Both are called again after
    a failed step, which voids the KV cache and therefore the worker's incarnation. `attach` is the present one.
    `address` is where routers reach the worker, if it may change; each session begins with the present one.
    """

    def __init__(
        self,
        new_agent: Callable[[], LeaseAgent],
        new_attach: Callable[[], Attach],
        runner: StepRunner,
        channel: LeaseChannel,
        sink: OutputSink,
        clock: Clock,
        address: Callable[[], str] | None = None,
    ) -> None:
        self._transfers: Transfers | None = None
        self._image_requests: ImageRequests | None = None
        self._events: KvEventSink | None = None
        self.serve_keys = ServeKeys()
        """The keys of tokens with which peers fetch from this worker."""
        self._new_agent, self._new_attach, self._address = new_agent, new_attach, address
        self._lease = LeaseSession(new_agent(), new_attach())
        self._runner, self._channel, self._sink, self._clock = runner, channel, sink, clock
        self._requests: dict[SequenceId, EngineRequest] = {}
        self._traced = TracedSteps()
        self._wants_step: Callable[[], bool] | None = None
        self.standstill = Standstill(lambda: bool(self._requests or self._commands))
        """When the worker stood still, or a step took many times its usual. The I/O loop begins to watch."""
        self._in_runner: set[SequenceId] = set()  # the runner holds state of these
        self._flights: deque[Flight] = deque()
        # Prompts that were computed for other workers. Their ends are told once the manager knows their blocks.
        self._unconfirmed, self._confirming = list[SequenceFinished](), deque[list[SequenceFinished]]()
        self._commands: deque[EngineRequest | tuple[SequenceId, FinishReason | None]] = deque()
        self._steps, self._sampled, self._scheduled, self._rates = 0, 0, 0, StepRates()
        self._usual = UsualSteps()
        self._drafts = dict[DraftKind, DraftTally]()
        self._failed = 0  # steps, since one was right
        self._over_at: float | None = None  # when the last step in flight was over, within a turn
        self._outputs, self._load, self._load_taken = GatheredOutputs(), EngineLoad(), 0.0
        self._starts, self._delays = StartWatch(), DelayWatch(channel.away_seconds)
        self._pace = ReportPace(self._agent.config.runway_slots)
        self._wake, self._stopping, self._draining = threading.Event(), False, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.ended: Future[None] = Future()
        """Done when the thread has ended: by `stop`, or by what it fails with. A dead engine must not look idle."""

    @property
    def attach(self) -> Attach:
        """The worker's identity, with its present incarnation."""
        return self._lease.attach

    @property
    def _agent(self) -> LeaseAgent:
        return self._lease.agent

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        self._thread.start()

    def record_steps(self, wanted: Callable[[], bool]) -> None:
        """Put a record of each step for which `wanted` is true into the outputs. Call it before `start`."""
        self._wants_step = wanted

    def transfer_by(self, transfers: Transfers, saved: Claims = NOTHING_CLAIMED, reset: int = 0) -> None:
        """Save blocks beside the steps, and fetch them. Call it before `start`.

        The disk has what is `saved`, and has carried out the resets up to the one of this id.
        """
        self._transfers = transfers
        self._agent.restore_saved(saved, reset)

    def serve_images(self, requests: ImageRequests) -> None:
        """Answer what peers ask for. Call it before `start`."""
        self._image_requests = requests

    def tell_changes(self, sink: KvEventSink) -> None:
        """Let subscribers of KV events know what the watch of the agents sees. Call it before `start`."""
        self._events = sink

    def stop(self) -> None:
        """End after the steps in flight and the commands so far, and wait for that.

        Raises EngineFailure, caused by what ended the thread early, if anything did.
        """
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._runner.close()
        if self._transfers is not None:
            self._transfers.close()
        failure = self.ended.exception() if self.ended.done() else None
        if failure is not None:
            raise EngineFailure(f"the engine ended early: {failure!r}") from failure

    def submit_request(self, request: EngineRequest) -> None:
        """Queue a sequence; its outputs, or a finish with reason ERROR, come through the sink."""
        self._commands.append(request)
        self.wake()

    def cancel_request(self, sequence: SequenceId, reason: FinishReason) -> None:
        """End a sequence early, in any state; unknown ones are ignored."""
        self._commands.append((sequence, reason))
        self.wake()

    def hand_over(self, sequence: SequenceId) -> None:
        """End a sequence that goes on elsewhere, behind the tokens of the steps in flight; unknown ones are ignored."""
        self._commands.append((sequence, None))
        self.wake()

    def drain(self) -> None:
        """Tell the manager that no new requests come; those that are here run on."""
        self._draining = True
        self.wake()

    def wake(self) -> None:
        """Make the engine look for commands and lease events now."""
        self._wake.set()

    def load(self) -> EngineLoad:
        """Return levels at most 50 ms or a step old, with the age of the running step as it is now."""
        oldest = next(iter(tuple(self._flights)), None)
        if oldest is None:
            return self._load
        age = self._clock.monotonic() - oldest.began
        return replace(self._load, step_age_seconds=age, step_predicted_seconds=oldest.predicted)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while True:
                self._wake.clear()  # before the queues are read: later entries wake the thread again
                if self._stopping and not self._flights and not self._commands:
                    break
                if not self.turn():
                    self._wake.wait(self._patience)
        except BaseException as failure:
            log.critical("the engine ended", exc_info=True)
            self.ended.set_exception(failure)
        else:
            self.ended.set_result(None)

    @property
    def _patience(self) -> float | None:
        """Seconds after which there is something to do although nothing wakes the engine; None: there is not."""
        movers = (each for each in (self._transfers, self._image_requests) if each is not None)
        return min((wait for each in movers if (wait := each.patience) is not None), default=None)

    def turn(self) -> bool:
        """Do everything that can be done now; return whether anything was. The engine's thread calls it in a loop.

        Raises EngineFailure once as many steps in a row have failed as requests alone do not explain: a process whose
        libraries or device are broken may be so for good, and a new one is not.
        """
        if self._failed >= MOST_FAILED:
            raise EngineFailure(f"the last {self._failed} steps failed, and none between them was right")
        worked = self._harvest()
        worked = self._take_commands() or worked
        worked = self._take_lease_events() or worked
        if self._transfers is not None:
            worked = self._transfers.turn(self._agent, self._block_seconds, bool(self._flights)) or worked
        if self._image_requests is not None:
            worked = self._image_requests.turn(self._agent, bool(self._flights)) or worked
        while not self._stopping and self._launch():
            worked = True
        worked = self._send_report() or worked
        worked = self._tell_changes() or worked
        if self._outputs:
            now = self._clock.monotonic()
            self._sink(self._outputs.pack(self._steps, now, self.standstill.seconds(now)))
        if worked:
            self._refresh_load()
        self._over_at = None  # a step that comes after this turn has waited for work, not for the engine
        return worked

    def _tell_changes(self) -> bool:
        """Tell subscribers what has changed in the cache, as much as a queue takes; the rest waits in the watch."""
        watch = self._agent.config.watch
        if self._events is None or watch is None or not watch.has_changes or not self._events.has_room():
            return False
        if changes := watch.take_changes(_MOST_CHANGES):
            self._events.publish(changes)
        return True

    def _send_report(self) -> bool:
        now = self._clock.monotonic()
        if self._draining:
            self._agent.note_drain()
        waits = self._unconfirmed or self._agent.report_is_urgent
        if self._flights and not waits and not self._pace.due(now):
            return False  # a running step brings another turn
        self._pace.looked(now)
        sent = False
        while (said := self._lease.take_report()) is not None:
            self._channel.send_report(*said)
            sent = True
            if not self._unconfirmed:
                return True
        self._confirm_ends()
        return sent

    def _confirm_ends(self) -> None:
        """Let the ends of this turn's prompts wait for the manager; without one there is nothing to wait for."""
        if self._unconfirmed and self._lease.open:
            self._channel.confirm(self._lease.session)
            self._confirming.append(self._unconfirmed)
        else:
            self._outputs.finished += self._unconfirmed
        self._unconfirmed = []

    def _tell_ends(self, groups: int) -> None:
        """Tell the ends of so many turns that wait for the manager."""
        for _ in range(groups):
            self._outputs.finished += self._confirming.popleft()

    # ------------------------------------------------------------ requests

    def _take_commands(self) -> bool:
        worked = bool(self._commands)
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, EngineRequest):
                self._take_request(command)
            else:
                self._end(*command)
                self._settle(self._agent.departures())
        return worked

    def _end(self, sequence: SequenceId, reason: FinishReason | None) -> None:
        """Cancel a sequence for a reason, or hand it over (None)."""
        if reason is None:
            self._agent.hand_over(sequence)
        else:
            self._agent.cancel_sequence(sequence, reason)

    def _take_request(self, request: EngineRequest) -> None:
        try:
            self._agent.submit_sequence(request.new)
        except QuireError as refused:
            usage = Usage(prompt_tokens=len(request.new.tokens))
            self._finish_with_error(request.new.sequence, str(refused), usage)
        else:
            self._requests[request.new.sequence] = request
            self._delays.waits(request.new.sequence, self._clock.monotonic())
            if request.traced:
                self._traced.follow(request.new.sequence, request.prompt_tokens)

    def _finish_with_error(self, sequence: SequenceId, message: str, usage: Usage) -> None:
        self._outputs.finished.append(SequenceFinished(sequence, FinishReason.ERROR, usage, None, message))

    # ------------------------------------------------------------ the KV manager

    def _take_lease_events(self) -> bool:
        events = self._channel.poll()
        for event in events:
            try:
                self._on_lease_event(event)
            except ProtocolViolation as violation:
                log.error("the KV manager broke the lease protocol; starting a session anew: %s", violation)
                self._leave_session()
        return bool(events)

    def _on_lease_event(self, event: LeaseEvent) -> None:
        match event:
            case Connected():
                self._tell_ends(len(self._confirming))
                if self._address is not None:
                    self._lease.advertise(self._address())
                self._channel.attach(*self._lease.connect())
            case Attached(session, ok):
                if self._lease.accept(session, ok):
                    self.serve_keys.note_key(ok.serve_key)
                elif self._lease.is_current(session):
                    seen = self._lease.epoch_seen
                    log.warning("refused a KV manager of epoch %d; epoch %d was here", ok.epoch, seen)
                    self._leave_session()
            case Granted(session, batch):
                applied = self._lease.receive(session, batch)
                if applied is not None:
                    self._start_admitted(applied)
            case Confirmed():
                self._tell_ends(min(1, len(self._confirming)))
            case Detached(session):
                self._tell_ends(len(self._confirming))
                self._lease.note_loss(session)

    def _leave_session(self) -> None:
        self._lease.leave_session()
        self._channel.reconnect()

    def _start_admitted(self, applied: Applied) -> None:
        """Hand admitted sequences to the runner."""
        for admit in applied.admitted:
            request = self._requests[admit.sequence]
            tokens = self._agent.tokens_of(admit.sequence)
            now = self._clock.monotonic()
            self._outputs.delayed += self._delays.admitted(admit.sequence, now)
            self._outputs.admitted.append(admit)
            self._starts.admitted(admit.sequence, now)
            self._in_runner.add(admit.sequence)
            try:
                self._runner.add_sequence(
                    admit.sequence, tokens, request.sampling, request.prompt_tokens, request.adapter
                )
            except Exception as error:
                log.exception("the runner refuses sequence %d, which ends", admit.sequence)
                self._end_with_error(admit.sequence, f"the sequence cannot be run: {error!r}")
        self._settle(self._agent.departures())

    def _end_with_error(self, sequence: SequenceId, message: str) -> None:
        """End one sequence for a reason that is its own."""
        self._agent.cancel_sequence(sequence, FinishReason.ERROR)
        left = self._agent.departures()
        ends = [replace(end, message=message) if end.sequence == sequence else end for end in left.finished]
        self._settle(replace(left, finished=tuple(ends)))

    # ------------------------------------------------------------ steps

    def _launch(self) -> bool:
        planned, planned_ns = self._clock.monotonic(), self._clock.time_ns()
        plan = self._agent.plan(self._rates.prices)
        self._outputs.delayed += self._delays.planned(self._agent.stalled, planned)
        if plan is None:
            return False
        try:
            result = self._runner.submit_step(plan)
        except StepNotBuilt as failure:
            self._leave_out(failure)
            return True
        flight = Flight(plan, result, self._rates.predict(plan), planned, planned_ns)
        flight.begin(self._clock)
        flight.ahead = bool(self._flights)
        flight.after = None if flight.ahead else self._over_at
        self._flights.append(flight)
        flight.result.add_done_callback(lambda _: self.wake())
        return True

    def _harvest(self) -> bool:
        worked = False
        while self._flights and self._flights[0].result.done():
            worked = True
            flight = self._flights[0]
            try:
                result = flight.result.result()
            except EngineFailure as failure:
                self._fail(failure)
                return True
            self._flights.popleft()
            self._failed = 0
            self._time(flight, result)
            if self._flights:
                self._flights[0].begin(self._clock)
            self._take_result(flight, result)
        return worked

    def _time(self, flight: Flight, result: StepResult) -> None:
        """Learn from when a step is over: the pace of steps that are planned ahead, or the gap before one alone."""
        now, copying = self._clock.monotonic(), result.copy_seconds
        if flight.ahead:
            self._rates.learn_pace(flight.plan, now - flight.began - copying)
        elif flight.after is not None:
            self._rates.learn_gap(now - flight.after - flight.plan.guessing - result.seconds - copying)
        self._over_at = None if self._flights else now
        if lost := self._usual.lost(flight.plan, now - flight.began - copying):
            self.standstill.add(now - lost, now)

    def _take_result(self, flight: Flight, result: StepResult) -> None:
        self._steps += 1
        self._pace.completed(flight.plan)
        self._rates.learn(flight.plan, result.seconds)
        if self._traced:
            begin_ns, end_ns = flight.wall_ns(flight.began), flight.wall_ns(self._clock.monotonic())
            self._outputs.chunks += self._traced.stepped(flight.plan, begin_ns, end_ns)
        if self._wants_step is not None and self._wants_step():
            traced = self._traced.among(flight.plan)
            self._outputs.steps.append(flight.record(result, self._clock.monotonic(), traced))
        if self._transfers is not None and result.copy_seconds and flight.plan.copies:
            self._transfers.note_copies(len(flight.plan.copies), result.copy_seconds)
        completion = self._agent.complete(result)
        if self._starts:
            begun = self._starts.stepped(
                flight.plan, flight.began, self._name_of, completion.loaded, self._block_seconds
            )
            self._outputs.started.extend(begun)
        self._outputs.tokens.extend(completion.tokens.items())
        self._sampled += sum(map(len, completion.tokens.values()))
        self._scheduled += completion.computed
        self._drafts = added(self._drafts, completion.drafts)
        for sequence, logprobs in result.logprobs.items():
            if sequence in completion.tokens:
                self._outputs.logprobs.setdefault(sequence, []).extend(logprobs[: len(completion.tokens[sequence])])
        for sequence in completion.scored:
            self._outputs.prompt_logprobs.setdefault(sequence, []).extend(result.prompt_logprobs[sequence])
        self._settle(completion)

    @property
    def _block_seconds(self) -> float:
        """The seconds in which a block of a prompt is computed; 0: not known."""
        return self._agent.config.block_size * self._rates.prefill_token

    def _name_of(self, sequence: SequenceId) -> str:
        request = self._requests.get(sequence)
        return request.new.request_id if request is not None else ""

    def _settle(self, completion: Completion) -> None:
        """Process sequences that ended or lost their blocks."""
        self._outputs.recounted.update(completion.recounted)
        now = self._clock.monotonic() if completion.finished or completion.preempted else 0.0
        for end in completion.finished:
            self._outputs.delayed += self._delays.left(end.sequence, now)
            request = self._requests.pop(end.sequence, None)
            told = self._unconfirmed if _is_for_others(end, request) else self._outputs.finished
            told.append(end)
            self._outputs.chunks += self._traced.ended(end.sequence)
            self._starts.left(end.sequence)
        for sequence in completion.preempted:
            self._starts.left(sequence)
            self._outputs.delayed += self._delays.left(sequence, now)
            self._delays.waits(sequence, now)
        self._outputs.preempted.extend(completion.preempted)
        for sequence in completion.forgotten:
            self._runner.remove(sequence)
            self._in_runner.discard(sequence)

    def _fail(self, failure: EngineFailure) -> None:
        """Handle a failed step, which voids the KV content: end every sequence and begin a new incarnation."""
        self._failed += 1
        log.error("a step failed; every sequence of this worker ends: %s", failure)
        for flight in self._flights:
            flight.result.exception()  # the steps queued behind it have failed too, or fail at once
        self._flights.clear()
        self._begin_anew(failure, frozenset(self._requests))

    def _leave_out(self, failure: StepNotBuilt) -> None:
        """Handle a step that was planned and cannot be built: end the sequences that are the cause.

        The plan counts slots as written that nothing writes, so a new incarnation begins, in which the others run on.
        """
        agent = self._agent
        while self._flights:
            self._flights[0].result.exception()  # waits
            self._harvest()
        if agent is not self._agent:
            return  # a step in flight failed, and ended everything
        culprits = failure.culprits & self._requests.keys()
        log.error("a step could not be built; of its sequences %s end: %s", sorted(culprits) or "all", failure)
        self._begin_anew(failure, culprits or frozenset(self._requests))

    def _begin_anew(self, failure: EngineFailure, ended: frozenset[SequenceId]) -> None:
        """Begin a new incarnation. Sequences that did not end wait again, with the tokens that they have."""
        now = self._clock.monotonic()
        for sequence in self._requests:
            self._outputs.delayed += self._delays.left(sequence, now)
        for sequence in ended:
            self._finish_with_error(sequence, str(failure), self._agent.usage(sequence))
            self._outputs.chunks += self._traced.ended(sequence)
            del self._requests[sequence]
        others = [each for each in self._agent.unfinished() if each.id in self._requests]
        self._outputs.preempted.extend(each.id for each in others if each.phase is not SequencePhase.WAITING)
        for sequence in self._in_runner:  # including those that ended while a step in flight still contained them
            self._runner.remove(sequence)
        self._traced.keep(self._requests.keys())
        self._in_runner.clear()
        self._starts.clear()
        for each in others:
            self._delays.waits(each.id, now)
        agent, lease = self._new_agent(), self._lease
        agent.take_over(others)
        if self._transfers is not None:
            agent.restore_saved(self._agent.saved_claims, self._agent.reset)
        self.serve_keys.forget_keys()
        attach = replace(self._new_attach(), session=lease.session, epoch_seen=lease.epoch_seen)
        self._lease = LeaseSession(agent, attach)
        self._leave_session()

    # ------------------------------------------------------------ levels

    def _refresh_load(self) -> None:
        now = self._clock.monotonic()
        if now - self._load_taken < _LOAD_AGE_SECONDS and self._flights:
            return  # a running step brings another turn soon; without one, these levels may last
        self._load_taken, counts = now, self._agent.counts()
        self._load = EngineLoad(
            running=counts.running,
            waiting=counts.waiting,
            num_blocks=self._agent.config.num_blocks,
            unheld_blocks=counts.unheld,
            pending_prefill_tokens=counts.pending_prefill,
            prefill_tokens_in_flight=counts.prefill_in_flight,
            decode_step_seconds=self._rates.decode_step,
            prefill_seconds_per_token=self._rates.prefill_token,
            steps=self._steps,
            tokens_sampled=self._sampled,
            tokens_scheduled=self._scheduled,
            manager_attached=self._lease.open,
            fetch_seconds_per_block=self._transfers.fetch_seconds if self._transfers is not None else 0.0,
            fetch_setup_seconds=self._transfers.fetch_setup_seconds if self._transfers is not None else 0.0,
            decode_times=self._rates.decode_times,
            mixed_times=self._rates.mixed_times,
            drafts=self._drafts,
        )


@dataclass(slots=True)
class Flight:
    """A submitted step: the plan, its future, the predicted seconds, and when the device began it."""

    plan: StepPlan
    result: Future[StepResult]
    predicted: float
    planned: float
    """When its planning began, on the monotonic clock as all seconds here."""
    planned_ns: int
    """The same on the wall clock, which may be set while the step runs: it is read once for a step."""
    began: float = 0.0
    submitted: float | None = None
    after: float | None = None
    """When the step before it was over, if no other step was in flight then or since."""
    ahead: bool = False
    """Whether it was planned while another step was in flight."""

    def begin(self, clock: Clock) -> None:
        """Note that no other step is before it: at its submission, or when the step before it is over."""
        self.began = clock.monotonic()
        if self.submitted is None:
            self.submitted = self.began

    def wall_ns(self, instant: float) -> int:
        """Return the time of an instant for spans; those of one step have the order of their instants."""
        return self.planned_ns + round(max(0.0, instant - self.planned) * _NS)

    def record(self, result: StepResult, ended: float, traced: tuple[SequenceId, ...]) -> StepRecord:
        """Return what a span of the step says; `traced` are its sequences that have spans of their own."""
        plan = self.plan
        submitted = self.began if self.submitted is None else self.submitted
        decodes = sum(1 for row in plan.rows if row.samples and row.length == 1)
        return StepRecord(
            step=plan.step,
            begin_ns=self.planned_ns,
            end_ns=self.wall_ns(ended),
            decodes=decodes,
            prefill_tokens=plan.scheduled_tokens - plan.drafts - decodes,
            drafts=plan.drafts,
            predicted=self.predicted,
            planning=max(0.0, submitted - self.planned - plan.guessing),
            guessing=plan.guessing,
            waiting=self.began - submitted,
            running=result.seconds,
            finishing=max(0.0, ended - self.began - result.seconds - result.copy_seconds),
            traced=traced,
            copying=result.copy_seconds,
        )


def _is_for_others(end: SequenceFinished, request: EngineRequest | None) -> bool:
    """Return whether a sequence has left nothing but the blocks of its prompt, which another worker is to fetch."""
    if request is None or end.reason is not FinishReason.LENGTH or end.embedding:
        return False
    return request.sampling.max_tokens == 0 and request.sampling.prompt_logprobs is None


# The outputs of one turn of the engine's loop, until they go to the sink.
@dataclass(slots=True)
class GatheredOutputs:
    """The outputs of one turn of the engine's loop."""

    admitted: list[Admit] = field(default_factory=list)
    tokens: list[tuple[SequenceId, tuple[int, ...]]] = field(default_factory=list)
    logprobs: dict[SequenceId, list[TokenLogprobs]] = field(default_factory=dict)
    finished: list[SequenceFinished] = field(default_factory=list)
    preempted: list[SequenceId] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    prompt_logprobs: dict[SequenceId, list[TokenLogprobs]] = field(default_factory=dict)
    recounted: dict[SequenceId, int] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    delayed: list[Delayed] = field(default_factory=list)

    def __bool__(self) -> bool:
        events = self.tokens or self.admitted or self.finished or self.preempted or self.chunks
        return bool(events or self.prompt_logprobs or self.recounted or self.started or self.steps or self.delayed)

    def pack(self, step: int, at: float = 0.0, lost: float = 0.0) -> EngineOutputs:
        """Return the gathered outputs and clear them; `at` and `lost` are those of EngineOutputs."""
        outputs = EngineOutputs(
            step,
            tuple(self.admitted),
            tuple(self.tokens),
            _tuples(self.logprobs),
            tuple(self.finished),
            tuple(self.preempted),
            tuple(self.chunks),
            _tuples(self.prompt_logprobs),
            self.recounted.copy(),
            tuple(self.started),
            tuple(self.steps),
            tuple(self.delayed),
            at,
            lost,
        )
        for part in (self.admitted, self.tokens, self.finished, self.preempted, self.chunks):
            part.clear()
        for told in (self.started, self.steps, self.delayed):
            told.clear()
        self.logprobs.clear()
        self.prompt_logprobs.clear()
        self.recounted.clear()
        return outputs


def _tuples(lists: dict[SequenceId, list[TokenLogprobs]]) -> dict[SequenceId, tuple[TokenLogprobs, ...]]:
    return {sequence: tuple(each) for sequence, each in lists.items()}


GATHER_SECONDS: Final = 0.05


# How long a report that nothing waits for gathers the content of short steps.
# A message costs both ends more than its content. Such a report is looked for after 50 ms, or once the sequences
# have used a quarter of their runway: a lease want that rises must reach the manager long before a sequence needs
# the block.
class ReportPace:
    """The time and the slots since the engine last looked for a report."""

    __slots__ = ("_looked", "_most_slots", "_slots")

    def __init__(self, runway_slots: int) -> None:
        self._most_slots = max(1, runway_slots // 4)
        self._looked, self._slots = -math.inf, 0

    def completed(self, plan: StepPlan) -> None:
        """Count the slots by which a sequence may have come further in a step."""
        self._slots += 1 + (max(len(row.drafts) for row in plan.rows) if plan.drafts else 0)

    def due(self, now: float) -> bool:
        """Whether the content has gathered for long enough."""
        return self._slots >= self._most_slots or now - self._looked >= GATHER_SECONDS

    def looked(self, now: float) -> None:
        self._looked, self._slots = now, 0


# Watches admitted sequences until their first step: how long they wait, and for whom the worker computes then.
@dataclass(slots=True)
class _Waiting:
    """When a sequence was admitted, and the positions computed since: in all, and of the longest row of each step.

    `loaded` are the blocks that were copied from host memory for it.
    """

    since: float
    computed: int = 0
    loaded: Loaded = NOTHING_LOADED
    longest: Counter[SequenceId] = field(default_factory=Counter)


class StartWatch:
    """A step costs nothing here while every admitted sequence has begun. Times are readings of Clock.monotonic."""

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def admitted(self, sequence: SequenceId, now: float) -> None:
        self._waiting[sequence] = _Waiting(now)

    def left(self, sequence: SequenceId) -> None:
        """Forget a sequence that ended or lost its blocks."""
        self._waiting.pop(sequence, None)

    def clear(self) -> None:
        self._waiting.clear()

    def stepped(
        self,
        plan: StepPlan,
        began: float,
        name: Callable[[SequenceId], str],
        loaded: Mapping[SequenceId, Loaded] = MappingProxyType({}),
        block_seconds: float = 0.0,
    ) -> Iterable[Started]:
        """Return the sequences whose first step this was; count its positions for those that still wait.

        `name` returns the request of a sequence, or "" where it has gone. `loaded` is what the step copied from host
        memory; to compute a block takes `block_seconds`.
        """
        rows = {row.sequence: row.length for row in plan.rows}
        started = [
            self._started(each, began, name, loaded.get(each, NOTHING_LOADED), block_seconds)
            for each in rows
            if each in self._waiting
        ]
        for sequence in loaded.keys() & self._waiting.keys():
            self._waiting[sequence].loaded = self._waiting[sequence].loaded.and_then(loaded[sequence])
        longest, computed = max(rows, key=lambda each: rows[each]), sum(rows.values())
        for waiting in self._waiting.values():
            waiting.computed += computed
            if rows[longest] > 1:  # a prompt; a decode takes one position, and delays no other row
                waiting.longest[longest] += rows[longest]
        return started

    def _started(
        self,
        sequence: SequenceId,
        began: float,
        name: Callable[[SequenceId], str],
        with_it: Loaded,
        block_seconds: float,
    ) -> Started:
        waiting = self._waiting.pop(sequence)
        most = waiting.longest.most_common(1)
        ahead_of = name(most[0][0]) if most else ""
        waited = max(0.0, began - waiting.since - waiting.loaded.seconds)
        loaded = waiting.loaded.and_then(with_it)
        return Started(sequence, waited, waiting.computed, ahead_of, loaded, loaded.blocks * block_seconds)


# Seconds below which a delay is told with the next one.
_LEAST_S: Final = 0.02


# Watches what holds sequences up for want of blocks: a KV manager that is away, and an empty pool.
class DelayWatch:
    """A step costs nothing here while every sequence has blocks. Times are readings of Clock.monotonic.

    `away` returns the seconds between two times in which no KV manager answered.
    """

    def __init__(self, away: Callable[[float, float], float]) -> None:
        self._away = away
        # Since when sequences wait to be admitted, and since when those that run have no block.
        self._waiting: dict[SequenceId, float] = {}
        self._stalled: dict[SequenceId, float] = {}
        # Delays of sequences that run again, and were too short to be told.
        self._untold: dict[SequenceId, Delayed] = {}

    def waits(self, sequence: SequenceId, now: float) -> None:
        """Watch a sequence that waits to be admitted, from now on if it did not before."""
        self._waiting.setdefault(sequence, now)

    def admitted(self, sequence: SequenceId, now: float) -> Iterator[Delayed]:
        """Yield what of a sequence's wait the manager was away."""
        since = self._waiting.pop(sequence, now)
        if now > since and (away := self._away(since, now)) > 0.0:
            yield Delayed(sequence, 0.0, away)

    def planned(self, stalled: Collection[SequenceId], now: float) -> Iterator[Delayed]:
        """Yield the delays of sequences that have blocks again; `stalled` are those that have none."""
        if self._stalled or stalled:
            for sequence in self._stalled.keys() - stalled:
                yield from self._told(self._ended(sequence, now), _LEAST_S)
            for sequence in stalled:
                self._stalled.setdefault(sequence, now)

    def left(self, sequence: SequenceId, now: float) -> Iterator[Delayed]:
        """Yield the delays of a sequence that ended or lost its blocks, and forget it."""
        yield from self.admitted(sequence, now)
        if sequence in self._stalled:
            yield from self._told(self._ended(sequence, now), 0.0)
        elif (untold := self._untold.pop(sequence, None)) is not None:
            yield untold

    def _ended(self, sequence: SequenceId, now: float) -> Delayed:
        since = self._stalled.pop(sequence)
        before = self._untold.pop(sequence, Delayed(sequence, 0.0, 0.0))
        return Delayed(sequence, before.stalled + now - since, before.away + self._away(since, now))

    def _told(self, delay: Delayed, least: float) -> Iterator[Delayed]:
        if delay.stalled >= least:
            yield delay
        else:
            self._untold[delay.sequence] = delay


# What traced sequences did in their steps: a prefill chunk is told at once, all decode steps together at the end.
class _Traced:
    """One traced sequence: the length of its prompt, and the sum of its decode steps."""

    __slots__ = ("begin_ns", "drafts", "end_ns", "prompt_tokens", "start", "steps")

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.begin_ns = self.end_ns = self.start = self.steps = self.drafts = 0


class TracedSteps:
    """The traced sequences of an engine. A decode step of one costs no object: it is added to a sum."""

    def __init__(self) -> None:
        self._traced: dict[SequenceId, _Traced] = {}

    def __bool__(self) -> bool:
        return bool(self._traced)

    def follow(self, sequence: SequenceId, prompt_tokens: int) -> None:
        """Trace a sequence from now on."""
        self._traced[sequence] = _Traced(prompt_tokens)

    def stepped(self, plan: StepPlan, begin_ns: int, end_ns: int) -> list[Chunk]:
        """Take in a step; return what its rows computed of prompts, or anew after a preemption."""
        chunks, find = list[Chunk](), self._traced.get
        # Rows are unpacked, and hold few conditions: a step has a row for each sequence.
        for sequence, start, length, _, samples, drafts, _ in plan.rows:
            one = find(sequence)
            if one is None:
                continue
            if samples and length == 1 and start >= one.prompt_tokens:
                if not one.steps:
                    one.begin_ns, one.start = begin_ns, start
                one.end_ns = end_ns
                one.steps += 1
                if drafts:
                    one.drafts += len(drafts)
            else:
                chunks.append(Chunk(sequence, start, length, begin_ns, end_ns, drafts=len(drafts)))
        return chunks

    def among(self, plan: StepPlan) -> tuple[SequenceId, ...]:
        """Return the traced sequences of a step."""
        return tuple(row.sequence for row in plan.rows if row.sequence in self._traced)

    def ended(self, sequence: SequenceId) -> tuple[Chunk, ...]:
        """Forget a sequence; return its decode steps, if it was traced and had any."""
        one = self._traced.pop(sequence, None)
        if one is None or not one.steps:
            return ()
        # The wall clock may have been set back since the first step.
        end_ns = max(one.begin_ns, one.end_ns)
        return (Chunk(sequence, one.start, one.steps, one.begin_ns, end_ns, True, one.drafts, one.steps),)

    def keep(self, sequences: Collection[SequenceId]) -> None:
        """Forget all others."""
        self._traced = {each: one for each, one in self._traced.items() if each in sequences}


log = logging.getLogger(__name__)


_LOAD_AGE_SECONDS = 0.05
