"""Bodies of OpenAI-compatible requests to Quire's own requests, one for each prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.errors import FieldViolation, InvalidRequest, Unsupported
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.openai_types import ChatRequest, CompletionRequest, GenerationFields

# Fields whose name is the same here and there.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "ignore_eos", "n", "stop_token_ids"),
)


def completion_requests(body: CompletionRequest, headers: Mapping[str, str]) -> list[pb.GenerateRequest]:
    """Return a request for each prompt. Raises Unsupported and InvalidRequest."""
    _refuse(body)
    if not body.prompts:
        raise InvalidRequest(FieldViolation("prompt", "is empty; expected a text, token ids, or a list of either"))
    sampling = _sampling(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
    prompts = [
        pb.Prompt(text=each) if isinstance(each, str) else pb.Prompt(token_ids=pb.TokenIds(ids=each))
        for each in body.prompts
    ]
    requests = [_request(body, prompt, sampling, headers) for prompt in prompts]
    if len(requests) > 1 and requests[0].request_id:
        for place, request in enumerate(requests):
            request.request_id += f"-{place}"
    return requests


def chat_requests(body: ChatRequest, headers: Mapping[str, str]) -> list[pb.GenerateRequest]:
    """Return the one request of a chat. Raises Unsupported."""
    _refuse(body)
    _refuse_other_than_text(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    messages = [pb.ChatMessage(role=message.role, content=message.text) for message in body.messages]
    prompt = pb.Prompt(chat=pb.Chat(messages=messages))
    request = _request(body, prompt, _sampling(body, max_tokens=max_tokens, logprobs=logprobs), headers)
    if body.response_format is not None and body.response_format.type != "text":
        request.json_schema = json.dumps(body.response_format.json_schema or {})
    return [request]


def _refuse(body: GenerationFields) -> None:
    if body.unsupported:
        raise Unsupported(f"{', '.join(body.unsupported)}: not offered; leave it out")


def _refuse_other_than_text(body: ChatRequest) -> None:
    for place, message in enumerate(body.messages):
        parts = message.content if isinstance(message.content, list) else []
        kinds = sorted({part.type for part in parts} - {"text"})
        if kinds:
            raise Unsupported(f"messages[{place}].content: {', '.join(kinds)} is not offered; send text alone")


def _request(
    body: GenerationFields, prompt: pb.Prompt, sampling: types_pb2.SamplingParams, headers: Mapping[str, str]
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=headers.get("x-request-id", ""),
        prompt=prompt,
        sampling=sampling,
        priority=body.priority,
        cache=pb.CacheOptions(salt=body.cache_salt),
        traceparent=headers.get("traceparent", ""),
    )


def _sampling(body: GenerationFields, **given: int | None) -> types_pb2.SamplingParams:
    """Return the sampling; what a client leaves out or sets to null stays unset."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields |= given | {"include_stop": body.include_stop_str_in_output}
    fields["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    return types_pb2.SamplingParams(**{name: value for name, value in fields.items() if value is not None})
