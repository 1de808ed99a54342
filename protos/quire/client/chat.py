"""Converts the messages of a chat, and what its template needs beside them, to the message on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NotRequired, TypedDict

from quire.api.errors import FieldViolation, InvalidRequest
from quire.inference.v1 import inference_pb2 as pb


class ToolCall(TypedDict):
    """One call in an earlier answer; `arguments` is a JSON object, or the text of one."""

    id: str
    name: str
    arguments: str | Mapping[str, Any]


class Message(TypedDict):
    """One message of a chat; `role` is one that the model's chat template accepts (system, user, assistant, tool).

    `tool_calls` and `reasoning_content` belong to an earlier answer, `tool_call_id` and `name` to the result of a call.
    """

    role: str
    content: str
    tool_calls: NotRequired[Sequence[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChatOptions(TypedDict, total=False):
    """What the template of a chat gets beside the messages; None is the same as absent.

    `tools` has functions in OpenAI's form: the prompt names them, and a constraint can force a call.
    `chat_template_kwargs` has further variables of the template, such as enable_thinking. With `continue_final_message`
    the output continues the last message.
    """

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    reasoning_effort: str | None


CHAT: Final = ChatOptions.__optional_keys__
_PATH: Final = "prompt.chat."
# Options that travel as JSON, and the names of their fields.
_AS_JSON: Final = {
    "tools": "tools_json",
    "documents": "documents_json",
    "chat_template_kwargs": "template_kwargs_json",
}
_TEXTS: Final = frozenset({"role", "content", "tool_call_id", "name", "reasoning_content"})
_KEYS: Final = _TEXTS | {"tool_calls"}


def chat_of(messages: Sequence[Any], options: Mapping[str, Any]) -> pb.Chat:
    """Raises InvalidRequest for wrong messages, and for options of a wrong type."""
    wrong = [place for place, message in enumerate(messages) if not _is_message(message)]
    if wrong:
        what = "expected a role and a content, both texts, and nothing else than the keys of Message"
        raise InvalidRequest(
            *(FieldViolation(f"{_PATH}messages[{place}]", f"is {messages[place]!r}; {what}") for place in wrong)
        )
    chat = pb.Chat(messages=[_message(each, place) for place, each in enumerate(messages)])
    for name, value in options.items():
        _set(chat, _AS_JSON.get(name, name), _json(value, name) if name in _AS_JSON else value)
    return chat


def _set(chat: pb.Chat, field: str, value: Any) -> None:
    try:
        setattr(chat, field, value)
    except TypeError as error:
        raise InvalidRequest(FieldViolation(_PATH + field, f"is {value!r}: {error}")) from error


def _is_message(given: object) -> bool:
    if not isinstance(given, Mapping) or not {"role", "content"} <= given.keys() <= _KEYS:
        return False
    return all(isinstance(given[name], str) for name in given.keys() & _TEXTS)


def _message(given: Mapping[str, Any], place: int) -> pb.ChatMessage:
    texts = {name: given[name] for name in given.keys() & _TEXTS}
    path = f"messages[{place}].tool_calls"
    calls = [_call(each, f"{path}[{number}]") for number, each in enumerate(given.get("tool_calls", ()))]
    return pb.ChatMessage(**texts, tool_calls=calls)


def _call(given: object, path: str) -> pb.ToolCall:
    if not isinstance(given, Mapping) or given.keys() != {"id", "name", "arguments"}:
        raise InvalidRequest(FieldViolation(_PATH + path, f"is {given!r}; expected an id, a name and arguments"))
    arguments = given["arguments"]
    text = arguments if isinstance(arguments, str) else _json(arguments, f"{path}.arguments")
    return pb.ToolCall(id=str(given["id"]), name=str(given["name"]), arguments_json=text)


def _json(value: Any, name: str) -> str:
    """Return JSON. Raises InvalidRequest for what has none."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(FieldViolation(_PATH + name, f"cannot be written as JSON: {error}")) from error
