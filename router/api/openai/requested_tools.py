"""Reads the tools of a chat: OpenAI's `tools` and `tool_choice`, and the older `functions` and `function_call`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NoReturn

from common.contracts.errors import FieldViolation, InvalidRequest
from router.answers.dialects.grammar import ToolChoice
from router.answers.dialects.offered import OfferedTool
from router.answers.reading import ToolUse
from router.answers.requested_tools import quoted, tools_of
from router.api.openai.types import ChatFields

log = logging.getLogger(__name__)

# Tools in an error that names those that there are.
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class AskedTools:
    """The tools for the template, as the client wrote them, and their use. `older`: asked for as `functions`."""

    given: list[Any]
    use: ToolUse
    older: bool = False

    def held_to(self, grammars: Mapping[str, str]) -> AskedTools:
        """Return the same, where the texts that tools of these names take follow grammars."""
        tools = [tool.held_to(grammars[tool.name]) if tool.name in grammars else tool for tool in self.use.tools]
        return replace(self, use=replace(self.use, tools=tuple(tools)))


def left_out_note(kinds: Iterable[str]) -> str:
    """Return what the client should know of tools that are left out of its request, "" where none is; log each kind."""
    found = dict.fromkeys(kinds)
    for kind in found:
        _say(kind)
    return f"tools are left out that this server does not run: {', '.join(found)}" if found else ""


@lru_cache(maxsize=256)
def _say(kind: str) -> None:
    """Log once that tools of a kind are left out: an agent sends the same ones with each request."""
    log.info("tools of type %s are left out of requests: this server does not run them", kind)


def asked_tools(body: ChatFields) -> AskedTools:
    """Return the tools of a body. Raises InvalidRequest for malformed ones, and a choice of what is not there."""
    if body.functions:
        if body.tools:
            _refuse("functions", "cannot be combined with tools, its newer form; send only one of them")
        return _asked(_wrapped(body.functions), body.function_call, "function_call", ToolUse(parallel=False), True)
    parallel = body.parallel_tool_calls is not False
    return _asked(body.tools or [], body.tool_choice, "tool_choice", ToolUse(parallel=parallel), False)


def _wrapped(functions: list[Any]) -> list[Any]:
    return [{"type": "function", "function": each} for each in functions]


def _asked(given: list[Any], choice: Any, field: str, use: ToolUse, older: bool) -> AskedTools:
    tools = tools_of(given, "functions" if older else "tools")
    if not tools and choice not in (None, "none", "auto"):
        _refuse(field, f"needs {'functions' if older else 'tools'}, and there is none; leave it out")
    if not tools or choice == "none":
        return AskedTools([], use, older)
    if choice in (None, "auto"):
        return AskedTools(given, replace(use, tools=tools), older)
    if choice == "required" and not older:
        return AskedTools(given, replace(use, tools=tools, choice=ToolChoice.REQUIRED), older)
    return AskedTools(given, _chosen(choice, field, replace(use, tools=tools), older), older)


def _chosen(choice: Any, field: str, use: ToolUse, older: bool) -> ToolUse:
    """Return the use of a choice that names one or several tools."""
    if isinstance(choice, dict):
        if older:
            return _named(choice, field, use)
        if choice.get("type", "function") == "function" and isinstance(choice.get("function"), dict):
            return _named(choice["function"], f"{field}.function", use)
        if choice.get("type") == "allowed_tools" and isinstance(choice.get("allowed_tools"), dict):
            return _allowed(choice["allowed_tools"], f"{field}.allowed_tools", use)
    words = "none, auto" if older else "none, auto, required"
    form = '{"name": ...}' if older else '{"type": "function", "function": {"name": ...}}'
    raise InvalidRequest(FieldViolation(field, f"is {quoted(choice)}; expected {words} or {form}"))


def _named(choice: dict[str, Any], path: str, use: ToolUse) -> ToolUse:
    tool = _tool(choice.get("name"), f"{path}.name", use)
    return replace(use, tools=(tool,), choice=ToolChoice.REQUIRED, named=True, parallel=False)


def _allowed(choice: dict[str, Any], path: str, use: ToolUse) -> ToolUse:
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        _refuse(f"{path}.mode", f"is {quoted(mode)}; expected auto or required")
    if not isinstance(listed, list) or not listed:
        _refuse(f"{path}.tools", 'must be a list of tools; expected [{"type": "function", "function": {"name": ...}}]')
    names = [_name_of(each) for each in listed]
    found = [_tool(name, f"{path}.tools[{place}]", use) for place, name in enumerate(names)]
    allowed = tuple([tool for tool in use.tools if tool in found])
    return replace(use, tools=allowed, choice=ToolChoice.REQUIRED if mode == "required" else ToolChoice.AUTO)


def _name_of(given: Any) -> Any:
    function = given.get("function") if isinstance(given, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _tool(name: Any, path: str, use: ToolUse) -> OfferedTool:
    found = [tool for tool in use.tools if tool.name == name]
    if not found:
        there = ", ".join(tool.name for tool in use.tools[:_MOST_NAMED])
        more = " and others" if len(use.tools) > _MOST_NAMED else ""
        _refuse(path, f"is {quoted(name)}, and no tool has that name; the tools are {there}{more}")
    return found[0]


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(path, what))
