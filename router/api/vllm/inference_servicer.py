"""vLLM's own `Inference` service: translates calls to the router's ports."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from common.contracts.errors import FieldViolation, InvalidRequest, ModelNotFound
from common.contracts.limits import MAX_ADAPTER_NAME_CHARS, MAX_REPLY_BYTES
from quire.vllm.v1 import inference_pb2 as pb
from quire.vllm.v1 import inference_pb2_grpc as rpc
from router.api.shared.answer_size import AnswerRoom, check_least_size, checked_reply
from router.api.shared.call_context import Calls, Context, note_id
from router.api.shared.field_names import in_words_by
from router.api.vllm.fields import Asked, charged_if_wrong, check_rank
from router.api.vllm.inference_codec import LEAST_ENTRY_BYTES, Answer, merged, read
from router.api.vllm.kv_hints import ANSWER_KEY, bounded, packed, read_hints
from router.api.vllm.kv_hints import Answer as HintAnswer
from router.contracts.events import Admitted, ValidatedRequest
from router.contracts.ports import AdapterSource, Frontend, ModelCard, RequestValidator

INFERENCE: Final = "vllm.Inference"


class InferenceServicer(rpc.InferenceServicer):
    """Answers gateways. Errors are mapped by the server's interceptor; a cancelled call closes its events."""

    def __init__(
        self, frontend: Frontend, validator: RequestValidator, card: ModelCard, calls: Calls, adapters: AdapterSource
    ) -> None:
        self._frontend, self._validator, self._card, self._calls = frontend, validator, card, calls
        self._adapters = adapters
        self._room = AnswerRoom()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Answer a request for one sequence as a whole."""
        asked, validated, hints = await self._validated(request, context, streaming=False)
        with in_words_by(asked.named):
            token = int(request.response.output_token_ids)
            check_least_size([validated], token, LEAST_ENTRY_BYTES, MAX_REPLY_BYTES)
            whole = replace(validated, whole=True)
            async with aclosing(self._responses(request, whole, _told(request, hints, context))) as responses:
                return checked_reply(merged([each async for each in responses]))

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Yield the facts of the prompt, then what the sequences put out, and the end of each."""
        asked, validated, hints = await self._validated(request, context, streaming=True)
        with in_words_by(asked.named):
            async with aclosing(self._responses(request, validated, _told(request, hints, context))) as responses:
                async for response in responses:
                    yield checked_reply(response)

    async def _validated(
        self, request: pb.GenerateRequest, context: Context, streaming: bool
    ) -> tuple[Asked, ValidatedRequest, Sequence[HintAnswer]]:
        call = self._calls.context(context)
        note_id(request.request_id)
        with charged_if_wrong(self._calls.meter, call):
            check_rank(context)
            model = self._model_of(request)
        if request.session_id:
            call = replace(call, session_id=request.session_id)
        asked = read(request, self._card, streaming)
        hints = read_hints(request.kv_hints, asked.generate.cache_retention) if request.HasField("kv_hints") else ()
        validated = await asked.validated(self._validator, replace(call, model=model))
        return asked, validated, bounded(hints, validated.retention)

    def _model_of(self, request: pb.GenerateRequest) -> str:
        """Return the base or the adapter that a request is for. Raises ModelNotFound, and InvalidRequest for two."""
        model, adapter, card = request.model, request.lora_name, self._card
        if model not in ("", *card.names):
            self._check_adapter("model", model)
        if adapter:
            self._check_adapter("adapter", adapter)
            if model not in ("", adapter, *card.names):
                what = f"is {adapter!r}, and model is {model!r}, which is another adapter; leave one of them out"
                raise InvalidRequest(FieldViolation("lora_name", what))
        return adapter or model

    def _check_adapter(self, kind: str, name: str) -> None:
        if self._adapters.find_adapter(name) is None:
            shown = name[:MAX_ADAPTER_NAME_CHARS]
            raise ModelNotFound(f"{kind} {shown!r} is not served here; {self._card.name!r} is", shown)

    async def _responses(
        self, request: pb.GenerateRequest, validated: ValidatedRequest, tell: Callable[[str], None]
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yield the responses; `tell` is called with the id of the decision that admitted the request."""
        place = self._room.place(MAX_REPLY_BYTES)
        # What is streamed is not collected, but for the log-probabilities of the prompt.
        answer = Answer(
            request, validated, place.grow if validated.whole or request.response.prompt_logprobs else _ignore
        )
        try:
            async with aclosing(self._frontend.generate(validated)) as events:
                async for event in events:
                    if isinstance(event, Admitted):
                        tell(event.decision_id)
                    for response in answer.responses(event):
                        yield response
        finally:
            place.leave()


def _told(request: pb.GenerateRequest, hints: Sequence[HintAnswer], context: Context) -> Callable[[str], None]:
    """Return what answers the request's hints, once it is admitted."""

    def tell(decision_id: str) -> None:
        if request.HasField("kv_hints"):
            context.set_trailing_metadata(((ANSWER_KEY, packed(request.kv_hints, hints, decision_id)),))

    return tell


def _ignore(size: int) -> None:
    """Count nothing."""
