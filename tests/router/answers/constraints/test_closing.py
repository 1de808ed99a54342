"""Objects of JSON schemas are closed where that is safe, and the constraint then ends with the last named property."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cli.demo_model import CHECKPOINT
from common.constraint_grammar import grammar_of, parser_limits
from common.contracts.types import Constraint, ConstraintKind
from router.answers.constraints.closing import close, closed_text

A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
CLOSED_A, CLOSED_B = {**A, "additionalProperties": False}, {**B, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED_A),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"items": A}, {"items": CLOSED_A}),
        ({"items": [A, B]}, {"items": [CLOSED_A, CLOSED_B]}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": A}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED_A}}),
        (
            {"properties": {"x": A}, "additionalProperties": B},
            {"properties": {"x": CLOSED_A}, "additionalProperties": CLOSED_B},
        ),
        ({"patternProperties": {"^x": A}, **B}, {"patternProperties": {"^x": CLOSED_A}, **CLOSED_B}),
        ({**A, "anyOf": [{"required": ["a"]}]}, {**CLOSED_A, "anyOf": [{"required": ["a"]}]}),
        # The properties of a property are its own affair.
        (
            {"allOf": [{"properties": {"x": A}}, B]},
            {"allOf": [{"properties": {"x": CLOSED_A}}, B]},
        ),
    ],
)
def test_what_is_closed(schema: Any, closed: Any) -> None:
    assert json.loads(closed_text(json.dumps(schema))) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "additionalProperties": True, "properties": {}},
        {"additionalProperties": {"type": "integer"}, "properties": {}},
        {"unevaluatedProperties": False, "properties": {}},
        {"properties": {}, "required": ["other"]},
        {"properties": {}, "minProperties": 1},
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "anyOf": [B, {"type": "object"}]},
        {**A, "$ref": "#/$defs/b", "$defs": {"b": B}},
        {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}},
        {"allOf": [{"$ref": "#/$defs/a~1"}, {"oneOf": [B]}], "$defs": {"a/": {"$ref": "#/$defs/c"}, "c": A}},
        {"$ref": "#/allOf/0", "allOf": [A, B]},
        {"const": A, "enum": [A], "default": A, "examples": [A]},
        {"not": A},
        {"properties": 3, "items": 3, "allOf": [3], "$ref": "#/x/y", "required": 3},
        [A],
        True,
    ],
)
def test_what_is_left_open(schema: Any) -> None:
    text = json.dumps(schema)
    assert closed_text(text) == text


@pytest.mark.parametrize("text", ["", "{", "[" * 30_000, '{"a":' * 30_000, '{"a": ' + "9" * 5_000 + "}"])
def test_what_is_no_schema_is_left_to_the_examiner(text: str) -> None:
    assert closed_text(text) == text


def test_a_schema_that_refers_to_itself_is_closed_once() -> None:
    schema: dict[str, Any] = {"properties": {"next": {"$ref": "#"}}}
    assert close(schema)
    assert not close(schema)


@pytest.mark.parametrize(
    ("schema", "document", "follows"),
    [
        (A, '{"a": 1, "more": 2}', False),
        (A, '{"a": 1}', True),
        ({"allOf": [A, B]}, '{"a": 1, "b": 2}', True),
        ({"anyOf": [A, B]}, '{"b": 2}', True),
        ({"oneOf": [A, B]}, '{"b": 2}', True),
        ({**A, "additionalProperties": True}, '{"a": 1, "more": 2}', True),
        ({**A, "patternProperties": {"^x": {"type": "integer"}}}, '{"a": 1, "x1": 2}', True),
    ],
)
def test_documents_follow_the_closed_schema(schema: Any, document: str, follows: bool) -> None:
    tokenizer = LLTokenizer(str(CHECKPOINT / "tokenizer.json"))
    text = closed_text(json.dumps({"type": "object", **schema}))
    grammar = grammar_of(Constraint(ConstraintKind.JSON_SCHEMA, text))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    tokens = tokenizer.tokenize_str(document)
    assert not matcher.is_error(), matcher.get_error()
    assert (matcher.try_consume_tokens(tokens) == len(tokens)) is follows
