"""The parameters of a tool one by one, for dialects that do not write arguments as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from router.answers.dialects.offered import Schema

# With these keywords alone a schema is a list of parameters.
_LIST = frozenset(
    (
        "type", "properties", "required", "additionalProperties", "title", "description", "default", "examples",
        "$schema", "$comment", "$defs", "definitions",
    )
)  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")


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
