"""The service by which SMG's gateway calls a vLLM engine: translates calls to the router's ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from common.contracts.errors import InvalidRequest, Unsupported
from common.contracts.limits import MAX_REPLY_BYTES
from common.version import quire_version
from quire.inference.v1 import inference_pb2
from quire.vllm.v1 import engine_common_pb2 as common
from quire.vllm.v1 import engine_pb2 as pb
from quire.vllm.v1 import engine_pb2_grpc as rpc
from router.answers.text.tokenizer_files import TokenizerFiles
from router.api.shared.answer_size import AnswerRoom, check_least_size, checked_reply
from router.api.shared.call_context import Calls, Context, note_id
from router.api.shared.embedding import Embedder
from router.api.shared.field_names import FieldNames, in_words_by
from router.api.vllm.engine_codec import LEAST_ENTRY_BYTES, LEAST_TOKEN_BYTES, SPOKEN, Answer, read
from router.api.vllm.facts import PortRouters, StatusSource, Totals, abort_all
from router.api.vllm.fields import Reader, charged_if_wrong, check_rank, unknown_fields
from router.api.vllm.tokenizer_archive import archive_of
from router.contracts.embedding import numbers_of
from router.contracts.ports import Frontend, RequestValidator

ENGINE: Final = "vllm.grpc.engine.VllmEngine"
_NUMBER_BYTES: Final = 4
_INPUTS: Final = FieldNames((r"^inputs(\[0\])?(\.token_ids\.ids)?", "tokenized.input_ids"))
_PROFILES: Final = "use `quire trace` and the spans of workers"


class EngineServicer(rpc.VllmEngineServicer):
    """Answers a gateway. `why_not_ready` is "" while requests can be served."""

    def __init__(
        self,
        frontend: Frontend,
        validator: RequestValidator,
        status: StatusSource,
        routers: PortRouters,
        calls: Calls,
        files: TokenizerFiles,
        why_not_ready: Callable[[], str],
    ) -> None:
        self._frontend, self._validator, self._status = frontend, validator, status
        self._routers, self._calls, self._files, self._why_not_ready = routers, calls, files, why_not_ready
        self._room, self._began = AnswerRoom(), calls.clock.monotonic()
        self._embedder = Embedder(frontend, validator, status.model().hidden_size, calls.meter)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Yield chunks of the sequences if they are streamed, and the end of each."""
        call = self._calls.context(context)
        note_id(request.request_id)
        with charged_if_wrong(self._calls.meter, call):
            check_rank(context)
        asked = read(request)
        validated = await asked.validated(self._validator, call)
        whole = not request.stream
        with in_words_by(asked.named):
            if whole:
                check_least_size([validated], LEAST_TOKEN_BYTES, LEAST_ENTRY_BYTES, MAX_REPLY_BYTES)
            place = self._room.place(MAX_REPLY_BYTES)
            # What is streamed is not collected, but for the log-probabilities of the prompt.
            collects = whole or validated.sampling.prompt_logprobs is not None
            answer = Answer(request, validated, place.grow if collects else _ignore)
            try:
                async with aclosing(self._frontend.generate(replace(validated, whole=whole))) as events:
                    async for event in events:
                        for response in answer.responses(event):
                            yield checked_reply(response)
            finally:
                place.leave()

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        call = self._calls.context(context)
        note_id(request.request_id)
        reader = Reader()
        ids = reader.ids("tokenized.input_ids", request.tokenized.input_ids)
        with charged_if_wrong(self._calls.meter, call):
            if wrong := [*unknown_fields(request, SPOKEN), *reader.wrong]:
                raise InvalidRequest(*wrong)
        prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=ids))
        own = inference_pb2.EmbedRequest(request_id=request.request_id, inputs=[prompt])
        place = self._room.place(MAX_REPLY_BYTES)
        try:
            with in_words_by(_INPUTS):
                asked = await self._embedder.validated(own, call, _NUMBER_BYTES, MAX_REPLY_BYTES)
                (found,) = await self._embedder.run(asked, place.grow)
        finally:
            place.leave()
        numbers = numbers_of(found.vector)
        return pb.EmbedResponse(embedding=numbers, prompt_tokens=found.usage.prompt_tokens, embedding_dim=len(numbers))

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        why = self._why_not_ready()
        return pb.HealthCheckResponse(healthy=not why, message=why or "ready")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the caller's requests of these ids, at whichever router they are."""
        await abort_all(self._routers, request.request_ids, self._calls.caller(context))
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Return the model's facts; where its files lie is not among them."""
        self._calls.caller(context)
        card = self._status.model()
        return pb.GetModelInfoResponse(
            model_path=card.name,
            is_generation=not card.identity.embeds,
            max_context_length=card.max_model_len,
            vocab_size=card.vocab_size,
            served_model_name=card.name,
            eos_token_ids=card.eos_token_ids,
            max_req_input_len=card.max_model_len,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        totals, card = await self._totals(context), self._status.model()
        return pb.GetServerInfoResponse(
            active_requests=totals.queued + totals.running,
            uptime_seconds=self._calls.clock.monotonic() - self._began,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype=card.identity.kv_geometry.dtype,
            block_size=card.identity.block_size,
            max_num_seqs=totals.sequences,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Return the sums over all workers as the load of the only rank."""
        totals, block_size = await self._totals(context), self._status.model().identity.block_size
        used = totals.blocks - totals.unheld_blocks
        load = pb.SchedulerLoad(
            num_running_reqs=totals.running,
            num_waiting_reqs=totals.queued,
            num_total_reqs=totals.queued + totals.running,
            num_used_tokens=used * block_size,
            max_total_num_tokens=totals.blocks * block_size,
            token_usage=used / totals.blocks if totals.blocks else 0.0,
            max_running_requests=totals.sequences,
        )
        now = datetime.fromtimestamp(self._calls.clock.time_ns() / 1e9, UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=f"quire {quire_version()}", dp_rank_count=1, loads=[load])

    async def _totals(self, context: Context) -> Totals:
        caller, status = self._calls.caller(context), self._status.status()
        await self._routers.add_to(status)
        return Totals.of(status, self._status.model(), caller)

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        """Send the tokenizer's files as one archive."""
        self._calls.caller(context)
        async with aclosing(archive_of(self._files)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> common.FlushCacheResponse:
        """Raises Unsupported."""
        raise self._refused(context, "FlushCache", "operators reset the cache by `quire reset-cache`")

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> common.ProfileResponse:
        """Raises Unsupported."""
        raise self._refused(context, "StartProfile", _PROFILES)

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> common.ProfileResponse:
        """Raises Unsupported."""
        raise self._refused(context, "StopProfile", _PROFILES)

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common.KvEventBatch]:
        """Raises Unsupported."""
        what = "events have hashes of all tenants, and no tokens; operators subscribe at the admin plane"
        raise self._refused(context, "SubscribeKvEvents", what)
        yield common.KvEventBatch()

    def _refused(self, context: Context, method: str, why: str) -> Unsupported:
        self._calls.caller(context)
        return Unsupported(f"{method} is not offered: {why}")


def _ignore(size: int) -> None:
    """Count nothing."""
