"""POST /tokenize and /detokenize, as in vLLM; load generators and proxies count tokens with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_TOKENIZE_CHARS
from quire.inference.v1 import inference_pb2 as pb
from router.api.openai.chat_prompt import chat_prompt
from router.api.openai.requested_tools import asked_tools
from router.api.openai.schema import answers
from router.api.openai.service import unless_gone
from router.api.openai.types import ChatFields, Messages, TokenIds
from router.api.shared.metering import UNLIMITED, Meter
from router.contracts.ports import ModelCard, RequestValidator, TextCodec
from router.tenants.tenancy import Charge

# Ids that are written before other tasks run; the texts of so many take a few milliseconds.
_IDS_A_TURN: Final = 1_000


class TokenizeRequest(ChatFields):
    """A text, or a chat to render with the checkpoint's template, which takes the same fields as an answered one."""

    model: str | None = None
    prompt: str | None = Field(None, max_length=MAX_TOKENIZE_CHARS)
    messages: Messages | None = None
    add_special_tokens: bool = Field(True, description="add the tokens that the tokenizer puts around a text")
    return_token_strs: bool | None = None


class TokenizeAnswer(BaseModel):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model: str | None = None
    tokens: TokenIds = Field(..., description="token ids")


class Detokenized(BaseModel):
    """The text of token ids, special tokens included."""

    prompt: str


def token_routes(
    codec: TextCodec,
    validator: RequestValidator,
    card: ModelCard,
    check_model: Callable[[str | None], None],
    meter: Meter = UNLIMITED,
) -> APIRouter:
    """Return the two routes; `check_model` raises for a model that is not served."""
    router = APIRouter(tags=["tokens"])

    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a text or a chat."""
        check_model(body.model)
        prompt, tenant = _prompt(body), request.state.caller.tenant
        request.state.charge = Charge.of()
        ids = await unless_gone(request, meter.encoded(codec, prompt, body.add_special_tokens, tenant))
        texts = await _listed(ids, lambda each: _text(codec, each)) if body.return_token_strs else "null"
        head = f'"count":{len(ids)},"max_model_len":{card.max_model_len}'
        content = f'{{{head},"tokens":{await _listed(ids, str)},"token_strs":{texts}}}'
        return Response(content, media_type="application/json")

    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """Return the text of tokens."""
        check_model(body.model)
        request.state.charge = Charge.of()
        meter.decodes(body.tokens, request.state.caller.tenant)
        validator.check_token_ids(body.tokens)
        return {"prompt": await unless_gone(request, codec.text_of(body.tokens, skip_special_tokens=False))}

    post: dict[str, Any] = {"methods": ["POST"]}
    router.add_api_route(
        "/tokenize", tokenize, response_model=TokenizeAnswer, responses=answers(TokenizeAnswer), **post
    )
    router.add_api_route("/detokenize", detokenize, response_model=Detokenized, responses=answers(Detokenized), **post)
    return router


async def _listed(ids: Sequence[int], write: Callable[[int], str]) -> str:
    """Return a JSON list with what `write` makes of each id; other tasks run after every thousand."""
    parts = []
    for start in range(0, len(ids), _IDS_A_TURN):
        parts.append(",".join(map(write, ids[start : start + _IDS_A_TURN])))
        await asyncio.sleep(0)
    return f"[{','.join(parts)}]"


def _text(codec: TextCodec, token_id: int) -> str:
    return json.dumps(codec.token_name(token_id))


def _prompt(body: TokenizeRequest) -> pb.Prompt:
    if body.messages is not None and body.prompt is None:
        return chat_prompt(body.messages, body, asked_tools(body))
    if body.prompt is not None and body.messages is None:
        return pb.Prompt(text=body.prompt)
    raise InvalidRequest(FieldViolation("prompt", "expected either prompt or messages, and not both"))
