"""Converts a call's arguments to the request message. Values of a wrong type are refused with the field's name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, Required, TypeAlias, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from quire.api.errors import FieldViolation, InvalidRequest
from quire.client.chat import CHAT, ChatOptions, Message, chat_of
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a chat, which the model's own template renders."""


class Sampling(TypedDict, total=False):
    """How tokens are sampled; ranges and defaults are those of quire/types/v1/types.proto."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    ignore_eos: bool | None
    logprobs: int | None
    n: int | None
    include_stop: bool | None
    prompt_logprobs: int | None
    bad_words: Sequence[str] | None
    closing_token_id: int | None
    logprob_token_ids: Sequence[int] | None


class ThoughtBudget(TypedDict, total=False):
    """Ends a thought of the model by force once it has `max_tokens` tokens.

    `opener` and `closer` are the marks around a thought, `end` is what then comes; it contains the closer. `is_open`:
    the prompt ends within the thought. `anywhere`: thoughts may stand anywhere, and all count.
    """

    max_tokens: Required[int]
    opener: Required[str]
    closer: Required[str]
    end: Required[str]
    is_open: bool
    anywhere: bool


class RetentionRange(TypedDict, total=False):
    """A part of the prompt: tokens from `start` on and before `end`, or the first `messages` of a chat."""

    start: int
    end: int
    messages: int
    priority: Required[int]
    duration: float


class CacheRetention(TypedDict, total=False):
    """Which blocks stay cached once the request has ended; priorities 0 to 100, 35 is the usual one; seconds."""

    priority: int
    duration: float
    ranges: Sequence[RetentionRange]
    decode_priority: int
    decode_duration: float


class Options(Sampling, ChatOptions, total=False):
    """Everything that a request may say besides its prompt; None is the same as absent.

    At most one of `json_schema` (JSON, or a value that becomes JSON), `regex` and `grammar` (Lark's notation)
    restricts the output. Special tokens among `kept_special_tokens`, such as `<tool_call>`, stay in its text.
    `timeout` is in seconds for the whole call, retries and the caller's pauses between chunks included.
    """

    json_schema: str | Mapping[str, Any] | bool | None
    regex: str | None
    grammar: str | None
    priority: int | None
    no_cache: bool | None
    salt: str | None
    shared_domain: str | None
    request_id: str | None
    traceparent: str | None
    kept_special_tokens: Sequence[str] | None
    thought_budget: ThoughtBudget | None
    prediction: str | None
    cache_retention: CacheRetention | None
    session_id: str | None
    skip_special_tokens: bool | None
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None
    timeout: float | None


_SAMPLING: Final = Sampling.__optional_keys__
_CONSTRAINTS: Final = frozenset({"json_schema", "regex", "grammar"})
_OF_TOKENS: Final = frozenset(
    {"skip_special_tokens", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"}
)
_OF_THOUGHTS: Final = frozenset({"kept_special_tokens", "thought_budget"})
_OF_BLOCKS: Final = frozenset({"cache_retention"})
_OF_RECORDS: Final = frozenset({"request_id", "session_id", "traceparent"})
_ENVELOPE: Final = frozenset({"priority", "prediction"}) | _OF_RECORDS | _OF_TOKENS | _OF_THOUGHTS | _OF_BLOCKS
# The ends of what fits a field, by its type.
_RANGES: Final = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
}
_CACHE: Final = frozenset({"no_cache", "salt", "shared_domain"})


def request_of(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Raises TypeError for an option that does not exist, InvalidRequest for wrong values."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given.pop("timeout", None)
    if unknown := sorted(given.keys() - Options.__optional_keys__):
        raise TypeError(
            f"there is no option {', '.join(unknown)}; known are {', '.join(sorted(Options.__optional_keys__))}"
        )
    _text_to_list(given)
    constraints = sorted(given.keys() & _CONSTRAINTS)
    if len(constraints) > 1:
        raise InvalidRequest(FieldViolation("constraint", f"is given as {' and '.join(constraints)}; expected one"))
    fields = {name: _encoded(name, given[name]) for name in (*constraints, *sorted(given.keys() & _ENVELOPE))}
    _check_fields(pb.GenerateRequest, fields, "")
    return pb.GenerateRequest(
        prompt=prompt_of(prompt, {name: given[name] for name in given.keys() & CHAT}),
        sampling=_filled(types_pb2.SamplingParams, given, _SAMPLING, "sampling."),
        cache=_filled(pb.CacheOptions, given, _CACHE, "cache."),
        **fields,
    )


def prompt_of(prompt: Prompt, options: Mapping[str, Any] = MappingProxyType({})) -> pb.Prompt:
    """Raises InvalidRequest where the prompt is neither text, nor ids, nor messages, which alone have options."""
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        return pb.Prompt(chat=chat_of(prompt, options))
    if options:
        what = f"is not a chat, and {', '.join(sorted(options))} apply to chats only; send messages, or leave them out"
        raise InvalidRequest(FieldViolation("prompt", what))
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    try:
        return pb.Prompt(token_ids=pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(FieldViolation("prompt.token_ids.ids", f"must be token ids: {error}")) from error


def embed_request_of(inputs: Sequence[Prompt], dimensions: int | None) -> pb.EmbedRequest:
    """Raises InvalidRequest where an input is not a prompt, or a single text stands where a list of them belongs."""
    if isinstance(inputs, str):
        raise InvalidRequest(FieldViolation("inputs", "is one text; expected a list of inputs"))
    _check_fields(pb.EmbedRequest, {"dimensions": dimensions}, "")
    return pb.EmbedRequest(inputs=map(prompt_of, inputs), dimensions=dimensions)


def conversation_of(messages: str | Sequence[Message]) -> Sequence[Message]:
    """Return the messages of a chat; a text is one of the user's."""
    return [Message(role="user", content=messages)] if isinstance(messages, str) else messages


def _text_to_list(given: dict[str, Any]) -> None:
    """Replace a single string by a list: protobuf would take it for a list of characters."""
    for name in ("stop", "kept_special_tokens"):
        if isinstance(given.get(name), str):
            given[name] = [given[name]]


def _encoded(name: str, value: Any) -> Any:
    if name == "json_schema" and not isinstance(value, str):
        return json.dumps(value)
    if name == "truncation_side":
        return f"TRUNCATION_SIDE_{value}".upper()
    return value


def _filled(kind: Any, given: Mapping[str, Any], names: frozenset[str], path: str) -> Any:
    fields = {name: given[name] for name in sorted(given.keys() & names)}
    _check_fields(kind, fields, path)
    return kind(**fields)


def _check_fields(kind: Any, fields: Mapping[str, Any], path: str) -> None:
    """Raise InvalidRequest that names every field whose value has the wrong type, or does not fit."""
    wrong: list[FieldViolation] = []
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError) as error:
            wrong.append(FieldViolation(path + name, f"is {value!r}{_expectation(kind, name, error)}"))
    if wrong:
        raise InvalidRequest(*wrong)


def _expectation(kind: Any, name: str, error: Exception) -> str:
    """Return what was expected of a field that does not take a value."""
    ends = _RANGES.get(kind.DESCRIPTOR.fields_by_name[name].type)
    return f"; expected {ends[0]} to {ends[1]}" if ends and isinstance(error, ValueError) else f": {error}"
