"""A constraint as llguidance reads it: the router checks it in this form, the worker computes masks of it.

Needs `llguidance`, which the extras of router and worker bring; nothing else of `common` imports this module.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from common.types import Constraint, ConstraintKind

# Items of the parser at one token. An ambiguous grammar (`s: s s | /./ |`) makes more with each token: at llguidance's
# 50,000 one mask took 130 ms, for which all sequences of the step wait, at 5,000 it is refused at 15 ms.
_MAX_ITEMS = 5_000
# Between the parts of a JSON document there may be one space, as most programs write it: that costs fewest tokens, and
# some models, free to choose, never stop writing blanks.
_WHITESPACE: Any = {"whitespace_pattern": " "}


def grammar_of(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own notation. Raises ValueError when a JSON schema is no JSON object."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            # `true` and `{}` allow the same; options can be laid over an object alone.
            schema = "{}" if constraint.text.strip() == "true" else constraint.text
            # A schema may carry options for the compiler ("x-guidance"), such as other whitespace; it must not ask for
            # keywords to be passed over in silence.
            return LLMatcher.grammar_from_json_schema(schema, defaults=_WHITESPACE, overrides={"lenient": False})
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            # Wrapped here: llguidance would take a text that begins with a brace for its own notation.
            return json.dumps({"grammars": [{"lark_grammar": constraint.text}]})


def parser_limits() -> LLParserLimits:
    """Return what compiling and one mask may cost: some 0.1 s to compile at most, some 15 ms a mask.

    Without its verbose errors, which quote tokens of the output.
    """
    return LLParserLimits(step_max_items=_MAX_ITEMS, verbose_errors=False)
