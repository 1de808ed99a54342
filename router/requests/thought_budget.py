"""Checks the budget of a request's thoughts."""

from __future__ import annotations

from common.contracts.errors import FieldViolation
from common.contracts.limits import MAX_THOUGHT_END_CHARS, MAX_THOUGHT_MARK_CHARS
from quire.types.v1 import types_pb2
from router.answers.tools import quoted

_MOST = {"opener": MAX_THOUGHT_MARK_CHARS, "closer": MAX_THOUGHT_MARK_CHARS, "end": MAX_THOUGHT_END_CHARS}


def wrong_thought(given: types_pb2.ThoughtBudget) -> list[FieldViolation]:
    """Return what is wrong with a budget."""
    found = [
        FieldViolation(f"thought_budget.{name}", f"has {len(getattr(given, name))} characters; expected 1 to {most}")
        for name, most in _MOST.items()
        if not 0 < len(getattr(given, name)) <= most
    ]
    if not found and given.closer not in given.end:
        what = f"lacks the closing mark {quoted(given.closer)}; expected it, or the thought would not end"
        found.append(FieldViolation("thought_budget.end", what))
    return found
