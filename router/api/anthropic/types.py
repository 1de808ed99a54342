"""Bodies of Anthropic's Messages API.

Ranges are checked in `requests/validate.py`, for every API. Unsupported fields that would change the answer are refused
by name. Other unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from common.contracts import limits
from router.api.shared.field_names import Float32, Int32, Int64, SessionId

# Values that have no effect.
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


class CacheControl(BaseModel):
    """Every prompt is cached anyway; a mark keeps the prompt up to it for longer than others."""

    type: str = Field(..., description="ephemeral")
    ttl: str | None = Field(None, description="5m or 1h, from the end of the request on; unset: 5m")


class Block(BaseModel):
    """One block of a message; `type` says which of the other fields it has."""

    type: str = Field(
        ..., description="text, image, document, search_result, thinking, redacted_thinking, tool_use or tool_result"
    )
    text: str | None = None
    thinking: str | None = Field(None, description="a thought of an earlier answer; its signature is not verified")
    id: str | None = Field(None, description="of a tool_use")
    name: str | None = Field(None, description="of a tool_use")
    input: dict[str, Any] | None = Field(None, description="the arguments of a tool_use")
    tool_use_id: str | None = Field(None, description="the tool_use that a tool_result answers")
    content: str | Annotated[list[Block], Field(fail_fast=True)] | None = Field(
        None, description="of a tool_result or a search_result"
    )
    title: str | None = Field(None, description="of a document or a search_result")
    source: dict[str, Any] | str | None = Field(None, description="of a document: its text; of others nothing is read")
    cache_control: CacheControl | None = None
    is_error: bool | None = Field(None, description="the tool failed; its result then begins with `Error: `")


Content = str | Annotated[list[Block], Field(fail_fast=True)]


class MessageBody(BaseModel):
    """One turn. Consecutive turns of one role count as one turn."""

    role: str = Field(
        ...,
        description="user or assistant; system is accepted too",
        json_schema_extra={"enum": ["user", "assistant", "system"]},
    )
    content: Content


class ToolBody(BaseModel):
    """A tool that the client runs."""

    model_config = ConfigDict(extra="allow")

    # Unsupported fields, each with the values that have no effect.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_callers": (None, [], ["direct"]),
    }

    type: str | None = Field(None, description="custom, or nothing")
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, description="JSON schema of the tool's input")
    strict: bool | None = Field(None, description="the input matches the schema, by constraint")
    input_examples: list[dict[str, Any]] | None = Field(None, description="shown as the schema's examples")
    cache_control: CacheControl | None = None

    @property
    def unsupported(self) -> list[str]:
        given = self.model_extra or {}
        return [name for name, harmless in self.refused.items() if name in given and given[name] not in harmless]


class ToolChoice(BaseModel):
    """Whether the model calls tools."""

    type: str = Field(..., description="auto, any, tool or none")
    name: str | None = Field(None, description="of the one tool, with type tool")
    disable_parallel_tool_use: bool | None = Field(None, description="one tool_use in an answer at most")


class Thinking(BaseModel):
    """Whether the model thinks before it answers, where its chat template has a choice."""

    type: str = Field(..., description="enabled, adaptive or disabled")
    budget_tokens: Int32 | None = Field(None, description="needed with enabled; then the thought ends")
    display: str | None = Field(None, description="omitted: thinking blocks come without their text")


class OutputFormat(BaseModel):
    """The form that the text of the answer must have."""

    model_config = ConfigDict(populate_by_name=True)

    type: str = Field(..., description="json_schema")
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class OutputConfig(BaseModel):
    """The form of the answer, and how much the model thinks about it."""

    effort: str | None = Field(None, description="low, medium, high, ...: for chat templates that take it")
    format: OutputFormat | None = None


class CountRequest(BaseModel):
    """Body of POST /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="allow")

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"container": _NOTHING, "mcp_servers": _NOTHING}

    model: str | None = Field(None, description="a name from /v1/models; optional")
    messages: Annotated[list[MessageBody], Field(fail_fast=True, max_length=limits.MAX_CHAT_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True, max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(None, description="a mark at the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the chat template")

    @property
    def unsupported(self) -> list[str]:
        """Names of the unsupported fields that are set."""
        given = self.model_extra or {}
        return [name for name, harmless in self.refused.items() if name in given and given[name] not in harmless]


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages. The fields from `seed` on are Quire's own."""

    max_tokens: Int32 = Field(..., description="a larger number than the context holds is lowered to what it holds")
    stream: bool | None = Field(None, description="answer in typed events, as server-sent events")
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: Float32 | None = Field(None, description="0 is greedy; unset: the checkpoint's, else 1")
    top_p: Float32 | None = None
    top_k: Int32 | None = None
    metadata: dict[str, Any] | None = Field(None, description="user_id has no effect")
    seed: Int64 | None = Field(None, description="equal requests with equal seeds draw equal tokens")
    session_id: SessionId | None = Field(None, description="the conversation or the run of an agent that it is part of")
    priority: Int32 | None = Field(None, description="-100 to 100; higher is served first")
    cache_salt: str | None = Field(None, description="share cached prefixes only with requests of the same salt")
