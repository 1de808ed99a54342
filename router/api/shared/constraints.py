"""Constraints that clients give in other forms: any JSON object, a choice of texts, `allowed_token_ids`.

The output of `allowed_token_ids` consists of these tokens, as a grammar of them has it. A grammar also lets an output
end. A token that ends the text must be allowed by name, so others are made unlikely.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_CONSTRAINT_BYTES
from common.contracts.types import Constraint, ConstraintKind
from quire.types.v1 import types_pb2

FIELD: Final = "allowed_token_ids"
ANY_OBJECT: Final = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}')
# Each text has quotes and a bar in the grammar, so more of them make one that is too long.
_MOST_TEXTS: Final = MAX_CONSTRAINT_BYTES // len('"" | ')
# The lowest logit bias that requests may have: e^-100 of a probability.
_NEVER: Final = -100.0


def choice_of(texts: Sequence[str], field: str) -> Constraint:
    """Return the constraint to one of these texts. Raises InvalidRequest that names the field: none, or too many."""
    if not texts:
        raise InvalidRequest(FieldViolation(field, "is empty; expected at least one text"))
    if len(texts) > _MOST_TEXTS:
        raise InvalidRequest(FieldViolation(field, f"has {len(texts)} texts; expected at most {_MOST_TEXTS}"))
    # Lark writes strings as JSON does. As one terminal, the texts make states of a lexer; as alternatives of a rule,
    # each would be an item of the parser, and 2,000 are too many.
    quoted = " | ".join(map(json.dumps, texts))
    return Constraint(ConstraintKind.GRAMMAR, f"start: CHOICE\nCHOICE: {quoted}")


def allowed_tokens(ids: Sequence[int]) -> Constraint:
    """Return the constraint to any number of these tokens. Raises InvalidRequest without tokens."""
    if not ids:
        raise InvalidRequest(FieldViolation(FIELD, "is empty; expected at least one token id"))
    return Constraint(ConstraintKind.GRAMMAR, f"start: <[{','.join(_ranges(ids))}]>*")


def check_allowed(ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest that names the first id which is not in the vocabulary."""
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            what = f"is {token_id}; expected a token id, 0 to {vocab_size - 1}"
            raise InvalidRequest(FieldViolation(f"{FIELD}[{place}]", what))


def forbid_other_ends(sampling: types_pb2.SamplingParams, ids: Sequence[int], ends: Collection[int]) -> None:
    """Let none of `ends` end the output unless it is allowed."""
    for token_id in set(ends).difference(ids):
        sampling.logit_bias[token_id] = _NEVER


def _ranges(ids: Sequence[int]) -> Iterator[str]:
    """Yield the ids in order, those that follow each other as first-last."""
    ordered = sorted(set(ids))
    first = last = ordered[0]
    for token_id in [*ordered[1:], None]:
        if token_id is not None and token_id == last + 1:
            last = token_id
            continue
        yield str(first) if first == last else f"{first}-{last}"
        if token_id is not None:
            first = last = token_id
