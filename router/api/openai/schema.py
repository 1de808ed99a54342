"""The answers of the OpenAI-compatible API as /openapi.json describes them.

The code does not build answers from these classes: `response.py` and `app.py` write them, and tests compare both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from common.contracts.limits import MAX_HTTP_SEQUENCES
from router.requests.violations import RANGES, Range

Json = dict[str, Any]
# Fields under the name of the range that holds for them.
_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
# -1 stands for all, as in vLLM.
_OTHERS: Final[Mapping[str, Json]] = {"top_k": {"minimum": -1}, "priority": {"minimum": -100, "maximum": 100}}
_NOT_EMPTY: Final[Mapping[tuple[str, str], Json]] = {
    ("ChatRequest", "messages"): {"minItems": 1},
    ("ChatBatchRequest", "messages"): {"minItems": 1, "maxItems": MAX_HTTP_SEQUENCES},
    ("MessagesRequest", "messages"): {"minItems": 1},
    ("CountRequest", "messages"): {"minItems": 1},
    ("ResponsesRequest", "input"): {"minItems": 1},
    ("RerankRequest", "documents"): {"minItems": 1},
    ("RerankRequest", "top_n"): {"minimum": 0},
    ("CompletionRequest", "prompt"): {"minItems": 1, "minLength": 1},
}


# Writes into the OpenAPI document which values are served: the ranges that `requests/validate.py` checks.
# They stand in no model of a body: each API would say in other words what is wrong.
def add_ranges(schemas: Mapping[str, Json]) -> None:
    """Add the ranges to the properties of bodies."""
    for name, schema in schemas.items():
        if name.endswith("Request"):
            for field, given in schema.get("properties", {}).items():
                given.update(_NOT_EMPTY.get((name, field)) or _range_of(field))


def _range_of(field: str) -> Json:
    """Return the keywords for a field; each holds for values of its own type alone."""
    if field in _OTHERS:
        return {**_OTHERS[field]}
    found = RANGES.get(_NAMES.get(field, field))
    return {} if found is None else _keywords(found)


def _keywords(given: Range) -> Json:
    low = {"exclusiveMinimum" if given.open_low else "minimum": given.low}
    return low if given.high == math.inf else low | {"maximum": given.high}


_REF = "#/components/schemas/{model}"
Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls", "function_call"]


_PROMPT_IDS = "with return_token_ids: the tokens of the prompt, in its first choice or chunk"


class _Exact(BaseModel):
    """A body without undescribed fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Exact):
    """What went wrong."""

    message: str
    type: str = Field(..., description="invalid_request_error, rate_limit_error or server_error")
    param: str | None = Field(..., description="the first field that is wrong")
    code: str | None = Field(..., description="context_length_exceeded, model_not_found, rate_limit_exceeded, ...")


class ErrorBody(_Exact):
    """Body of every answer that is not 2xx, and of a line in a stream that broke."""

    error: ErrorDetail


class PromptTokensDetails(_Exact):
    """Part of Usage."""

    cached_tokens: int = Field(..., description="tokens of prompts whose keys and values were cached")


class CompletionTokensDetails(_Exact):
    """Part of Usage."""

    reasoning_tokens: int | None = Field(None, description="tokens of thoughts, of those of the answer")
    accepted_prediction_tokens: int | None = Field(None, description="guessed tokens that became output")
    rejected_prediction_tokens: int | None = Field(None, description="guessed tokens that were wrong")


class Usage(_Exact):
    """Token counts of a request; a prompt counts once for its n choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        None, description="where thoughts or calls are read, or tokens were guessed"
    )


class TopLogprob(_Exact):
    """A likely token; `bytes` is null where the tokenizer has text alone."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The sampled token, and the likeliest at its position, best first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Exact):
    """Log-probabilities of a message."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(_Exact):
    """Log-probabilities of a completion, in parallel lists; `text_offset` counts characters of the output."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(..., description="null for the first token of an echoed prompt")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedToken(_Exact):
    """A likely token, or the prompt's own, at one place of a prompt; 1 is the rank of the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


# By token id, the prompt's own token first.
PromptLogprobs = list[dict[str, RankedToken] | None]
_PROMPT_LOGPROBS = "with prompt_logprobs: by token id, the prompt's own first; null for the first token"


class _Choice(_Exact):
    """Fields that all choices share."""

    index: int
    stop_reason: str | int | None = Field(..., description="the stop text, or the id of the stop token, that ended it")
    token_ids: list[int] | None = Field(None, description="with return_token_ids")


class FunctionCall(_Exact):
    """The function of a call, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(_Exact):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(_Exact):
    """The answer."""

    role: Literal["assistant"]
    content: str | None = Field(..., description="null where the answer has only calls")
    reasoning_content: str | None = Field(None, description="what the model thought before it answered")
    reasoning: str | None = Field(None, description="the same by another name")
    refusal: None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = Field(None, description="in place of tool_calls, where functions were given")


class ChatChoice(_Choice):
    """One answer of a chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class CompletionChoice(_Choice):
    """One completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    prompt_token_ids: list[int] | None = Field(None, description=_PROMPT_IDS)
    prompt_logprobs: PromptLogprobs | None = Field(None, description=_PROMPT_LOGPROBS)


class _Head(_Exact):
    """Fields at the start of every body."""

    id: str
    created: int = Field(..., description="Unix seconds")
    model: str
    system_fingerprint: str = Field(..., description="version of the server and fingerprint of the checkpoint")


class ChatCompletion(_Head):
    """Answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(None, description=_PROMPT_IDS)
    prompt_logprobs: PromptLogprobs | None = Field(None, description=_PROMPT_LOGPROBS)


class Completion(_Head):
    """Answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class FunctionDelta(_Exact):
    """What a chunk adds to the function of a call: its name first, then its arguments in pieces."""

    name: str | None = None
    arguments: str


class ToolCallDelta(_Exact):
    """What a chunk adds to a call; the first of a call has its id."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(_Exact):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChatChunkChoice(_Choice):
    """What a chunk adds to one answer."""

    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class CompletionChunkChoice(_Choice):
    """What a chunk adds to one completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    prompt_token_ids: list[int] | None = Field(None, description=_PROMPT_IDS)


class ChatChunk(_Head):
    """One `data:` line of a streamed chat; the last line is `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = Field(None, description=_PROMPT_IDS)


class CompletionChunk(_Head):
    """One `data:` line of a streamed completion; the last line is `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


# Their streams end with a line that is not JSON.
_ENDED_BY_DONE: Final = (ChatChunk, CompletionChunk)


class EmbeddingUsage(_Exact):
    """Token counts of a request for embeddings."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(_Exact):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(..., description="numbers, or with base64 their little-endian float32 bytes")


class EmbeddingList(_Exact):
    """Answer of POST /v1/embeddings; `data` is in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class Model(_Exact):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(..., description="the base's first name; of an adapter the SHA-256 of its content")
    parent: str | None = Field(..., description="of a LoRA adapter the base; null: it is the base")
    max_model_len: int = Field(..., description="tokens of prompt and output together")
    pooling: str | None = Field(..., description="how the pool embeds, such as 'last, normalised'; null: it generates")


class Models(_Exact):
    """The models that are served: one, under each of its names, and its LoRA adapters."""

    object: Literal["list"]
    data: list[Model]


class Health(_Exact):
    """Whether requests can be served now."""

    status: Literal["ok", "not ready"]
    reason: str = Field("", description="Why not.")


class Version(_Exact):
    """The version of the server."""

    version: str


def describe(app: FastAPI, *others: type[BaseModel]) -> None:
    """Add chunks and errors to an application's description: of them FastAPI knows the names alone.

    FastAPI describes 422 for every route with a body; such a body is answered with 400. Ranges are added too.
    """
    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        schemas = schema["components"]["schemas"]
        named: list[type[BaseModel]] = [ErrorBody, ChatChunk, CompletionChunk, *others]
        for each in named:
            model = each.model_json_schema(ref_template=_REF)
            schemas |= model.pop("$defs", {}) | {each.__name__: model}
        for operation in (operation for path in schema["paths"].values() for operation in path.values()):
            operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        add_ranges(schemas)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


# What the statuses of a refusal mean, on any path.
ALWAYS: Final = {
    "408": "the headers or the body did not come in time",
    "431": "the headers are too large",
    "500": "a defect of the server",
}
# The same of a path for which a key may be needed.
REFUSALS: Final = {
    **ALWAYS,
    "400": "a field is wrong, or asks for what is not offered",
    "401": "a key is needed, and none came that is known",
    "403": "the key may not do this",
    "404": "another model is served here",
    "409": "a request with this id runs already",
    "413": "the body is larger than the router takes",
    "415": "the body has a content-encoding that the router does not read",
    "429": "the queue is full, or a limit is reached; Retry-After says when to try again",
    "499": "the request was cancelled",
    "503": "no worker is there, or the router drains; Retry-After says when to try again",
    "504": "the deadline passed",
}


def answers(
    whole: type[BaseModel],
    chunk: type[BaseModel] | None = None,
    error: type[BaseModel] = ErrorBody,
    refusals: Mapping[str, str] = REFUSALS,
) -> dict[int | str, dict[str, Any]]:
    """Return what a route may answer, for FastAPI's `responses`; `chunk` is one event of its stream."""
    stream = {} if chunk is None else {"text/event-stream": {"schema": _event(chunk, error)}}
    errors = refused(refusals, error)
    return {200: {"model": whole, "description": "the answer", "content": stream}, **errors}


def refused(refusals: Mapping[str, str], error: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Return what a route answers with these statuses; `describe` adds the body of the error.

    It has no `model`: of that FastAPI builds a validator for each status of each route, a quarter of the time.
    """
    body = {"application/json": {"schema": _reference(error)}}
    return {status: {"description": what, "content": body} for status, what in refusals.items()}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _event(chunk: type[BaseModel], error: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of one server-sent event: an object of its fields, whose data is a text of JSON."""
    bodies = [_reference(each) for each in (chunk, error)]
    data: dict[str, Any] = {"contentMediaType": "application/json", "contentSchema": {"anyOf": bodies}}
    if chunk in _ENDED_BY_DONE:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"type": "string", **data}},
        "required": ["data"],
    }
