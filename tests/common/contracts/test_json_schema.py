"""JSON schemas in the form that llguidance enforces: exact values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.contracts.json_schema import enforceable

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
SAME = [
    True,
    False,
    {},
    {"type": "string", "format": "date", "minLength": 1},
    {"type": "integer", "minimum": 0, "maximum": 5},
    {"type": "number", "exclusiveMinimum": -90, "maximum": 90},
    {"enum": [{"format": "zzz"}], "const": {"uniqueItems": False}},
    {"oneOf": [STRING, INTEGER]},
    {"oneOf": [{"const": 1}, {"enum": [1, 2]}]},
    {"propertyNames": {"maxLength": 3}},
    {"properties": {"format": STRING, "oneOf": INTEGER}},
]


@pytest.mark.parametrize("schema", SAME)
def test_what_has_a_form_stays(schema: Any) -> None:
    assert enforceable(schema) == schema


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"type": "string", "format": "password"}, STRING),
        ({"items": {"anyOf": [{"format": "zzz"}]}, "$defs": {"format": {"format": "a"}}},
         {"items": {"anyOf": [{}]}, "$defs": {"format": {}}}),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64},
         {"type": "integer", "minimum": -(2**62), "maximum": 2**63 - 1}),
        ({"type": "integer", "exclusiveMinimum": -1e30, "minimum": 3}, {"type": "integer", "minimum": 3}),
        ({"type": "number", "exclusiveMaximum": 1e300}, {"type": "number", "maximum": 10**18}),
        ({"minimum": 2, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False},
         {"exclusiveMinimum": 2, "maximum": 3}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
        ({"oneOf": [{"const": 1}, {"enum": ["1", None]}]}, {"anyOf": [{"const": 1}, {"enum": ["1", None]}]}),
        ({"propertyNames": True, "minProperties": 1}, {"minProperties": 1}),
        ({"propertyNames": STRING, "additionalProperties": INTEGER}, {"additionalProperties": INTEGER}),
        ({"propertyNames": {"pattern": "^a"}, "additionalProperties": INTEGER},
         {"patternProperties": {"^a": INTEGER}, "additionalProperties": False}),
        ({"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": INTEGER, "c": STRING}},
         {"properties": {"a": INTEGER, "b": True}, "additionalProperties": False}),
    ],
)  # fmt: skip
def test_what_has_none_gets_another_form(schema: Any, made: Any) -> None:
    assert enforceable(schema) == made


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        # Its name is taken, so the pattern has nothing left.
        ({"properties": {"score": INTEGER}, "patternProperties": {"^score$": INTEGER}},
         {"properties": {"score": INTEGER}}),
        ({"properties": {"ab": STRING}, "patternProperties": {"^a": {"maxLength": 3}}},
         {"properties": {"ab": {"allOf": [STRING, {"maxLength": 3}]}}, "patternProperties": {"^a": {"maxLength": 3}}}),
        ({"required": ["ab"], "patternProperties": {"^a": INTEGER}, "additionalProperties": False},
         {"required": ["ab"], "properties": {"ab": INTEGER}, "patternProperties": {"^a": INTEGER},
          "additionalProperties": False}),
        ({"patternProperties": {"^(a|b)$": STRING}}, {"properties": {"a": STRING, "b": STRING}}),
        ({"properties": {"ab": STRING}, "patternProperties": {"^a": False}},
         {"properties": {"ab": False}, "patternProperties": {"^a": False}}),
    ],
)  # fmt: skip
def test_a_named_property_gets_what_patterns_demand(schema: Any, made: Any) -> None:
    assert enforceable(schema) == made


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"type": "array", "items": {"pattern": "^(?!x)", "minLength": 2}, "uniqueItems": True},
         {"type": "array", "items": {"minLength": 2}}),
        ({"not": STRING, "if": STRING, "then": {}, "contains": INTEGER, "type": "array"}, {"type": "array"}),
        ({"oneOf": [STRING, {"maxLength": 3}]}, {"anyOf": [STRING, {"maxLength": 3}]}),
        ({"properties": {"a": STRING}, "minProperties": 1}, {"properties": {"a": STRING}}),
        ({"properties": {"a": STRING}, "required": ["a"], "minProperties": 2},
         {"properties": {"a": STRING}, "required": ["a"], "minProperties": 2}),
        ({"patternProperties": {"^a": STRING, "b$": INTEGER}}, {"additionalProperties": True}),
        ({"type": "integer", "multipleOf": 2**40}, INTEGER),
    ],
)  # fmt: skip
def test_what_need_not_be_enforced_is_left_out_where_it_cannot_be(schema: Any, made: Any) -> None:
    assert enforceable(schema, lenient=True) == made


def test_what_is_given_stays_as_it_is() -> None:
    given = {"properties": {"a": {"format": "zzz"}}, "patternProperties": {"^a$": STRING}}
    enforceable(given, lenient=True)
    assert given == {"properties": {"a": {"format": "zzz"}}, "patternProperties": {"^a$": STRING}}


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^a?a?a?a?b$", "a*a*a*b", r"^(a)\1$"])
def test_a_pattern_that_may_take_long_is_not_tried(pattern: str) -> None:
    schema = {"properties": {"a" * 60: STRING}, "patternProperties": {pattern: INTEGER}}
    assert enforceable(schema) == schema


def test_many_names_and_patterns_stay_as_they_are() -> None:
    schema = {
        "properties": {f"n{number}": STRING for number in range(1_500)},
        "patternProperties": {f"^m{number}": INTEGER for number in range(1_500)},
    }
    assert enforceable(schema) == schema


def test_nested_copies_are_bounded() -> None:
    """Each level would double the schema."""
    schema: Any = STRING
    for _ in range(40):
        schema = {"patternProperties": {"^(a|b)$": schema}}
    assert len(json.dumps(enforceable(schema))) < 100_000


def test_many_constants_are_compared_once() -> None:
    options = [{"const": number} for number in range(20_000)]
    assert enforceable({"oneOf": options}) == {"anyOf": options}
