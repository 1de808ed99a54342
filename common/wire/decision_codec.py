"""Decision records to their message on the wire, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from common.contracts.types import Candidate, Decision, DecisionKind
from quire.decision.v1 import decision_pb2


def decision_to_proto(decision: Decision) -> decision_pb2.DecisionRecord:
    """Return the message of a record; of its traceparent the trace id alone."""
    return decision_pb2.DecisionRecord(
        decision_id=decision.decision_id,
        kind=decision.kind,
        time_unix_nano=decision.time_ns,
        request_id=decision.request_id,
        chosen=decision.chosen,
        candidates=[candidate_to_proto(candidate) for candidate in decision.candidates],
        reasons=decision.reasons,
        signal_ages=dict(decision.signal_ages),
        victim=decision.victim,
        beneficiary=decision.beneficiary,
        figures=dict(decision.figures),
        trace_id=trace_id_of(decision.traceparent),
        tenant=decision.tenant,
        worker=decision.worker,
        session=decision.session,
    )


def decision_from_proto(message: decision_pb2.DecisionRecord) -> Decision:
    """Return the record of a message, without its traceparent. Raises ValueError for a kind that is unknown here."""
    return Decision(
        decision_id=message.decision_id,
        kind=DecisionKind(message.kind),
        time_ns=message.time_unix_nano,
        chosen=message.chosen,
        request_id=message.request_id,
        candidates=tuple(map(_candidate_from_proto, message.candidates)),
        reasons=tuple(message.reasons),
        signal_ages=_pairs(message.signal_ages),
        victim=message.victim,
        beneficiary=message.beneficiary,
        figures=_pairs(message.figures),
        tenant=message.tenant,
        worker=message.worker,
        session=message.session,
    )


def known_decisions(messages: Iterable[decision_pb2.DecisionRecord]) -> Iterator[Decision]:
    """Yield the records of kinds that this version knows; a newer service may have others."""
    for each in messages:
        try:
            yield decision_from_proto(each)
        except ValueError:
            continue


def _candidate_from_proto(message: decision_pb2.Candidate) -> Candidate:
    cost = message.cost if message.HasField("cost") else None
    return Candidate(message.name, cost, _pairs(message.terms), message.rejected, _pairs(message.figures))


def _pairs(numbers: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Return the pairs of a map, sorted: a map on the wire has no order."""
    return tuple(sorted(numbers.items()))


def trace_id_of(traceparent: str) -> str:
    """Return the 32 hexadecimal digits of the trace id in a W3C traceparent; "" if there is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else ""


def candidate_to_proto(candidate: Candidate) -> decision_pb2.Candidate:
    return decision_pb2.Candidate(
        name=candidate.name,
        cost=candidate.cost,
        terms=dict(candidate.terms),
        rejected=candidate.rejected,
        figures=dict(candidate.figures),
    )
