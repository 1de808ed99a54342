"""Closes JSON schemas: an object that names its properties gets `additionalProperties: false`, unless it has the key.

JSON Schema allows further properties wherever `additionalProperties` is missing. A model that may write them runs away
into ever more of them, and few authors of schemas want any. Left open are objects that no closing can keep
satisfiable: those that require other properties than they name, and those whose properties several schemas name
together (`allOf`, or `anyOf` and `$ref` beside `properties`), because each of these sees its own names alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import unquote

Schema = dict[str, Any]

_ADDITIONAL: Final = "additionalProperties"
# Keywords whose value is a schema, a list of schemas, or an object of schemas.
_ONE: Final = ("items", "additionalItems", "contains", "propertyNames", _ADDITIONAL, "unevaluatedItems", "then", "else")
_LIST: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_SAYS_ITSELF: Final = (_ADDITIONAL, "unevaluatedProperties")


def closed_text(text: str) -> str:
    """Return a schema, as JSON, with its objects closed; what is not a schema is returned as it is."""
    try:
        schema = json.loads(text)
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":")) if close(schema) else text
    except (ValueError, RecursionError):
        return text


def close(schema: object) -> bool:
    """Close the objects of a schema, in place; return whether there were any to close."""
    if not isinstance(schema, dict):
        return False
    schemas = list(_schemas(schema))
    composed = {id(part) for each in schemas for part in _composed(each, schema)}
    found = [each for each in schemas if _can_be_closed(each) and id(each) not in composed]
    for each in found:
        each[_ADDITIONAL] = False
    return bool(found)


def _schemas(root: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas in it."""
    waiting: list[object] = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            yield schema
            waiting += [schema.get(name) for name in _ONE]
            waiting += [each for name in _LIST for each in _entries(schema, name)]
            waiting += [each for name in _NAMED for each in _members(schema, name)]


def _can_be_closed(schema: Schema) -> bool:
    names, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(names, dict) or not isinstance(required, list) or any(each in schema for each in _SAYS_ITSELF):
        return False
    least = schema.get("minProperties", 0)
    return all(name in names for name in required if isinstance(name, str)) and not (
        isinstance(least, int) and least > len(names)
    )


def _composed(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Yield the schemas that name the properties of an object together, if they are more than one."""
    own = [schema] if "properties" in schema else []
    choices = [*_entries(schema, "anyOf"), *_entries(schema, "oneOf")]
    groups = [own, *(_naming([each], root) for each in _entries(schema, "allOf")), _naming(choices, root)]
    groups.append(_naming([_target(schema, root)], root))
    naming = [group for group in groups if group]
    if len(naming) > 1:
        yield from (each for group in naming for each in group)


def _naming(parts: Iterable[object], root: Schema) -> list[Schema]:
    """Return the schemas that name properties of the object itself, among some, what they consist of and refer to."""
    waiting, seen = list(parts), dict[int, Schema]()
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in seen:
            seen[id(schema)] = schema
            waiting += [each for name in ("allOf", "anyOf", "oneOf") for each in _entries(schema, name)]
            waiting.append(_target(schema, root))
    return [each for each in seen.values() if "properties" in each]


def _target(schema: Schema, root: Schema) -> object:
    """Return what a reference within the document refers to; None without one."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _entries(schema: Schema, name: str) -> list[object]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _members(schema: Schema, name: str) -> list[object]:
    value = schema.get(name)
    return list(value.values()) if isinstance(value, dict) else []
