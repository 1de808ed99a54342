"""A router's side of the public API over real gRPC that plays scripts, and both clients behind one API."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from common.contracts.errors import QuireError
from common.rpc.server import RpcServer
from common.rpc.tls import ServerTls
from quire.client import AsyncClient, AsyncStream, Chunk, Client, Completion, Stream
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types

PATIENCE_S = 120.0
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
# What a call does next: send an event, end with an error (a bare code has no details), or wait.
Step = pb.GenerateResponse | QuireError | grpc.StatusCode | asyncio.Event
Context = aio.ServicerContext[Any, Any]


def admitted(cached: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        admitted=pb.Admitted(
            request_id="r1",
            worker_id="worker-0",
            prompt_tokens=5,
            cached_tokens=cached,
            queue_seconds=0.25,
            decision_id="d1",
            trace_id=TRACE_ID,
            seed=9,
            miss_reason=types.MISS_REASON_NEVER_SEEN,
        )
    )


def tokens(text: str, *ids: int, index: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(tokens=pb.Tokens(index=index, text=text, token_ids=ids))


def finished(
    output_tokens: int, index: int = 0, reason: types.FinishReason.ValueType = types.FINISH_REASON_STOP, **by: Any
) -> pb.GenerateResponse:
    usage = types.Usage(prompt_tokens=5, cached_tokens=4, output_tokens=output_tokens)
    timings = pb.Timings(time_to_first_token=0.5, total_seconds=1.5)
    return pb.GenerateResponse(finished=pb.Finished(index=index, reason=reason, usage=usage, timings=timings, **by))


HELLO = (admitted(cached=4), tokens("Hel", 1, 2), tokens("lo", 3), finished(3))


@dataclass
class RouterDouble(rpc.InferenceServiceServicer):
    """Each call plays the next script, the last one repeatedly; calls, their metadata and time left are recorded."""

    scripts: Sequence[Sequence[Step]] = (HELLO,)
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    time_left: list[float | None] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def _next(self, request: Any, context: Context) -> Iterator[Step]:
        place = min(len(self.requests), len(self.scripts) - 1)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.time_left.append(context.time_remaining())
        return iter(self.scripts[place])

    async def _play(self, step: Step, context: Context) -> None:
        match step:
            case QuireError():
                raise step
            case grpc.StatusCode():
                await context.abort(step, "no details")
            case asyncio.Event():
                await step.wait()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        playing = True

        def done(_: Context) -> None:  # a call that is cancelled while an answer is sent never gets here again
            if playing:
                self.cancelled.set()

        context.add_done_callback(done)  # type: ignore[arg-type]  # the stub names a class, not a protocol
        try:
            for step in self._next(request, context):
                await self._play(step, context)
                if isinstance(step, pb.GenerateResponse):
                    yield step
        except QuireError:
            playing = False
            raise
        playing = False

    async def GenerateUnary(self, request: pb.GenerateUnaryRequest, context: Context) -> pb.GenerateUnaryResponse:
        raise NotImplementedError

    async def _ask(self, request: Any, context: Context) -> None:
        for step in self._next(request, context):
            await self._play(step, context)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        await self._ask(request, context)
        return pb.TokenizeResponse(token_ids=[4, 5])

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        await self._ask(request, context)
        usage = types.Usage(prompt_tokens=3 * len(request.inputs))
        return pb.EmbedResponse(embeddings=[pb.Embedding(values=[0.5, 1.0]) for _ in request.inputs], usage=usage)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        await self._ask(request, context)
        return pb.DetokenizeResponse(text="back")

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        await self._ask(request, context)
        identity = types.PoolIdentity(model_fingerprint="m", block_size=16)
        return pb.GetModelResponse(model="demo", identity=identity, max_model_len=512, eos_token_ids=[2])

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        await self._ask(request, context)
        return pb.AbortResponse(aborted=1)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        await self._ask(request, context)
        return pb.GetLoadsResponse()

    def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> Any:
        raise NotImplementedError

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        raise NotImplementedError

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        raise NotImplementedError

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        raise NotImplementedError

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        raise NotImplementedError

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        raise NotImplementedError

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        await self._ask(request, context)
        worker = pb.WorkerStatus(worker_id="worker-0", state="connected", num_blocks=64, manager_attached=True)
        return pb.GetStatusResponse(queued_requests=2, running_requests=1, version="0.1.0", workers=[worker])


@asynccontextmanager
async def served(double: RouterDouble, tls: ServerTls | None = None) -> AsyncIterator[str]:
    """Serve a double; gives its address."""
    server = RpcServer(["quire.inference.v1.InferenceService"], tls=tls)
    rpc.add_InferenceServiceServicer_to_server(double, server.server)
    port = await server.start("127.0.0.1", 0)
    yield f"127.0.0.1:{port}"
    await server.server.stop(None)


@dataclass(frozen=True)
class Face:
    """One of the two clients, called the same way by tests: the blocking one runs on a thread."""

    client: Client | AsyncClient
    # Abandoned streams, kept here: the finaliser of an unreferenced stream would cancel it, closed or not.
    left: list[Stream | AsyncStream] = field(default_factory=list)

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        if isinstance(self.client, AsyncClient):
            return await getattr(self.client, method)(*args, **options)
        return await asyncio.to_thread(getattr(self.client, method), *args, **options)

    async def chunks(self, prompt: Any, most: int = 1_000, **options: Any) -> tuple[list[Chunk], Completion]:
        """Return up to `most` chunks, and the state of the stream when the reader left it."""
        if isinstance(self.client, AsyncClient):
            seen = []
            async with self.client.stream(prompt, **options) as stream:
                async for chunk in stream:
                    seen.append(chunk)
                    if len(seen) == most:
                        break
            self.left.append(stream)
            return seen, stream.completion
        return await asyncio.to_thread(self._chunks, prompt, most, options)

    def _chunks(self, prompt: Any, most: int, options: Any) -> tuple[list[Chunk], Completion]:
        assert isinstance(self.client, Client)
        with self.client.stream(prompt, **options) as stream:
            self.left.append(stream)
            return list(itertools.islice(stream, most)), stream.completion


@asynccontextmanager
async def facing(kind: str, address: str | Sequence[str], **options: Any) -> AsyncIterator[Face]:
    """Open the client of a kind, `threads` or `asyncio`."""
    options = {"timeout": PATIENCE_S} | options
    if kind == "asyncio":
        async with AsyncClient(address, **options) as client:
            yield Face(client)
    else:
        with Client(address, **options) as client:
            yield Face(client)
