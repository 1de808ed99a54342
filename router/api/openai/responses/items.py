"""Turns items of a conversation, in the form of the Responses API, into the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from common.contracts.limits import MAX_CHAT_MESSAGES
from router.answers.requested_tools import quoted
from router.api.openai.responses.tool_kinds import FUNCTION, ToolName, arguments_of
from router.api.openai.types import CallBody, CalledFunction, ContentPart, Message
from router.contracts.media import medium_of, stand_in

Item = Mapping[str, Any]
_ROLES: Final = ("user", "assistant", "system", "developer")
_FIRST: Final = ("system", "developer")
_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# The fields of an item that have parts.
_PARTED: Final = ("content", "output")
_SERVED: Final = "message, reasoning, function_call, custom_tool_call, or the output of either"


def items_of(given: str | Sequence[Item], field: str = "input") -> list[Item]:
    """Return the items of a field. Raises InvalidRequest where there are none, or too many."""
    items: list[Item] = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else [*given]
    if not items:
        _refuse(field, f"is empty; expected {'a text or ' if field == 'input' else ''}at least one item")
    if len(items) > MAX_CHAT_MESSAGES:
        _refuse(field, f"has {len(items)} items; expected at most {MAX_CHAT_MESSAGES}")
    return items


def messages_of(
    instructions: str | None, earlier: Sequence[Item], given: Sequence[Item], field: str = "input"
) -> list[Message]:
    """Return the chat of a conversation. Raises InvalidRequest and Unsupported with the place of a wrong item.

    Leading system messages become one, because many templates take no other. A thought, the text after it and calls
    become one message of the assistant, as templates have it.
    """
    read = [_read(item, "previous_response_id") for item in earlier]
    read += [_read(item, f"{field}[{place}]") for place, item in enumerate(given)]
    messages = [Message(role="system", content=instructions)] if instructions else []
    messages += list(_joined(each for each in read if each is not None))
    return [*_one_system(messages)]


def as_texts(items: Sequence[Item]) -> list[Item]:
    """Return items with the text that stands in for each part that is not text, as the model has read them."""
    parted = [{name: item[name] for name in _PARTED if isinstance(item.get(name), list)} for item in items]
    return [
        {**item, **{name: _as_texts(parts) for name, parts in fields.items()}}
        for item, fields in zip(items, parted, strict=True)
    ]


def _as_texts(parts: list[Any]) -> list[Any]:
    media = [medium_of(part.get("type")) if isinstance(part, dict) else None for part in parts]
    return [
        part if medium is None else {"type": "input_text", "text": stand_in(medium)}
        for part, medium in zip(parts, media, strict=True)
    ]


def _read(item: Item, path: str) -> Message | None:
    """Return the message of one item; None of a thought that is not in plain text."""
    match item.get("type", "message"):
        case "message":
            return _message(item, path)
        case "function_call" | "custom_tool_call":
            return _call(item, path)
        case "function_call_output" | "custom_tool_call_output":
            return _output(item, path)
        case "reasoning":
            parts = _parts(item.get("content") or item.get("summary") or "", f"{path}.content")
            thought = "".join([part.shown for part in parts])
            return Message(role="assistant", reasoning_content=thought) if thought else None
        case other:
            raise Unsupported(f"{path}.type: {quoted(other)} is not offered; expected {_SERVED}")


def _message(item: Item, path: str) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        _refuse(f"{path}.role", f"is {quoted(role)}; expected user, assistant, system or developer")
    return Message(role=role, content=_parts(item.get("content"), f"{path}.content"))


def _call(item: Item, path: str) -> Message:
    name, namespace = _string(item, "name", path), item.get("namespace")
    if item["type"] == "custom_tool_call":
        arguments = arguments_of(_string(item, "input", path))
    else:
        arguments = _string(item, "arguments", path)
    seen = ToolName(FUNCTION, name, namespace if isinstance(namespace, str) else None).function
    function = CalledFunction(name=seen, arguments=arguments)
    return Message(role="assistant", tool_calls=[CallBody(id=_string(item, "call_id", path), function=function)])


def _output(item: Item, path: str) -> Message:
    call_id = _string(item, "call_id", path)
    return Message(role="tool", tool_call_id=call_id, content=_parts(item.get("output"), f"{path}.output"))


def _string(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        _refuse(
            f"{path}.{name}", "is missing; expected a text" if value is None else f"is {quoted(value)}; expected a text"
        )
    return value


def _parts(content: Any, path: str) -> list[ContentPart]:
    if isinstance(content, str):
        return [ContentPart(type="text", text=content)]
    if not isinstance(content, list):
        _refuse(path, "is missing; expected a text or a list of parts")
    return [_part(part, f"{path}[{place}]") for place, part in enumerate(content)]


def _part(part: Any, path: str) -> ContentPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return ContentPart(type="text", text=_string(part, "refusal", path))
    if kind in _TEXTS:
        return ContentPart(type="text", text=_string(part, "text", path))
    if medium_of(kind) is not None:
        return ContentPart(type=kind)
    raise Unsupported(f"{path}.type: {quoted(kind)} is not offered; send text")


def _joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, with those of one turn of the assistant in one."""
    turn: Message | None = None
    for each in messages:
        if turn is not None and each.role == "assistant" and _goes_on(turn, each):
            turn = _both(turn, each)
            continue
        if turn is not None:
            yield turn
        turn = each
    if turn is not None:
        yield turn


def _goes_on(turn: Message, more: Message) -> bool:
    """Return whether a message stands after what the turn has already: a thought, then text, then calls."""
    if turn.role != "assistant":
        return False
    if more.tool_calls:
        return True
    return not turn.tool_calls and not turn.text and not more.reasoning_content


def _both(turn: Message, more: Message) -> Message:
    return Message(
        role="assistant",
        content=turn.text + more.text,
        tool_calls=[*(turn.tool_calls or ()), *(more.tool_calls or ())] or None,
        reasoning_content=turn.reasoning_content or more.reasoning_content,
    )


def _one_system(messages: Sequence[Message]) -> Iterator[Message]:
    count = next((place for place, each in enumerate(messages) if each.role not in _FIRST), len(messages))
    if count:
        yield Message(role="system", content="\n\n".join(each.text for each in messages[:count] if each.text))
    yield from messages[count:]


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(path, what))
