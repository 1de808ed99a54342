"""Gathers a request's violations field by field, and has the ranges of its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.contracts.errors import FieldViolation
from common.contracts.limits import MAX_LOGPROBS, MAX_SEQUENCES

# Wrong entries of a list that are reported one by one.
_MOST_NAMED = 5
# Violations that are reported at most.
_MOST_VIOLATIONS = 100


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a field may have, `low` to `high`; `open_low` leaves out `low` itself."""

    low: float
    high: float
    open_low: bool = False
    hint: str = ""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.open_low and value == self.low) and math.isfinite(value)

    def __str__(self) -> str:
        if self.high == math.inf:
            words = f"more than {self.low:g}" if self.open_low else f"{self.low:g} or more"
        else:
            words = (
                f"more than {self.low:g}, at most {self.high:g}" if self.open_low else f"{self.low:g} to {self.high:g}"
            )
        return words + (f" ({self.hint})" if self.hint else "")


RANGES = {
    "temperature": Range(0, math.inf, hint="0 is greedy"),
    "top_p": Range(0, 1, open_low=True, hint="1 keeps all tokens"),
    "top_k": Range(0, math.inf, hint="0 keeps all tokens"),
    "min_p": Range(0, 1),
    "max_tokens": Range(1, math.inf),
    "min_tokens": Range(0, math.inf),
    "repetition_penalty": Range(0, math.inf, open_low=True, hint="1 is none"),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "n": Range(1, MAX_SEQUENCES),
}


@dataclass(slots=True)
class Report:
    violations: list[FieldViolation] = field(default_factory=list)

    def add(self, path: str, what: str) -> None:
        self.add_violation(FieldViolation(path, what))

    def add_violation(self, violation: FieldViolation) -> None:
        if len(self.violations) < _MOST_VIOLATIONS:
            self.violations.append(violation)

    def check(self, path: str, value: float, allowed: Range) -> None:
        if value not in allowed:
            shown = f"{value:.7g}" if isinstance(value, float) else value
            self.add(path, f"is {shown}; expected {allowed}")

    def fits(self, path: str, count: int, most: int, unit: str) -> bool:
        """Return whether there are at most `most`; else add a violation. A loop over them comes after this check."""
        if count > most:
            self.add(path, f"has {count} {unit}; expected at most {most}")
        return count <= most

    def holds(self, wrong: Sequence[FieldViolation]) -> bool:
        """Return whether nothing is wrong; else add the violations."""
        for each in wrong:
            self.add_violation(each)
        return not wrong

    def check_ids(self, path: str, ids: Sequence[int], vocab_size: int) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            return
        wrong = [(place, token_id) for place, token_id in enumerate(ids) if not 0 <= token_id < vocab_size]
        for place, token_id in wrong[:_MOST_NAMED]:
            self.add(f"{path}[{place}]", f"is {token_id}; expected a token id, 0 to {vocab_size - 1}")
        if len(wrong) > _MOST_NAMED:
            self.add(path, f"has {len(wrong) - _MOST_NAMED} more ids out of the vocabulary")
