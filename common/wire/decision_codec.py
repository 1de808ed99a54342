"""Decision records to their message on the wire."""

from __future__ import annotations

from common.types import Candidate, Decision
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


def trace_id_of(traceparent: str) -> str:
    """Return the 32 hexadecimal digits of the trace id in a W3C traceparent; "" if there is none."""
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
