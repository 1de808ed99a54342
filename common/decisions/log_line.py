"""The log line of a decision record: the same facts as its span event and its RPC, with the id of its trace.

A decision that costs a request something is logged at info, one that every request has at debug. Standard library only.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from common.types import Candidate, Decision, DecisionKind

log = logging.getLogger("quire.decisions")

_COSTLY: Final = frozenset({DecisionKind.REJECTION, DecisionKind.PREEMPTION, DecisionKind.MIGRATION})


def log_decision(decision: Decision) -> None:
    """Log a record; costs next to nothing when its level is off."""
    level = logging.INFO if decision.kind in _COSTLY else logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "%s: %s", decision.kind, decision.chosen, extra=_fields(decision))


def _fields(decision: Decision) -> dict[str, Any]:
    """Return the record without its empty fields; its kind and choice are the message."""
    whole = {
        "decision_id": decision.decision_id,
        "request_id": decision.request_id,
        "tenant": decision.tenant,
        "reasons": list(decision.reasons),
        "victim": decision.victim,
        "beneficiary": decision.beneficiary,
        "figures": dict(decision.figures),
        "signal_ages": dict(decision.signal_ages),
        "candidates": [candidate_fields(each) for each in decision.candidates],
        "traceparent": decision.traceparent,
    }
    return {name: value for name, value in whole.items() if value}


def candidate_fields(candidate: Candidate) -> dict[str, Any]:
    """Return an option of a decision without its empty fields; a term keeps its own name."""
    parts = {
        "name": candidate.name,
        "cost": candidate.cost,
        **dict(candidate.terms),
        "figures": dict(candidate.figures),
        "rejected": candidate.rejected,
    }
    return {name: value for name, value in parts.items() if value not in (None, "", {})}
