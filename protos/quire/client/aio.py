"""The client for asyncio: `AsyncClient` and `AsyncStream`. It follows the same rules as the client in sync.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc import aio

from quire.client.base import BaseClient, BaseStream
from quire.client.request import Message, Options, Prompt, conversation_of, prompt_of, request_of
from quire.client.results import Chunk, Completion, Model, Status
from quire.client.retry import Retry
from quire.client.setup import DEFAULT_TIMEOUT, Metadata, client_options
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc

_AnswerT = TypeVar("_AnswerT", bound=ProtoMessage)
_Call = aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncStream(BaseStream[_Call], AsyncIterator[Chunk]):
    """The chunks of one request as they arrive. Leaving `async with`, or `aclose`, cancels the request."""

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __anext__(self) -> Chunk:
        while not self._closed:
            event = await self._event()
            if event is None:
                self._end()
            elif (chunk := self._fold.take(event)) is not None:
                return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended; nothing more comes."""
        self._closed = True
        self._call.cancel()

    async def _event(self) -> pb.GenerateResponse | None:
        while True:
            try:
                event = await self._call.read()
            except aio.AioRpcError as error:
                await asyncio.sleep(self._attempts.wait_after(error, self._fold))
                if self._closed:  # by another task, while this waited
                    return None
                self._call = self._start(self._attempts.time_left())
            except asyncio.CancelledError:
                if self._closed:  # by another task
                    return None
                raise  # grpc.aio has cancelled the call
            else:
                return event if isinstance(event, pb.GenerateResponse) else None


class AsyncClient(BaseClient):
    """Calls one router over one connection. Create it inside a running event loop.

    `timeout` is in seconds for a whole call with its retries; each call may set another. Raises QuireErrors.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        retry: Retry = Retry(),  # noqa: B008 - frozen
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
    ) -> None:
        """`address` is HOST:PORT; nothing is sent yet. `credentials` ask for TLS; `metadata` goes with every call."""
        super().__init__(timeout, retry, metadata)
        options = client_options()
        self._channel = (
            aio.secure_channel(address, credentials, options) if credentials else aio.insecure_channel(address, options)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._budget.end()
        await self._channel.close()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Begin a request and return its chunks as they come."""
        request = request_of(prompt, options)
        start = partial(self._stub.Generate, request, metadata=self._metadata)
        attempts = self._attempts(options.get("timeout"))
        return AsyncStream(lambda timeout: start(timeout=timeout), attempts, request.sampling.n)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Return the whole answer to a prompt. The call streams, so that Interrupted can carry a partial answer."""
        async with self.stream(prompt, **options) as stream:
            async for _ in stream:
                pass
            return stream.completion

    async def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Return the answer to the messages of a chat; a text is one message of the user."""
        return await self.generate(conversation_of(messages), **options)

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, timeout: float | None = None
    ) -> tuple[int, ...]:
        request = pb.TokenizeRequest(prompt=prompt_of(prompt), add_special_tokens=add_special_tokens)
        return tuple((await self._ask(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._ask(self._stub.Detokenize, request, timeout)).text

    async def model(self, *, timeout: float | None = None) -> Model:
        return Model.from_proto(await self._ask(self._stub.GetModel, pb.GetModelRequest(), timeout))

    async def status(self, *, timeout: float | None = None) -> Status:
        """Return the router's queue and its workers."""
        return Status.from_proto(await self._ask(self._stub.GetStatus, pb.GetStatusRequest(), timeout))

    async def _ask(
        self, method: aio.UnaryUnaryMultiCallable[Any, _AnswerT], request: ProtoMessage, timeout: float | None
    ) -> _AnswerT:
        attempts = self._attempts(timeout)
        while True:
            try:
                answer = await method(request, timeout=attempts.time_left(), metadata=self._metadata)
            except aio.AioRpcError as error:
                await asyncio.sleep(attempts.wait_after(error))
            else:
                attempts.succeeded()
                return answer
