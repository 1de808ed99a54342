"""The log line of a decision record: the same facts as its span event and its RPC, with the id of its trace.

A decision that costs a request something is logged at info, one that every request has at debug. A client causes as
many of the first as it likes: their lines are few and short, unless debug is on. The record itself is always whole.
Standard library only.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from common.contracts.limits import MAX_DECISION_LINES, MAX_LINE_ITEMS, MAX_LINE_REASON_CHARS
from common.contracts.types import Candidate, Decision, DecisionKind
from common.untrusted.rare_lines import RareLines

log = logging.getLogger("quire.decisions")

_COSTLY: Final = frozenset({DecisionKind.REJECTION, DecisionKind.PREEMPTION, DecisionKind.MIGRATION})
_LINES: Final = {kind: RareLines(1.0, MAX_DECISION_LINES) for kind in _COSTLY}


def log_decision(decision: Decision, quiet: bool = False) -> None:
    """Log a record, a `quiet` one at debug alone; costs next to nothing when its level is off."""
    costly = decision.kind in _COSTLY and not quiet
    if log.isEnabledFor(logging.DEBUG):
        level = logging.INFO if costly else logging.DEBUG
        log.log(level, "%s: %s", decision.kind, decision.chosen, extra=_fields(decision))
        return
    if not costly or not log.isEnabledFor(logging.INFO):
        return
    if (held_back := _LINES[decision.kind].next()) is not None:
        extra = _short(_fields(decision)) | ({"lines_held_back": held_back} if held_back else {})
        log.info("%s: %s", decision.kind, decision.chosen, extra=extra)


def _fields(decision: Decision) -> dict[str, Any]:
    """Return the record without its empty fields; its kind and choice are the message."""
    whole = {
        "decision_id": decision.decision_id,
        "request_id": decision.request_id,
        "tenant": decision.tenant,
        "session": decision.session,
        "reasons": list(decision.reasons),
        "victim": decision.victim,
        "beneficiary": decision.beneficiary,
        "figures": dict(decision.figures),
        "signal_ages": dict(decision.signal_ages),
        "candidates": [candidate_fields(each) for each in decision.candidates],
        "traceparent": decision.traceparent,
    }
    return {name: value for name, value in whole.items() if value}


def _short(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the first few candidates and reasons, and how many more there are."""
    left_out = {}
    for name in ("candidates", "reasons"):
        items = fields.get(name, ())
        if len(items) > MAX_LINE_ITEMS:
            left_out[f"more_{name}"] = len(items) - MAX_LINE_ITEMS
            fields[name] = items[:MAX_LINE_ITEMS]
    if "reasons" in fields:
        fields["reasons"] = [reason[:MAX_LINE_REASON_CHARS] for reason in fields["reasons"]]
    return fields | left_out


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
