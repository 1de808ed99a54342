"""POST /tokenize and /detokenize, as in vLLM; load generators and proxies count tokens with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from common.errors import FieldViolation, InvalidRequest
from quire.inference.v1 import inference_pb2 as pb
from router.openai.request import chat_prompt
from router.openai.types import Message
from router.ports import ModelCard, RequestValidator, TextCodec
from router.serving.numbers import Int32


class TokenizeRequest(BaseModel):
    """A text, or a chat to render with the checkpoint's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
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
    tokens: list[Annotated[Int32, Field(description="a token id")]]


class Detokenized(BaseModel):
    """The text of token ids, special tokens included."""

    prompt: str


def token_routes(
    codec: TextCodec, validator: RequestValidator, card: ModelCard, check_model: Callable[[str | None], None]
) -> APIRouter:
    """Return the two routes; `check_model` raises for a model that is not served."""
    router = APIRouter(tags=["tokens"])

    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a text or a chat."""
        check_model(body.model)
        ids = await codec.encode(_prompt(body), body.add_special_tokens)
        found = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [codec.decode([token_id], skip_special_tokens=False) for token_id in ids]
        return found

    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of tokens."""
        check_model(body.model)
        validator.check_token_ids(body.tokens)
        return {"prompt": codec.decode(body.tokens, skip_special_tokens=False)}

    router.add_api_route("/tokenize", tokenize, methods=["POST"], response_model=TokenizeAnswer)
    router.add_api_route("/detokenize", detokenize, methods=["POST"], response_model=Detokenized)
    return router


def _prompt(body: TokenizeRequest) -> pb.Prompt:
    if body.messages is not None and body.prompt is None:
        return chat_prompt(body.messages)
    if body.prompt is not None and body.messages is None:
        return pb.Prompt(text=body.prompt)
    raise InvalidRequest(FieldViolation("prompt", "expected either prompt or messages, and not both"))
