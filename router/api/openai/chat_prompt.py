"""Turns the messages of a chat, and what its template needs beside them, into Quire's own prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from quire.inference.v1 import inference_pb2 as pb
from router.answers.requested_tools import quoted
from router.api.openai.requested_tools import AskedTools
from router.api.openai.types import CalledFunction, ChatFields, Message
from router.contracts.media import medium_of

# OpenAI's older name for the role of a result.
_ROLES = {"function": "tool"}
_TEXTS = frozenset({"text", "refusal"})
# The fields of nearly all messages.
_PLAIN = frozenset({"role", "content"})


def chat_prompt(messages: list[Message], body: ChatFields, tools: AskedTools) -> pb.Prompt:
    """Return the prompt of a chat. Raises Unsupported for unknown kinds of content, InvalidRequest for odd calls."""
    _check_parts(messages)
    chat = pb.Chat(
        messages=[_message(each, place) for place, each in enumerate(messages)],
        tools_json=_json(tools.given),
        documents_json=_json(body.documents),
        template_kwargs_json=_json(body.chat_template_kwargs),
        continue_final_message=bool(body.continue_final_message),
        reasoning_effort=body.reasoning_effort or "",
    )
    if body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    return pb.Prompt(chat=chat)


def _message(given: Message, place: int) -> pb.ChatMessage:
    role = _ROLES.get(given.role, given.role)
    if given.model_fields_set <= _PLAIN:
        return pb.ChatMessage(role=role, content=given.text)
    return pb.ChatMessage(
        role=role,
        content=given.text,
        tool_calls=_calls(given, place),
        tool_call_id=given.tool_call_id or "",
        name=given.name or "",
        reasoning_content=given.reasoning_content or given.reasoning or "",
    )


def _calls(given: Message, place: int) -> Iterator[pb.ToolCall]:
    for number, call in enumerate(given.tool_calls or ()):
        if call.type != "function":
            what = f"is {call.type!r}; only function is offered"
            raise InvalidRequest(FieldViolation(f"messages[{place}].tool_calls[{number}].type", what))
        yield _call(call.id, call.function)
    if given.function_call is not None:
        yield _call("", given.function_call)


def _call(call_id: str, function: CalledFunction) -> pb.ToolCall:
    arguments = function.arguments
    text = arguments if isinstance(arguments, str | None) else json.dumps(arguments, ensure_ascii=False)
    return pb.ToolCall(id=call_id, name=function.name, arguments_json=text or "")


def _json(given: Any) -> str:
    """Return JSON of a list or an object; "" of an empty one, and of none."""
    return json.dumps(given, ensure_ascii=False) if given else ""


def media_in(messages: list[Message]) -> tuple[str, ...]:
    """Return what the parts hold that are not text."""
    parts = [part for each in messages if isinstance(each.content, list) for part in each.content]
    return tuple([medium for part in parts if (medium := medium_of(part.type)) is not None])


def _check_parts(messages: list[Message]) -> None:
    for place, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        kinds = sorted({part.type for part in parts if medium_of(part.type) is None} - _TEXTS)
        if kinds:
            raise Unsupported(f"messages[{place}].content: {quoted(', '.join(kinds))} is not offered; send text")
