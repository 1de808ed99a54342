"""The client for asyncio: `AsyncClient` and `AsyncStream`. It follows the same rules as the client in sync.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc import aio

from quire.client.base import BaseClient, BaseStream
from quire.client.chat import ChatOptions, Message
from quire.client.request import Options, Prompt, conversation_of, embed_request_of, prompt_of, request_of
from quire.client.results import Chunk, Completion, Embeddings, Model, Status
from quire.client.retry import Retry
from quire.client.setup import DEFAULT_TIMEOUT, Metadata, client_options, credentials_of, metadata_of
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc

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
                self._attempts.goes_on()
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
                wait = self._seconds_until_next(error)
                if wait is None:
                    return None
                await asyncio.sleep(wait)
                if self._closed:  # by another task, while this waited
                    return None
                self._start_again()
            except asyncio.CancelledError:
                if self._closed:  # by another task
                    return None
                raise  # grpc.aio has cancelled the call
            else:
                return event if isinstance(event, pb.GenerateResponse) else None


class AsyncClient(BaseClient):
    """Calls a router over one connection, and the next one when it breaks. Create it inside a running event loop.

    `timeout` is in seconds for a whole call with its retries; each call may set another. Raises QuireErrors.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        retry: Retry = Retry(),  # noqa: B008 - frozen
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        ca: str | Path | None = None,
        api_key: str | None = None,
    ) -> None:
        """`address` is HOST:PORT, or those of a pool's routers; nothing is sent yet. `metadata` goes with every call.

        `ca` names a PEM file and asks for TLS (unset: QUIRE_CA; "": plain text), `credentials` ask for it in full.
        `api_key` goes with every call (unset: QUIRE_API_KEY; "": none).
        """
        super().__init__(address, timeout, retry, metadata_of(metadata, api_key))
        credentials = credentials or credentials_of(ca)
        self._channels = [_channel(each, credentials) for each in self._addresses.all]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._budget.end()
        for channel in self._channels:
            await channel.close()

    def _begin(self, number: int, request: pb.GenerateRequest, timeout: float | None) -> _Call:
        return self._stubs[number].Generate(request, timeout=timeout, metadata=self._metadata)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Begin a request and return its chunks as they come."""
        request = request_of(prompt, options)
        attempts = self._attempts(options.get("timeout"))
        return AsyncStream(self._begin, request, attempts, self._addresses)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Return the whole answer to a prompt. The call streams, so that Interrupted can carry a partial answer."""
        async with self.stream(prompt, **options) as stream:
            async for _ in stream:
                pass
            return stream.completion

    async def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Return the answer to the messages of a chat; a text is one message of the user."""
        return await self.generate(conversation_of(messages), **options)

    async def embed(
        self, inputs: Sequence[Prompt], *, dimensions: int | None = None, timeout: float | None = None
    ) -> Embeddings:
        """Return the vectors of several inputs, from a pool that embeds, with so many leading numbers."""
        request = embed_request_of(inputs, dimensions)
        return Embeddings.from_proto(await self._ask("Embed", request, timeout))

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt as `generate` would send it."""
        prompted = prompt_of(prompt, {name: value for name, value in options.items() if value is not None})
        request = pb.TokenizeRequest(prompt=prompted, add_special_tokens=add_special_tokens)
        return tuple((await self._ask("Tokenize", request, timeout)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._ask("Detokenize", request, timeout)).text)

    async def model(self, *, timeout: float | None = None) -> Model:
        return Model.from_proto(await self._ask("GetModel", pb.GetModelRequest(), timeout))

    async def status(self, *, timeout: float | None = None) -> Status:
        """Return the router's queue and its workers."""
        return Status.from_proto(await self._ask("GetStatus", pb.GetStatusRequest(), timeout))

    async def _ask(self, method: str, request: ProtoMessage, timeout: float | None) -> Any:
        attempts = self._attempts(timeout)
        while True:
            number = self._addresses.current
            try:
                call = getattr(self._stubs[number], method)
                answer = await call(request, timeout=attempts.time_left(), metadata=self._metadata)
            except aio.AioRpcError as error:
                await asyncio.sleep(attempts.wait_after(error))
                self._addresses.leave(number)
            else:
                attempts.succeeded()
                return answer


def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> aio.Channel:
    options = client_options(address)
    return aio.secure_channel(address, credentials, options) if credentials else aio.insecure_channel(address, options)
