"""One page of the decisions of several routers: their newest records by time, and where each of them goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.contracts.limits import MAX_LISTED_BYTES
from common.decisions.pages import token_of
from quire.decision.v1 import decision_pb2 as pb


def merged(
    answers: Sequence[pb.ListDecisionsResponse], bounds: Mapping[str, int] | None, limit: int
) -> pb.ListDecisionsResponse:
    """Return the newest `limit` records of all answers, oldest first, with the token of those before them.

    The records of one process stay in the order in which it made them, whatever its clock did meanwhile.
    """
    left = {answer.source: list(answer.decisions) for answer in answers}
    taken, room = list[pb.DecisionRecord](), MAX_LISTED_BYTES
    reached = {source: (bounds or {}).get(source, records[-1].sequence + 1 if records else 0)
               for source, records in left.items()}  # fmt: skip
    while len(taken) < limit and any(left.values()):
        source = max(
            (each for each, records in left.items() if records), key=lambda each: left[each][-1].time_unix_nano
        )
        room -= left[source][-1].ByteSize()
        if taken and room < 0:
            break
        record = left[source].pop()
        reached[source] = record.sequence
        taken.append(record)
    more = any(left.values()) or any(answer.next_page_token for answer in answers)
    return pb.ListDecisionsResponse(
        decisions=reversed(taken),
        next_page_token=token_of(reached) if more else "",
        complete_since_unix_nano=max((answer.complete_since_unix_nano for answer in answers), default=0),
        source=answers[0].source if len(answers) == 1 else "",
    )
