"""InferenceService over gRPC: translates calls to the router's ports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from common.clock import Clock
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from router.core.events import GenerateEvent
from router.grpc_api.codec import event_to_proto, model_to_proto, unary_to_proto
from router.observe.siblings import Siblings, asked_by_sibling
from router.ports import Frontend, ModelCard, RequestValidator, TextCodec
from router.serving.call_context import Context, call_context


class StatusSource(Protocol):
    def model(self) -> ModelCard: ...

    def status(self) -> pb.GetStatusResponse: ...


class InferenceServicer(rpc.InferenceServiceServicer):
    """Answers clients. Errors are mapped by the server's interceptor; a cancelled call closes its events."""

    def __init__(
        self,
        frontend: Frontend,
        validator: RequestValidator,
        codec: TextCodec,
        status: StatusSource,
        clock: Clock,
        siblings: Siblings,
    ) -> None:
        self._frontend, self._validator, self._codec = frontend, validator, codec
        self._status, self._clock, self._siblings = status, clock, siblings

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        validated = await self._validator.validate(request, call_context(self._clock, context))
        async with aclosing(self._frontend.generate(validated)) as events:
            async for event in events:
                yield event_to_proto(event)

    async def GenerateUnary(self, request: pb.GenerateUnaryRequest, context: Context) -> pb.GenerateUnaryResponse:
        """Answer one request as a whole. DEADLINE_EXCEEDED when the deadline cut it short."""
        validated = await self._validator.validate(request.request, call_context(self._clock, context))
        events: list[GenerateEvent] = []
        async with aclosing(self._frontend.generate(replace(validated, whole=True))) as stream:
            async for event in stream:
                events.append(event)  # noqa: PERF401 - a comprehension would hide that this awaits
        return unary_to_proto(events, validated.sampling.n)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return pb.TokenizeResponse(token_ids=await self._codec.encode(request.prompt, special))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Return the text of tokens; those that Generate refuses are refused here too."""
        self._validator.check_token_ids(request.token_ids)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=self._codec.decode(request.token_ids, skip))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return model_to_proto(self._status.model())

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Return queue and workers; the requests are those of all routers on these ports."""
        status = self._status.status()
        if not asked_by_sibling(context):
            await self._siblings.add_to(status)
        return status
