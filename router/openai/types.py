"""Bodies of OpenAI-compatible requests. Fields beyond OpenAI's have the names that vLLM gave them.

Ranges are checked in `requests/validate.py`, for every API. Unsupported fields that would change the answer are refused
by name. Other unknown fields are ignored, because clients send many.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from router.serving.numbers import Float32, Int32, Int64

# Long lists report the first wrong entry alone.
TokenIds = Annotated[list[Int32], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# Values that have no effect.
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


class StreamOptions(BaseModel):
    """Whether a stream reports its usage."""

    include_usage: bool = Field(False, description="end with a chunk that has `usage` and no choices")
    continuous_usage_stats: bool = Field(False, description="with include_usage: say the usage so far in every chunk")


class JsonSchemaFormat(BaseModel):
    """A JSON schema as OpenAI wraps it; a schema is enforced whether or not `strict` is set."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form that the answer must have."""

    type: str = Field("text", description="text, json_object or json_schema")
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's form of a constraint; exactly one field must be set."""

    model_config = ConfigDict(populate_by_name=True)

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    regex: str | None = Field(None, description="in the syntax of Rust's regex crate, without look-around")
    grammar: str | None = Field(None, description="in Lark's notation, with the rule `start`")
    choice: Texts | None = Field(None, description="the answer is one of these texts")
    json_object: bool | None = Field(None, description="any JSON object")


class GenerationFields(BaseModel):
    """Fields of both kinds of request."""

    model_config = ConfigDict(extra="allow")

    # Unsupported fields, each with the values that have no effect.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_token_ids": _NOTHING,
        "bad_words": _NOTHING,
        "logits_processors": _NOTHING,
        "prompt_logprobs": (None,),
        "skip_special_tokens": (None, True),
        "truncate_prompt_tokens": (None,),
        "use_beam_search": _NOTHING,
    }

    model: str | None = Field(None, description="a name from /v1/models; optional")
    stream: bool | None = Field(None, description="answer in chunks, as server-sent events")
    stream_options: StreamOptions | None = None
    temperature: Float32 | None = Field(None, description="0 is greedy; unset: the checkpoint's, else 1")
    top_p: Float32 | None = None
    n: Int32 | None = Field(None, description="choices for each prompt; they share the blocks of the prompt")
    stop: str | Texts | None = Field(None, description="up to 16 texts at which an answer ends")
    seed: Int64 | None = Field(None, description="equal requests with equal seeds draw equal tokens")
    presence_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    logit_bias: dict[Int32, Float32] | None = None
    response_format: ResponseFormat | None = None
    top_k: Int32 | None = Field(None, description="0 and -1 keep all tokens")
    min_p: Float32 | None = None
    min_tokens: Int32 | None = None
    repetition_penalty: Float32 | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Texts | None = None
    request_id: str | None = Field(None, description="instead of the header X-Request-Id")
    priority: Int32 | None = Field(None, description="-100 to 100; higher is served first")
    cache_salt: str | None = Field(None, description="share cached prefixes only with requests of the same salt")
    return_token_ids: bool | None = Field(None, description="give every choice its `token_ids`")

    @property
    def unsupported(self) -> list[str]:
        """Names of the unsupported fields that are set."""
        given = self.model_extra or {}
        return [name for name, harmless in self.refused.items() if name in given and given[name] not in harmless]


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions. A list of prompts is answered by `n` choices for each, in order."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.refused | {"suffix": _NOTHING}

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        ..., description="texts or token ids"
    )
    max_tokens: Int32 | None = 16
    logprobs: Int32 | None = Field(None, description="so many of the most likely tokens at each position, 0 to 20")
    echo: bool | None = Field(None, description="begin each choice with its prompt")
    best_of: Int32 | None = Field(None, description="must equal n")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or many, as texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TextPart(BaseModel):
    """One part of a message; only text is served."""

    type: str
    text: str = ""


class Message(BaseModel):
    """One message of a chat."""

    role: str = Field(..., description="a role of the checkpoint's chat template; developer counts as system")
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.refused | {
        "add_generation_prompt": (None, True),
        "audio": _NOTHING,
        "chat_template": _NOTHING,
        "chat_template_kwargs": _NOTHING,
        "continue_final_message": _NOTHING,
        "documents": _NOTHING,
        "echo": _NOTHING,
        "function_call": (*_NOTHING, "none", "auto"),
        "functions": _NOTHING,
        "modalities": (*_NOTHING, ["text"]),
        "tool_choice": (*_NOTHING, "none", "auto"),
        "tools": _NOTHING,
        "web_search_options": (None,),
    }

    messages: Annotated[list[Message], Field(fail_fast=True)]
    max_completion_tokens: Int32 | None = Field(None, description="unset: as many as the context holds")
    max_tokens: Int32 | None = Field(None, description="the older name of max_completion_tokens")
    logprobs: bool | None = None
    top_logprobs: Int32 | None = Field(None, description="0 to 20; needs `logprobs`")
