"""The engine: one thread that turns requests and grants into steps, and steps into tokens and reports.

One step runs, and the next one is planned and queued behind it. The lease agent (pure) decides everything. This file
moves data between the agent, the step runner, the channel to the KV manager and the sink of outputs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from common.contracts.clock import Clock
from common.contracts.errors import EngineFailure, ProtocolViolation, QuireError
from common.contracts.lease import Attach, Attached, Connected, Detached, Granted, LeaseChannel, LeaseEvent
from common.contracts.types import FinishReason, SequenceId, SequencePhase, Usage
from common.process.standstill import Standstill
from gpuworker.engine.delay_watch import DelayWatch
from gpuworker.engine.flight import Flight
from gpuworker.engine.gathered_outputs import GatheredOutputs
from gpuworker.engine.ports import EngineLoad, EngineRequest, OutputSink
from gpuworker.engine.report_pace import ReportPace
from gpuworker.engine.start_watch import StartWatch
from gpuworker.engine.step_rates import StepRates, UsualSteps
from gpuworker.engine.traced_steps import TracedSteps
from gpuworker.scheduling.batch_plan import StepNotBuilt, StepResult, StepRunner
from gpuworker.scheduling.draft_tally import DraftKind, DraftTally, added
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.lease_session import LeaseSession
from gpuworker.scheduling.outcomes import Applied, Completion, SequenceFinished

log = logging.getLogger(__name__)

_LOAD_AGE_SECONDS = 0.05


class Engine:
    """Runs sequences until it is stopped. Any thread may call `submit`, `cancel`, `hand_over`, `load` and `wake`.

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
        self._commands: deque[EngineRequest | tuple[SequenceId, FinishReason | None]] = deque()
        self._steps, self._sampled, self._scheduled, self._rates = 0, 0, 0, StepRates()
        self._usual = UsualSteps()
        self._drafts = dict[DraftKind, DraftTally]()
        self._over_at: float | None = None  # when the last step in flight was over, within a turn
        self._outputs, self._load, self._load_taken = GatheredOutputs(), EngineLoad(), 0.0
        self._starts, self._delays = StartWatch(), DelayWatch(channel.away_seconds)
        self._pace = ReportPace(self._agent.config.runway_slots)
        self._wake, self._stopping = threading.Event(), False
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

    def stop(self) -> None:
        """End after the steps in flight and the commands so far, and wait for that.

        Raises EngineFailure, caused by what ended the thread early, if anything did.
        """
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._runner.close()
        failure = self.ended.exception() if self.ended.done() else None
        if failure is not None:
            raise EngineFailure(f"the engine ended early: {failure!r}") from failure

    def submit(self, request: EngineRequest) -> None:
        """Queue a sequence; its outputs, or a finish with reason ERROR, come through the sink."""
        self._commands.append(request)
        self.wake()

    def cancel(self, sequence: SequenceId, reason: FinishReason) -> None:
        """End a sequence early, in any state; unknown ones are ignored."""
        self._commands.append((sequence, reason))
        self.wake()

    def hand_over(self, sequence: SequenceId) -> None:
        """End a sequence that goes on elsewhere, behind the tokens of the steps in flight; unknown ones are ignored."""
        self._commands.append((sequence, None))
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
                    self._wake.wait()
        except BaseException as failure:
            log.critical("the engine ended", exc_info=True)
            self.ended.set_exception(failure)
        else:
            self.ended.set_result(None)

    def turn(self) -> bool:
        """Do everything that can be done now; return whether anything was. The engine's thread calls it in a loop."""
        worked = self._harvest()
        worked = self._take_commands() or worked
        worked = self._take_lease_events() or worked
        while not self._stopping and self._launch():
            worked = True
        worked = self._send_report() or worked
        if self._outputs:
            now = self._clock.monotonic()
            self._sink(self._outputs.pack(self._steps, now, self.standstill.seconds(now)))
        if worked:
            self._refresh_load()
        self._over_at = None  # a step that comes after this turn has waited for work, not for the engine
        return worked

    def _send_report(self) -> bool:
        now = self._clock.monotonic()
        if self._flights and not self._pace.due(now) and not self._agent.report_is_urgent:
            return False  # a running step brings another turn
        self._pace.looked(now)
        said = self._lease.take_report()
        if said is None:
            return False
        self._channel.send(*said)
        return True

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
            self._agent.cancel(sequence, reason)

    def _take_request(self, request: EngineRequest) -> None:
        try:
            self._agent.submit(request.new)
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
                if self._address is not None:
                    self._lease.advertise(self._address())
                self._channel.attach(*self._lease.connect())
            case Attached(session, ok):
                if not self._lease.accept(session, ok) and self._lease.is_current(session):
                    seen = self._lease.epoch_seen
                    log.warning("refused a KV manager of epoch %d; epoch %d was here", ok.epoch, seen)
                    self._leave_session()
            case Granted(session, batch):
                applied = self._lease.receive(session, batch)
                if applied is not None:
                    self._seat(applied)
            case Detached(session):
                self._lease.lose(session)

    def _leave_session(self) -> None:
        self._lease.leave()
        self._channel.reconnect()

    def _seat(self, applied: Applied) -> None:
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
                self._runner.add(admit.sequence, tokens, request.sampling, request.prompt_tokens)
            except Exception as error:
                log.exception("the runner refuses sequence %d, which ends", admit.sequence)
                self._end_with_error(admit.sequence, f"the sequence cannot be run: {error!r}")
        self._settle(self._agent.departures())

    def _end_with_error(self, sequence: SequenceId, message: str) -> None:
        """End one sequence for a reason that is its own."""
        self._agent.cancel(sequence, FinishReason.ERROR)
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
            result = self._runner.submit(plan)
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
            self._time(flight, result.seconds)
            if self._flights:
                self._flights[0].begin(self._clock)
            self._take_result(flight, result)
        return worked

    def _time(self, flight: Flight, seconds: float) -> None:
        """Learn from when a step is over: the pace of steps that are planned ahead, or the gap before one alone."""
        now = self._clock.monotonic()
        if flight.ahead:
            self._rates.learn_pace(flight.plan, now - flight.began)
        elif flight.after is not None:
            self._rates.learn_gap(now - flight.after - flight.plan.guessing - seconds)
        self._over_at = None if self._flights else now
        if lost := self._usual.lost(flight.plan, now - flight.began):
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
        if self._starts:
            self._outputs.started.extend(self._starts.stepped(flight.plan, flight.began, self._name_of))
        completion = self._agent.complete(result)
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

    def _name_of(self, sequence: SequenceId) -> str:
        request = self._requests.get(sequence)
        return request.new.request_id if request is not None else ""

    def _settle(self, completion: Completion) -> None:
        """Process sequences that ended or lost their blocks."""
        self._outputs.recounted.update(completion.recounted)
        now = self._clock.monotonic() if completion.finished or completion.preempted else 0.0
        for end in completion.finished:
            self._outputs.delayed += self._delays.left(end.sequence, now)
            self._outputs.finished.append(end)
            self._requests.pop(end.sequence, None)
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
            decode_times=self._rates.decode_times,
            mixed_times=self._rates.mixed_times,
            drafts=self._drafts,
        )
