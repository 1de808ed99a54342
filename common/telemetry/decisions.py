"""A decision record as the attributes of a span event; the log line and the RPC are made from the same record."""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterator, Mapping
from typing import Final

from opentelemetry.trace import Span

from common.contracts.types import Decision
from common.decisions.log_line import candidate_fields

EVENT = "decision"


class DecisionAttributes(Mapping[str, str | float | list[str]]):
    """The attributes of a decision, made at each reading: most traces in a router's ring are never read."""

    __slots__ = ("decision",)

    def __init__(self, decision: Decision) -> None:
        self.decision: Final = decision

    def items(self) -> ItemsView[str, str | float | list[str]]:
        """Return all at once; OTLP is written from these."""
        return attributes_of(self.decision).items()

    def __getitem__(self, key: str) -> str | float | list[str]:
        return attributes_of(self.decision)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(attributes_of(self.decision))

    def __len__(self) -> int:
        return len(attributes_of(self.decision))


def add_decision(span: Span, decision: Decision) -> None:
    """Add a decision to the span of its request; free when the span is not recorded."""
    if span.is_recording():
        span.add_event(EVENT, DecisionAttributes(decision), decision.time_ns)


def attributes_of(decision: Decision) -> dict[str, str | float | list[str]]:
    """Return the decision as flat attributes; empty fields are left out, candidates are one JSON object each."""
    whole: dict[str, str | float | list[str]] = {
        "quire.decision.id": decision.decision_id,
        "quire.decision.kind": str(decision.kind),
        "quire.decision.chosen": decision.chosen,
        "quire.decision.candidates": [json.dumps(candidate_fields(each)) for each in decision.candidates],
        "quire.decision.reasons": list(decision.reasons),
        "quire.decision.victim": decision.victim,
        "quire.decision.beneficiary": decision.beneficiary,
    }
    whole |= {f"quire.decision.age.{name}": seconds for name, seconds in decision.signal_ages}
    whole |= {f"quire.decision.{name}": value for name, value in decision.figures}
    return {key: value for key, value in whole.items() if value not in ("", [])}
