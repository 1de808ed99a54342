"""Pages and watches of a decision ring as messages on the wire."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.types import DecisionKind
from common.decisions.query import DecisionQuery
from common.decisions.ring import DecisionRing, Numbered, Passed
from common.decisions.watch import watched
from common.process.loop_turns import in_steps
from common.wire.decision_codec import decision_to_proto
from quire.decision.v1 import decision_pb2 as pb

RING_MOVED_ON: Final = "ring_moved_on"
GONE: Final = "gone"
# Processes of one token: a router has a few siblings.
_MOST_SOURCES: Final = 1_024


def query_of(request: pb.ListDecisionsRequest | pb.WatchDecisionsRequest) -> DecisionQuery:
    """Return the filters of a call. Raises InvalidRequest for a kind that there is not."""
    if request.kind and request.kind not in set(DecisionKind):
        kinds = ", ".join(sorted(DecisionKind))
        raise InvalidRequest(FieldViolation("kind", f"is {request.kind[:40]!r}; expected one of {kinds}"))
    texts = request.request_id, request.kind, request.tenant, request.worker
    if isinstance(request, pb.WatchDecisionsRequest):
        return DecisionQuery(*texts)
    return DecisionQuery(*texts, request.session, request.since_unix_nano, request.until_unix_nano)


async def page_of(ring: DecisionRing, request: pb.ListDecisionsRequest) -> pb.ListDecisionsResponse:
    """Return the records of one process that a call asks for, and the token of those before them.

    The records are chosen at once. Their messages are made in steps, because there may be a thousand of them.
    """
    query, bounds = query_of(request), bounds_of(request.page_token)
    before = None if bounds is None else bounds.get(ring.source, 0)
    page = ring.page(query, request.limit, before)
    token = token_of({ring.source: page.records[0][0]}) if page.more else ""
    complete_since = ring.complete_since_ns
    return pb.ListDecisionsResponse(
        decisions=await in_steps(_message, page.records),
        next_page_token=token,
        complete_since_unix_nano=complete_since,
        source=ring.source,
    )


def bounds_of(token: str) -> dict[str, int] | None:
    """Return before which record each process goes on; None for the first page. Raises InvalidRequest."""
    if not token:
        return None
    parts = [part.rpartition(":") for part in token.split(",", _MOST_SOURCES)]
    if len(parts) > _MOST_SOURCES or not all(source and _is_number(number) for source, _, number in parts):
        what = f"is {token[:40]!r}; expected next_page_token of an earlier answer, as it is"
        raise InvalidRequest(FieldViolation("page_token", what))
    return {source: int(number) for source, _, number in parts}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def token_of(bounds: Mapping[str, int]) -> str:
    return ",".join(f"{source}:{number}" for source, number in bounds.items())


async def watch_of(
    ring: DecisionRing, request: pb.WatchDecisionsRequest
) -> AsyncGenerator[pb.WatchDecisionsResponse, None]:
    """Yield what one process adds to its ring, from the position that the request has of it."""
    query = query_of(request)
    after = next((each.sequence for each in request.positions if each.source == ring.source), None)
    async with aclosing(watched(ring, query, after)) as stream:
        async for passed in stream:
            yield _passed_to_proto(ring.source, passed)


def gone(source: str) -> pb.WatchDecisionsResponse:
    """Return the notice that a process does not answer, or is no more."""
    return pb.WatchDecisionsResponse(position=pb.Position(source=source), lost_because=GONE)


def _passed_to_proto(source: str, passed: Passed) -> pb.WatchDecisionsResponse:
    return pb.WatchDecisionsResponse(
        decisions=map(_message, passed.records),
        position=pb.Position(source=source, sequence=passed.number),
        lost=passed.lost,
        lost_because=RING_MOVED_ON if passed.lost else "",
    )


def _message(record: Numbered) -> pb.DecisionRecord:
    number, decision = record
    message = decision_to_proto(decision)
    message.sequence = number
    return message
