"""Converts a constraint to llguidance's notation: the router checks the constraint, the worker computes its masks.

Needs `llguidance`, which the extras of router and worker install; nothing else of `common` imports this module.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from common.contracts.json_schema import enforceable
from common.contracts.types import Constraint, ConstraintKind

# Items of the parser at one token. An ambiguous grammar (`s: s s | /./ |`) makes more with each token. At llguidance's
# limit of 50,000 one mask took 130 ms, and all sequences of the step wait for it. With 5,000 it is refused at 15 ms.
_MAX_ITEMS = 5_000
# Items of the parser after one token: about four for each property that may come next. llguidance's own limit, 2,000,
# refuses 500 optional properties.
_MAX_ROW_ITEMS = 5_000
# A JSON document may have one space between its parts, as most programs write it. That costs fewest tokens, and some
# models never stop writing blanks when they may.
_WHITESPACE: Any = {"whitespace_pattern": " "}

_OF_A_LIMIT = re.compile(r"limit|max is|fuel|too many|too complex|too large", re.IGNORECASE)


def grammar_of(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own notation. Raises ValueError for a schema that it cannot hold."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            # A schema may carry options for the compiler ("x-guidance"), such as other whitespace; it must not ask for
            # keywords to be ignored silently.
            schema = _schema(constraint.text)
            return LLMatcher.grammar_from_json_schema(schema, defaults=_WHITESPACE, overrides={"lenient": False})
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            # The text is wrapped: llguidance would parse a text that begins with a brace as its own notation.
            return json.dumps({"grammars": [{"lark_grammar": _lark(constraint.text)}]})


def _schema(text: str) -> str:
    """Return a JSON schema in the form that llguidance enforces; what is not JSON is left to its error."""
    try:
        schema = enforceable(json.loads(text))
    except RecursionError as error:
        raise ValueError("recursion limit exceeded") from error
    except ValueError:
        return text
    # `true` and `{}` allow the same; options can only be added to an object.
    return "{}" if schema is True else json.dumps(schema)


def _lark(text: str) -> str:
    """Return a grammar in Lark's notation; one in GBNF (`root ::= ...`), as llama.cpp has it, is converted."""
    if "::=" not in text or is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception too
        raise ValueError(f"as GBNF: {error}") from None


def passes_a_limit(error: str) -> bool:
    """Return whether an error of llguidance says that the grammar is too large, and not that a token is wrong."""
    return _OF_A_LIMIT.search(error) is not None


def parser_limits() -> LLParserLimits:
    """Return the limits of compiling and of one mask: about 0.1 s to compile, about 15 ms a mask.

    Verbose errors are off, because they quote tokens of the output.
    """
    return LLParserLimits(step_max_items=_MAX_ITEMS, max_items_in_row=_MAX_ROW_ITEMS, verbose_errors=False)
