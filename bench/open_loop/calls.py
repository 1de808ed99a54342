"""Makes the requests of the load benchmark: over gRPC, over the OpenAI-compatible HTTP, or straight to a worker."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpc import aio

from bench.open_loop.plan import FINISHED, Plan, Trace
from bench.open_loop.token_check import TokenCheck
from cli.certificates.folder import Leaf
from common.contracts.hashing import block_digests, block_hash_of, little_endian_int32, root_digest
from common.contracts.types import PoolIdentity
from common.rpc.roles import Role
from common.rpc.server import open_channel
from common.wire.identity_codec import identity_from_proto
from common.wire.packing import pack_hashes, unpack_u32
from quire.gpuworker.v1 import gpuworker_pb2 as worker_pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as worker_rpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.types.v1 import types_pb2 as types

_GENERATE = "/quire.inference.v1.InferenceService/Generate"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt of token ids, the number of tokens that follow, the seed of its samples, and the check of its tokens."""

    prompt: Sequence[int]
    output_tokens: int
    seed: int
    check: TokenCheck | None


class Api(Protocol):
    """Makes requests of one kind. `call` fills in the trace until the request is over, whatever ends it."""

    async def call(self, request: LoadRequest, trace: Trace) -> None: ...


@asynccontextmanager
async def open_api(plan: Plan) -> AsyncIterator[Api]:
    opener = {"grpc": _grpc, "http": _http, "direct": _direct}[plan.api]
    async with opener(plan) as api:
        yield api


# ------------------------------------------------------------ gRPC


class GrpcApi:
    """Calls `Generate`, on several connections by turns."""

    def __init__(self, channels: Sequence[aio.Channel]) -> None:
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        self._stubs = itertools.cycle(stubs)

    async def call(self, request: LoadRequest, trace: Trace) -> None:
        sampling = types.SamplingParams(
            temperature=1.0, max_tokens=request.output_tokens, ignore_eos=True, seed=request.seed
        )
        message = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=request.prompt)), sampling=sampling)
        check, monotonic = request.check, time.monotonic
        try:
            async for event in next(self._stubs).Generate(message):
                if event.HasField("tokens"):
                    ids = event.tokens.token_ids
                    trace.add(monotonic(), len(ids))
                    if check is not None:
                        check.take(ids)
            trace.status = FINISHED
        except aio.AioRpcError as error:
            trace.status = error.code().name


@asynccontextmanager
async def _grpc(plan: Plan) -> AsyncIterator[Api]:
    channels = [open_channel(plan.address) for _ in range(plan.channels)]
    try:
        for channel in channels:
            await channel.channel_ready()
        yield GrpcApi(channels)
    finally:
        for channel in channels:
            await channel.close()


# ------------------------------------------------------------ HTTP


class HttpApi:
    """Posts to /v1/completions and reads server-sent events, each request on a connection of its own.

    The events have text, not ids: their tokens are counted by `usage` at the end, and cannot be checked one by one.
    """

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    async def call(self, request: LoadRequest, trace: Trace) -> None:
        body = json.dumps(
            {
                "prompt": list(request.prompt),
                "max_tokens": request.output_tokens,
                "seed": request.seed,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            trace.status = type(error).__name__
            return
        try:
            writer.write(head.encode() + body)
            await self._read(reader, trace)
        except (OSError, asyncio.IncompleteReadError) as error:
            trace.status = type(error).__name__
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, trace: Trace) -> None:
        status = (await reader.readline()).split()[1].decode()
        if status != "200":
            trace.status = f"HTTP_{status}"
            return
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                trace.status = "HTTP_ERROR_EVENT"
                return
            if any(choice["text"] for choice in event["choices"]):
                trace.add(time.monotonic(), 1)
            if event.get("usage"):
                _spread(trace, event["usage"]["completion_tokens"])
                trace.status = FINISHED


def _spread(trace: Trace, tokens: int) -> None:
    """Assign the tokens that came with others' text to the events, the last first; an event has one at least."""
    if trace.counts:
        trace.counts[-1] += tokens - sum(trace.counts)


@asynccontextmanager
async def _http(plan: Plan) -> AsyncIterator[Api]:
    yield HttpApi(plan.address)


# ------------------------------------------------------------ straight to a worker


class DirectApi:
    """Sends sequences down one stream to a worker, as a router does, with nothing between."""

    def __init__(
        self, call: aio.StreamStreamCall[worker_pb.StreamRequest, worker_pb.StreamResponse], identity: PoolIdentity
    ) -> None:
        self._call, self._writing = call, asyncio.Lock()  # two writes at once end an RPC
        self._block_size = identity.block_size
        self._root = root_digest(identity.model_fingerprint, identity.tokenizer_fingerprint, identity.block_size)
        self._handles = itertools.count(1)
        self._live: dict[int, tuple[Trace, TokenCheck | None, asyncio.Event]] = {}

    async def call(self, request: LoadRequest, trace: Trace) -> None:
        handle, done = next(self._handles), asyncio.Event()
        self._live[handle] = trace, request.check, done
        digests = block_digests(self._root, request.prompt, self._block_size)
        submit = worker_pb.Submit(
            handle=handle,
            prompt_token_ids=little_endian_int32(request.prompt),
            block_hashes=pack_hashes(map(block_hash_of, digests)),
            parent_digest=digests[-1] if digests else self._root,
            sampling=types.SamplingParams(
                temperature=1.0,
                top_p=1.0,
                repetition_penalty=1.0,
                max_tokens=request.output_tokens,
                seed=request.seed,
                ignore_eos=True,
            ),
        )
        async with self._writing:
            await self._call.write(worker_pb.StreamRequest(submit=submit))
        await done.wait()

    async def read(self) -> None:
        """Handle the worker's messages until the stream ends."""
        while isinstance(response := await self._call.read(), worker_pb.StreamResponse):
            now, outputs = time.monotonic(), response.outputs
            drawn = iter(unpack_u32(outputs.token_ids))
            for handle, count in zip(unpack_u32(outputs.handles), unpack_u32(outputs.counts), strict=True):
                ids = list(itertools.islice(drawn, count))
                trace, check, _ = self._live[handle]
                trace.add(now, count)
                if check is not None:
                    check.take(ids)
            for end in outputs.finished:
                self._end(end.handle, FINISHED)
            if response.HasField("refused"):
                self._end(response.refused.handle, "REFUSED")

    def _end(self, handle: int, status: str) -> None:
        trace, _, done = self._live.pop(handle)
        trace.status = status
        done.set()


@asynccontextmanager
async def _direct(plan: Plan) -> AsyncIterator[Api]:
    identity = Leaf(Path(plan.certs)).identity() if plan.certs else None
    async with open_channel(plan.address, identity=identity, role=Role.WORKER) as channel:
        call = worker_rpc.GpuWorkerServiceStub(channel).Stream()
        await call.write(worker_pb.StreamRequest(hello=worker_pb.Hello(router_id="bench")))
        hello = await call.read()
        assert isinstance(hello, worker_pb.StreamResponse), "the worker ended the stream"
        api = DirectApi(call, identity_from_proto(hello.hello.info.identity))
        reader = asyncio.create_task(api.read())
        try:
            yield api
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            call.cancel()
