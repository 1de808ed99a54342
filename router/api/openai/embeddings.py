"""POST /v1/embeddings, in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_ANSWER_BYTES
from quire.inference.v1 import inference_pb2 as pb
from router.api.openai import schema
from router.api.openai.errors import UnsupportedField
from router.api.openai.foreign_fields import NOTHING
from router.api.openai.response import WholeResponse
from router.api.openai.service import Service, unless_gone
from router.api.openai.types import Texts, TokenIds, TruncationSide, truncation_side_of
from router.api.shared.answer_size import AnswerPlace
from router.api.shared.embedding import Embedder, Embedding, usage_of
from router.api.shared.field_names import Int32
from router.contracts.embedding import numbers_of


class _Bytes(NamedTuple):
    """Bytes of a number in an answer."""

    least: int
    most: int


_NUMBER_BYTES: Final = {"float": _Bytes(2, 16), "base64": _Bytes(5, 6)}
_INPUT: Final = re.compile(r"inputs(\[\d+\])?(.*)")
# Fields of other servers that change the vectors, each with the values that have no effect.
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "input_type": NOTHING,
    "instruction": NOTHING,
    "messages": NOTHING,
    "normalize": (None, True),
    "prompt": NOTHING,
    "prompt_name": NOTHING,
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
}


class EmbeddingRequest(BaseModel):
    """Body of POST /v1/embeddings: one input or up to 2048, as texts or as token ids."""

    model_config = ConfigDict(extra="allow")

    input: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        ..., description="texts or token ids; each may fill the model's context, and none may be empty"
    )
    model: str | None = Field(None, description="a name from /v1/models; optional")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: little-endian float32 bytes")
    dimensions: Int32 | None = Field(None, description="keep so many leading numbers, scaled to length 1")
    user: str | None = None
    add_special_tokens: bool | None = Field(
        None, description="add the tokens that the tokenizer puts around a text; unset: true"
    )
    truncate_prompt_tokens: Int32 | None = Field(
        None, description="keep so many of each input's last tokens; -1: what the context holds"
    )
    truncation_side: TruncationSide | None = Field(
        None, description="which end truncate_prompt_tokens takes away; unset: left, so that the last tokens stay"
    )
    request_id: str | None = Field(None, description="a correlation id, instead of the header X-Request-Id")
    priority: Int32 | None = Field(None, description="-100 to 100; higher is served first")
    cache_salt: str | None = Field(None, description="share cached prefixes only with requests of the same salt")
    shared_domain: str | None = Field(None, description="share cached prefixes with all users of an open domain")

    @property
    def form(self) -> str:
        return self.encoding_format or "float"

    @property
    def inputs(self) -> list[pb.Prompt]:
        """The inputs, one or many."""
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            return [_prompt(self.input)]
        return [_prompt(each) for each in self.input]

    @property
    def unsupported(self) -> list[str]:
        """Names of the unsupported fields that are set."""
        extra = self.model_extra or {}
        return [name for name, harmless in _REFUSED.items() if extra.get(name) not in harmless]


def _prompt(given: Any) -> pb.Prompt:
    return pb.Prompt(text=given) if isinstance(given, str) else pb.Prompt(token_ids=pb.TokenIds(ids=given))


def embedding_routes(service: Service) -> APIRouter:
    """Return the route."""
    router, parts = APIRouter(tags=["OpenAI"]), service.parts
    embedder = Embedder(parts.frontend, parts.validator, parts.card.hidden_size, parts.meter)

    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Return the vector of each input. 400 where the pool generates, with what to start instead."""
        service.begin_with(body.request_id, body.model, request)
        if body.unsupported:
            raise UnsupportedField(body.unsupported[0], f"{', '.join(body.unsupported)}: not offered; leave it out")
        place = service.room.place(MAX_ANSWER_BYTES)
        try:
            with _in_words_of(body):
                found = await unless_gone(request, _embedded(embedder, service, body, request, place))
            content = await _content(found, body, service.shown_model(body.model))
            return WholeResponse(content, _trace_of(found[0]), place.leave)
        except BaseException:  # broad: an answer that is not sent, for whatever reason, takes no room
            place.leave()
            raise

    answers = schema.answers(schema.EmbeddingList)
    router.add_api_route("/v1/embeddings", embeddings, methods=["POST"], response_model=None, responses=answers)
    return router


async def _embedded(
    embedder: Embedder, service: Service, body: EmbeddingRequest, request: Request, place: AnswerPlace
) -> list[Embedding]:
    message, number = _message(body), _NUMBER_BYTES[body.form]
    asked = await embedder.validated(message, service.call(request), number.least, MAX_ANSWER_BYTES)
    return await embedder.run(asked, lambda size: place.grow(size // 4 * number.most))


def _trace_of(embedding: Embedding) -> dict[str, str]:
    return {"x-trace-id": embedding.trace_id} if embedding.trace_id else {}


def _message(body: EmbeddingRequest) -> pb.EmbedRequest:
    if body.dimensions is not None and body.dimensions < 1:
        raise InvalidRequest(FieldViolation("dimensions", f"is {body.dimensions}; expected 1 or more"))
    return pb.EmbedRequest(
        inputs=body.inputs,
        dimensions=body.dimensions,
        priority=body.priority or 0,
        cache=pb.CacheOptions(salt=body.cache_salt or "", shared_domain=body.shared_domain or ""),
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=truncation_side_of(body.truncation_side),
    )


async def _content(embeddings: Sequence[Embedding], body: EmbeddingRequest, model: str) -> list[bytes]:
    """Return the answer in JSON, in parts; other tasks run after every vector."""
    parts = [b'{"object":"list","data":[']
    for index, each in enumerate(embeddings):
        vector = _decimals(each.vector) if body.form == "float" else f'"{b64encode(each.vector).decode()}"'
        item = f'{{"object":"embedding","index":{index},"embedding":{vector}}}'
        parts.append(f"{',' if index else ''}{item}".encode())
        await asyncio.sleep(0)
    tokens = usage_of(embeddings).prompt_tokens
    usage = schema.EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens).model_dump_json()
    return [*parts, f'],"model":{json.dumps(model)},"usage":{usage}}}'.encode()]


def _decimals(vector: bytes) -> str:
    """Return a list of numbers with nine digits, which give every float32 back."""
    return f"[{','.join([f'{each:.9g}' for each in numbers_of(vector)])}]"


@contextmanager
def _in_words_of(body: EmbeddingRequest) -> Iterator[None]:
    """Let errors about inputs name those of the body."""
    one = isinstance(body.input, str) or not body.input or isinstance(body.input[0], int) or len(body.input) == 1
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(*(_renamed(each, one) for each in error.violations)) from None


def _renamed(violation: FieldViolation, one: bool) -> FieldViolation:
    match = _INPUT.fullmatch(violation.field)
    if match is None:
        return violation
    field = "input" if one or match[1] is None else f"input{match[1]}"
    return FieldViolation(field, violation.description, violation.reason)
