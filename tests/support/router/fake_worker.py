"""A GPU worker's side of the router's stream, over real gRPC, under the control of a test."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from common.contracts.errors import IdentityMismatch, QuireError
from common.contracts.hashing import little_endian_int32
from common.contracts.types import FinishReason, KvGeometry, MissReason, PoolIdentity
from common.rpc.server import RpcServer
from common.rpc.status import to_status
from common.rpc.tls import ServerTls
from common.wire.identity_codec import identity_from_proto, identity_to_proto
from common.wire.packing import unpack_u32
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from quire.types.v1 import types_pb2

IDENTITY = PoolIdentity("m" * 32, "t" * 32, 4, KvGeometry(2, 1, 8, 8, "float32"))
PATIENCE_S = 120.0
_BEAT_S = 1.0


@dataclass
class FakeWorker(rpc.GpuWorkerServiceServicer):
    """Records the router's messages; answers on command, or at once while `automatic`.

    An automatic worker samples 100, 101, 102, ... by output position: a continued sequence then shows whether a token
    was lost or repeated.
    """

    worker_id: str = "w0"
    identity: PoolIdentity = IDENTITY
    num_blocks: int = 64
    max_num_seqs: int = 8
    prefix_caching: bool = True
    disaggregation: pb.Disaggregation.ValueType = pb.DISAGGREGATION_UNSPECIFIED
    fetches_blocks: bool = False
    max_model_len: int = 256
    automatic: bool = False
    greets: bool = True
    # The error that refuses every new stream.
    refuses: QuireError | None = None
    # Seconds of a router's silence that it says it bears; 0: it says nothing of that.
    silence: float = 0.0
    port: int = 0
    tls: ServerTls | None = None
    incarnation: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    hellos: list[pb.Hello] = field(default_factory=list)
    submits: list[pb.Submit] = field(default_factory=list)
    cancels: list[pb.Cancel] = field(default_factory=list)
    streams: int = 0
    # One for each pulse of a router.
    pulses: list[pb.Pulse] = field(default_factory=list)
    loads: list[pb.LoadAdapter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._outbox: asyncio.Queue[pb.StreamResponse | QuireError | None] = asyncio.Queue()
        self._seq = 0
        self._server: RpcServer | None = None
        self._load = self._load_of({})

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Listen, on the previous port if there was one."""
        self._server = RpcServer(["quire.gpuworker.v1.GpuWorkerService"], tls=self.tls)
        rpc.add_GpuWorkerServiceServicer_to_server(self, self._server.server)
        self.port = await self._server.start("127.0.0.1", self.port)

    async def kill(self) -> None:
        """Close at once, without a drain."""
        if self._server is not None:
            await self._server.server.stop(None)
            self._server = None

    async def restart(self) -> None:
        """Start again as a new process."""
        await self.kill()
        self.incarnation = secrets.token_bytes(16)
        await self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # ------------------------------------------------------------ the service

    async def Stream(
        self, request_iterator: AsyncIterator[pb.StreamRequest], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.StreamResponse]:
        requests = aiter(request_iterator)
        hello = (await anext(requests)).hello
        await self._note(self.hellos, hello)
        if hello.HasField("identity") and (found := self.identity.differences(identity_from_proto(hello.identity))):
            raise IdentityMismatch(found)
        if self.refuses is not None:
            raise self.refuses
        self._outbox, self._seq = asyncio.Queue(), 0
        if self.greets:
            hello_back = pb.WorkerHello(info=self.info(), silence_seconds=self.silence)
            self._outbox.put_nowait(pb.StreamResponse(hello=hello_back))
        await self._note_stream()
        outbox = self._outbox
        tasks = [asyncio.create_task(self._read(requests)), asyncio.create_task(self._beat())]
        tasks[0].add_done_callback(lambda _: outbox.put_nowait(None))
        try:
            while (message := await outbox.get()) is not None:
                if isinstance(message, QuireError):
                    raise message
                yield message
        finally:
            for task in tasks:
                task.cancel()

    async def _beat(self) -> None:
        """Repeat the last heartbeat, as a worker does: for a router one that is silent for 5 s is hung."""
        while self.greets:
            await asyncio.sleep(_BEAT_S)
            self._outbox.put_nowait(pb.StreamResponse(heartbeat=pb.Heartbeat(load=self._load)))

    async def GetWorker(
        self, request: pb.GetWorkerRequest, context: aio.ServicerContext[Any, Any]
    ) -> pb.GetWorkerResponse:
        return pb.GetWorkerResponse(info=self.info())

    async def _read(self, requests: AsyncIterator[pb.StreamRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "submit":
                    await self._note(self.submits, request.submit)
                    if self.automatic:
                        self.run(request.submit)
                case "cancel":
                    await self._note(self.cancels, request.cancel)
                case "pulse":
                    await self._note(self.pulses, request.pulse)
                case "load_adapter":
                    await self._note(self.loads, request.load_adapter)
                case "find":
                    # It has no orphans.
                    self.say(pb.StreamResponse(found=pb.Found(query=request.find.query)))

    async def _note(self, where: list[Any], what: object) -> None:
        async with self._changed:
            where.append(what)
            self._changed.notify_all()

    async def _note_stream(self) -> None:
        async with self._changed:
            self.streams += 1
            self._changed.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until a message of the router makes `true` hold."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(true)

    def info(self) -> pb.WorkerInfo:
        return pb.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            identity=identity_to_proto(self.identity),
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            vocab_size=1000,
            prefix_caching=self.prefix_caching,
            disaggregation=self.disaggregation,
            fetches_blocks=self.fetches_blocks,
        )

    # ------------------------------------------------------------ what it says

    def say(self, response: pb.StreamResponse | None) -> None:
        """Send a message; None ends the stream."""
        self._outbox.put_nowait(response)

    def fail(self, error: QuireError) -> None:
        """End the stream with the status of an error."""
        self._outbox.put_nowait(error)

    def heartbeat(self, **load: float) -> None:
        self._load = self._load_of(load)
        self.say(pb.StreamResponse(heartbeat=pb.Heartbeat(load=self._load)))

    def _load_of(self, load: dict[str, float]) -> pb.Load:
        full = {"num_blocks": self.num_blocks, "unheld_blocks": self.num_blocks, "manager_attached": True} | load
        return pb.Load(**full)  # type: ignore[arg-type]

    def refuse(self, handle: int, error: QuireError) -> None:
        status = to_status(error).SerializeToString()
        self.say(pb.StreamResponse(refused=pb.Refused(handle=handle, status=status)))

    def tell_of_adapters(self, **in_memory: bool) -> None:
        """Say which adapters it knows; the content of each is 64 times the first letter of its name."""
        known = [pb.Adapter(name=name, fingerprint=64 * name[0], in_memory=held) for name, held in in_memory.items()]
        self.say(pb.StreamResponse(adapters=pb.Adapters(adapters=known, max_in_memory=1)))

    def answer_load(self, error: QuireError | None = None) -> None:
        """Answer the last load."""
        status = b"" if error is None else to_status(error).SerializeToString()
        self.say(pb.StreamResponse(adapter_answer=pb.AdapterAnswer(query=self.loads[-1].query, status=status)))

    def step(
        self,
        tokens: dict[int, Sequence[int]] | None = None,
        admitted: dict[int, int] | None = None,
        finished: dict[int, FinishReason] | None = None,
        wrong_field: str = "",
        embedding: bytes = b"",
        recounted: dict[int, int] | None = None,
        **more: Any,
    ) -> None:
        """Send one step's outputs: tokens by handle, cached tokens of those admitted, reasons of those finished."""
        self._seq += 1
        tokens = tokens or {}
        admissions = [
            pb.SequenceAdmitted(handle=handle, cached_tokens=cached, miss_reason=_miss(MissReason.NEVER_SEEN))
            for handle, cached in (admitted or {}).items()
        ]
        admissions += [
            pb.SequenceAdmitted(handle=handle, cached_tokens=cached, recounted=True)
            for handle, cached in (recounted or {}).items()
        ]
        ended = [
            pb.SequenceFinished(handle=handle, reason=_finish(reason), wrong_field=wrong_field, embedding=embedding)
            for handle, reason in (finished or {}).items()
        ]
        sampled = [token for some in tokens.values() for token in some]
        outputs = pb.StepOutputs(
            seq=self._seq,
            step=self._seq,
            admitted=[*admissions, *more.pop("admissions", [])],
            handles=little_endian_int32(list(tokens)),
            counts=little_endian_int32([len(some) for some in tokens.values()]),
            token_ids=little_endian_int32(sampled),
            finished=[*ended, *more.pop("ended", [])],
            **more,
        )
        self.say(pb.StreamResponse(outputs=outputs))

    def run(self, submit: pb.Submit) -> None:
        """Sample all tokens of a sequence, one a step."""
        handle, start = submit.handle, submit.output_tokens_before
        self.step(admitted={handle: 0})
        if not submit.sampling.max_tokens:
            self.step(finished={handle: FinishReason.LENGTH})
        for position in range(start, submit.sampling.max_tokens):
            last = position == submit.sampling.max_tokens - 1
            self.step({handle: [100 + position]}, finished={handle: FinishReason.LENGTH} if last else None)


def prompt_of(submit: pb.Submit) -> list[int]:
    return unpack_u32(submit.prompt_token_ids)


def _finish(reason: FinishReason) -> types_pb2.FinishReason.ValueType:
    return types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")


def _miss(reason: MissReason) -> types_pb2.MissReason.ValueType:
    return types_pb2.MissReason.Value(f"MISS_REASON_{reason.name}")


@asynccontextmanager
async def running(*workers: FakeWorker) -> AsyncIterator[None]:
    """Start workers, and kill them at the end."""
    try:
        for worker in workers:
            await worker.start()
        yield
    finally:
        for worker in workers:
            await worker.kill()
