"""Reads the chat of a request: messages, tools, documents and variables, checked before a template sees them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import (
    MAX_CHAT_MESSAGES,
    MAX_DOCUMENTS,
    MAX_QUOTED_CHARS,
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATE_NUMBER,
    MAX_TEMPLATE_VARIABLES,
    MAX_TOOL_CALLS,
    MAX_TOOLS_BYTES,
)
from common.untrusted import json_shape
from quire.inference.v1 import inference_pb2 as pb
from router.answers.requested_tools import tools_of

# A template may build control tokens from the role ("<|" + role + "|>"); a plain word cannot inject another token.
_ROLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# Variables that a chat has fields for, that the tokenizer gives, or that mean something to Jinja.
_TAKEN: Final = frozenset(
    "messages tools documents add_generation_prompt continue_final_message chat_template tokenize self caller varargs "
    "kwargs loop range dict lipsum cycler joiner namespace raise_exception strftime_now bos_token eos_token unk_token "
    "sep_token pad_token cls_token mask_token".split()
)
# Wrong messages of a chat that are reported one by one.
_MOST_NAMED: Final = 5
_CHAT: Final = "prompt.chat."


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool in an earlier answer. `arguments` is the JSON as it was sent."""

    id: str
    name: str
    arguments: str


class Message(NamedTuple):
    """One message. `call_id` and `name` belong to the result of a call, `calls` and `thought` to an earlier answer.

    A chat may have thousands, and a tuple is made in half the time of a frozen dataclass.
    """

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""
    thought: str = ""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A checked chat. Tools and documents are the client's own objects, `variables` those that it names itself."""

    messages: Sequence[Message]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str = ""


def chat_input(chat: pb.Chat) -> ChatInput:
    """Return a chat whose messages are checked. Raises InvalidRequest for other fields that cannot be rendered."""
    continued = chat.continue_final_message
    if continued and chat.add_generation_prompt:
        _refuse("continue_final_message", "contradicts add_generation_prompt; leave out one of them")
    if chat.reasoning_effort and not _ROLE.fullmatch(chat.reasoning_effort):
        _refuse("reasoning_effort", f"is {_quoted(chat.reasoning_effort)}; expected a word such as low")
    _check_shapes(chat)
    return ChatInput(
        messages=[_message(each, place) for place, each in enumerate(chat.messages)],
        tools=_tools(chat.tools_json),
        documents=_documents(chat.documents_json),
        variables=_variables(chat.template_kwargs_json),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continued,
        continue_final_message=continued,
        reasoning_effort=chat.reasoning_effort,
    )


def _check_shapes(chat: pb.Chat) -> None:
    """Raise InvalidRequest for JSON that takes long to parse, in a field or in the arguments of all calls together."""
    arguments = [call.arguments_json for each in chat.messages for call in each.tool_calls]
    fields = (
        ("tools_json", [chat.tools_json]),
        ("documents_json", [chat.documents_json]),
        ("template_kwargs_json", [chat.template_kwargs_json]),
        ("messages", arguments),
    )
    for name, texts in fields:
        if excess := json_shape.BODY.excess(*(text.encode() for text in texts if text)):
            _refuse(name, f"{'have arguments of calls whose JSON' if texts is arguments else ''} {excess}".strip())


def characters(chat: pb.Chat) -> int:
    """Return the characters that a client sent for the prompt, at least as many as a template usually shows."""
    texts = sum(len(each.content) + len(each.reasoning_content) for each in chat.messages)
    return texts + len(chat.documents_json)


def _message(given: pb.ChatMessage, place: int) -> Message:
    fields = given.ListFields()
    if not fields or fields[-1][0].number <= pb.ChatMessage.CONTENT_FIELD_NUMBER:  # nearly all messages
        return Message(given.role, given.content)
    if len(given.tool_calls) > MAX_TOOL_CALLS:
        what = f"has {len(given.tool_calls)} calls; expected at most {MAX_TOOL_CALLS}"
        _refuse(f"messages[{place}].tool_calls", what)
    calls = tuple([Call(each.id, each.name, each.arguments_json) for each in given.tool_calls])
    return Message(given.role, given.content, calls, given.tool_call_id, given.name, given.reasoning_content)


def check_messages(chat: pb.Chat) -> None:
    """Raise InvalidRequest for messages that cannot be rendered: none, too many, odd roles."""
    count = len(chat.messages)
    if not count:
        _refuse("messages", "is empty; expected at least one message")
    if count > MAX_CHAT_MESSAGES:
        _refuse("messages", f"has {count} messages; expected at most {MAX_CHAT_MESSAGES}")
    wrong = [(place, each.role) for place, each in enumerate(chat.messages) if not _ROLE.fullmatch(each.role)]
    if wrong:
        raise InvalidRequest(*_wrong_roles(wrong))


def _tools(text: str) -> list[Any] | None:
    if not text:
        return None
    if len(text) > MAX_TOOLS_BYTES:
        _refuse("tools_json", f"has {len(text)} characters; expected at most {MAX_TOOLS_BYTES}")
    given = _parsed(text, "tools_json")
    tools_of(given, f"{_CHAT}tools_json")
    return list(given) or None


def _documents(text: str) -> list[Any] | None:
    if not text:
        return None
    given = _parsed(text, "documents_json")
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        _refuse("documents_json", 'must be a list of objects; expected [{"title": ..., "text": ...}]')
    if len(given) > MAX_DOCUMENTS:
        _refuse("documents_json", f"has {len(given)} documents; expected at most {MAX_DOCUMENTS}")
    return given or None


def _variables(text: str) -> Mapping[str, Any]:
    name = "template_kwargs_json"
    if not text:
        return {}
    if len(text) > MAX_TEMPLATE_BYTES:
        _refuse(name, f"has {len(text)} characters; expected at most {MAX_TEMPLATE_BYTES}")
    given = _parsed(text, name)
    if not isinstance(given, dict):
        _refuse(name, 'must be an object, such as {"enable_thinking": false}')
    if len(given) > MAX_TEMPLATE_VARIABLES:
        _refuse(name, f"has {len(given)} variables; expected at most {MAX_TEMPLATE_VARIABLES}")
    for key in given:
        if key in _TAKEN:
            _refuse(f"{name}.{key}", "has another meaning; set it by the field of that name, if there is one")
        if not _VARIABLE.fullmatch(key):
            _refuse(name, f"has {_quoted(key)}; expected names of letters, digits and underscores")
    _check_numbers(given, name)
    return given


def _check_numbers(given: Any, name: str) -> None:
    """Refuse numbers by which a template could make an endless text: one that repeats, pads or counts."""
    waiting = [given]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting.extend(each.values() if isinstance(each, dict) else each)
        elif isinstance(each, int | float) and not -MAX_TEMPLATE_NUMBER <= each <= MAX_TEMPLATE_NUMBER:
            what = f"has a number beyond {MAX_TEMPLATE_NUMBER}; expected smaller ones, or the number as a text"
            _refuse(name, what)


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        _refuse(name, f"is not valid JSON: {error}")


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _refuse(name: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(_CHAT + name, what))


def _wrong_roles(wrong: Sequence[tuple[int, str]]) -> list[FieldViolation]:
    found = [
        FieldViolation(f"{_CHAT}messages[{place}].role", f"is {_quoted(role)}; expected a word such as user")
        for place, role in wrong[:_MOST_NAMED]
    ]
    if len(wrong) > _MOST_NAMED:
        found.append(FieldViolation(f"{_CHAT}messages", f"has {len(wrong) - _MOST_NAMED} more wrong roles"))
    return found


def _quoted(text: str) -> str:
    """Return a client's text for an error, in quotes and cut."""
    return repr(text) if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]!r}..."
