"""The answers of the Responses API as /openapi.json describes them; tests compare them with what is answered."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.api.openai.schema import TokenLogprob

Json = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OutputText(_Exact):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[TokenLogprob]


class OutputMessage(_Exact):
    """What the user reads."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningText(_Exact):
    """The text of a thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Exact):
    """What the model thought."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Json]
    content: list[ReasoningText]


class FunctionCall(_Exact):
    """A function that the client is to call; `arguments` is a text of JSON."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = Field(None, description="of the tool, if the request has it within one")
    arguments: str
    status: Status


class CustomCall(_Exact):
    """A custom tool that the client is to call; `input` is a text of any form."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: Status


class ResponseFailure(_Exact):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class WhyIncomplete(_Exact):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class InputDetails(_Exact):
    """Part of the usage."""

    cached_tokens: int = Field(..., description="tokens of the input whose keys and values were cached")
    cache_write_tokens: Literal[0]


class OutputDetails(_Exact):
    """Part of the usage."""

    reasoning_tokens: int


class ResponseUsage(_Exact):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OfConversation(_Exact):
    """The conversation that a response continues."""

    id: str


class ResponseBody(_Exact):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    background: bool
    completed_at: int | None
    conversation: OfConversation | None
    error: ResponseFailure | None
    incomplete_details: WhyIncomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCall | CustomCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Json
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None


class StreamEvent(BaseModel):
    """One event of a stream: its `type` says which further fields it has, as OpenAI describes them."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(..., description="response.created, response.output_text.delta, response.completed, ...")
    sequence_number: int = Field(..., description="counts the events of a response from 0")


class Deleted(_Exact):
    """A response is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(_Exact):
    """How many tokens an input has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(_Exact):
    """A page of the items of a conversation."""

    object: Literal["list"]
    data: list[Json]
    first_id: str
    last_id: str
    has_more: bool


class ConversationItem(BaseModel):
    """An item: its `type` says which further fields it has, as OpenAI describes them."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


class ConversationBody(_Exact):
    """A conversation; its items are listed by themselves."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(_Exact):
    """A conversation is forgotten."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]
