"""The kinds of tools of the Responses API as functions of a chat, and the model's calls of them as items.

A namespace is a list of functions. A custom tool takes a text. What only a vendor's server runs is left out: an agent
sends a search beside its own tools, and goes on without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from common.contracts.limits import MAX_TOOL_GRAMMARS_BYTES, MAX_TOOL_NAME_CHARS, MAX_TOOLS
from router.answers.dialects.quoted_lark import quoted_lark
from router.answers.requested_tools import quoted

Json = dict[str, Any]
FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
_SERVED: Final = f"{FUNCTION}, {CUSTOM} and {NAMESPACE} are"
# Kinds of which a vendor's server runs the calls, or that are commands of a form of their own.
_OF_VENDORS: Final = frozenset(
    "apply_patch code_interpreter computer computer_use computer_use_preview file_search image_generation local_shell "
    "mcp programmatic_tool_calling shell tool_search web_search web_search_2025_08_26 web_search_preview "
    "web_search_preview_2025_03_11".split()
)
_PLACE: Final = re.compile(r"^tools\[(\d+)\]")
# The one argument of a custom tool, as a function has it.
_INPUT: Final = "input"


@dataclass(frozen=True, slots=True)
class ToolName:
    """What a client calls a tool that the model knows as a function: its kind, its name and its namespace."""

    kind: str
    name: str
    namespace: str | None = None

    @property
    def function(self) -> str:
        """The name that the model sees."""
        whole = f"{self.namespace}.{self.name}" if self.namespace else self.name
        return whole if len(whole) <= MAX_TOOL_NAME_CHARS else self.name

    def item(self, ids: Mapping[str, str], text: str, status: str) -> Json:
        """Return the item of a call; `ids` are its own. `text` has the arguments, or so much of them as came."""
        named = {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})
        if self.kind == CUSTOM:
            return {**ids, "type": "custom_tool_call", **named, _INPUT: input_of(text), "status": status}
        return {**ids, "type": "function_call", **named, "arguments": text, "status": status}


@dataclass(frozen=True, slots=True)
class ToolKinds:
    """The tools of a request: as functions in OpenAI's form, by the names that the model sees, and kinds left out."""

    functions: list[Json] = field(default_factory=list)
    names: dict[str, ToolName] = field(default_factory=dict)
    # Where each function stands in the body.
    places: list[str] = field(default_factory=list)
    # What the inputs of custom tools follow, in Lark, by the names that the model sees.
    grammars: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def named(self, function: str) -> ToolName:
        return self.names.get(function, ToolName(FUNCTION, function))

    def placed(self, path: str) -> str:
        """Return the path of a field with the place of a function in the body."""
        found = _PLACE.match(path)
        if found is None or int(found[1]) >= len(self.places):
            return path
        return self.places[int(found[1])] + path[found.end() :]


def tool_kinds(given: Sequence[Json]) -> ToolKinds:
    """Return the tools of a request. Raises InvalidRequest and Unsupported with the place of a wrong one."""
    found, left_out, of_grammars = ToolKinds(), dict[str, None](), 0
    for path, tool, namespace in _flat(given):
        kind = tool.get("type")
        if isinstance(kind, str) and kind in _OF_VENDORS:
            left_out[kind] = None
        else:
            name, function = _function(tool, kind, namespace, path)
            found.functions.append({"type": FUNCTION, "function": function})
            found.names[name.function] = name
            found.places.append(path)
            if (grammar := _grammar(tool, kind)) is not None:
                _check_grammar(grammar, path)
                found.grammars[name.function] = grammar
                of_grammars += len(grammar.encode())
        if len(found.functions) > MAX_TOOLS:
            _refuse("tools", f"has more than {MAX_TOOLS} tools; expected at most {MAX_TOOLS}")
        if of_grammars > MAX_TOOL_GRAMMARS_BYTES:
            _refuse(
                "tools", f"has grammars of more than {MAX_TOOL_GRAMMARS_BYTES} bytes; expected fewer or smaller ones"
            )
    return replace(found, left_out=tuple(left_out))


def choice_of(given: Json) -> Json:
    """Return a choice of one tool in the form of a chat. Raises Unsupported for another one."""
    kind = given.get("type")
    if kind not in (FUNCTION, CUSTOM):
        raise Unsupported(f"tool_choice.type: {quoted(kind)} is not offered; function, custom, allowed_tools are")
    name, namespace = given.get("name"), given.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        return {"type": FUNCTION, "function": {key: value for key, value in given.items() if key != "type"}}
    return {"type": FUNCTION, "function": {"name": ToolName(kind, name, namespace).function}}


def arguments_of(text: str) -> str:
    """Return the input of a custom tool as the arguments of its function."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the input of a custom tool from its function's arguments; where they are others, these as they are."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    text = found.get(_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _flat(given: Sequence[Json]) -> Iterator[tuple[str, Json, str | None]]:
    """Yield each tool with its place, and the namespace that it is in."""
    for place, tool in enumerate(given):
        path = f"tools[{place}]"
        if tool.get("type") != NAMESPACE:
            yield path, tool, None
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str):
            _refuse(
                f"{path}.name", "is missing; expected a text" if name is None else f"is {quoted(name)}; expected a text"
            )
        if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
            _refuse(f"{path}.tools", "must be a list of tools")
        for number, each in enumerate(inner):
            yield f"{path}.tools[{number}]", each, name


def _function(tool: Json, kind: Any, namespace: str | None, path: str) -> tuple[ToolName, Json]:
    """Return the name of a tool, and its function."""
    if kind not in (FUNCTION, CUSTOM):
        raise Unsupported(f"{path}.type: {quoted(kind)} is not offered; {_SERVED}")
    given = tool.get("name")
    # What is not text is refused where all functions are read.
    name = ToolName(kind, given if isinstance(given, str) else "", namespace)
    named = {"name": name.function} if isinstance(given, str) else {}
    if kind == CUSTOM:
        return name, named | _custom(tool, path)
    return name, {key: value for key, value in tool.items() if key not in ("type", "name")} | named


def _custom(tool: Json, path: str) -> Json:
    """Return the description and the parameters of a custom tool's function."""
    text: Json = {"type": "string"}
    form = tool.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("text", "grammar"):
        _refuse(f"{path}.format.type", f"is {quoted(kind)}; expected text or grammar")
    words = [tool["description"]] if isinstance(tool.get("description"), str) else []
    if kind == "grammar":
        syntax, rules = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(rules, str):
            _refuse(f"{path}.format", "must be a grammar; expected its syntax, lark or regex, and its definition")
        if syntax == "regex":
            text["pattern"] = f"^(?:{rules})$"
        else:
            words.append(f"The input follows this grammar of Lark:\n{rules}")
    parameters = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    described = {"description": "\n".join(words)} if words else {}
    return described | {"parameters": parameters, "strict": kind == "grammar"}


def _grammar(tool: Json, kind: Any) -> str | None:
    """Return the grammar in Lark that a custom tool's input follows; None where there is none."""
    form = tool.get("format") if kind == CUSTOM else None
    is_lark = isinstance(form, dict) and form.get("type") == "grammar" and form.get("syntax") == "lark"
    return str(form["definition"]) if isinstance(form, dict) and is_lark else None


def _check_grammar(grammar: str, path: str) -> None:
    """Refuse a grammar that cannot be enforced."""
    try:
        quoted_lark(grammar)
    except ValueError as error:
        _refuse(f"{path}.format.definition", f"cannot be enforced: {error}")


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(path, what))
