"""Reads the constraint of a body: OpenAI's `response_format`, and vLLM's names for the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.types import Constraint, ConstraintKind
from router.answers.constraints.closing import close
from router.answers.reading import AskedConstraint
from router.api.openai import allowed_tokens
from router.api.openai.types import GenerationFields, ResponseFormat

_ANY_OBJECT = '{"type": "object"}'


def constraint_of(body: GenerationFields) -> AskedConstraint | None:
    """Return the one constraint of a body. Raises InvalidRequest for a malformed one, or two that contradict."""
    asked = [*_of_response_format(body.response_format), *_of_structured_outputs(body), *_of_guided(body)]
    if body.allowed_token_ids is not None:
        asked.append(AskedConstraint(allowed_tokens.FIELD, allowed_tokens.allowed_tokens(body.allowed_token_ids)))
    for other in asked[1:]:
        if other.constraint != asked[0].constraint:
            names = (asked[0].field, other.field)
            raise InvalidRequest(
                FieldViolation(names[0], f"contradicts {names[1]}; give one of {names[0]}, {names[1]}")
            )
    return asked[0] if asked else None


def _of_response_format(given: ResponseFormat | None) -> Iterator[AskedConstraint]:
    if given is None or given.type == "text":
        return
    if given.type == "json_object":
        schema = given.schema_
        yield _json("response_format", _ANY_OBJECT) if schema is None else _json("response_format.schema", schema)
    elif given.type != "json_schema":
        what = f"is {given.type!r}; expected text, json_object or json_schema"
        raise InvalidRequest(FieldViolation("response_format.type", what))
    elif given.json_schema is None or given.json_schema.schema_ is None:
        what = 'is missing; expected {"name": ..., "schema": {...}}'
        raise InvalidRequest(FieldViolation("response_format.json_schema", what))
    else:
        if given.json_schema.strict:
            close(given.json_schema.schema_)
        yield _json("response_format.json_schema.schema", given.json_schema.schema_)


def _of_structured_outputs(body: GenerationFields) -> Iterator[AskedConstraint]:
    given = body.structured_outputs
    if given is None:
        return
    found = [*_each("structured_outputs.", given.json_, given.regex, given.grammar, given.choice)]
    if given.json_object:
        found.append(_json("structured_outputs.json_object", _ANY_OBJECT))
    if not found:
        what = "has none of json, regex, grammar, choice and json_object; expected one of them"
        raise InvalidRequest(FieldViolation("structured_outputs", what))
    yield from found


def _of_guided(body: GenerationFields) -> Iterator[AskedConstraint]:
    yield from _each("guided_", body.guided_json, body.guided_regex, body.guided_grammar, body.guided_choice)
    # SGLang's names.
    yield from _each("", None, body.regex, None, None)
    if body.json_schema is not None:
        yield _json("json_schema", body.json_schema)
    if body.ebnf is not None:
        yield AskedConstraint("ebnf", Constraint(ConstraintKind.GRAMMAR, body.ebnf))


def _each(
    prefix: str, schema: dict[str, Any] | str | None, regex: str | None, grammar: str | None, choice: list[str] | None
) -> Iterator[AskedConstraint]:
    if schema is not None:
        yield _json(f"{prefix}json", schema)
    if regex is not None:
        yield AskedConstraint(f"{prefix}regex", Constraint(ConstraintKind.REGEX, regex))
    if grammar is not None:
        yield AskedConstraint(f"{prefix}grammar", Constraint(ConstraintKind.GRAMMAR, grammar))
    if choice is not None:
        yield _choice(f"{prefix}choice", choice)


def _json(field: str, schema: dict[str, Any] | bool | str) -> AskedConstraint:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return AskedConstraint(field, Constraint(ConstraintKind.JSON_SCHEMA, text))


def _choice(field: str, choice: list[str]) -> AskedConstraint:
    if not choice:
        raise InvalidRequest(FieldViolation(field, "is empty; expected at least one text"))
    # Lark writes strings as JSON does. As one terminal, the texts make states of a lexer; as alternatives of a rule,
    # each would be an item of the parser, and 2,000 are too many.
    texts = " | ".join(map(json.dumps, choice))
    return AskedConstraint(field, Constraint(ConstraintKind.GRAMMAR, f"start: CHOICE\nCHOICE: {texts}"))
