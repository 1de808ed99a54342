"""The cost model of a simulated step, and its notation in `--simulate`.

seconds of a step = base + decode · (rows that sample a token) + prefill · (positions beyond one for each such row)
seconds of its copies = frame · (blocks copied to host memory or back)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Final

DEFAULT_COSTS: Final = "base=5ms,decode=20us,prefill=50us"
_UNITS_PER_SECOND: Final = {"us": 1e6, "ms": 1e3, "s": 1.0}
_TERM: Final = re.compile(r"(\w+)=(\d+(?:\.\d+)?)(us|ms|s)")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step takes, in seconds."""

    base: float = 0.0
    decode: float = 0.0
    prefill: float = 0.0
    frame: float = 0.0

    def of(self, decodes: int, prefilled: int) -> float:
        """Return the seconds of a step with so many rows that sample and positions beyond those, without its copies."""
        return self.base + self.decode * decodes + self.prefill * prefilled


def parse_costs(text: str) -> StepCosts:
    """Return the costs that `text` gives, in the form of DEFAULT_COSTS. Raises ValueError for any other form.

    A term that is left out costs nothing.
    """
    terms = [_TERM.fullmatch(term.strip()) for term in text.split(",")]
    known = {each.name for each in fields(StepCosts)}
    found = {term[1]: float(term[2]) / _UNITS_PER_SECOND[term[3]] for term in terms if term is not None}
    if None in terms or not found.keys() <= known or len(found) < len(terms):
        raise ValueError(f"expected terms of {DEFAULT_COSTS},frame=0us, each at most once, in us, ms or s")
    return StepCosts(**found)
