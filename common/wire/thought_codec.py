"""Codec of the budget of a thought."""

from __future__ import annotations

from collections.abc import Sequence

from common.contracts.types import ThoughtBudget
from quire.types.v1 import types_pb2

_SAME = ("max_tokens", "opener", "closer", "is_open", "anywhere")


def thought_to_proto(budget: ThoughtBudget | None) -> types_pb2.ThoughtBudget | None:
    """Return the budget without its end, whose tokens travel beside it."""
    if budget is None:
        return None
    return types_pb2.ThoughtBudget(**{name: getattr(budget, name) for name in _SAME})


def thought_from_proto(message: types_pb2.ThoughtBudget, end_token_ids: Sequence[int]) -> ThoughtBudget:
    return ThoughtBudget(end_token_ids=tuple(end_token_ids), **{name: getattr(message, name) for name in _SAME})
