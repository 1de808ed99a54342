"""The Open Inference Protocol over gRPC: translates calls to the router's ports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from common.contracts.errors import ModelNotFound, QuireError
from common.contracts.limits import MAX_REPLY_BYTES
from common.contracts.types import TokenLogprobs
from common.rpc.call_notes import NOTES
from common.rpc.interceptor import send
from common.version import quire_version
from quire.kserve.v2 import kserve_pb2 as pb
from quire.kserve.v2 import kserve_pb2_grpc as rpc
from router.api.kserve import tensors
from router.api.kserve.request import Asked, read
from router.api.kserve.tensors import INPUTS, LOGPROBS, OUTPUTS, Elements, Tensor, add_output
from router.api.shared.answer_size import AnswerRoom, check_least_size, checked_reply
from router.api.shared.call_context import Calls, Context, metadata_of
from router.contracts.events import Admitted, Finished, GenerateEvent, PromptLogprobs, Tokens
from router.contracts.ports import AdapterSource, CallContext, Frontend, ModelCard, NoAdapters, RequestValidator
from router.requests.request_ids import automatic_id
from router.tenants.tenancy import Charge

VERSION: Final = "1"
# The finish reason of an unfinished sequence, as Triton's vLLM backend writes it and its clients expect it.
_UNFINISHED: Final = "None"
_FINAL: Final = "triton_final_response"
# Bytes of a log-probability in JSON at least:  "5": {"logprob": -1.5}
LEAST_ENTRY_BYTES: Final = 20
# Characters of an error message, which may quote the request.
_MOST_CHARACTERS: Final = 4096


# Encodes the router's events as responses of the Open Inference Protocol.
@dataclass(slots=True)
class _Sequence:
    """One sequence: its output since the last response, and the state that every response repeats."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)  # in JSON, made as they come
    cumulative_logprob: float = 0.0
    reason: str = _UNFINISHED

    def take(self, event: Tokens, with_logprobs: bool) -> int:
        """Take output; return the bytes that it adds to the answer at least."""
        self.text.append(event.text)
        self.token_ids += event.token_ids
        added = [json.dumps(_ranked(entry)) for entry in event.logprobs] if with_logprobs else []
        self.logprobs += added
        self.cumulative_logprob += sum(each.logprob for each in event.logprobs)
        return len(event.text) + sum(map(len, added))

    def clear(self) -> None:
        self.text, self.token_ids, self.logprobs = [], [], []


class Answer:
    """The answer to one request. Each response has the output since the last one.

    `grow` is called with the bytes that an event adds at least, and may raise.
    """

    def __init__(
        self,
        request: pb.ModelInferRequest,
        asked: Asked,
        sequences: int,
        grow: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._id, self._model, self._asked, self._grow = request.id, request.model_name, asked, grow
        self._sequences = [_Sequence() for _ in range(sequences)]
        for sequence in self._sequences:
            sequence.text.append(asked.prefix)
        self._admitted: Admitted | None = None
        self._cached_tokens = 0

    def take(self, event: GenerateEvent) -> None:
        match event:
            case Admitted():
                self._admitted, self._cached_tokens = event, event.cached_tokens
            case Tokens():
                self._grow(self._sequences[event.index].take(event, tensors.LOGPROBS in self._asked.outputs))
            case Finished():
                self._sequences[event.index].reason = event.reason.value
                if not event.index:
                    self._cached_tokens = event.usage.cached_tokens
            case PromptLogprobs():
                pass  # this API has no parameter that asks for them

    def response(self, final: bool = False) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(id=self._id, model_name=self._model, model_version=VERSION)
        response.parameters[_FINAL].bool_param = final
        if final and self._admitted is not None:
            response.parameters["request_id"].string_param = self._admitted.request_id
            response.parameters["trace_id"].string_param = self._admitted.trace_id
            response.parameters["cached_tokens"].int64_param = self._cached_tokens
        if not (final and self._nothing_to_tell()):
            for tensor in self._asked.outputs:
                add_output(response, tensor, self._elements(tensor), self._asked.raw)
        for sequence in self._sequences:
            sequence.clear()
        return response

    def _nothing_to_tell(self) -> bool:
        asked = self._asked
        new = any("".join(sequence.text) or sequence.token_ids for sequence in self._sequences)
        return asked.stream and asked.empty_final and asked.outputs == (tensors.TEXT_OUTPUT,) and not new

    def _elements(self, tensor: Tensor) -> Elements:
        if tensor == tensors.NUM_INPUT_TOKENS:
            return [0 if self._admitted is None else self._admitted.prompt_tokens]
        if tensor == tensors.OUTPUT_IDS:
            return [token_id for each in self._sequences for token_id in each.token_ids]
        return list(map(_OF_EACH_SEQUENCE[tensor], self._sequences))


def error_response(
    request: pb.ModelInferRequest, error: QuireError, request_id: str = ""
) -> pb.ModelStreamInferResponse:
    """Return the response that ends one request of a stream with an error. Some clients show the message alone."""
    whose = f"request {request.id}: " if request.id else ""
    response = pb.ModelStreamInferResponse(error_message=f"{whose}{error}"[:_MOST_CHARACTERS])
    response.infer_response.id = request.id
    response.infer_response.parameters[_FINAL].bool_param = True
    response.infer_response.parameters["reason"].string_param = error.reason
    response.infer_response.parameters["request_id"].string_param = request_id
    return response


def _ranked(entry: TokenLogprobs) -> dict[str, dict[str, float | int]]:
    """Return one token's log-probabilities by token id: the sampled token first, then the likeliest with their rank."""
    ranks = {token_id: {"logprob": logprob, "rank": rank} for rank, (token_id, logprob) in enumerate(entry.top, 1)}
    sampled: dict[int, dict[str, float | int]] = {entry.token_id: {"logprob": entry.logprob}}
    return {str(token_id): entries for token_id, entries in {**sampled, **ranks}.items()}


_OF_EACH_SEQUENCE: Final[Mapping[Tensor, Callable[[_Sequence], Any]]] = {
    tensors.TEXT_OUTPUT: lambda sequence: "".join(sequence.text).encode(),
    tensors.FINISH_REASON: lambda sequence: sequence.reason.encode(),
    tensors.CUMULATIVE_LOGPROB: lambda sequence: sequence.cumulative_logprob,
    tensors.LOGPROBS: lambda sequence: f"[{', '.join(sequence.logprobs)}]".encode(),
    tensors.NUM_OUTPUT_TOKENS: lambda sequence: len(sequence.token_ids),
}


KSERVE_SERVICE: Final = "inference.GRPCInferenceService"
# Concurrent requests of one stream; further ones wait in the client's own buffers.
MOST_AT_ONCE: Final = 1024
_EXTENSIONS: Final = ("model_configuration", "parameters")
_PLATFORM: Final = "quire"

Responses: TypeAlias = AsyncGenerator[pb.ModelInferResponse, None]


class KserveServicer(rpc.GRPCInferenceServiceServicer):
    """Answers clients of the protocol. `ready` is false until a worker is usable, and while draining."""

    def __init__(
        self,
        frontend: Frontend,
        validator: RequestValidator,
        card: ModelCard,
        ready: Callable[[], bool],
        calls: Calls,
        adapters: AdapterSource | None = None,
    ) -> None:
        self._adapters = adapters or NoAdapters()
        self._frontend, self._validator = frontend, validator
        self._card, self._ready, self._calls = card, ready, calls
        self._room = AnswerRoom()

    # ------------------------------------------------------------ what is served

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Return whether a model is served. Where callers have keys, an adapter is for those who may use it alone."""
        ready = self._ready() and self._serves(request.name, request.version)
        if request.name not in self._card.names:
            ready = self._calls.caller(context).tenant.may_use_adapter(request.name) and ready
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="quire", version=quire_version(), extensions=_EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Return the model's tensors. NOT_FOUND for another model."""
        self._check_asked(request, context)
        return pb.ModelMetadataResponse(
            name=self._card.name,
            versions=[VERSION],
            platform=_PLATFORM,
            inputs=map(_metadata, INPUTS),
            outputs=map(_metadata, OUTPUTS),
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """Return how to call the model. NOT_FOUND for another one."""
        self._check_asked(request, context)
        config = pb.ModelConfig(
            name=self._card.name,
            platform=_PLATFORM,
            backend=_PLATFORM,
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        )
        for each in INPUTS:
            config.input.add(name=each.name, data_type=each.datatype.config, dims=[each.length], optional=True)
        for each in OUTPUTS:
            config.output.add(name=each.name, data_type=each.datatype.config, dims=[each.length])
        return pb.ModelConfigResponse(config=config)

    # ------------------------------------------------------------ requests

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """Answer one request as a whole. DEADLINE_EXCEEDED when the deadline cut it short."""
        call = self._calls.context(context)
        async with aclosing(self._responses(request, call, streaming=False)) as responses:
            return await anext(responses)

    async def ModelStreamInfer(  # type: ignore[override] # it writes, as several requests answer at once
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Answer requests as they come, each in a task of its own. All of them end with the call."""
        stream = _Stream(self._responses, self._calls.context(context), context)
        places = asyncio.Semaphore(MOST_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await places.acquire()
                    call = stream.call(self._calls.clock.monotonic())
                    tasks.create_task(stream.serve(request, call)).add_done_callback(lambda _: places.release())
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def _responses(self, request: pb.ModelInferRequest, call: CallContext, streaming: bool) -> Responses:
        """Yield the responses to one request; the last response is the final one."""
        self._check_model(request.model_name, request.model_version)
        asked = read(request, streaming)
        validated = await asked.validated(self._validator, replace(call, model=request.model_name))
        if not asked.stream:
            entry = LEAST_ENTRY_BYTES if LOGPROBS in asked.outputs else 0
            check_least_size([validated], 0, entry, MAX_REPLY_BYTES)
        place = self._room.place(MAX_REPLY_BYTES)
        answer = Answer(request, asked, validated.sampling.n, _ignore if asked.stream else place.grow)
        try:
            async with aclosing(self._frontend.generate(replace(validated, whole=not asked.stream))) as events:
                async for event in events:
                    answer.take(event)
                    if asked.stream and isinstance(event, Tokens):
                        yield answer.response()
            # The final response promises that no error follows, so it is sent last.
            yield checked_reply(answer.response(final=True))
        finally:
            place.leave()

    def _serves(self, name: str, version: str) -> bool:
        served = name in self._card.names or self._adapters.find_adapter(name) is not None
        return served and version in ("", VERSION)

    def _check_asked(self, request: pb.ModelMetadataRequest | pb.ModelConfigRequest, context: Context) -> None:
        """Raise ModelNotFound for a model that is not served, PermissionDenied for an adapter of others."""
        tenant = self._calls.caller(context).tenant
        self._check_model(request.name, request.version)
        if request.name not in self._card.names:
            tenant.check_adapter(request.name)

    def _check_model(self, name: str, version: str) -> None:
        if not self._serves(name, version):
            asked = f"{name!r}, version {version!r}," if version else repr(name)
            what = f"model {asked} is not served here; {self._card.name!r}, version {VERSION!r}, is"
            raise ModelNotFound(what, name)


class _Stream:
    """One ModelStreamInfer call: serves its requests, and writes one response at a time."""

    def __init__(self, respond: Callable[..., Responses], call: CallContext, context: Context) -> None:
        self._respond, self._call, self._context = respond, call, context
        # Triton's clients set this to get a status in place of an error message.
        self._strict = metadata_of(context, "triton_grpc_error") == "true"
        self._writing = asyncio.Lock()

    def call(self, now: float) -> CallContext:
        """Return the context of a request that has just come on this stream."""
        return replace(self._call, arrived=now, charge=Charge(), request_id=automatic_id())

    async def serve(self, request: pb.ModelInferRequest, call: CallContext) -> None:
        """Answer one request. Its error goes to the client on the stream, and the stream goes on."""
        try:
            async with aclosing(self._respond(request, call, streaming=True)) as responses:
                async for response in responses:
                    await self._write(pb.ModelStreamInferResponse(infer_response=response))
        except QuireError as error:
            if self._strict:
                raise
            if (notes := NOTES.get()) is not None:
                notes.refused_within(error, call.request_id)
            await self._write(error_response(request, error, call.request_id))

    async def _write(self, response: pb.ModelStreamInferResponse) -> None:
        async with self._writing:
            await send(self._context, response)


def _ignore(size: int) -> None:
    """Count nothing: what is streamed is not collected."""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of those that ended a stream."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _metadata(tensor: Tensor) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype.name, shape=[tensor.length]
    )
