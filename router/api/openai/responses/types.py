"""Body of POST /v1/responses. Input items stay as they came: `items.py` reads them and names what is wrong."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.contracts import limits
from router.api.openai.types import Texts
from router.api.shared.field_names import CacheRetention, Float32, Int32, Int64, SessionId

Json = dict[str, Any]
# Values that have no effect.
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
Label = Annotated[str, Field(max_length=limits.MAX_METADATA_KEY_CHARS)]
Note = Annotated[str, Field(max_length=limits.MAX_METADATA_CHARS)]
Metadata = Annotated[dict[Label, Note], Field(max_length=limits.MAX_METADATA)]


class TextFormat(BaseModel):
    """The form that the text of the answer must have."""

    model_config = ConfigDict(populate_by_name=True)

    type: str = Field("text", description="text, json_object or json_schema")
    name: str = ""
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """Options of the text; `verbosity` has no effect on open models."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(BaseModel):
    """Options of the thought; it is answered as it is, so `summary` has no effect."""

    effort: str | None = Field(None, description="none, low, medium, high: where the chat template takes it")
    summary: str | None = None


class NamedConversation(BaseModel):
    """A conversation by its id."""

    id: str


class ConversationRequest(BaseModel):
    """Body of POST /v1/conversations."""

    items: list[Json] | None = Field(None, description="what it begins with, in the form of `input` of a response")
    metadata: Metadata | None = None


class ConversationChange(BaseModel):
    """Body of POST /v1/conversations/ID."""

    metadata: Metadata | None = Field(..., description="takes the place of what there is")


class NewItems(BaseModel):
    """Body of POST /v1/conversations/ID/items."""

    items: list[Json] = Field(..., description="what comes to its end, in the form of `input` of a response")


class ResponsesRequest(BaseModel):
    """What a model shall answer."""

    model_config = ConfigDict(extra="allow")

    # Unsupported fields, each with the values that have no effect.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context_management": _NOTHING,
        "moderation": _NOTHING,
        "prompt": _NOTHING,
        "n": (None, 1),
    }
    # Fields that a chat has under the same name.
    same: ClassVar[tuple[str, ...]] = (
        *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "min_tokens", "ignore_eos", "request_id", "priority", "cache_salt", "shared_domain"),
        "cache_retention",
        *("parallel_tool_calls", "chat_template_kwargs", "thinking_token_budget"),
    )

    input: str | list[Json] = Field(..., description="a text, or items: messages, calls, their outputs, thoughts")
    model: str | None = Field(None, description="a name from /v1/models; optional")
    instructions: str | None = Field(None, description="the first system message; not kept for the next response")
    previous_response_id: str | None = Field(None, description="the stored response that this one continues")
    conversation: str | NamedConversation | None = Field(
        None, description="the conversation that this response continues; input and output come to its end"
    )
    store: bool | None = Field(None, description="false: keep nothing; else the response can be read and continued")
    stream: bool | None = Field(None, description="answer in events, as server-sent events")
    background: bool | None = Field(None, description="answer at once, and work on; needs store")
    max_output_tokens: Int32 | None = Field(None, description="thought included; unset: as many as the context holds")
    temperature: Float32 | None = Field(None, description="0 is greedy; unset: the checkpoint's, else 1")
    top_p: Float32 | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[Json] | None = Field(None, description="functions that the model may call")
    tool_choice: str | Json | None = Field(
        None, description='none, auto, required, or {"type": "function", "name": ...}'
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call in an answer at most")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest items if the context cannot hold all"
    )
    metadata: Metadata | None = None
    include: Texts | None = Field(None, description="message.output_text.logprobs: those of the tokens of its text")
    top_logprobs: Int32 | None = Field(None, description="so many likely tokens at each position too, 0 to 20")
    top_k: Int32 | None = Field(None, description="0 and -1 keep all tokens")
    min_p: Float32 | None = None
    min_tokens: Int32 | None = None
    seed: Int64 | None = Field(None, description="equal requests with equal seeds draw equal tokens")
    stop: str | Texts | None = Field(None, description="up to 16 texts at which an answer ends")
    presence_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    repetition_penalty: Float32 | None = None
    ignore_eos: bool | None = None
    request_id: str | None = Field(None, description="instead of the header X-Request-Id")
    session_id: SessionId | None = Field(None, description="what it is part of; unset: its `conversation`")
    priority: Int32 | None = Field(None, description="-100 to 100; higher is served first")
    cache_salt: str | None = Field(None, description="share cached prefixes only with requests of the same salt")
    shared_domain: str | None = Field(None, description="share cached prefixes with all users of an open domain")
    cache_retention: CacheRetention | None = Field(None, description="how long blocks stay cached after the request")
    chat_template_kwargs: Json | None = Field(None, description="further variables of the chat template")
    thinking_token_budget: Int32 | None = Field(
        None, description="tokens of the thought at most; then it ends, and the answer follows; unset: no limit"
    )

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, NamedConversation) else given

    @property
    def unsupported(self) -> list[str]:
        """Names of the unsupported fields that are set."""
        given = self.model_extra or {}
        return [name for name, harmless in self.refused.items() if name in given and given[name] not in harmless]
