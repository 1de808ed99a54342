"""A tool as a request offers it, and what its schema says about one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Schema = Mapping[str, Any]

_TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength")
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"),
)  # fmt: skip
KINDS = frozenset(("boolean", "integer", "number", "string", "array", "object", "null"))


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call. `parameters` is the JSON schema of its arguments.

    With a `grammar`, in Lark, it has one argument, a text, and the grammar says which texts.
    """

    name: str
    parameters: Schema = field(default_factory=dict)
    strict: bool = False
    grammar: str = ""

    @property
    def text_argument(self) -> str:
        """The name of the only argument, which a grammar is for."""
        return str(next(iter(self.parameters["properties"])))

    def held_to(self, grammar: str) -> OfferedTool:
        """Return this tool of one text argument, whose text a grammar allows. Its format has it written in quotes."""
        text = {self.text_argument: {"type": "string", "format": "lark"}}
        parameters = {**self.parameters, "properties": text}
        return replace(self, parameters=parameters, strict=True, grammar=grammar)

    def parameter(self, key: str) -> Schema | None:
        """Return the schema of one parameter; None where the tool's schema does not describe it."""
        properties = self.parameters.get("properties")
        found = properties.get(key) if isinstance(properties, Mapping) else None
        return found if isinstance(found, Mapping) else None


def kinds(schema: Schema) -> frozenset[str]:
    """Return the JSON types that a schema names; empty where it names none, and any may come."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(kind_of(value) for value in values)


def kind_of(value: object) -> str:
    """Return the JSON type of a value."""
    return next((kind for cls, kind in _KINDS if isinstance(value, cls)), "null")


def is_kind(value: object, allowed: frozenset[str]) -> bool:
    """Return whether a value has one of these JSON types; no types allow all."""
    kind = kind_of(value)
    return not allowed or kind in allowed or (kind == "integer" and "number" in allowed)


def is_plain_text(schema: Schema) -> bool:
    """Return whether a value is a string that may be written without quotes: nothing limits how it is spelled."""
    return kinds(schema) == {"string"} and not any(limit in schema for limit in _TEXT_LIMITS)
