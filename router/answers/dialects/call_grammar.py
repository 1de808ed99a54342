"""What a constrained call looks like in each dialect: after its marker, up to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from router.answers.dialects import bare_calls, marked_calls, pythonic_calls
from router.answers.dialects.annotations import moved
from router.answers.dialects.lark import Lark, literal, one_of
from router.answers.dialects.marked_calls import HERMES, HERMES_END
from router.answers.dialects.offered import OfferedTool, Schema, is_plain_text, kinds
from router.answers.dialects.tagged_calls import CODER, GLM, Tags

# With these keywords alone a schema is a list of parameters.
_LIST = frozenset(
    (
        "type", "properties", "required", "additionalProperties", "title", "description", "default", "examples",
        "$schema", "$comment", "$defs", "definitions",
    )
)  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")


# The parameters of a tool one by one, for dialects that do not write arguments as one JSON object.
@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: Schema
    required: bool


def parameters(schema: Schema) -> list[Parameter] | None:
    """Return the parameters that a schema lists; None if it says more about its object than a list can."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not _LIST.issuperset(schema) or not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    described = {name: {} if found is True else found for name, found in properties.items()}
    if not all(isinstance(found, Mapping) and _is_closed(found) for found in described.values()):
        return None
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    if not _is_closed(shared):
        return None
    return [Parameter(name, {**shared, **found}, name in required) for name, found in described.items()]


def _is_closed(schema: Any) -> bool:
    """Return whether all references lead to definitions, which every parameter takes along."""
    return all(str(target).startswith(("#/$defs/", "#/definitions/")) for target in _references(schema))


def _references(schema: Any) -> Iterator[Any]:
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Mapping):
            yield from (found[key] for key in ("$ref", "$dynamicRef", "$recursiveRef") if key in found)
            waiting.extend(found.values())
        elif isinstance(found, list):
            waiting.extend(found)


_ANY_OBJECT: Schema = {"type": "object"}
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_PLAIN_NAME = re.compile(r"[\w.-]{1,256}")
_KEY = re.compile(r"[^<>\s]([^<>]{0,254}[^<>\s])?")


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of an answer in Lark.

    `block` is what follows the marker: one call, or all of them. Without a marker it is the whole answer.
    `closed` are the marks that other text must not spell. `bare` are the first characters of a call without a marker.
    `objects` are the schemas of calls that are JSON objects themselves; `more_objects`: several may follow each other.
    """

    marker: str
    block: str
    repeats: bool = False
    between: str = ""
    closed: tuple[str, ...] = ()
    bare: str = ""
    text_follows: bool = True
    fence: tuple[str, str] = ("", "")
    objects: tuple[Schema, ...] = ()
    more_objects: bool = False


def calls(lark: Lark, dialect: str, tools: Sequence[OfferedTool], parallel: bool) -> Calls:
    """Return the calls of a dialect with the schemas of these tools."""
    return _CALLS[dialect](lark, tools, parallel)


def arguments(tool: OfferedTool) -> Schema:
    """Return the schema of a tool's arguments, which are an object in any case."""
    return {**tool.parameters, "type": "object"} if tool.parameters else _NO_ARGUMENTS


def arguments_rule(lark: Lark, tool: OfferedTool) -> str:
    """Return an expression for a tool's arguments in JSON."""
    if not tool.grammar:
        return lark.json(arguments(tool))
    return f'{literal(f"{{{json.dumps(tool.text_argument)}: ")} {lark.quoted(tool.grammar)} "}}"'


def any_arguments(tool: OfferedTool) -> OfferedTool:
    """Return the tool with arguments of any form."""
    return OfferedTool(tool.name, _ANY_OBJECT)


# ---------------------------------------------------------------- JSON objects


def _object(lark: Lark, tool: OfferedTool, key: str = "arguments") -> str:
    head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
    return f'{literal(head)} {arguments_rule(lark, tool)} "}}"'


def _objects(lark: Lark, tools: Sequence[OfferedTool], key: str = "arguments") -> str:
    return lark.define("call", one_of([_object(lark, tool, key) for tool in tools]))


def _call_schemas(tools: Sequence[OfferedTool], key: str) -> tuple[Schema, ...]:
    return tuple([_call_schema(tool, key) for tool in tools])


def _call_schema(tool: OfferedTool, key: str) -> Schema:
    """Return the schema of a whole call. References within the arguments begin where the arguments now stand."""
    members = {"name": {"const": tool.name}, key: moved(arguments(tool), f"#/properties/{key}")}
    return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}


def _hermes(lark: Lark, tools: Sequence[OfferedTool], parallel: bool) -> Calls:
    block = f'"\\n" {_objects(lark, tools)} "\\n" {lark.mark(HERMES_END)}'
    return Calls(HERMES, block, parallel, "\n", (HERMES,))


def _llama(lark: Lark, tools: Sequence[OfferedTool], parallel: bool) -> Calls:
    call = _objects(lark, tools, "parameters")
    run = f'{call} ("; " {call})*' if parallel else call
    objects = _call_schemas(tools, "parameters")
    closed = (bare_calls.PYTHON_TAG,)
    return Calls(
        bare_calls.PYTHON_TAG, run, closed=closed, bare="{", text_follows=False, objects=objects, more_objects=parallel
    )


def _generic(lark: Lark, tools: Sequence[OfferedTool], parallel: bool) -> Calls:
    call = _objects(lark, tools)
    run = f'({call} | "[" {call} (", " {call})* "]")' if parallel else call
    fence, objects = marked_calls.FENCE, _call_schemas(tools, "arguments")
    around = ("\n", f"\n{marked_calls.FENCE_END}")
    return Calls(fence, run, closed=(fence,), bare="{[", fence=around, objects=objects, more_objects=parallel)


# ---------------------------------------------------------------- a name, and JSON arguments


def _named(lark: Lark, tools: Sequence[OfferedTool], before: str, between: str, after: str) -> str:
    options = [f"{before} {literal(plain(tool))} {between} {arguments_rule(lark, tool)} {after}" for tool in tools]
    return lark.define("call", one_of(options))


def plain(tool: OfferedTool) -> str:
    if not _PLAIN_NAME.fullmatch(tool.name):
        raise ValueError(
            f"the tool {tool.name!r} cannot be called here; name it with letters, digits, '_', '-' and '.'"
        )
    return tool.name


def _mistral(lark: Lark, tools: Sequence[OfferedTool], parallel: bool) -> Calls:
    """The newer form where the checkpoint has its mark for arguments; else the list."""
    closed = (marked_calls.MISTRAL,)
    mark = lark.mark(marked_calls.MISTRAL_ARGUMENTS)
    if mark.startswith("<["):
        return Calls(marked_calls.MISTRAL, _named(lark, tools, "", mark, ""), parallel, closed=closed)
    call = _objects(lark, tools)
    more = f' (", " {call})*' if parallel else ""
    return Calls(marked_calls.MISTRAL, f'" "? "[" {call}{more} "]"', closed=closed)


def _deepseek(lark: Lark, tools: Sequence[OfferedTool], parallel: bool, fenced: bool) -> Calls:
    separator, end = lark.mark(marked_calls.DEEPSEEK_SEPARATOR), lark.mark(marked_calls.DEEPSEEK_CALL_END)
    begin = lark.mark(marked_calls.DEEPSEEK_CALL)
    if fenced:
        before, between, after = f'"function" {separator}', '"\\n```json\\n"', f'"\\n```" {end}'
    else:
        before, between, after = "", separator, end
    call = _named(lark, tools, f"{begin} {before}", between, after)
    parted = '"\\n" ' if fenced else ""
    more = f" ({parted}{call})*" if parallel else ""
    block = f"{call}{more} {lark.mark(marked_calls.DEEPSEEK_END)}"
    return Calls(marked_calls.DEEPSEEK, block, closed=(marked_calls.DEEPSEEK, marked_calls.DEEPSEEK_CALL))


# ---------------------------------------------------------------- one parameter after another


def _tagged(lark: Lark, tools: Sequence[OfferedTool], parallel: bool, tags: Tags) -> Calls:
    call = lark.define("call", one_of([_tagged_call(lark, tool, tags) for tool in tools]))
    return Calls(HERMES, f"{call} {lark.mark(HERMES_END)}", parallel, "\n", (HERMES,))


def _tagged_call(lark: Lark, tool: OfferedTool, tags: Tags) -> str:
    listed = parameters(arguments(tool))
    if tool.parameters == _ANY_OBJECT:
        pairs = [f"{_any_pair(lark, tags)}*"]
    elif listed is None or not all(_KEY.fullmatch(given.name) for given in listed):
        return f'"\\n" {_object(lark, tool)} "\\n"'
    elif tool.grammar:
        value = f"{lark.quoted(tool.grammar)} {lark.mark(tags.value_end)}"
        pairs = [_pair(lark, tool.text_argument, value, tags)]
    else:
        values = [_tagged_value(lark, given.schema, tags) for given in listed]
        pairs = [
            f"{_pair(lark, given.name, value, tags)}{'' if given.required else '?'}"
            for given, value in zip(listed, values, strict=True)
        ]
    head = f"{tags.name}{plain(tool)}{tags.name_end}"
    ends = [literal(f"{tags.end}\n")] if tags.end else []
    return " ".join([literal(f"\n{head}\n" if tags.name else head), *pairs, *ends])


def _pair(lark: Lark, name: str, value: str, tags: Tags) -> str:
    return lark.define("pair", f'{_key(lark, literal(name), tags)} {value} "\\n"')


def _any_pair(lark: Lark, tags: Tags) -> str:
    key = _key(lark, lark.define("KEY", r"/[^<>\s]+/"), tags)
    return lark.define("any_pair", f'{key} {lark.until(tags.value_end)} "\\n"')


def _key(lark: Lark, name: str, tags: Tags) -> str:
    between = "" if tags.value == "\n" else '"\\n" '
    return f"{lark.mark(tags.key)} {name} {lark.mark(tags.key_end)} {between}{lark.mark(tags.value)}"


def _tagged_value(lark: Lark, schema: Schema, tags: Tags) -> str:
    end = lark.mark(tags.value_end)
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if not is_plain_text(schema) or not isinstance(values, list | None):
        return f"{lark.json(schema)} {end}"
    if values is None:
        return lark.until(tags.value_end)
    texts = [literal(value) for value in values if isinstance(value, str) and tags.value_end not in value]
    if not texts:
        raise ValueError("a string has no value that can be written; expected one in its enum")
    return f"{one_of(texts)} {end}"


def _pythonic(lark: Lark, tools: Sequence[OfferedTool], parallel: bool) -> Calls:
    call = lark.define("call", one_of([_pythonic_call(lark, tool) for tool in tools]))
    more = f' (", " {call})*' if parallel else ""
    start = pythonic_calls.PYTHON_START
    return Calls(start, f'"[" {call}{more} "]"', closed=(start,), bare="[", text_follows=False)


def _pythonic_call(lark: Lark, tool: OfferedTool) -> str:
    listed = parameters(arguments(tool))
    if tool.parameters == _ANY_OBJECT:
        return f'{literal(f"{plain(tool)}(")} {_any_keywords(lark)} ")"'
    if listed is None or not all(_PLAIN_NAME.fullmatch(given.name) for given in listed):
        return f'{literal(f"{plain(tool)}(**")} {lark.json(arguments(tool))} ")"'
    if tool.grammar:
        return f'{literal(f"{plain(tool)}({tool.text_argument}=")} {lark.quoted(tool.grammar)} ")"'
    return f'{literal(f"{plain(tool)}(")} {_keywords(lark, listed)} ")"'


def _keywords(lark: Lark, listed: Sequence[Parameter]) -> str:
    """Return an expression for `a=1, b=2` in the order of the schema; optional parameters may be left out.

    One option begins with each parameter that may come first. The others follow it, each after a comma.
    """
    items = [
        lark.define("item", f"{literal(f'{given.name}=')} {_pythonic_value(lark, given.schema)}") for given in listed
    ]
    more = [f'", " {item}' if given.required else f'(", " {item})?' for item, given in zip(items, listed, strict=True)]
    required = [at for at, given in enumerate(listed) if given.required]
    if required[:1] == [0]:
        return " ".join([items[0], *more[1:]])
    rests = _rests(lark, more)
    options = [f"{items[at]} {rests[at + 1]}" for at in range(required[0] + 1 if required else len(listed))]
    return one_of(options if required else [*options, '""'])


def _rests(lark: Lark, parts: Sequence[str]) -> list[str]:
    """Return rules for all these parts, for all but the first, and so on down to none."""
    rests = ['""']
    for part in reversed(parts):
        rests.append(lark.define("rest", f"{part} {rests[-1]}"))
    return rests[::-1]


def _any_keywords(lark: Lark) -> str:
    key = lark.define("KEYWORD", "/[A-Za-z_][A-Za-z0-9_]*=/")
    pair = lark.define("any_keyword", f"{key} {lark.json({})}")
    return f'({pair} (", " {pair})*)?'


def _pythonic_value(lark: Lark, schema: Schema) -> str:
    if schema.keys() & {"enum", "const", "anyOf", "allOf", "oneOf", "not", "$ref"}:
        return lark.json(schema)
    named = kinds(schema)
    return '("True" | "False")' if named == {"boolean"} else '"None"' if named == {"null"} else lark.json(schema)


_CALLS: Mapping[str, Callable[[Lark, Sequence[OfferedTool], bool], Calls]] = MappingProxyType(
    {
        "hermes": _hermes,
        "llama3_json": _llama,
        "pythonic": _pythonic,
        "mistral": _mistral,
        "deepseek_v3": lambda lark, tools, parallel: _deepseek(lark, tools, parallel, True),
        "deepseek_v31": lambda lark, tools, parallel: _deepseek(lark, tools, parallel, False),
        "glm45": lambda lark, tools, parallel: _tagged(lark, tools, parallel, GLM),
        "qwen3_coder": lambda lark, tools, parallel: _tagged(lark, tools, parallel, CODER),
        "generic": _generic,
    }
)
