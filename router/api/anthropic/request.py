"""Turns a body of the Messages API into the request of a chat, and errors about a chat into the words of the body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from common.contracts.limits import MAX_CHAT_MESSAGES, MAX_RETENTION_MESSAGE_RANGES, MAX_TOOL_CALLS
from router.answers.requested_tools import quoted
from router.api.anthropic.types import (
    Block,
    CacheControl,
    Content,
    CountRequest,
    MessageBody,
    MessagesRequest,
    OutputFormat,
    Thinking,
    ToolBody,
)
from router.api.openai.request import Order, chat_order
from router.api.openai.requested_tools import left_out_note
from router.api.openai.types import (
    CallBody,
    CalledFunction,
    ChatRequest,
    ContentPart,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
)
from router.api.shared.field_names import CacheRetention, FieldNames, RetentionRange, in_words_by
from router.contracts.media import medium_of

PRIORITY: Final = 60
"""Above all blocks without retention, and below what an operator's own clients may ask for."""
_SHORT: Final = "5m"
_SECONDS: Final = {_SHORT: 300.0, "1h": 3600.0}
# A mark and its place in the body.
Mark = tuple[CacheControl, str]


# The marks `cache_control` of a body: each retains the prompt up to the item that has it.
# An item is a tool, a block of a message, or the whole body, whose mark stands for the last message. The turn of a
# marked block counts as a whole.
def retention_of(body: CountRequest, marked: Sequence[tuple[Mark, int]], messages: int) -> CacheRetention | None:
    """Return what the marks of a body retain. `marked` are those of its blocks, each with the number of messages of the
    chat up to it; `messages` are all of them. Raises InvalidRequest.
    """
    found = [(mark, 0) for mark in _of_tools(body)] + list(marked)
    if body.cache_control is not None:
        found.append(((body.cache_control, "cache_control"), messages))
    if len(found) > MAX_RETENTION_MESSAGE_RANGES:
        where = found[MAX_RETENTION_MESSAGE_RANGES][0][1]
        _refuse(where, f"is one mark too many; expected at most {MAX_RETENTION_MESSAGE_RANGES} in a body")
    ranges = [
        RetentionRange(messages=min(count, messages), priority=PRIORITY, duration=_seconds(mark))
        for mark, count in found
    ]
    return CacheRetention(ranges=ranges) if ranges else None


def marks_of(block: Block, path: str) -> Iterator[Mark]:
    """Yield the marks of a block and, for the result of a tool, of the blocks in it."""
    for number, part in enumerate(block.content if isinstance(block.content, list) else ()):
        if part.cache_control is not None:
            yield part.cache_control, f"{path}.content[{number}].cache_control"
    if block.cache_control is not None:
        yield block.cache_control, f"{path}.cache_control"


def _of_tools(body: CountRequest) -> Iterator[Mark]:
    for place, tool in enumerate(body.tools or ()):
        if tool.cache_control is not None:
            yield tool.cache_control, f"tools[{place}].cache_control"


def _seconds(mark: Mark) -> float:
    control, path = mark
    if control.type != "ephemeral":
        _refuse(f"{path}.type", f"is {quoted(control.type)}; expected ephemeral")
    ttl = control.ttl or _SHORT
    if ttl not in _SECONDS:
        _refuse(f"{path}.ttl", f"is {quoted(ttl)}; expected {' or '.join(_SECONDS)}")
    return _SECONDS[ttl]


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(path, what))


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


# Turns the messages of a body into those of a chat: results of tools become messages of their own.
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


# Fields whose name is the same here and there.
_SAME: Final = ("temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "stream")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_OMITTED: Final = "omitted"
# How the beta is named in which a budget is that of a whole turn, with thoughts between its calls of tools.
_INTERLEAVED: Final = "interleaved-thinking"
# Names of a chat's fields in this API; `messages[N]` has a place of its own.
_NAMES: Final = FieldNames(
    (r"^(sampling\.)?stop\b", "stop_sequences"),
    (r"^max_completion_tokens\b", "max_tokens"),
    (r"^sampling\.", ""),
    (r"^prompt\.chat\.", ""),
    (r"^cache\.salt\b", "cache_salt"),
    (r"^tools_json\b", "tools"),
    (r"^template_kwargs_json\b", "chat_template_kwargs"),
    (r"^reasoning_effort\b", "output_config.effort"),
    (r"^(thinking_token_budget|thought_budget)\b.*", "thinking.budget_tokens"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^(tools\[\d+\]|tool_choice)\.function\b", r"\1"),
    (r"^(tools\[\d+\])\.parameters\b", r"\1.input_schema"),
    (r"^cache_retention\b.*", "cache_control"),
    (r"^prompt\b", "messages"),
)
# Types of tools by their vendor's date, such as web_search_20250305, and those without one.
_OF_VENDORS: Final = re.compile(r"[a-z][a-z_]{0,40}_20\d{6}|mcp_toolset|tool_search_tool_(bm25|regex)")
_MESSAGE: Final = re.compile(r"^messages\[(\d+)\]")
_TOOL: Final = re.compile(r"^tools\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Asked:
    """The chat of a body, and the places of its messages and tools in the body."""

    order: Order
    places: Sequence[str]
    tools: Sequence[int]
    shows_thoughts: bool

    def in_its_words(self) -> AbstractContextManager[None]:
        """Let errors about fields of a chat name those of the body."""
        return _in_its_words(self.places, self.tools)


def asked(body: CountRequest, headers: Mapping[str, str]) -> Asked:
    """Return the chat of a body. Raises InvalidRequest and Unsupported in the words of the body."""
    if body.unsupported:
        raise Unsupported(f"{', '.join(body.unsupported)}: not offered; leave it out")
    chat = conversation(body.system, body.messages)
    fields: dict[str, Any] = {
        "messages": chat.messages,
        "cache_retention": retention_of(body, chat.marked, len(chat.messages)),
        "continue_final_message": chat.continued or None,
        **_tools(body),
        **_thinking(body, headers),
        **_output(body),
        **(_sampling(body) if isinstance(body, MessagesRequest) else {}),
    }
    tools = [place for place, _ in _own_tools(body)]
    with _in_its_words(chat.places, tools):
        order = chat_order(ChatRequest(**{key: value for key, value in fields.items() if value is not None}))
    order = order.noted(left_out_note([each.type or "" for each in body.tools or () if _is_left_out(each)]))
    return Asked(order, chat.places, tools, body.thinking is None or body.thinking.display != _OMITTED)


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    if body.max_tokens < 1:
        _refuse("max_tokens", f"is {body.max_tokens}; expected at least 1")
    given = {name: getattr(body, name) for name in _SAME}
    return given | {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or None}


def _tools(body: CountRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if tools := [_tool(each, f"tools[{place}]") for place, each in _own_tools(body)]:
        fields["tools"] = tools
    if (choice := body.tool_choice) is not None:
        fields["tool_choice"] = _choice(choice.type, choice.name)
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _own_tools(body: CountRequest) -> list[tuple[int, ToolBody]]:
    """Return the tools that are offered, with their places in the body."""
    return [(place, tool) for place, tool in enumerate(body.tools or ()) if not _is_left_out(tool)]


def _is_left_out(tool: ToolBody) -> bool:
    """Return whether a vendor has made the tool: its server runs it, or its models alone know its form."""
    return tool.type is not None and _OF_VENDORS.fullmatch(tool.type) is not None


def _tool(tool: ToolBody, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        what = "is not offered; only custom tools are, which the client runs"
        raise Unsupported(f"{path}.type: {quoted(tool.type)} {what}")
    if tool.unsupported:
        raise Unsupported(f"{path}: {', '.join(tool.unsupported)} is not offered; leave it out")
    if tool.input_schema is None:
        _refuse(f"{path}.input_schema", 'is missing; expected a JSON schema such as {"type": "object"}')
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema | examples}
    given = {"description": tool.description, "strict": tool.strict}
    function |= {key: value for key, value in given.items() if value is not None}
    return {"type": "function", "function": function}


def _choice(kind: str, name: str | None) -> Any:
    if kind == "tool":
        if name is None:
            _refuse("tool_choice.name", "is missing; expected the name of a tool")
        return {"type": "function", "function": {"name": name}}
    if kind not in _CHOICES:
        _refuse("tool_choice.type", f"is {quoted(kind)}; expected auto, any, tool or none")
    return _CHOICES[kind]


def _thinking(body: CountRequest, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the budget and the variables of the chat template, which knows the choice by one of two names."""
    given = body.chat_template_kwargs or {}
    if (thinking := body.thinking) is None:
        return {"chat_template_kwargs": given or None}
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        _refuse("thinking.type", f"is {quoted(thinking.type)}; expected enabled, adaptive or disabled")
    thinks = thinking.type != "disabled"
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks, **given}}
    if thinking.type == "enabled":
        _check_budget(thinking, body, of_turn=_INTERLEAVED in headers.get("anthropic-beta", ""))
        fields["thinking_token_budget"] = thinking.budget_tokens
    return fields


def _check_budget(thinking: Thinking, body: CountRequest, of_turn: bool) -> None:
    budget = thinking.budget_tokens
    if budget is None or budget < 1:
        what = "is missing" if budget is None else f"is {budget}"
        _refuse("thinking.budget_tokens", f"{what}; expected at least 1, and less than max_tokens")
    if isinstance(body, MessagesRequest) and budget >= body.max_tokens and not of_turn:
        _refuse("thinking.budget_tokens", f"is {budget}; expected less than max_tokens, which is {body.max_tokens}")


def _output(body: CountRequest) -> dict[str, Any]:
    config = body.output_config
    if config is None:
        return {}
    return {"reasoning_effort": config.effort, "response_format": _format(config.format)}


def _format(given: OutputFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.type != "json_schema":
        _refuse("output_config.format.type", f"is {quoted(given.type)}; expected json_schema")
    if given.schema_ is None:
        _refuse("output_config.format.schema", "is missing; expected a JSON schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given.schema_, strict=True))


def _in_its_words(places: Sequence[str], tools: Sequence[int]) -> AbstractContextManager[None]:
    return in_words_by(lambda field: _placed(_NAMES(field), places, tools))


def _placed(field: str, places: Sequence[str], tools: Sequence[int]) -> str:
    """Return the name of a field with the place in the body where it names a message or a tool of the chat."""
    if (found := _MESSAGE.match(field)) is not None and int(found[1]) < len(places):
        return places[int(found[1])] + field[found.end() :]
    if (found := _TOOL.match(field)) is not None and int(found[1]) < len(tools):
        return f"tools[{tools[int(found[1])]}]{field[found.end() :]}"
    return field
