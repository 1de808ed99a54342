"""The tools of a chat, read from OpenAI's form and checked, for every client API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_QUOTED_CHARS, MAX_TOOL_NAME_CHARS, MAX_TOOLS
from router.answers.dialects.offered import OfferedTool

UNSEEN_TOOLS: Final = "the chat template shows no tools, so the model does not see those of a request"
NOTE_HEADER: Final = "x-quire-note"
_NAME: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME_CHARS}}}")


def tools_of(given: Any, path: str = "tools") -> tuple[OfferedTool, ...]:
    """Return the tools of a list in OpenAI's form. Raises InvalidRequest that names the wrong field below `path`."""
    if not isinstance(given, list):
        _refuse(path, 'must be a list; expected [{"type": "function", "function": {"name": ...}}]')
    if len(given) > MAX_TOOLS:
        _refuse(path, f"has {len(given)} tools; expected at most {MAX_TOOLS}")
    found = tuple([_tool(each, f"{path}[{place}]") for place, each in enumerate(given)])
    _check_distinct([tool.name for tool in found], path)
    return found


def _tool(given: Any, path: str) -> OfferedTool:
    if not isinstance(given, dict):
        _refuse(path, 'must be an object; expected {"type": "function", "function": {...}}')
    if (kind := given.get("type", "function")) != "function":
        _refuse(f"{path}.type", f"is {quoted(kind)}; only function is offered")
    if not isinstance(given.get("function"), dict):
        _refuse(f"{path}.function", 'is missing; expected {"name": ..., "parameters": {...}}')
    return _function(given["function"], f"{path}.function")


def _function(given: Mapping[str, Any], path: str) -> OfferedTool:
    name, description = given.get("name"), given.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "is missing" if name is None else f"is {quoted(name)}"
        letters = "letters, digits, underscores, hyphens and dots"
        _refuse(f"{path}.name", f"{what}; expected 1 to {MAX_TOOL_NAME_CHARS} {letters}")
    if not isinstance(description, str | None):
        _refuse(f"{path}.description", "must be a string")
    return OfferedTool(name, _parameters(given, path), _strict(given, path))


def _parameters(given: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    parameters = given.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        _refuse(f"{path}.parameters", 'must be a JSON schema; expected an object such as {"type": "object"}')
    if parameters.get("type", "object") != "object":
        what = f"is {quoted(parameters['type'])}; expected object, as arguments have names"
        _refuse(f"{path}.parameters.type", what)
    return parameters


def _strict(given: Mapping[str, Any], path: str) -> bool:
    strict = given.get("strict")
    if not isinstance(strict, bool | None):
        _refuse(f"{path}.strict", f"is {quoted(strict)}; expected true or false")
    return bool(strict)


def _check_distinct(names: list[str], path: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        _refuse(path, f"has two tools of the name {twice!r}; expected one")


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(path, what))


def quoted(value: object) -> str:
    """Return a client's value for an error, cut."""
    shown = repr(value) if not isinstance(value, str) else repr(value[: MAX_QUOTED_CHARS + 1])
    return shown if len(shown) <= MAX_QUOTED_CHARS + 2 else f"{shown[:MAX_QUOTED_CHARS]}..."
