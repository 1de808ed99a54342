"""Decision records to their message on the wire and back."""

from __future__ import annotations

from common.types import Candidate, Decision, DecisionKind
from quire.decision.v1 import decision_pb2


def decision_to_proto(decision: Decision) -> decision_pb2.DecisionRecord:
    """Return the message of a record; of its traceparent the trace id alone."""
    return decision_pb2.DecisionRecord(
        decision_id=decision.decision_id,
        kind=decision.kind,
        time_unix_nano=decision.time_ns,
        request_id=decision.request_id,
        chosen=decision.chosen,
        candidates=[_candidate_to_proto(candidate) for candidate in decision.candidates],
        reasons=decision.reasons,
        signal_ages=dict(decision.signal_ages),
        victim=decision.victim,
        beneficiary=decision.beneficiary,
        figures=dict(decision.figures),
        trace_id=trace_id_of(decision.traceparent),
    )


def decision_from_proto(record: decision_pb2.DecisionRecord) -> Decision:
    """Return the record of a message. Maps have no order: terms, ages and figures come sorted by name.

    Its `traceparent` is empty: the message has the trace id alone. Raises ValueError for a kind that nobody knows here.
    """
    return Decision(
        decision_id=record.decision_id,
        kind=DecisionKind(record.kind),
        time_ns=record.time_unix_nano,
        chosen=record.chosen,
        request_id=record.request_id,
        candidates=tuple(_candidate_from_proto(candidate) for candidate in record.candidates),
        reasons=tuple(record.reasons),
        signal_ages=tuple(sorted(record.signal_ages.items())),
        victim=record.victim,
        beneficiary=record.beneficiary,
        figures=tuple(sorted(record.figures.items())),
    )


def trace_id_of(traceparent: str) -> str:
    """Return the 32 hexadecimal digits of the trace id in a W3C traceparent; nothing if there is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else ""


def _candidate_to_proto(candidate: Candidate) -> decision_pb2.Candidate:
    return decision_pb2.Candidate(
        name=candidate.name,
        cost=candidate.cost,
        terms=dict(candidate.terms),
        rejected=candidate.rejected,
        figures=dict(candidate.figures),
    )


def _candidate_from_proto(candidate: decision_pb2.Candidate) -> Candidate:
    return Candidate(
        name=candidate.name,
        cost=candidate.cost if candidate.HasField("cost") else None,
        terms=tuple(sorted(candidate.terms.items())),
        rejected=candidate.rejected,
        figures=tuple(sorted(candidate.figures.items())),
    )
