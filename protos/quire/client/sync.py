"""The client for threads: `Client`, which threads may share, and `Stream`, which one thread reads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack, cast

import grpc
from google.protobuf.message import Message as ProtoMessage

from quire.api.status import RpcFailure
from quire.client.base import BaseClient, BaseStream
from quire.client.chat import ChatOptions, Message
from quire.client.request import Options, Prompt, conversation_of, embed_request_of, prompt_of, request_of
from quire.client.results import Chunk, Completion, Embeddings, Model, Status
from quire.client.retry import Retry
from quire.client.setup import DEFAULT_TIMEOUT, Metadata, client_options, credentials_of, metadata_of
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc


class _Stub(Protocol):
    """The generated stub over a channel for threads; the generated types cover asyncio alone."""

    Generate: grpc.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]
    Embed: grpc.UnaryUnaryMultiCallable[pb.EmbedRequest, pb.EmbedResponse]
    Tokenize: grpc.UnaryUnaryMultiCallable[pb.TokenizeRequest, pb.TokenizeResponse]
    Detokenize: grpc.UnaryUnaryMultiCallable[pb.DetokenizeRequest, pb.DetokenizeResponse]
    GetModel: grpc.UnaryUnaryMultiCallable[pb.GetModelRequest, pb.GetModelResponse]
    GetStatus: grpc.UnaryUnaryMultiCallable[pb.GetStatusRequest, pb.GetStatusResponse]


class Stream(BaseStream[Any], Iterator[Chunk]):
    """The chunks of one request as they arrive. Leaving the context (`with`), or `close`, cancels the request."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Chunk:
        while not self._closed:
            event = self._event()
            if event is None:
                self._end()
            elif (chunk := self._fold.take(event)) is not None:
                self._attempts.goes_on()
                return chunk
        raise StopIteration

    def close(self) -> None:
        """Cancel the request, unless it has ended; nothing more comes."""
        self._closed = True
        self._call.cancel()

    def _event(self) -> pb.GenerateResponse | None:
        while True:
            try:
                event = next(self._call, None)
            except grpc.RpcError as error:
                if self._closed:  # from another thread
                    return None
                wait = self._seconds_until_next(cast("RpcFailure", error))
                if wait is None:
                    return None
                time.sleep(wait)
                self._start_again()
                if self._closed:  # while this waited
                    self._call.cancel()
            else:
                return event


class Client(BaseClient):
    """Calls a router over one connection, and the next one when it breaks; threads may share it.

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
        self._stubs = [
            cast("_Stub", inference_pb2_grpc.InferenceServiceStub(cast("Any", channel))) for channel in self._channels
        ]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._budget.end()
        for channel in self._channels:
            channel.close()

    def _begin(self, number: int, request: pb.GenerateRequest, timeout: float | None) -> Any:
        return self._stubs[number].Generate(request, timeout=timeout, metadata=self._metadata)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Begin a request and return its chunks as they come."""
        request = request_of(prompt, options)
        attempts = self._attempts(options.get("timeout"))
        return Stream(self._begin, request, attempts, self._addresses)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Return the whole answer to a prompt. The call streams, so that Interrupted can carry a partial answer."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.completion

    def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Return the answer to the messages of a chat; a text is one message of the user."""
        return self.generate(conversation_of(messages), **options)

    def embed(
        self, inputs: Sequence[Prompt], *, dimensions: int | None = None, timeout: float | None = None
    ) -> Embeddings:
        """Return the vectors of several inputs, from a pool that embeds, with so many leading numbers."""
        request = embed_request_of(inputs, dimensions)
        return Embeddings.from_proto(self._ask("Embed", request, timeout))

    def tokenize(
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
        return tuple(self._ask("Tokenize", request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._ask("Detokenize", request, timeout).text)

    def model(self, *, timeout: float | None = None) -> Model:
        return Model.from_proto(self._ask("GetModel", pb.GetModelRequest(), timeout))

    def status(self, *, timeout: float | None = None) -> Status:
        """Return the router's queue and its workers."""
        return Status.from_proto(self._ask("GetStatus", pb.GetStatusRequest(), timeout))

    def _ask(self, method: str, request: ProtoMessage, timeout: float | None) -> Any:
        attempts = self._attempts(timeout)
        while True:
            number = self._addresses.current
            try:
                call = getattr(self._stubs[number], method)
                answer = call(request, timeout=attempts.time_left(), metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.wait_after(cast("RpcFailure", error)))
                self._addresses.leave(number)
            else:
                attempts.succeeded()
                return answer


def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    options = client_options(address)
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)
