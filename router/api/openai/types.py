"""Bodies of OpenAI-compatible requests. Fields beyond OpenAI's have the names that vLLM gave them.

Ranges are checked in `requests/validate.py`, for every API. Unsupported fields that would change the answer are refused
by name. Other unknown fields are ignored, because clients send many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.contracts import limits
from quire.inference.v1 import inference_pb2 as pb
from router.api.openai import foreign_fields
from router.api.shared.field_names import CacheRetention, Float32, Int32, Int64, SessionId
from router.contracts.media import medium_of, stand_in

# Long lists report the first wrong entry alone. `bodies.py` bounds the values of a whole body.
TokenIds = Annotated[list[Int32], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
SamplingIds = Annotated[list[Int32], Field(fail_fast=True, max_length=limits.MAX_STOP_TOKEN_IDS)]
TruncationSide = Literal["left", "right"]
# Values that have no effect.
_NOTHING: tuple[Any, ...] = foreign_fields.NOTHING


def truncation_side_of(side: TruncationSide | None) -> pb.TruncationSide.ValueType:
    """Return the value of the protobuf enum."""
    return pb.TruncationSide.Value(f"TRUNCATION_SIDE_{(side or 'unspecified').upper()}")


class StreamOptions(BaseModel):
    """What a stream reports besides."""

    include_usage: bool = Field(False, description="end with a chunk that has `usage` and no choices")
    continuous_usage_stats: bool = Field(False, description="with include_usage: say the usage so far in every chunk")
    event_ids: bool = Field(False, description="give events an `id`, after which `Last-Event-ID` goes on")


class JsonSchemaFormat(BaseModel):
    """A JSON schema as OpenAI wraps it; a schema is enforced whether or not `strict` is set."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form that the answer must have."""

    model_config = ConfigDict(populate_by_name=True)

    type: str = Field("text", description="text, json_object or json_schema")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="with json_object: its schema")
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's form of a constraint; exactly one field must be set."""

    model_config = ConfigDict(populate_by_name=True, extra="allow")

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    regex: str | None = Field(None, description="in the syntax of Rust's regex crate, without look-around")
    grammar: str | None = Field(None, description="in Lark's notation, with the rule `start`")
    choice: Texts | None = Field(None, description="the answer is one of these texts")
    json_object: bool | None = Field(None, description="any JSON object")


class GenerationFields(BaseModel):
    """Fields of both kinds of request."""

    model_config = ConfigDict(extra="allow")

    # Unsupported fields, each with the values that have no effect.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = foreign_fields.REFUSED

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
    logit_bias: Annotated[dict[Int32, Float32], Field(max_length=limits.MAX_LOGIT_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    top_k: Int32 | None = Field(None, description="0 and -1 keep all tokens")
    min_p: Float32 | None = None
    min_tokens: Int32 | None = None
    repetition_penalty: Float32 | None = None
    stop_token_ids: SamplingIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Texts | None = None
    regex: str | None = Field(None, description="SGLang's name of guided_regex")
    ebnf: str | None = Field(None, description="SGLang's constraint by a grammar in GBNF, with the rule `root`")
    json_schema: dict[str, Any] | str | None = Field(None, description="SGLang's name of guided_json")
    allowed_token_ids: TokenIds | None = Field(None, description="sample only these tokens; excludes a constraint")
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=limits.MAX_BAD_WORDS)] | None = Field(
        None, description="up to 128 texts that the answer may not contain; excludes a constraint"
    )
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text; unset: true")
    truncate_prompt_tokens: Int32 | None = Field(
        None, description="keep so many of the prompt's last tokens; -1: what the context leaves before max_tokens"
    )
    truncation_side: TruncationSide | None = Field(
        None, description="which end truncate_prompt_tokens takes away; unset: left, so that the last tokens stay"
    )
    prompt_logprobs: Int32 | None = Field(
        None, description="log-probabilities of the prompt's tokens and of so many likely ones, 0 to 20; no stream"
    )
    logprob_token_ids: Annotated[list[Int32], Field(max_length=limits.MAX_LOGPROB_TOKEN_IDS)] | None = Field(
        None, description="log-probabilities of these tokens in place of the most likely ones; needs logprobs"
    )
    return_tokens_as_token_ids: bool | None = Field(None, description="name tokens token_id:N in log-probabilities")
    request_id: str | None = Field(None, description="a correlation id, instead of the header X-Request-Id")
    session_id: SessionId | None = Field(None, description="the conversation or the run of an agent that it is part of")
    priority: Int32 | None = Field(None, description="-100 to 100; higher is served first")
    cache_salt: str | None = Field(None, description="share cached prefixes only with requests of the same salt")
    shared_domain: str | None = Field(None, description="share cached prefixes with all users of an open domain")
    cache_retention: CacheRetention | None = Field(None, description="how long blocks stay cached after the request")
    return_token_ids: bool | None = Field(None, description="give every choice its `token_ids`, and the prompt's")

    @property
    def unsupported(self) -> list[str]:
        """Names of the unsupported fields that are set."""
        found = _unsupported(self, self.refused)
        if self.structured_outputs is not None:
            inner = _unsupported(self.structured_outputs, foreign_fields.REFUSED_STRUCTURED)
            found += [f"structured_outputs.{name}" for name in inner]
        return found


def _unsupported(given: BaseModel, refused: Mapping[str, tuple[Any, ...]]) -> list[str]:
    extra = given.model_extra or {}
    return [name for name, harmless in refused.items() if name in extra and extra[name] not in harmless]


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions. A list of prompts is answered by `n` choices for each, in order."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.refused | {"suffix": _NOTHING}

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        ..., description="texts or token ids"
    )
    max_tokens: Int32 | None = Field(16, description="0 with echo or prompt_logprobs: compute only the prompt")
    logprobs: Int32 | None = Field(None, description="so many of the most likely tokens at each position, 0 to 20")
    add_special_tokens: bool | None = Field(
        None, description="add the tokens that the tokenizer puts around a text; unset: true"
    )
    echo: bool | None = Field(None, description="begin each choice with its prompt, and its log-probabilities too")
    best_of: Int32 | None = Field(None, description="must equal n")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or many, as texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class ContentPart(BaseModel):
    """One part of a message. A text stands in for an image, a file, audio or video."""

    type: str
    text: str = ""
    refusal: str = Field("", description="of a part of type refusal")

    @property
    def shown(self) -> str:
        """What the model reads."""
        if (medium := medium_of(self.type)) is not None:
            return stand_in(medium)
        return self.refusal if self.type == "refusal" else self.text


class CalledFunction(BaseModel):
    """The function of a call, and its arguments as a text of JSON."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallBody(BaseModel):
    """One call in an earlier answer of the assistant."""

    id: str = ""
    type: str = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message of a chat."""

    role: str = Field(
        ...,
        description="a role of the checkpoint's chat template; developer counts as system where the template has none",
        json_schema_extra={"pattern": "^[A-Za-z_][A-Za-z0-9_-]{0,31}$"},
    )
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[CallBody], Field(fail_fast=True, max_length=limits.MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = Field(None, description="the call whose result a message of role tool has")
    name: str | None = None
    reasoning_content: str | None = Field(None, description="what the assistant thought before an earlier answer")
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    function_call: CalledFunction | None = Field(None, description="the older form of tool_calls")

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.shown for part in self.content)


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=limits.MAX_CHAT_MESSAGES)]
# Read by `requested_tools.py`, which names what is wrong; here they stay as they are, for the chat template.
Objects = list[dict[str, Any]]
_EXAMPLE = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class ChatFields(BaseModel):
    """Fields that the prompt of a chat is made of, beside its messages."""

    tools: Objects | None = Field(None, description="functions that the model may call", examples=[_EXAMPLE])
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='none, auto, required, or {"type": "function", "function": {"name": ...}}'
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call in an answer at most")
    functions: Objects | None = Field(None, description="the older form of tools")
    function_call: str | dict[str, Any] | None = Field(None, description="the older form of tool_choice")
    documents: Objects | None = Field(
        None, description="texts to answer from; refused where the chat template shows none"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="further variables of the chat template, such as enable_thinking"
    )
    add_generation_prompt: bool | None = Field(None, description="false: the prompt ends with the last message")
    continue_final_message: bool | None = Field(None, description="the answer continues the last message")
    reasoning_effort: str | None = Field(None, description="none, low, medium, high: where the chat template takes it")


class Prediction(BaseModel):
    """The text that the client expects as answer."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatOptions(GenerationFields, ChatFields):
    """All fields of a chat, beside its messages."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.refused | {
        "add_special_tokens": _NOTHING,
        "audio": _NOTHING,
        "chat_template": _NOTHING,
        "modalities": (*_NOTHING, ["text"]),
        "web_search_options": (None,),
    }

    max_completion_tokens: Int32 | None = Field(None, description="unset, or more: as many as the context holds")
    max_tokens: Int32 | None = Field(None, description="the older name of max_completion_tokens")
    prediction: Prediction | None = Field(None, description="the expected answer: a worker may guess from it")
    logprobs: bool | None = None
    top_logprobs: Int32 | None = Field(None, description="0 to 20; needs `logprobs`")
    thinking_token_budget: Int32 | None = Field(
        None, description="tokens of the thought at most; then it ends, and the answer follows; unset: no limit"
    )
    echo: bool | None = Field(
        None, description="with continue_final_message: begin each choice with the message that the answer continues"
    )
    include_reasoning: bool | None = Field(None, description="false: answers leave out `reasoning_content`")


class ChatRequest(ChatOptions):
    """Body of POST /v1/chat/completions."""

    messages: Messages


class ChatBatchRequest(ChatOptions):
    """Body of POST /v1/chat/completions/batch: each conversation gets one choice, in order."""

    messages: Annotated[list[Messages], Field(fail_fast=True)] = Field(
        ..., description=f"1 to {limits.MAX_HTTP_SEQUENCES} conversations"
    )
