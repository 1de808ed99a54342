"""Turns a body of the Responses API into the request of a chat, and errors about a chat into the words of the body."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, NoReturn

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from router.api.openai.request import Order, chat_order
from router.api.openai.requested_tools import left_out_note
from router.api.openai.responses.items import Item, messages_of
from router.api.openai.responses.tool_kinds import FUNCTION, ToolKinds, choice_of
from router.api.openai.responses.types import Json, ResponsesRequest
from router.api.openai.types import ChatRequest, JsonSchemaFormat, Message, ResponseFormat
from router.api.shared.field_names import FieldNames, in_words_by

# Of what clients ask for by `include`, all else is there in any case, or belongs to tools that are not offered.
_LOGPROBS: Final = "message.output_text.logprobs"
# Names of a chat's fields in this API.
_NAMES: Final = FieldNames(
    (r"^(prompt\.chat\.)?messages\b", "input"),
    (r"^response_format(\.json_schema)?\b", "text.format"),
    (r"^(max_completion_tokens|sampling\.max_tokens)\b", "max_output_tokens"),
    (r"^(prompt\.chat\.)?reasoning_effort\b", "reasoning.effort"),
    (r"^(tools\[\d+\](?:\.tools\[\d+\])?|tool_choice)\.function\b", r"\1"),
    (r"^tool_choice\.allowed_tools\b", "tool_choice"),
)


def order_of(body: ResponsesRequest, kinds: ToolKinds, messages: list[Message]) -> Order:
    """Return the order of a body with such tools. Raises InvalidRequest and Unsupported in the words of the body."""
    with in_its_words(kinds):
        order = chat_order(chat_request(body, kinds, messages)).noted(left_out_note(kinds.left_out))
    if order.tools is None or not kinds.grammars:
        return order
    return replace(order, tools=order.tools.held_to(kinds.grammars))


def conversation(body: ResponsesRequest, earlier: Sequence[Item], given: Sequence[Item]) -> list[Message]:
    """Return the messages of a conversation. Raises InvalidRequest and Unsupported."""
    return messages_of(body.instructions, earlier, given)


def check(body: ResponsesRequest) -> None:
    """Raise Unsupported and InvalidRequest for fields that have no place in a chat."""
    if body.unsupported:
        raise Unsupported(f"{', '.join(body.unsupported)}: not offered; leave it out")
    if body.background and body.store is False:
        _refuse("background", "needs a stored response, and store is false; leave out one of them")
    if body.conversation is not None and body.previous_response_id is not None:
        _refuse("conversation", "cannot be combined with previous_response_id; leave out one of them")


def chat_request(body: ResponsesRequest, kinds: ToolKinds, messages: list[Message]) -> ChatRequest:
    """Return the same as a request of a chat."""
    fields: Json = {name: getattr(body, name) for name in body.same}
    fields |= {
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "stream": body.stream,
        "logprobs": _LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        "top_logprobs": body.top_logprobs,
    }
    if kinds.functions:
        fields["tools"] = kinds.functions
        fields["tool_choice"] = _chat_choice(body.tool_choice)
    elif body.tool_choice not in (None, "auto", "none"):
        _refuse("tool_choice", "needs tools, and there is none; leave it out")
    return ChatRequest(messages=messages, **{name: value for name, value in fields.items() if value is not None})


def in_its_words(kinds: ToolKinds) -> AbstractContextManager[None]:
    """Let errors about fields of a chat with such tools name those of this API."""
    return in_words_by(lambda field: _NAMES(kinds.placed(field)))


def format_body(body: ResponsesRequest) -> Json:
    """Return the form of the text as answers repeat it."""
    given = body.text.format if body.text else None
    if given is None or given.type == "text":
        return {"type": "text"}
    if given.type == "json_object":
        return {"type": "json_object"}
    named = {"name": given.name, "description": given.description, "strict": bool(given.strict)}
    return {"type": given.type, "schema": given.schema_ or {}, **named}


def tool_bodies(body: ResponsesRequest) -> list[Json]:
    """Return the tools as answers repeat them."""
    return [_tool_body(each) for each in body.tools or ()]


def _tool_body(given: Json) -> Json:
    if given.get("type") != FUNCTION:
        return given
    return {
        "type": FUNCTION,
        "name": given["name"],
        "description": given.get("description"),
        "parameters": given.get("parameters"),
        "strict": bool(given.get("strict")),
    }


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    given = body.text.format if body.text else None
    if given is None:
        return None
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    schema = JsonSchemaFormat(name=given.name, schema=given.schema_, strict=given.strict)
    return ResponseFormat(type=given.type, json_schema=schema)


def _chat_choice(given: Any) -> Any:
    """Return a choice in the form of a chat."""
    if not isinstance(given, dict):
        return given
    if given.get("type") != "allowed_tools":
        return choice_of(given)
    listed = given.get("tools")
    tools = [_chat_choice(each) for each in listed] if isinstance(listed, list) else listed
    return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode", "auto"), "tools": tools}}


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(path, what))
