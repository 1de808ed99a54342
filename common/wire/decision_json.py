"""Decision records as lines of JSON, and back: the JSON form of `DecisionRecord`, with the names of its fields.

So `quire decisions --json` prints them too. Integers of 64 bits are texts there, and empty fields are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from common.contracts.types import Candidate, Decision
from common.wire.decision_codec import decision_to_proto, trace_id_of
from quire.decision.v1 import decision_pb2 as pb

text_of: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
).encode
_INTEGERS: Final = ("sequence", "time_unix_nano")


def line_of(number: int, decision: Decision) -> bytes:
    """Return the line of a record, with its newline. Raises ValueError or TypeError where it has no message."""
    try:
        text = text_of(_fields(number, decision))
    except (ValueError, TypeError):  # a number that is not finite, or a kind of number that JSON does not know
        message = decision_to_proto(decision)
        message.sequence = number
        text = text_of(plain(message))
    return text.encode() + b"\n"


def plain(message: pb.DecisionRecord) -> dict[str, Any]:
    """Return the JSON form of a record; protobuf's own way takes six times as long as `line_of`."""
    return MessageToDict(message, preserving_proto_field_name=True)


def record_of(line: bytes) -> pb.DecisionRecord:
    """Return the record of a line, without fields that a newer Quire added. Raises ValueError where it has none."""
    fields = json.loads(line)
    try:
        return pb.DecisionRecord(**{**fields, **{name: int(fields.get(name, 0)) for name in _INTEGERS}})
    except (ValueError, TypeError, AttributeError):
        pass
    try:
        return ParseDict(fields, pb.DecisionRecord(), ignore_unknown_fields=True)
    except (ParseError, TypeError, AttributeError) as error:
        raise ValueError(f"is not a decision record: {error}") from None


def _fields(number: int, decision: Decision) -> dict[str, Any]:
    whole = {
        "decision_id": decision.decision_id,
        "kind": decision.kind,
        "time_unix_nano": str(decision.time_ns),
        "request_id": decision.request_id,
        "chosen": decision.chosen,
        "candidates": [_candidate(each) for each in decision.candidates],
        "reasons": decision.reasons,
        "signal_ages": dict(decision.signal_ages),
        "victim": decision.victim,
        "beneficiary": decision.beneficiary,
        "figures": dict(decision.figures),
        "trace_id": trace_id_of(decision.traceparent),
        "tenant": decision.tenant,
        "worker": decision.worker,
        "session": decision.session,
        "sequence": str(number),
    }
    return _filled(whole.items())


def _candidate(candidate: Candidate) -> dict[str, Any]:
    whole = {
        "name": candidate.name,
        "cost": candidate.cost,
        "terms": dict(candidate.terms),
        "rejected": candidate.rejected,
        "figures": dict(candidate.figures),
    }
    return _filled(whole.items())


def _filled(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value or value == 0.0}
