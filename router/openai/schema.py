"""The answers of the OpenAI-compatible API as /openapi.json describes them.

The code does not build answers from these classes: `response.py` and `stream.py` write them, and tests compare both.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

_REF = "#/components/schemas/{model}"
Finish = Literal["stop", "length"]


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


class Usage(_Exact):
    """Token counts of a request; a prompt counts once for its n choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _Choice(_Exact):
    """Fields that all choices share."""

    index: int
    stop_reason: str | int | None = Field(..., description="the stop text, or the id of the token, that ended it")
    token_ids: list[int] | None = Field(None, description="with return_token_ids")


class AssistantMessage(_Exact):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice):
    """One answer of a chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class CompletionChoice(_Choice):
    """One completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish


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


class Completion(_Head):
    """Answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class Delta(_Exact):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Choice):
    """What a chunk adds to one answer."""

    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class CompletionChunkChoice(_Choice):
    """What a chunk adds to one completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class ChatChunk(_Head):
    """One `data:` line of a streamed chat; the last line is `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChunk(_Head):
    """One `data:` line of a streamed completion; the last line is `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class Model(_Exact):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int = Field(..., description="tokens of prompt and output together")


class Models(_Exact):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[Model]


class Health(_Exact):
    """Whether requests can be served now."""

    status: Literal["ok", "not ready"]


class Version(_Exact):
    """The version of the server."""

    version: str


def describe(app: FastAPI) -> None:
    """Add the chunks to an application's description: FastAPI takes one model for each answer, the whole one."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        for chunk in (ChatChunk, CompletionChunk):
            model = chunk.model_json_schema(ref_template=_REF)
            schema["components"]["schemas"] |= model.pop("$defs") | {chunk.__name__: model}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def answers(whole: type[BaseModel], chunk: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """Return what a route may answer, for FastAPI's `responses`; `chunk` is one line of its stream."""
    stream = {"text/event-stream": {"schema": {"$ref": _REF.format(model=chunk.__name__)}}} if chunk is not None else {}
    said = {
        "400": "a field is wrong, or asks for what is not offered",
        "404": "another model is served here",
        "429": "the queue is full; Retry-After says when to try again",
        "503": "no worker is there, or the router drains; Retry-After says when to try again",
        "default": "any other error",
    }
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": what} for status, what in said.items()
    }
    return {200: {"model": whole, "description": "the answer", "content": stream}, **errors}
