"""InferenceService over gRPC: translates calls to the router's ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Protocol

from google.protobuf.message import Message

from common.contracts.errors import FieldViolation, InvalidRequest, NotFound, PermissionDenied, Unsupported
from common.contracts.limits import MAX_REPLY_BYTES
from common.untrusted.ids import ID_WORDS, is_id
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from router.answers.requested_tools import NOTE_HEADER, UNSEEN_TOOLS
from router.answers.text.tokenizer_files import TokenizerFiles
from router.api.grpc.codec import (
    LEAST_ENTRY_BYTES,
    LEAST_TOKEN_BYTES,
    UnaryAnswer,
    embeddings_to_proto,
    event_to_proto,
    model_to_proto,
)
from router.api.shared.answer_size import AnswerRoom, check_least_size, checked_reply
from router.api.shared.call_context import Calls, Context, note_id
from router.api.shared.embedding import Embedder
from router.contracts.ports import CallContext, Frontend, ModelCard, RequestValidator, Resumed, Resumer, TextCodec
from router.observe.siblings import Siblings

_NUMBER_BYTES: Final = 4
_OF_ADAPTERS: Final = "adapters are for operators; ask the router's admin plane, as `quire adapters` does"
# What GetStatus leaves out for callers who are not operators, and where each has a key: of the answer, and of a worker.
_OF_OPERATORS: Final = ("discovery_problem", "managers"), ("address", "reason", "kv_events")
_OF_OTHERS: Final = (
    ("queued_requests", "running_requests"),
    ("running_sequences", "waiting_sequences", "unheld_blocks", "prefill_tokens_per_second", "decode_step_seconds"),
)


class StatusSource(Protocol):
    def model(self) -> ModelCard: ...

    def status(self) -> pb.GetStatusResponse: ...

    def loads(self, worker_id: str = "") -> pb.GetLoadsResponse: ...


class Routers:
    """This router and its siblings. `abort` ends requests here; it takes an id and a tenant, or "" for any.

    `resumer` goes on with requests of routers that died.
    """

    def __init__(self, abort: Callable[[str, str], int], siblings: Siblings, resumer: Resumer) -> None:
        self._abort, self._siblings, self.resumer = abort, siblings, resumer

    async def add_to(self, answer: pb.GetStatusResponse | pb.GetLoadsResponse) -> None:
        """Add the requests of each sibling to those of this process."""
        await self._siblings.add_to(answer)

    def abort_here(self, request: pb.AbortRequest) -> int:
        return self._abort(request.request_id, request.tenant)

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        """Raises InvalidRequest for what is not an id, and NotFound where no request has it."""
        if not is_id(request.request_id):
            raise InvalidRequest(FieldViolation("request_id", f"is not {ID_WORDS}"))
        aborted = self.abort_here(request) + await self._siblings.abort_elsewhere(request)
        if not aborted:
            raise NotFound(f"no request {request.request_id} of this caller runs or waits; it may have ended by itself")
        return pb.AbortResponse(aborted=aborted)


class InferenceServicer(rpc.InferenceServiceServicer):
    """Answers clients. Errors are mapped by the server's interceptor; a cancelled call closes its events."""

    def __init__(
        self,
        frontend: Frontend,
        validator: RequestValidator,
        codec: TextCodec,
        status: StatusSource,
        calls: Calls,
        routers: Routers,
        files: TokenizerFiles,
    ) -> None:
        self._frontend, self._validator, self._codec = frontend, validator, codec
        self._status, self._calls, self._routers, self._files = status, calls, routers, files
        self._room = AnswerRoom()
        self._embedder = Embedder(frontend, validator, status.model().hidden_size, calls.meter)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        asked = await self._asked(request, self._calls.context(context))
        self._note(request, context)
        async with aclosing(asked.events(asked.request)) as events:
            async for event in events:
                yield event_to_proto(event)

    def _note(self, request: pb.GenerateRequest, context: Context) -> None:
        """Tell a client in the trailing metadata that the model does not see its tools."""
        if request.prompt.chat.tools_json and not self._codec.sees_tools:
            context.set_trailing_metadata(((NOTE_HEADER, UNSEEN_TOOLS),))

    async def _asked(self, request: pb.GenerateRequest, call: CallContext) -> Resumed:
        """Return a new request, or one that another router began."""
        note_id(request.request_id)
        if request.WhichOneof("input") == "resume":
            return await self._routers.resumer.resumed(request, call)
        return Resumed(await self._validator.validate(request, call), self._frontend.generate)

    async def GenerateUnary(self, request: pb.GenerateUnaryRequest, context: Context) -> pb.GenerateUnaryResponse:
        """Answer one request as a whole. DEADLINE_EXCEEDED when the deadline cut it short."""
        asked = await self._asked(request.request, self._calls.context(context))
        self._note(request.request, context)
        check_least_size([asked.request], LEAST_TOKEN_BYTES, LEAST_ENTRY_BYTES, MAX_REPLY_BYTES)
        place = self._room.place(MAX_REPLY_BYTES)
        answer = UnaryAnswer(asked.request.sampling.n, place.grow)
        try:
            async with aclosing(asked.events(replace(asked.request, whole=True))) as events:
                async for event in events:
                    answer.take(event)
            return checked_reply(answer.message())
        finally:
            place.leave()

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Embed every input, or none of them."""
        call = self._calls.context(context)
        note_id(request.request_id)
        asked = await self._embedder.validated(request, call, _NUMBER_BYTES, MAX_REPLY_BYTES)
        place = self._room.place(MAX_REPLY_BYTES)
        try:
            return checked_reply(embeddings_to_proto(await self._embedder.run(asked, place.grow)))
        finally:
            place.leave()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        tenant = self._calls.caller(context).tenant
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await self._calls.meter.encoded(self._codec, request.prompt, special, tenant)
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Return the text of tokens; those that Generate refuses are refused here too."""
        self._calls.meter.decodes(request.token_ids, self._calls.caller(context).tenant)
        self._validator.check_token_ids(request.token_ids)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await self._codec.text_of(request.token_ids, skip))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        self._calls.caller(context)
        return model_to_proto(self._status.model())

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Return queue and workers; where workers listen, and what is wrong, is for operators and admin tenants.

        Where keys tell tenants apart, so is what shows how much the others send.
        """
        caller = self._calls.caller(context)
        status = self._status.status()
        await self._routers.add_to(status)
        hidden = () if caller.tenant.admin else (_OF_OPERATORS, _OF_OTHERS) if caller.credential else (_OF_OPERATORS,)
        for of_answer, of_worker in hidden:
            _clear(status, of_answer)
            for worker in status.workers:
                _clear(worker, of_worker)
        return status

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a request of the caller's tenant, at whichever router it is; an admin tenant ends any."""
        tenant = self._calls.caller(context).tenant
        own = pb.AbortRequest(request_id=request.request_id, tenant=request.tenant if tenant.admin else tenant.name)
        return await self._routers.abort(own)

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """Send the tokenizer's files, unless the client has them."""
        self._calls.caller(context)
        fingerprint = await self._files.fingerprint()
        if request.known_fingerprint == fingerprint:
            yield pb.GetTokenizerResponse(fingerprint=fingerprint)
            return
        async with aclosing(self._files.pieces()) as pieces:
            async for piece in pieces:
                yield pb.GetTokenizerResponse(
                    fingerprint=fingerprint,
                    file=piece.file,
                    content=piece.content,
                    end_of_file=bool(piece.sha256),
                    sha256=piece.sha256,
                )

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        """Raises Unsupported: the admin plane pins."""
        raise Unsupported("Pin is for operators; ask the router's admin plane, as `quire pin` does")

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        """Raises Unsupported: the admin plane prefetches."""
        raise Unsupported("Prefetch is for operators; ask the router's admin plane, as `quire prefetch` does")

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        raise Unsupported(_OF_ADAPTERS)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        raise Unsupported(_OF_ADAPTERS)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        raise Unsupported(_OF_ADAPTERS)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Return each worker's load to an admin tenant: it shows what others do. Raises PermissionDenied."""
        if not self._calls.caller(context).tenant.admin:
            raise PermissionDenied("GetLoads is for operators: ask the router's admin plane, or as an admin tenant")
        loads = self._status.loads(request.worker_id)
        await self._routers.add_to(loads)
        return loads


def _clear(message: Message, names: Iterable[str]) -> None:
    for name in names:
        message.ClearField(name)
