"""Turns bodies of OpenAI-compatible requests into Quire's own requests, one for each prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from common.contracts.limits import MAX_HTTP_SEQUENCES, MAX_LOGPROBS
from common.contracts.types import Constraint, ConstraintKind
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.answers.constraints.closing import close
from router.answers.reading import AskedConstraint, Reading
from router.api.openai.chat_prompt import chat_prompt, media_in
from router.api.openai.errors import UnsupportedField
from router.api.openai.requested_tools import AskedTools, asked_tools
from router.api.openai.types import (
    ChatBatchRequest,
    ChatOptions,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    Message,
    ResponseFormat,
    truncation_side_of,
)
from router.api.shared.constraints import ANY_OBJECT, FIELD, allowed_tokens, choice_of
from router.contracts.media import note_of


# Reads the constraint of a body: OpenAI's `response_format`, and vLLM's names for the same.
def constraint_of(body: GenerationFields) -> AskedConstraint | None:
    """Return the one constraint of a body. Raises InvalidRequest for a malformed one, or two that contradict."""
    asked = [*_of_response_format(body.response_format), *_of_structured_outputs(body), *_of_guided(body)]
    if body.allowed_token_ids is not None:
        asked.append(AskedConstraint(FIELD, allowed_tokens(body.allowed_token_ids)))
    for other in asked[1:]:
        if other.constraint != asked[0].constraint:
            names = (asked[0].field, other.field)
            raise InvalidRequest(
                FieldViolation(names[0], f"contradicts {names[1]}; give one of {names[0]}, {names[1]}")
            )
    return asked[0] if asked else None


def _of_response_format(given: ResponseFormat | None) -> Iterator[AskedConstraint]:
    if given is None or given.type == "text":
        return
    if given.type == "json_object":
        schema = given.schema_
        yield _json("response_format", ANY_OBJECT.text) if schema is None else _json("response_format.schema", schema)
    elif given.type != "json_schema":
        what = f"is {given.type!r}; expected text, json_object or json_schema"
        raise InvalidRequest(FieldViolation("response_format.type", what))
    elif given.json_schema is None or given.json_schema.schema_ is None:
        what = 'is missing; expected {"name": ..., "schema": {...}}'
        raise InvalidRequest(FieldViolation("response_format.json_schema", what))
    else:
        if given.json_schema.strict:
            close(given.json_schema.schema_)
        yield _json("response_format.json_schema.schema", given.json_schema.schema_)


def _of_structured_outputs(body: GenerationFields) -> Iterator[AskedConstraint]:
    given = body.structured_outputs
    if given is None:
        return
    found = [*_each("structured_outputs.", given.json_, given.regex, given.grammar, given.choice)]
    if given.json_object:
        found.append(_json("structured_outputs.json_object", ANY_OBJECT.text))
    if not found:
        what = "has none of json, regex, grammar, choice and json_object; expected one of them"
        raise InvalidRequest(FieldViolation("structured_outputs", what))
    yield from found


def _of_guided(body: GenerationFields) -> Iterator[AskedConstraint]:
    yield from _each("guided_", body.guided_json, body.guided_regex, body.guided_grammar, body.guided_choice)
    # SGLang's names.
    yield from _each("", None, body.regex, None, None)
    if body.json_schema is not None:
        yield _json("json_schema", body.json_schema)
    if body.ebnf is not None:
        yield AskedConstraint("ebnf", Constraint(ConstraintKind.GRAMMAR, body.ebnf))


def _each(
    prefix: str, schema: dict[str, Any] | str | None, regex: str | None, grammar: str | None, choice: list[str] | None
) -> Iterator[AskedConstraint]:
    if schema is not None:
        yield _json(f"{prefix}json", schema)
    if regex is not None:
        yield AskedConstraint(f"{prefix}regex", Constraint(ConstraintKind.REGEX, regex))
    if grammar is not None:
        yield AskedConstraint(f"{prefix}grammar", Constraint(ConstraintKind.GRAMMAR, grammar))
    if choice is not None:
        yield AskedConstraint(f"{prefix}choice", choice_of(choice, f"{prefix}choice"))


def _json(field: str, schema: dict[str, Any] | bool | str) -> AskedConstraint:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return AskedConstraint(field, Constraint(ConstraintKind.JSON_SCHEMA, text))


# Fields whose name is the same here and there.
_SAME = (
    *("temperature", "top_p", "min_p", "min_tokens", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "ignore_eos", "n", "stop_token_ids"),
    "logprob_token_ids",
)
# Fields that several conversations cannot have, each with the values that have no effect.
_NOT_IN_BATCHES: Mapping[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "n": (None, 1),
    "tools": (None, []),
    "functions": (None, []),
    "prompt_logprobs": (None,),
    "prediction": (None,),
    "continue_final_message": (None, False),
}
_OF_PROMPTS = ("skip_special_tokens", "truncate_prompt_tokens", "add_special_tokens")


@dataclass(frozen=True, slots=True)
class Order:
    """The prompts of a body, and what its requests have in common.

    `names` maps fields of Quire's own API to the body's names, beyond those that all bodies share; `defaults` are those
    that the body lacks and this API fills in. With `echo`, choices begin with their prompts. `asked` is the body's
    constraint, and `tools` are those of a chat.
    """

    prompts: list[pb.Prompt]
    common: pb.GenerateRequest
    names: Mapping[str, str]
    echo: bool = False
    defaults: frozenset[str] = frozenset()
    asked: AskedConstraint | None = None
    tools: AskedTools | None = None
    # Tokens that the thoughts of an answer may have.
    thinking_budget: int | None = None
    # What the client should know of its answer: a closed set of texts and none of the client's.
    notes: tuple[str, ...] = ()
    # What the parts of its conversation hold that are not text, and do not reach the model.
    media: tuple[str, ...] = ()

    def noted(self, note: str) -> Order:
        """Return the order with one more note, unless that is empty."""
        return replace(self, notes=(*self.notes, note)) if note else self

    def read_by(self, reading: Reading) -> Order:
        """Return the order whose answers are read in that way."""
        common = pb.GenerateRequest()
        common.CopyFrom(self.common)
        common.kept_special_tokens.extend(sorted(reading.kept))
        if reading.budget is not None:
            common.thought_budget.CopyFrom(reading.budget)
        names = {**self.names, **_constrain(common, reading.asked)}
        return replace(self.noted(reading.note), common=common, names=names, asked=reading.asked)

    def in_its_words(self, found: FieldViolation) -> FieldViolation:
        """Return what is wrong with a request in the words of its body."""
        what = found.description
        if found.field in self.defaults:
            name = self.names.get(found.field, found.field.rpartition(".")[2])
            what = f"{what} (the body has no {name}: this is the default)"
        return replace(found, field=self.names.get(found.field, found.field), description=what)

    def requests(self) -> Iterator[pb.GenerateRequest]:
        """Yield a request for each prompt, made when it is wanted: what is wrong with the first is not copied."""
        for prompt in self.prompts:
            request = pb.GenerateRequest(prompt=prompt)
            request.MergeFrom(self.common)
            yield request


def completion_order(body: CompletionRequest) -> Order:
    """Return the requests of a body with one or several prompts. Raises Unsupported and InvalidRequest."""
    _refuse(body)
    _check_sequences(len(body.prompts), 1 if body.n is None else body.n)
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise Unsupported(f"best_of: is {body.best_of}; only as many as n are sampled, so leave it out")
    scored = body.prompt_logprobs
    if body.echo:
        _check_echo(body)
        scored = _scored_by_echo(body)
    sampling = _sampling(body, max_tokens=body.max_tokens, logprobs=body.logprobs, prompt_logprobs=scored)
    prompts = [
        pb.Prompt(text=each) if isinstance(each, str) else pb.Prompt(token_ids=pb.TokenIds(ids=each))
        for each in body.prompts
    ]
    order = _order(body, prompts, sampling, bool(body.echo))
    if scored != body.prompt_logprobs:
        order = replace(order, names={**order.names, "sampling.prompt_logprobs": "logprobs"})
    if "max_tokens" in body.model_fields_set:
        return order
    return replace(order, defaults=frozenset({"sampling.max_tokens"}))


def _check_echo(body: CompletionRequest) -> None:
    if body.stream and body.logprobs is not None and body.n not in (None, 1):
        what = "is more than 1, and only the first choice could begin with the prompt's log-probabilities in a stream"
        raise InvalidRequest(FieldViolation("n", f"{what}; leave out stream, echo or logprobs"))


def _scored_by_echo(body: CompletionRequest) -> int | None:
    """Return the log-probabilities of the prompt that an echo needs, beside those that the body asks for."""
    asked = body.prompt_logprobs
    if body.logprobs is None:
        return 0 if asked is None and body.max_tokens == 0 else asked
    if asked is not None and not 0 <= asked <= MAX_LOGPROBS:
        return asked  # refused by its own name
    return max(asked or 0, min(body.logprobs, MAX_LOGPROBS))


def _check_sequences(prompts: int, n: int) -> None:
    if not 1 <= prompts <= MAX_HTTP_SEQUENCES:
        what = f"has {prompts} prompts; expected a text, token ids, or a list of 1 to {MAX_HTTP_SEQUENCES} of either"
        raise InvalidRequest(FieldViolation("prompt", what))
    if prompts > 1 and prompts * n > MAX_HTTP_SEQUENCES:
        what = f"has {prompts} prompts, and n is {n}; expected at most {MAX_HTTP_SEQUENCES} sequences in one body"
        raise InvalidRequest(FieldViolation("prompt", f"{what}; send several bodies"))


def chat_order(body: ChatRequest) -> Order:
    """Return the request of a chat. Raises Unsupported and InvalidRequest."""
    return _chat_order(body, [body.messages])


def chat_batch_order(body: ChatBatchRequest) -> Order:
    """Return the requests of several conversations. Raises Unsupported and InvalidRequest."""
    for field, harmless in _NOT_IN_BATCHES.items():
        if getattr(body, field) not in harmless:
            raise UnsupportedField(field, f"{field}: not offered for several conversations at once; leave it out")
    if not 1 <= len(body.messages) <= MAX_HTTP_SEQUENCES:
        what = f"has {len(body.messages)} conversations; expected 1 to {MAX_HTTP_SEQUENCES}"
        raise InvalidRequest(FieldViolation("messages", what))
    return _chat_order(body, body.messages)


def _chat_order(body: ChatOptions, conversations: Sequence[list[Message]]) -> Order:
    _refuse(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(FieldViolation("top_logprobs", "needs logprobs, which is not set; set it to true"))
    newer = body.max_completion_tokens is not None
    max_tokens = body.max_completion_tokens if newer else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)
    tools = asked_tools(body)
    if tools.use.tools and body.allowed_token_ids is not None:
        what = "cannot be combined with tools, whose calls need other tokens; omit one, or send tool_choice none"
        raise InvalidRequest(FieldViolation(FIELD, what))
    prompts = [_prompt(place, body, tools, conversations) for place in range(len(conversations))]
    order = _order(body, prompts, sampling)
    if body.prediction is not None:
        order.common.prediction = body.prediction.text
    names = {
        "prompt": "messages",
        "prediction": "prediction.content",
        "sampling.logprobs": "top_logprobs",
        "thought_budget": "thinking_token_budget",
    }
    if newer:
        names["sampling.max_tokens"] = "max_completion_tokens"
    media = media_in([message for each in conversations for message in each])
    if media:
        order = replace(order.noted(note_of(media)), media=media)
    return replace(order, names={**order.names, **names}, tools=tools, thinking_budget=_thinking_budget(body))


def _prompt(place: int, body: ChatOptions, tools: AskedTools, conversations: Sequence[list[Message]]) -> pb.Prompt:
    """Return the prompt of a conversation; errors name it where there are several."""
    if len(conversations) == 1:
        return chat_prompt(conversations[0], body, tools)
    try:
        return chat_prompt(conversations[place], body, tools)
    except InvalidRequest as error:
        raise InvalidRequest(*(of_conversation(each, place) for each in error.violations)) from None
    except Unsupported as error:
        raise Unsupported(f"conversation {place}: {error}") from None


def of_conversation(violation: FieldViolation, place: int) -> FieldViolation:
    """Return a violation of a chat as one of its place among several."""
    field = violation.field.removeprefix("prompt.chat.")
    if field == "prompt" or field.startswith("messages"):
        field = f"messages[{place}]{field.removeprefix('prompt').removeprefix('messages')}"
        return replace(violation, field=field)
    return violation


def _thinking_budget(body: ChatOptions) -> int | None:
    budget = body.thinking_token_budget
    if budget is not None and budget < 0:
        what = f"is {budget}; expected 0 or more, or nothing for thoughts of any length"
        raise InvalidRequest(FieldViolation("thinking_token_budget", what))
    return budget


def _refuse(body: GenerationFields) -> None:
    if body.unsupported:
        raise UnsupportedField(body.unsupported[0], f"{', '.join(body.unsupported)}: not offered; leave it out")
    if body.stream and body.prompt_logprobs is not None:
        what = "belongs to a whole answer, and stream is set; leave out one of them, or use echo with logprobs"
        raise InvalidRequest(FieldViolation("prompt_logprobs", what))


def _order(
    body: GenerationFields,
    prompts: list[pb.Prompt],
    sampling: types_pb2.SamplingParams,
    echo: bool = False,
) -> Order:
    common = pb.GenerateRequest(
        sampling=sampling,
        priority=body.priority or 0,
        cache=pb.CacheOptions(salt=body.cache_salt or "", shared_domain=body.shared_domain or ""),
        truncation_side=truncation_side_of(body.truncation_side),
    )
    if body.cache_retention is not None:
        common.cache_retention.CopyFrom(body.cache_retention.message())
    for name in _OF_PROMPTS:
        if (value := getattr(body, name, None)) is not None:
            setattr(common, name, value)
    asked = constraint_of(body)
    return Order(prompts, common, _constrain(common, asked), echo, asked=asked)


def _constrain(request: pb.GenerateRequest, asked: AskedConstraint | None) -> dict[str, str]:
    """Set a request's constraint; return the name of its field for the body's."""
    if asked is None:
        return {}
    kind = asked.constraint.kind.value
    setattr(request, kind, asked.constraint.text)
    if asked.closing_token is not None:
        request.sampling.closing_token_id = asked.closing_token
    return {kind: asked.field}


def _sampling(body: GenerationFields, **given: int | None) -> types_pb2.SamplingParams:
    """Return the sampling; fields that are missing or null stay unset."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields |= given | {"include_stop": body.include_stop_str_in_output}
    fields["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    fields["bad_words"] = body.bad_words
    fields["top_k"] = 0 if body.top_k == -1 else body.top_k
    return types_pb2.SamplingParams(**{name: value for name, value in fields.items() if value is not None})
