"""Routing for the page: what each worker would have cost, and the first token, predicted and then measured."""

from __future__ import annotations

from typing import Any

from common.contracts.types import DecisionKind
from common.process.loop_turns import in_steps
from quire.decision.v1 import decision_pb2 as pb
from router.api.page.query import Query
from router.api.page.records import MOST, ROUTER, Records, known_or_none, record_of
from router.api.page.requests import Requests
from router.observe.diagnosis.calibration import actual_s, predicted_s
from router.observe.diagnosis.outcome import Outcome

Json = dict[str, Any]


def asked(query: Query) -> pb.ListDecisionsRequest:
    """Return which decisions are asked for. Raises InvalidRequest for a wrong value."""
    limit = query.number("limit", 60, MOST) or MOST
    return pb.ListDecisionsRequest(kind=DecisionKind.ROUTING, worker=query.text("worker"), limit=limit)


class Routing:
    def __init__(self, records: Records, requests: Requests) -> None:
        self._records, self._requests = records, requests

    async def answer(self, query: Query) -> Json:
        """Return the newest decisions, newest first, each with how its request went once that has ended."""
        found = (await self._records.list(ROUTER, asked(query))).decisions
        ends = dict(await self._requests.ended(MOST))
        return {"decisions": await in_steps(lambda each: _joined(each, ends.get(each.request_id)), reversed(found))}


def _joined(record: pb.DecisionRecord, outcome: Outcome | None) -> Json:
    decided = known_or_none(record)
    return {
        **record_of(record, ROUTER),
        "predicted_s": predicted_s(decided) if decided is not None else None,
        "actual_s": actual_s(outcome),
        "cached_tokens": outcome.cached_tokens if outcome is not None else None,
    }
