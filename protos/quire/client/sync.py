"""The client for threads: `Client`, which threads may share, and `Stream`, which one thread reads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, Unpack, cast

import grpc
from google.protobuf.message import Message as ProtoMessage

from quire.api.status import RpcFailure
from quire.client.base import BaseClient, BaseStream
from quire.client.request import Message, Options, Prompt, conversation_of, prompt_of, request_of
from quire.client.results import Chunk, Completion, Model, Status
from quire.client.retry import Retry
from quire.client.setup import DEFAULT_TIMEOUT, Metadata, client_options
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc

_AnswerT = TypeVar("_AnswerT", bound=ProtoMessage)


class _Stub(Protocol):
    """The generated stub over a channel for threads; the generated types cover asyncio alone."""

    Generate: grpc.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]
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
                return chunk
        raise StopIteration

    def close(self) -> None:
        """Cancel the request, unless it has ended; nothing more comes."""
        self._closed = True
        self._call.cancel()

    def _event(self) -> pb.GenerateResponse | None:
        while True:
            try:
                return next(self._call, None)
            except grpc.RpcError as error:
                if self._closed:  # from another thread
                    return None
                time.sleep(self._attempts.wait_after(cast("RpcFailure", error), self._fold))
                self._call = self._start(self._attempts.time_left())
                if self._closed:  # while this waited
                    self._call.cancel()


class Client(BaseClient):
    """Calls one router over one connection; threads may share it.

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
            grpc.secure_channel(address, credentials, options)
            if credentials
            else grpc.insecure_channel(address, options)
        )
        self._stub = cast("_Stub", inference_pb2_grpc.InferenceServiceStub(cast("Any", self._channel)))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._budget.end()
        self._channel.close()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Begin a request and return its chunks as they come."""
        request = request_of(prompt, options)
        start = partial(self._stub.Generate, request, metadata=self._metadata)
        attempts = self._attempts(options.get("timeout"))
        return Stream(lambda timeout: start(timeout=timeout), attempts, request.sampling.n)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Return the whole answer to a prompt. The call streams, so that Interrupted can carry a partial answer."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.completion

    def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Return the answer to the messages of a chat; a text is one message of the user."""
        return self.generate(conversation_of(messages), **options)

    def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, timeout: float | None = None
    ) -> tuple[int, ...]:
        request = pb.TokenizeRequest(prompt=prompt_of(prompt), add_special_tokens=add_special_tokens)
        return tuple(self._ask(self._stub.Tokenize, request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._ask(self._stub.Detokenize, request, timeout).text

    def model(self, *, timeout: float | None = None) -> Model:
        return Model.from_proto(self._ask(self._stub.GetModel, pb.GetModelRequest(), timeout))

    def status(self, *, timeout: float | None = None) -> Status:
        """Return the router's queue and its workers."""
        return Status.from_proto(self._ask(self._stub.GetStatus, pb.GetStatusRequest(), timeout))

    def _ask(
        self, method: grpc.UnaryUnaryMultiCallable[Any, _AnswerT], request: ProtoMessage, timeout: float | None
    ) -> _AnswerT:
        attempts = self._attempts(timeout)
        while True:
            try:
                answer = method(request, timeout=attempts.time_left(), metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.wait_after(cast("RpcFailure", error)))
            else:
                attempts.succeeded()
                return answer
