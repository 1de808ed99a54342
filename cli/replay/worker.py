"""A worker of a replay: a real engine with a real ledger, whose steps take the time of a cost model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from cli.replay.links import Links
from common.contracts.clock import Clock
from common.contracts.lease import (
    Attach,
    Attached,
    AttachRejected,
    Confirmed,
    Connected,
    Granted,
    Inventory,
    LeaseEvent,
    Report,
    TierCopy,
)
from common.contracts.types import BlockHash, Decision, SamplingParams, SequenceId
from gpuworker.engine.engine import Engine
from gpuworker.engine.ports import EngineRequest, OutputSink
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.step_costs import DEFAULT_COSTS, StepCosts, parse_costs
from kvmanager.contracts.index_events import IndexEvent
from kvmanager.ledger.registry import WorkerRegistration, WorkerRegistry
from router.placement.worker_model import Load

SIMULATED: Final = parse_costs(DEFAULT_COSTS)
_PART_PAUSE_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Timing:
    """What takes time, in seconds: a step, a message one way, an entry of the prefix index until routers find it."""

    costs: StepCosts = SIMULATED
    message: float = 0.0003
    index: float = 0.002


@dataclass(frozen=True, slots=True)
class Listener:
    """Takes what comes out of a worker: outputs, changes of the prefix index, prompts, decisions of the KV manager."""

    outputs: OutputSink
    index: Callable[[Sequence[IndexEvent]], None]
    prompts: Callable[[Sequence[Sequence[BlockHash]]], None]
    """Those that the worker has got, where hot prefixes are replicated."""
    decisions: Callable[[Sequence[Decision]], None]


class _Runner:
    """Implements `StepRunner`: a step begins when the one before it is over, and samples the recorded tokens."""

    def __init__(self, costs: StepCosts, clock: Clock, done: Callable[[float, Future[StepResult], StepResult], None]):
        self._costs, self._clock, self._done = costs, clock, done
        self.tokens: dict[SequenceId, tuple[int, ...]] = {}
        self._due = 0.0

    def add_sequence(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        sampling: SamplingParams,
        prompt_tokens: int,
        adapter: object | None = None,
    ) -> None:
        """The tokens are known since the submission."""

    def remove(self, sequence: SequenceId) -> None:
        """They are forgotten when the sequence has finished."""

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        tokens = self.tokens
        sampled = {row.sequence: (tokens[row.sequence][row.start + row.length],) for row in plan.rows if row.samples}
        frames = sum([isinstance(each, TierCopy) for each in plan.copies]) if plan.copies else 0
        seconds, copying = self._costs.of(len(sampled), plan.prefilled), self._costs.frame * frames
        self._due = max(self._clock.monotonic(), self._due) + seconds + copying
        future: Future[StepResult] = Future()
        self._done(self._due, future, StepResult(plan.step, sampled, seconds=seconds, copy_seconds=copying))
        return future

    def close(self) -> None:
        pass


class ReplayWorker:
    """One engine, its session with the manager, and the delays between them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        attach: Attach,
        config: AgentConfig,
        timing: Timing,
        manager: WorkerRegistry,
        listener: Listener,
    ) -> None:
        self._loop, self._manager, self._timing, self._listener = loop, manager, timing, listener
        self._events: deque[LeaseEvent] = deque([Connected()])
        self._registration: WorkerRegistration | None = None
        self._turning = False
        self._moves = self._looks_ahead = False
        self._session = 0
        self._runner = _Runner(timing.costs, clock, self._step_ends)
        self.worker_id, self.reports = attach.worker_id, 0
        self._engine = Engine(lambda: LeaseAgent(config), lambda: attach, self._runner, self, listener.outputs, clock)
        self._turn_soon()

    def move_by(self, links: Links) -> None:
        """Move blocks beside the steps. Call it before the first turn."""
        self._moves = True
        transfers, requests = links.connect(self.worker_id, self._turn_soon)
        self._engine.transfer_by(transfers)
        self._engine.serve_images(requests)

    def submit(self, request: EngineRequest, tokens: tuple[int, ...]) -> None:
        """Run a sequence; `tokens` are those of its prompt and of its output."""
        self._runner.tokens[request.new.sequence] = tokens
        self._engine.submit_request(request)
        self._turn_soon()

    def forget(self, sequence: SequenceId) -> None:
        """Drop the tokens of a sequence that has finished: no later step contains it."""
        del self._runner.tokens[sequence]

    def load(self) -> Load:
        """Return a heartbeat."""
        load = self._engine.load()
        return Load(
            load.running,
            load.waiting,
            load.unheld_blocks,
            load.pending_prefill_tokens,
            load.decode_step_seconds,
            load.prefill_seconds_per_token,
            load.step_age_seconds,
            load.step_predicted_seconds,
            load.steps,
            load.manager_attached,
            sampled_tokens=load.tokens_sampled,
            computed_tokens=load.tokens_scheduled,
            prefill_tokens_in_flight=load.prefill_tokens_in_flight,
            fetch_seconds_per_block=load.fetch_seconds_per_block,
            fetch_setup_seconds=load.fetch_setup_seconds,
        )

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        if self._engine.turn() and self._moves:
            self._turn_soon()  # a turn takes and lands few images

    def _step_ends(self, due: float, future: Future[StepResult], result: StepResult) -> None:
        def over() -> None:
            future.set_result(result)
            self._turn()

        self._loop.call_at(due, over)

    # ------------------------------------------------------------ the engine's LeaseChannel

    def poll(self) -> list[LeaseEvent]:
        events = list(self._events)
        self._events.clear()
        return events

    def attach(self, attach: Attach, inventory: Inventory) -> None:
        self._loop.call_later(self._timing.message, self._on_attach, attach, inventory)

    def send_report(self, session: int, report: Report) -> None:
        self._loop.call_later(self._timing.message, self._on_report, session, report)

    def confirm(self, session: int) -> None:
        self._loop.call_later(self._timing.message, self._answer, Confirmed(session))

    def reconnect(self) -> None:
        raise AssertionError("a replayed worker keeps its session")

    def away_seconds(self, begin: float, end: float) -> float:
        return 0.0

    # ------------------------------------------------------------ at the KV manager

    def _on_attach(self, attach: Attach, inventory: Inventory) -> None:
        registration = self._manager.attach(attach)
        assert not isinstance(registration, AttachRejected), registration.reason
        self._registration, self._session = registration, attach.session
        self._answer(Attached(attach.session, self._manager.complete(registration, inventory)))
        self._grant(attach.session)

    def _on_report(self, session: int, report: Report) -> None:
        assert self._registration is not None
        self.reports += 1
        self._registration.ledger.apply_report(report)
        self._grant(session)
        if report.reserve and self._manager.hot is not None:
            self._listener.prompts([each.block_hashes for each in report.reserve])

    @property
    def replicated(self) -> int:
        """Blocks that came ahead of need."""
        ledger = self._registration.ledger if self._registration is not None else None
        return sum(ledger.state.totals.ahead_loads.values()) if ledger is not None else 0

    def order_ahead(self) -> None:
        """Order what is to come to this worker although nobody waits for it, each part when it is its turn."""
        assert self._registration is not None
        self._grant(self._session)
        if self._registration.ledger.state.ahead.wishes and not self._looks_ahead:
            self._looks_ahead = True
            self._loop.call_later(_PART_PAUSE_S, self._look_ahead)

    def _look_ahead(self) -> None:
        self._looks_ahead = False
        self.order_ahead()

    def _grant(self, session: int) -> None:
        assert self._registration is not None
        ledger = self._registration.ledger
        batch = ledger.schedule()
        if batch is not None:
            self._answer(Granted(session, batch))
        if events := ledger.drain_index_events():
            self._loop.call_later(self._timing.index, self._listener.index, events)
        self._listener.decisions(ledger.drain_decisions())

    def _answer(self, event: LeaseEvent) -> None:
        def arrives() -> None:
            self._events.append(event)
            self._turn_soon()

        self._loop.call_later(self._timing.message, arrives)
