"""The executable model of a move at drain: the real router over two workers of the lease model, each with its manager.

The lease model has one worker, because a manager shares nothing between workers. A move concerns two, and the router
between them. So this model puts two worlds of the lease model behind the streams of the real frontend. The router's
coroutines cannot be copied: a search replays the events that led to a state.

An event is a pair (name, argument). A worker and its manager exchange all messages after each event of the worker; the
lease model has their interleavings. A drain is an event here, as are the deaths of either worker and of its manager.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from grpc import aio

from common.contracts.clock import ManualClock
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from tests.suites.protocol.drain.drained_worker import DrainedWorker
from tests.suites.protocol.drain.memory_stream import MemoryCall, channel_of
from tests.suites.protocol.drain.router_side import Client, RouterSide
from tests.suites.protocol.drain.still_loop import StillLoop
from tests.suites.protocol.invariants import Violation, check, check_quiescence
from tests.suites.protocol.scenario import Request, Scenario

Event = tuple[str, int]
FAULTS = ("crash", "lose_manager", "leave")
OF_WORKER = frozenset({"plan", "complete", "down", "attach", "crash", "lose_manager"})
"""Events that may change the worker of their number, or its manager; the others change neither worker."""
PEACE_ROUNDS = 200
# Seconds between two chances of the mover.
_BEAT_S = 0.11


@dataclass(frozen=True, slots=True)
class Drain:
    """Requests, and the size of both workers. `faults` bounds each kind of fault.

    The last `after` requests come after the drain, the others before it.
    `late`: no client reads more than its first event before the event `read`. `at_once`: a heartbeat reaches the router
    when it is sent, with all that waits before it.
    """

    requests: tuple[Request, ...]
    num_blocks: int = 6
    max_num_seqs: int = 2
    late: bool = False
    after: int = 0
    at_once: bool = False
    faults: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def sizes(self) -> Scenario:
        return Scenario(self.requests, self.num_blocks, max_num_seqs=self.max_num_seqs, faults={"worker_crash": 1})


class DrainWorld:
    """One state. `close` ends it."""

    def __init__(self, scenario: Drain) -> None:
        self.scenario = scenario
        self.loop = StillLoop()
        self.workers = [DrainedWorker(scenario.sizes, name) for name in ("w0", "w1")]
        self.streams: list[MemoryCall | None] = [None, None]
        self.faults_left = dict(scenario.faults)
        self.drained = self.crashed = False
        self._found: Violation | None = None
        self.router = RouterSide(scenario.requests, self._dial)
        self._in_loop(self._start)
        for _ in range(len(scenario.requests) - scenario.after):
            self.begin(0)

    def _start(self) -> None:
        for client in self.router.clients:
            if not self.scenario.late:
                client.reads.set()
        self.router.pool.add_worker("0")
        self.router.pool.add_worker("1")

    @property
    def _clock(self) -> ManualClock:
        return self.router.clock

    def close(self) -> None:
        self.loop.end()

    def _in_loop(self, work: object) -> None:
        self.loop.call_soon(work)  # type: ignore[arg-type]
        self.loop.settle()

    # ------------------------------------------------------------ streams

    def _dial(self, address: str) -> aio.Channel:
        number = int(address)
        call = MemoryCall(self.workers[number].hello, lambda message: self._sent(number, message))
        self.streams[number] = call
        return channel_of(call)

    def _stream(self, number: int) -> MemoryCall | None:
        stream = self.streams[number]
        return stream if stream is not None and stream.open else None

    def _sent(self, number: int, message: pb.StreamRequest) -> None:
        """Check what the router sends (D2 to D5). The event that made it send raises what is found."""
        if message.HasField("cancel"):
            self._check_place(number, message.cancel)
            return
        request, output = int(message.submit.request_id), message.submit.output_tokens_before
        model = self.router.model_at(str(number))
        if model is not None and model.load.draining:
            self._find("D5", f"request {request} is sent to a worker that drains")
        for worker in self.workers:
            if worker.drawn.get(request, 0) > output:
                drawn = worker.drawn[request]
                self._find(
                    "D2", f"{drawn} output tokens of request {request} were computed, and it goes on behind {output}"
                )
            if request in worker.request_of.values():
                self._find("D3", f"request {request} is sent to a worker while {worker.worker_id} has it")

    def _check_place(self, number: int, cancel: pb.Cancel) -> None:
        """Check that a sequence is handed over to a worker in whose batch it has a place (D4)."""
        if cancel.hands_over:
            booked = self.router.booked_for(str(number), cancel.handle)
            if booked is None or booked.sequences > booked.capacity.max_num_seqs:
                self._find("D4", f"handle {cancel.handle} of w{number} is handed over, and no batch has a place for it")

    def _find(self, invariant: str, text: str) -> None:
        self._found = self._found or Violation(invariant, text)

    # ------------------------------------------------------------ events

    def events(self) -> list[Event]:
        """List the possible events; some of them may turn out to change nothing."""
        found: list[Event] = []
        for number, worker in enumerate(self.workers):
            stream = self._stream(number)
            found += [("plan", number)] if len(worker.flights) < 2 and worker.has_work else []
            found += [("complete", number)] if worker.flights else []
            found += [("down", number)] if stream is not None and stream.to_worker else []
            found += [("up", number)] if stream is not None and worker.to_router else []
            found += [("beat", number)] if stream is not None and worker.has_news(self.router.may_move()) else []
            found += [("attach", number)] if worker.link is None else []
        found += [("drain", number) for number in (0, 1) if not self.drained and self.workers[number].request_of]
        found += [("begin", 0)] if self.drained and self._to_begin() else []
        found += [("read", 0)] if any(not client.reads.is_set() for client in self.router.clients) else []
        found += [("time", 0)] if self._waits_for_time() else []
        return found

    def faults(self) -> list[Event]:
        kinds = [kind for kind in FAULTS if self.faults_left.get(kind)]
        live = [client.number for client in self.router.clients if client.task is not None and not client.over]
        return [(kind, argument) for kind in kinds for argument in (live if kind == "leave" else (0, 1))]

    def happen(self, event: Event) -> None:
        """Let an event happen and check every invariant. Raises Violation."""
        self.occur(event)
        self.check()

    def occur(self, event: Event) -> None:
        """Let an event happen. Raises Violation for what is wrong in the event itself, not for the state after it."""
        name, argument = event
        if name in FAULTS:
            self.faults_left[name] -= 1
        if name in OF_WORKER:
            worker = self.workers[argument]
            worker.worker_touched = worker.managers_touched = True
        getattr(self, name)(argument)
        self.loop.settle()

    def plan(self, number: int) -> None:
        self.workers[number].plan(0)
        self.workers[number].exchange()

    def complete(self, number: int) -> None:
        self.workers[number].complete(0)
        self.workers[number].exchange()

    def down(self, number: int) -> None:
        """A message of the router reaches a worker."""
        stream = self._stream(number)
        assert stream is not None
        self.workers[number].take(stream.to_worker.popleft())
        self.workers[number].exchange()

    def up(self, number: int) -> None:
        """A message of a worker reaches the router."""
        stream, message = self._stream(number), self.workers[number].to_router.popleft()
        assert stream is not None
        if message.HasField("heartbeat"):
            self._clock.advance(_BEAT_S)
        stream.deliver(message)

    def beat(self, number: int) -> None:
        worker = self.workers[number]
        worker.beat()
        while self.scenario.at_once and worker.to_router:
            self.up(number)

    def attach(self, number: int) -> None:
        """A worker reaches its new manager."""
        self.workers[number].reach_manager()

    def drain(self, number: int) -> None:
        """A worker gets SIGTERM; its next heartbeat says so."""
        self.drained = self.workers[number].draining = True

    def begin(self, _: int) -> None:
        """The next client sends its request."""
        client = self._to_begin()[0]
        self._in_loop(lambda: client.start(self.router.frontend, self._clock.monotonic()))

    def _to_begin(self) -> list[Client]:
        return [client for client in self.router.clients if client.task is None]

    def read(self, _: int) -> None:
        """The clients read on."""
        for client in self.router.clients:
            client.reads.set()

    def time(self, _: int) -> None:
        """A second passes at the router, which connects again where it is not connected."""
        self.loop.pass_time(1.0)

    def _waits_for_time(self) -> bool:
        return any(self._stream(number) is None for number in (0, 1)) or any(run.waits for run in self.router.runs())

    # ------------------------------------------------------------ faults

    def crash(self, number: int) -> None:
        """A worker dies, and another process starts in its place."""
        self.crashed = True
        stream = self._stream(number)
        self.workers[number].crash()
        if stream is not None:
            stream.break_off("Socket closed")

    def lose_manager(self, number: int) -> None:
        """The manager of a worker dies, and another one starts."""
        self.workers[number].lose_manager()

    def leave(self, number: int) -> None:
        """A client goes."""
        task = self.router.clients[number].task
        assert task is not None
        task.cancel()

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        """Check everything that must hold at every moment. Raises Violation."""
        if self._found is not None:
            raise self._found
        for worker in self.workers:
            check(worker)
        for client in self.router.clients:
            outputs, got = client.request.outputs, tuple(client.tokens)
            if got != outputs[: len(got)] or (client.end is not None and got != outputs):
                raise Violation("D1", f"client {client.number} has {got} of {outputs}")
            if client.error is not None:
                raise Violation("D1", f"request {client.number} failed: {client.error}")
        if any(self.router.waiting()) and not self.crashed:
            raise Violation("D4", "a sequence has left its worker and waits for another one")
        for model in self.router.pool.models():
            if model.outstanding != self.router.reserved_at(model) and not self.router.tries_suspects():
                raise Violation("D6", f"{model.outstanding} places are counted at {model.worker_id}, not all are held")

    def state_key(self) -> tuple[object, ...]:
        """Return everything that decides the future, hashable."""
        return (
            tuple([self._worker_key(number) for number in (0, 1)]),
            self.router.state_key(),
            (self.drained, self.crashed, tuple(self.faults_left.items())),
        )

    def _worker_key(self, number: int) -> tuple[object, ...]:
        worker, stream = self.workers[number], self._stream(number)
        below = tuple([each.SerializeToString() for each in stream.to_worker]) if stream is not None else None
        above = tuple([each.SerializeToString(deterministic=True) for each in worker.to_router])
        return worker.state_key(), worker.draining, tuple(worker.handles.items()), below, above

    def make_peace(self) -> None:
        """Let no more faults happen and move every part in turn until nothing moves. Raises Violation."""
        before: object = None
        for _ in range(PEACE_ROUNDS):
            for name in ("attach", "down", "plan", "complete", "up", "beat", "up", "read", "time"):
                for event in self.events():
                    while event[0] == name and event in self.events():
                        self.happen(event)
                        if name not in ("down", "up"):
                            break
            before, now = self.state_key(), before
            if before == now:
                self.check_rest()
                return
        raise Violation("D7", "the faults stopped, and the world does not come to rest")

    def check_rest(self) -> None:
        """D7, when nothing more will happen: every request has its end, and nothing is held anywhere."""
        for worker in self.workers:
            check_quiescence(worker)
        hanging = [client.number for client in self.router.clients if client.task is not None and not client.over]
        if hanging or self.router.runs():
            raise Violation("D7", f"nothing moves any more and requests {hanging} have not ended")
        limiter = self.router.admission
        if (limiter.queued, limiter.running, limiter.tokens_in_flight) != (0, 0, 0):
            raise Violation("D7", "the router counts requests that have ended")
        if any(model.outstanding for model in self.router.pool.models()):
            raise Violation("D6", "places are held for sequences that have ended")
