"""Turns the messages of a body into those of a chat: results of tools become messages of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from common.contracts.limits import MAX_CHAT_MESSAGES, MAX_TOOL_CALLS
from router.answers.tools import quoted
from router.api.anthropic.cache_control import Mark, marks_of
from router.api.anthropic.types import Block, Content, MessageBody
from router.api.openai.types import CallBody, CalledFunction, ContentPart, Message
from router.contracts.media import medium_of

T = TypeVar("T")

# Blocks by the role of their message.
_OFFERED: Final = {
    "user": "text, image, document, search_result or tool_result",
    "assistant": "text, thinking or tool_use",
    "system": "text",
}
_RESULTS: Final = "text, image, document or search_result"
# Between turns of one role, which count as one.
_BETWEEN_TURNS: Final = "\n\n"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat, and the place in the body that each comes from.

    With `continued` the answer goes on with the last message. `marked` are the marks `cache_control` of blocks, each
    with the number of messages up to the end of its turn.
    """

    messages: list[Message]
    places: list[str]
    continued: bool
    marked: list[tuple[Mark, int]]


def conversation(system: Content | None, messages: Sequence[MessageBody]) -> Conversation:
    """Return the chat of a body. Raises InvalidRequest, and Unsupported for unknown kinds of blocks."""
    writer = _Writer()
    if system:
        writer.begin("system", "system")
        writer.add(system)
    for place, message in enumerate(messages):
        if message.role not in _OFFERED:
            _refuse(f"messages[{place}].role", f"is {quoted(message.role)}; expected user or assistant")
        writer.begin(message.role, f"messages[{place}]")
        writer.add(message.content)
    return writer.written()


@dataclass(slots=True)
class _Turn:
    """A message of the chat that is being written."""

    role: str
    place: str
    parts: list[ContentPart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[CallBody] = field(default_factory=list)
    # Of the result of a tool.
    call_id: str | None = None
    name: str | None = None
    marks: list[Mark] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.parts or self.thoughts or self.calls) and self.call_id is None

    def add(self, text: str) -> None:
        self.parts.append(ContentPart(type="text", text=text))

    def message(self) -> Message:
        return Message(
            role=self.role,
            content=self.parts,
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
            name=self.name,
            reasoning_content="".join(self.thoughts) or None,
        )


class _Writer:
    """Writes turn after turn."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        # The names of tools by the ids of their calls.
        self._names: dict[str, str] = {}
        self._place = ""
        # A message has begun that goes on with the turn of another one.
        self._joins = False

    def begin(self, role: str, place: str) -> None:
        """Begin a message of the body, which goes on with the last turn of the same role."""
        self._place = place
        self._joins = bool(self._turns) and self._last.role == role
        if not self._joins:
            self._turn(role)

    def add(self, content: Content) -> None:
        if isinstance(content, str):
            self._text(content)
            return
        role, within = self._last.role, "" if self._place == "system" else ".content"
        for number, block in enumerate(content):
            path = f"{self._place}{within}[{number}]"
            self._block(block, role, path)
            self._last.marks += marks_of(block, path)

    def written(self) -> Conversation:
        """Return the chat. Raises InvalidRequest for an end that nothing can answer."""
        turns = [turn for turn in self._turns if not turn.is_empty]
        if len(turns) > MAX_CHAT_MESSAGES:
            _refuse("messages", f"has {len(turns)} turns and results of tools; expected at most {MAX_CHAT_MESSAGES}")
        continued = bool(turns) and turns[-1].role == "assistant"
        if continued:
            _check_end(turns[-1])
        marked = [(mark, count) for count, turn in enumerate(turns, start=1) for mark in turn.marks]
        return Conversation([turn.message() for turn in turns], [turn.place for turn in turns], continued, marked)

    @property
    def _last(self) -> _Turn:
        return self._turns[-1]

    def _turn(self, role: str) -> _Turn:
        self._turns.append(_Turn(role, self._place))
        return self._last

    def _text(self, text: str) -> None:
        self._part(ContentPart(type="text", text=text))

    def _part(self, part: ContentPart) -> None:
        if self._joins and self._last.parts:
            self._last.add(_BETWEEN_TURNS)
        self._joins = False
        self._last.parts.append(part)

    def _block(self, block: Block, role: str, path: str) -> None:
        match block.type:
            case "tool_result" if role == "user":
                self._result(block, path)
            case "thinking" if role == "assistant":
                self._last.thoughts.append(_needed(block.thinking, f"{path}.thinking"))
            case "redacted_thinking" if role == "assistant":
                pass  # only the server that made it can read it
            case "tool_use" if role == "assistant":
                self._call(block, path)
            case _ if (parts := _content(block, path)) is not None:
                if self._last.role != role:
                    self._turn(role)
                for part in parts:
                    self._part(part)
            case _:
                what = f"{quoted(block.type)} is not offered in a message of role {role}"
                raise Unsupported(f"{path}.type: {what}; expected {_OFFERED[role]}")

    def _call(self, block: Block, path: str) -> None:
        name, call_id = _needed(block.name, f"{path}.name"), _needed(block.id, f"{path}.id")
        arguments = json.dumps(_needed(block.input, f"{path}.input"), ensure_ascii=False)
        if len(self._last.calls) == MAX_TOOL_CALLS:
            _refuse(path, f"is one tool_use too many; expected at most {MAX_TOOL_CALLS} in a turn")
        self._names[call_id] = name
        self._last.calls.append(CallBody(id=call_id, function=CalledFunction(name=name, arguments=arguments)))

    def _result(self, block: Block, path: str) -> None:
        call_id = _needed(block.tool_use_id, f"{path}.tool_use_id")
        self._joins = False
        turn = self._turn("tool")
        turn.call_id, turn.name = call_id, self._names.get(call_id)
        if block.is_error:
            turn.add("Error: ")
        if isinstance(block.content, str):
            turn.add(block.content)
            return
        for number, part in enumerate(block.content or ()):
            where = f"{path}.content[{number}]"
            if (found := _content(part, where)) is None:
                what = f"{quoted(part.type)} is not offered in a tool_result; expected {_RESULTS}"
                raise Unsupported(f"{where}.type: {what}")
            turn.parts += found


def _check_end(turn: _Turn) -> None:
    if turn.calls:
        _refuse(turn.place, "ends with a tool_use; expected a user message with its tool_result after it")
    if not turn.message().text.strip():
        _refuse(turn.place, "has no text that an answer could go on with; add some, or end with a user message")


def _content(block: Block, path: str) -> list[ContentPart] | None:
    """Return the parts of a block that the model reads, or that a text stands in for; None of another block."""
    if block.type == "text":
        return [ContentPart(type="text", text=_needed(block.text, f"{path}.text"))]
    if block.type == "search_result":
        given = block.content if isinstance(block.content, list) else []
        texts = [_needed(each.text, f"{path}.content[{place}].text") for place, each in enumerate(given)]
        return [ContentPart(type="text", text="\n".join([each for each in (block.title, *texts) if each]))]
    if block.type == "document" and (text := _plain(block.source)) is not None:
        return [ContentPart(type="text", text=f"{block.title}\n{text}" if block.title else text)]
    return None if medium_of(block.type) is None else [ContentPart(type=block.type)]


def _plain(source: Any) -> str | None:
    """Return the text of a document's source; None of a file."""
    if not isinstance(source, dict) or source.get("type") != "text":
        return None
    return data if isinstance(data := source.get("data"), str) else None


def _needed(value: T | None, path: str) -> T:
    if value is None:
        _refuse(path, "is missing; a block of this type needs it")
    return value


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(path, what))
