"""Schemas that allow the same in another form: without annotations, or as a part of another schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
)
# Where schemas stand within a schema: as the value of a keyword, in a list, or under names that callers chose.
_SCHEMA = frozenset(("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"))
_LIST = frozenset(("anyOf", "allOf", "oneOf", "prefixItems"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def without_annotations(schema: Any) -> Any:
    """Return a schema without descriptions, which can be longer than all that is enforced.

    Constants and unknown keywords stay as they are.
    """
    if not isinstance(schema, Mapping):
        return schema
    return {key: _of_parts(without_annotations, key, value) for key, value in schema.items() if key not in _ANNOTATIONS}


def moved(schema: Any, place: str) -> Any:
    """Return a whole schema as a part of another one, where it stands at `place`, such as `#/properties/a`."""
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _of_parts(lambda part: moved(part, place), key, value) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        made["$ref"] = place + target[1:]
    return made


def _of_parts(form: Callable[[Any], Any], key: str, value: Any) -> Any:
    """Return the value of a keyword with another form of each schema in it."""
    if key in _SCHEMA:
        return form(value)
    if key in _LIST and isinstance(value, list):
        return [form(one) for one in value]
    if key in _NAMED and isinstance(value, Mapping):
        return {name: form(one) for name, one in value.items()}
    return value
