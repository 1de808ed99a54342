"""Writes JSON schemas so that llguidance can enforce them: with other words for the same, or for a little less.

What it refuses for its form alone has another form here: bounds beyond 64 bits, names of properties that a pattern
matches too, options that cannot overlap. An unknown format is an annotation, as JSON Schema says. `lenient` is for
schemas that need not be enforced, such as those of tools that are not strict: it leaves out what cannot be.

A schema is anybody's, and a router rewrites it on its event loop. So patterns are tried where that is quick, on few
names, and little is copied; what is beyond that stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

Schema = dict[str, Any]

# Formats that llguidance 1.9 enforces.
_FORMATS: Final = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid".split())
# Beyond these bounds it finds no expression for a range.
_INTEGERS: Final = (-(2**62), 2**63 - 1)
_NUMBERS: Final = (-(10**18), 10**18)
_NOT_ENFORCED: Final = (
    "not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies "
    "unevaluatedProperties unevaluatedItems uniqueItems propertyNames"
).split()
# Steps of numbers whose multiples have an expression of a tolerable size.
_STEPS: Final = (1e-6, 1e6)
_NOT_REGULAR: Final = re.compile(r"\(\?<?[=!]|\\[1-9bBkcZAzG]")
# Patterns that take time in proportion to a name: without groups, with one part at most that may match more or less.
_GROUP_OR_REFERENCE: Final = re.compile(r"[()]|\\[1-9]")
_OPEN_ENDED: Final = re.compile(r"(?<!\\)[*+?]|\{\d*,\d*\}")
_MOST_NAME: Final = 64
_WORDS: Final = re.compile(r"\^(?:\((?:\?:)?)?([\w\-:@/ ]+(?:\|[\w\-:@/ ]+)*)\)?\$")
# Where schemas stand within a schema: as the value of a keyword, in a list, or under names that callers chose.
_SCHEMA: Final = frozenset("items additionalProperties additionalItems not if then else contains propertyNames".split())
_LIST: Final = frozenset(("anyOf", "allOf", "oneOf", "prefixItems", "items"))
_NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


@dataclass(slots=True)
class _Left:
    """What may still be spent on one whole schema: trials of a pattern on a name, and schemas that are copied."""

    trials: int = 1_000
    copies: int = 2_000


def enforceable(schema: Any, lenient: bool = False) -> Any:
    """Return a schema all of whose documents match `schema`, in a form that can be enforced as far as this knows.

    `lenient`: what cannot be enforced is left out, and some documents do not match. Raises RecursionError.
    """
    return _rewritten(schema, lenient, _Left())


def _rewritten(schema: Any, lenient: bool, left: _Left) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _of_parts(lambda part: _rewritten(part, lenient, left), key, value) for key, value in schema.items()}
    for rewrite in (_format, _bounds, _unique, _one_of):
        rewrite(made)
    _names(made, left)
    _patterns(made, left)
    if lenient:
        _leave_out(made)
    return made


def _of_parts(form: Callable[[Any], Any], key: str, value: Any) -> Any:
    """Return the value of a keyword with another form of each schema in it."""
    if key in _LIST and isinstance(value, list):
        return [form(one) for one in value]
    if key in _SCHEMA:
        return form(value)
    if key in _NAMED and isinstance(value, Mapping):
        return {name: form(one) for name, one in value.items()}
    return value


def _format(schema: Schema) -> None:
    if schema.get("format") not in _FORMATS:
        schema.pop("format", None)


def _bounds(schema: Schema) -> None:
    """Bring bounds of numbers into what has an expression; those of draft 4 are written as in later drafts."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
            schema[exclusive] = schema.pop(bound)
    least, most = _INTEGERS if schema.get("type") == "integer" else _NUMBERS
    for low in ("minimum", "exclusiveMinimum"):
        if _is_number(schema.get(low)) and schema[low] < least:
            del schema[low]
            schema["minimum"] = max(least, schema.get("minimum", least))
    for high in ("maximum", "exclusiveMaximum"):
        if _is_number(schema.get(high)) and schema[high] > most:
            del schema[high]
            schema["maximum"] = min(most, schema.get("maximum", most))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unique(schema: Schema) -> None:
    """Leave out what an array of one item at most meets by itself."""
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (isinstance(most, int | float) and most <= 1):
        schema.pop("uniqueItems", None)


def _one_of(schema: Schema) -> None:
    """Write `oneOf` as `anyOf` where no document can match two options: those of constants, or of different types."""
    options = schema.get("oneOf")
    if not isinstance(options, list) or "anyOf" in schema:
        return
    values = [each for each in map(_values, options) if each is not None]
    if len(values) == len(options) and len(frozenset().union(*values)) == sum(map(len, values)):
        schema["anyOf"] = schema.pop("oneOf")


def _values(option: Any) -> frozenset[str] | None:
    """Return the documents that an option allows, as JSON; None where there are others."""
    if not isinstance(option, Mapping):
        return None
    found = option["enum"] if isinstance(option.get("enum"), list) else [option["const"]] if "const" in option else None
    if found is None or any(isinstance(each, float | dict | list) for each in found):
        return None
    return frozenset(json.dumps(each) for each in found)


def _names(schema: Schema, left: _Left) -> None:
    """Write `propertyNames` as names or a pattern of properties, where it is a list of names or one pattern."""
    names = {} if schema.get("propertyNames") is True else schema.get("propertyNames")
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return
    limits = names.keys() - {"type", "title", "description"}
    if not limits:
        del schema["propertyNames"]
    others = schema.get("additionalProperties", True)
    if not limits or "patternProperties" in schema:
        return
    given = dict(schema["properties"]) if isinstance(schema.get("properties"), Mapping) else {}
    if (allowed := _values(names)) is not None and limits <= {"enum", "const"}:
        words = [each for each in map(json.loads, allowed) if isinstance(each, str)]
        listed = {name: given.get(name, others) for name in words}
        schema |= {"properties": {n: s for n, s in listed.items() if s is not False}, "additionalProperties": False}
        del schema["propertyNames"]
    elif (
        limits == {"pattern"} and _may_try(len(given), left) and all(_matches(names["pattern"], name) for name in given)
    ):
        schema["patternProperties"] = {names["pattern"]: others}
        schema["additionalProperties"] = False
        del schema["propertyNames"]


def _patterns(schema: Schema, left: _Left) -> None:
    """Give a named property what the patterns demand that match its name, too; a pattern of a few words becomes names.

    llguidance keeps the names of `properties` from the patterns. What such a pattern has left may be nothing, and the
    output would have to end where a name is due.
    """
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, Mapping) or not all(isinstance(each, str) for each in patterns):
        return
    given = dict(schema["properties"]) if isinstance(schema.get("properties"), Mapping) else {}
    required = [each for each in _listed(schema.get("required")) if each not in given]
    lists = [each[1].split("|") for each in map(_WORDS.fullmatch, patterns) if each is not None]
    names = list(dict.fromkeys([*given, *required, *chain.from_iterable(lists)]))
    if not _may_try(len(names) * len(patterns), left):
        return
    found = {name: [form for pattern, form in patterns.items() if _matches(pattern, name)] for name in names}
    if not _may_copy([form for over in found.values() for form in over], left):
        return
    for name, over in found.items():
        if over:
            own = [given[name]] if name in given else []
            forms = [each for each in (*own, *over) if each is not True]
            given[name] = False if False in forms else _all_of(forms)
    kept = {pattern: form for pattern, form in patterns.items() if not _WORDS.fullmatch(pattern)}
    schema.pop("patternProperties")
    if kept:
        schema["patternProperties"] = kept
    if given:
        schema["properties"] = given


def _all_of(forms: list[Any]) -> Any:
    distinct = [each for place, each in enumerate(forms) if each not in forms[:place]]
    return True if not distinct else distinct[0] if len(distinct) == 1 else {"allOf": distinct}


def _listed(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _may_try(trials: int, left: _Left) -> bool:
    left.trials -= trials
    return left.trials >= 0


def _may_copy(forms: Sequence[Any], left: _Left) -> bool:
    """Count the schemas that would stand in several places; return whether that many may."""
    seen, waiting = set[int](), list[Any]()
    for form in forms:
        if id(form) in seen:
            waiting.append(form)
        seen.add(id(form))
    while waiting and left.copies > 0:
        each = waiting.pop()
        left.copies -= 1
        waiting += each.values() if isinstance(each, Mapping) else each if isinstance(each, list) else ()
    return not waiting


def _matches(pattern: Any, name: str) -> bool:
    """Return whether a pattern matches a name; one that Python cannot read, or not quickly, matches none."""
    if not isinstance(pattern, str) or len(name) > _MOST_NAME:
        return False
    if words := _WORDS.fullmatch(pattern):
        return name in words[1].split("|")
    if _GROUP_OR_REFERENCE.search(pattern) or len(_OPEN_ENDED.findall(pattern)) > 1:
        return False
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _leave_out(schema: Schema) -> None:
    """Leave out what cannot be enforced."""
    for key in _NOT_ENFORCED:
        schema.pop(key, None)
    if set(schema.get("properties") or ()) - set(_listed(schema.get("required"))):  # it counts required ones alone
        schema.pop("minProperties", None)
        schema.pop("maxProperties", None)
    step = schema.get("multipleOf")
    if isinstance(step, int | float) and not _STEPS[0] <= step <= _STEPS[1]:
        del schema["multipleOf"]
    if isinstance(schema.get("pattern"), str) and _NOT_REGULAR.search(schema["pattern"]):
        del schema["pattern"]
    if "oneOf" in schema and "anyOf" not in schema:
        schema["anyOf"] = schema.pop("oneOf")
    schema.pop("oneOf", None)
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping) and (len(patterns) > 1 or any(map(_NOT_REGULAR.search, patterns))):
        del schema["patternProperties"]
        schema["additionalProperties"] = True
