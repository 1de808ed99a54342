"""One worker with its KV manager, as the lease model has them, behind the stream of a router."""

from __future__ import annotations

from collections import deque

from common.contracts.hashing import little_endian_int32
from common.contracts.types import FinishReason, SequenceId
from common.wire.enum_codec import finish_to_proto
from common.wire.identity_codec import identity_to_proto
from common.wire.packing import unpack_u32
from gpuworker.scheduling.outcomes import Completion
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from tests.suites.protocol.scenario import Scenario
from tests.suites.protocol.world import World
from tests.support.router.fake_worker import IDENTITY

# Every token and both limits of a request fit.
_MAX_MODEL_LEN = 64


class DrainedWorker(World):
    """The router submits here, and gets what is sampled. The lease model's own requests are not submitted."""

    def __init__(self, scenario: Scenario, worker_id: str) -> None:
        self.worker_id, self.draining = worker_id, False
        self.to_router: deque[pb.StreamResponse] = deque()
        self.handles: dict[SequenceId, int] = {}
        # Handles whose admission was said, and outputs so far on this stream.
        self._admitted: set[int] = set()
        self._outputs = 0
        self._reported = pb.Load()
        # Output tokens that steps of this process have drawn, by request.
        self.drawn: dict[int, int] = {}
        super().__init__(scenario)
        self._nothing_here()
        self.connect(0)
        self.exchange()

    def state_key(self) -> tuple[object, ...]:
        """Return the key of the world; its parts are made anew, since events happen here without `occur`."""
        self.worker_hash = self.managers_hash = None
        return super().state_key()

    def _nothing_here(self) -> None:
        self.unsubmitted = ()
        self.ended = [each or FinishReason.CANCELLED for each in self.ended]

    # ------------------------------------------------------------ the router's stream

    def hello(self) -> pb.WorkerHello | None:
        """Answer a router's hello; a worker that drains takes no new stream."""
        if self.draining:
            return None
        self._outputs, self._reported = 0, self._load()
        self._admitted.clear()
        self.to_router.clear()
        sizes = self.scenario
        info = pb.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation.to_bytes(16, "big"),
            identity=identity_to_proto(IDENTITY),
            num_blocks=sizes.num_blocks,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=sizes.max_num_seqs,
            vocab_size=10,
        )
        return pb.WorkerHello(info=info)

    def take(self, message: pb.StreamRequest) -> None:
        """Do what a message of the router says."""
        if message.HasField("submit"):
            self._take_submit(message.submit)
        else:
            self._take_cancel(message.cancel)

    def _take_submit(self, message: pb.Submit) -> None:
        number = int(message.request_id)
        request, tokens = self.scenario.requests[number], unpack_u32(message.prompt_token_ids)
        assert tuple(tokens[: len(request.prompt)]) == request.prompt
        assert message.output_tokens_before == len(tokens) - len(request.prompt)
        self.delivered[number] = list(tokens[len(request.prompt) :])
        self.ended[number], self.unsubmitted = None, (number,)
        self.submit(0)
        self.handles[SequenceId(self.next_sequence - 1)] = message.handle

    def _take_cancel(self, message: pb.Cancel) -> None:
        named = [sequence for sequence, handle in self.handles.items() if handle == message.handle]
        for sequence in named:
            if message.hands_over:
                self.agent.hand_over(sequence)
            else:
                self.agent.cancel_sequence(sequence)
        self._settle(self.agent.departures())

    @property
    def has_work(self) -> bool:
        """Whether a plan may change something: it gives back leases too."""
        return self.agent.has_work or bool(self.agent.counts().pool)

    def beat(self) -> None:
        """Report the load, behind what the router has not read yet."""
        self._reported = self._load()
        self.to_router.append(pb.StreamResponse(heartbeat=pb.Heartbeat(load=self._reported)))

    def has_news(self, chances: bool) -> bool:
        """Return whether a heartbeat would tell something new, or (`chances`) give the router's mover a chance."""
        waits = bool(self.to_router) and self.to_router[-1].HasField("heartbeat")
        return not waits and (chances or self._reported != self._load())

    def _load(self) -> pb.Load:
        counts = self.agent.counts()
        return pb.Load(
            running=counts.running,
            waiting=counts.waiting,
            num_blocks=self.scenario.num_blocks,
            unheld_blocks=counts.unheld,
            manager_attached=self.worker.open,
            draining=self.draining,
            migrating=self.draining,
        )

    def _settle(self, completion: Completion) -> None:
        """Put what the router gets into the stream."""
        super()._settle(completion)
        tokens = {self.handles[each]: some for each, some in completion.tokens.items()}
        ends = {self.handles.pop(each.sequence): each.reason for each in completion.finished}
        if tokens or ends:
            self._say(tokens, ends)

    def _say(self, tokens: dict[int, tuple[int, ...]], ends: dict[int, FinishReason]) -> None:
        self._outputs += 1
        sampled = [token for some in tokens.values() for token in some]
        outputs = pb.StepOutputs(
            seq=self._outputs,
            step=self._outputs,
            admitted=[pb.SequenceAdmitted(handle=handle) for handle in tokens if handle not in self._admitted],
            handles=little_endian_int32(list(tokens)),
            counts=little_endian_int32([len(some) for some in tokens.values()]),
            token_ids=little_endian_int32(sampled),
            finished=[pb.SequenceFinished(handle=each, reason=finish_to_proto(why)) for each, why in ends.items()],
        )
        self._admitted |= tokens.keys()
        self.to_router.append(pb.StreamResponse(outputs=outputs))

    # ------------------------------------------------------------ steps and faults

    def plan(self, _: int) -> bool:
        planned = super().plan(0)
        for sequence, number in self.request_of.items():
            output = len(self.paths[sequence]) - len(self.scenario.requests[number].prompt)
            self.drawn[number] = max(output, self.drawn.get(number, 0))
        return planned

    def crash(self) -> None:
        """The process dies with all that the router has not read, and another one starts in its place."""
        self.faults_left["worker_crash"], self.faults_in_all = 1, 1
        self.occur(("worker_crash", 0))
        self._nothing_here()
        self.to_router.clear()
        self.handles.clear()
        self.drawn.clear()
        self.draining = False

    def lose_manager(self) -> None:
        """The manager dies, and another one starts. The worker does not reach it before `reach_manager`."""
        self.end_manager(self.managers[-1])

    def reach_manager(self) -> None:
        self.connect(len(self.managers) - 1)
        self.exchange()

    # ------------------------------------------------------------ the KV manager

    def exchange(self) -> None:
        """Let the worker and its manager say all that they have to say."""
        moved = True
        while moved and self.link is not None:
            number = len(self.links) - 1
            moved = self.report(0)
            while self.links[number].to_manager:
                moved = self.to_manager(number)
            while self.links[number].to_worker:
                moved = self.to_worker(number)
