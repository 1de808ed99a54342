"""The answers of the Messages API as /openapi.json describes them; tests compare them with real ones."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.api.openai import schema
from router.api.openai.schema import REFUSALS

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class _Exact(BaseModel):
    """A body without undescribed fields."""

    model_config = ConfigDict(extra="forbid")


class MessagesErrorDetail(_Exact):
    """What went wrong."""

    type: str = Field(..., description="invalid_request_error, authentication_error, overloaded_error, ...")
    message: str


class MessagesError(_Exact):
    """Body of every answer that is not 2xx, and of an event `error`."""

    type: Literal["error"]
    error: MessagesErrorDetail


class TextBlock(_Exact):
    """A part of the answer that the user reads."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(_Exact):
    """A thought. Clients send it back with its signature, which is not verified."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(_Exact):
    """A tool that the client is to run."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(_Exact):
    """Token counts; the tokens of the prompt are input_tokens and cache_read_input_tokens together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnswerMessage(_Exact):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageEvent(BaseModel):
    """One event of a streamed message; `type` is the name of the event and says which other fields it has."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: AnswerMessage | None = Field(None, description="of message_start")
    index: int | None = Field(None, description="the place of the block")
    content_block: TextBlock | ThinkingBlock | ToolUseBlock | None = None
    delta: dict[str, Any] | None = Field(None, description="text_delta, thinking_delta, signature_delta, ...")
    usage: MessagesUsage | None = Field(None, description="of message_delta")
    error: MessagesErrorDetail | None = None


class TokenCount(_Exact):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


# What the statuses of a refusal mean, where they differ from OpenAI's.
_REFUSALS: Final = {
    **{status: what for status, what in REFUSALS.items() if status != "503"},
    "429": "a limit of the key is reached; Retry-After says when to try again",
    "529": "the queue is full, no worker is there, or the router drains; Retry-After says when to try again",
}


def answers(whole: type[BaseModel], event: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """Return what a route may answer, for FastAPI's `responses`; `event` is one event of its stream."""
    return schema.answers(whole, event, MessagesError, _REFUSALS)
