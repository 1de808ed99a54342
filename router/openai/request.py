"""Turns bodies of OpenAI-compatible requests into Quire's own requests, one for each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import FieldViolation, InvalidRequest, Unsupported
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.openai.constraint import constraint_of
from router.openai.types import ChatRequest, CompletionRequest, GenerationFields, Message

MAX_PROMPTS = 1024
# Fields whose name is the same here and there.
_SAME = (
    *("temperature", "top_p", "min_p", "min_tokens", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "ignore_eos", "n", "stop_token_ids"),
)


@dataclass(frozen=True, slots=True)
class Order:
    """The requests of a body, one for each prompt.

    `names` maps fields of Quire's own API to the body's names, beyond those that all bodies share.
    """

    requests: list[pb.GenerateRequest]
    names: Mapping[str, str]


def completion_order(body: CompletionRequest, headers: Mapping[str, str]) -> Order:
    """Return a request for each prompt. Raises Unsupported and InvalidRequest."""
    _refuse(body)
    if not 1 <= len(body.prompts) <= MAX_PROMPTS:
        what = f"has {len(body.prompts)} prompts; expected a text, token ids, or a list of 1 to {MAX_PROMPTS} of either"
        raise InvalidRequest(FieldViolation("prompt", what))
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise Unsupported(f"best_of: is {body.best_of}; only as many as n are sampled, so leave it out")
    if body.echo and body.logprobs is not None:
        raise Unsupported("echo: not offered together with logprobs, as a prompt has none; leave out one of them")
    sampling = _sampling(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
    prompts = [
        pb.Prompt(text=each) if isinstance(each, str) else pb.Prompt(token_ids=pb.TokenIds(ids=each))
        for each in body.prompts
    ]
    order = _order(body, prompts, sampling, headers)
    if len(order.requests) > 1 and order.requests[0].request_id:
        for place, request in enumerate(order.requests):
            request.request_id += f"-{place}"
    return order


def chat_order(body: ChatRequest, headers: Mapping[str, str]) -> Order:
    """Return the request of a chat. Raises Unsupported and InvalidRequest."""
    _refuse(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(FieldViolation("top_logprobs", "needs logprobs, which is not set; set it to true"))
    newer = body.max_completion_tokens is not None
    max_tokens = body.max_completion_tokens if newer else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, max_tokens=max_tokens, logprobs=logprobs)
    order = _order(body, [chat_prompt(body.messages)], sampling, headers)
    names = {"prompt": "messages", "sampling.logprobs": "top_logprobs"}
    if newer:
        names["sampling.max_tokens"] = "max_completion_tokens"
    return Order(order.requests, {**order.names, **names})


def chat_prompt(messages: list[Message]) -> pb.Prompt:
    """Return the prompt of a chat's messages. Raises Unsupported for content other than text."""
    _refuse_other_than_text(messages)
    # OpenAI's newer name for a system message; few templates accept it.
    given = [("system" if each.role == "developer" else each.role, each.text) for each in messages]
    return pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in given]))


def _refuse(body: GenerationFields) -> None:
    if body.unsupported:
        raise Unsupported(f"{', '.join(body.unsupported)}: not offered; leave it out")


def _refuse_other_than_text(messages: list[Message]) -> None:
    for place, message in enumerate(messages):
        if message.tool_calls:
            raise Unsupported(f"messages[{place}].tool_calls: tools are not offered; write what they gave as text")
        parts = message.content if isinstance(message.content, list) else []
        kinds = sorted({part.type for part in parts} - {"text"})
        if kinds:
            raise Unsupported(f"messages[{place}].content: {', '.join(kinds)} is not offered; send text alone")


def _order(
    body: GenerationFields, prompts: list[pb.Prompt], sampling: types_pb2.SamplingParams, headers: Mapping[str, str]
) -> Order:
    common = pb.GenerateRequest(
        request_id=body.request_id or headers.get("x-request-id", ""),
        sampling=sampling,
        priority=body.priority or 0,
        cache=pb.CacheOptions(salt=body.cache_salt or ""),
        traceparent=headers.get("traceparent", ""),
    )
    names = {}
    asked = constraint_of(body)
    if asked is not None:
        kind = asked.constraint.kind.value
        setattr(common, kind, asked.constraint.text)
        names[kind] = asked.field
    requests = []
    for prompt in prompts:
        request = pb.GenerateRequest(prompt=prompt)
        request.MergeFrom(common)
        requests.append(request)
    return Order(requests, names)


def _sampling(body: GenerationFields, **given: int | None) -> types_pb2.SamplingParams:
    """Return the sampling; fields that are missing or null stay unset."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields |= given | {"include_stop": body.include_stop_str_in_output}
    fields["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    fields["top_k"] = 0 if body.top_k == -1 else body.top_k
    return types_pb2.SamplingParams(**{name: value for name, value in fields.items() if value is not None})
