"""Turns a body of the Messages API into the request of a chat, and errors about a chat into the words of the body."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from router.answers.tools import quoted
from router.api.anthropic.cache_control import retention_of
from router.api.anthropic.conversation import conversation
from router.api.anthropic.types import CountRequest, MessagesRequest, OutputFormat, Thinking, ToolBody
from router.api.openai.request import Order, chat_order
from router.api.openai.tools import left_out_note
from router.api.openai.types import ChatRequest, JsonSchemaFormat, ResponseFormat
from router.api.shared.field_names import FieldNames, in_words_by

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


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(path, what))
