"""Routing for the page: what each worker would have cost, and the first token, predicted and then measured."""

from __future__ import annotations

from typing import Any, Final

from common.types import Decision, DecisionKind
from quire.decision.v1 import decision_pb2 as pb
from router.core.diagnosis.outcome import Outcome
from router.page.loop_share import in_steps
from router.page.query import Query
from router.page.records import MOST, ROUTER, Records, known_or_none, record_of
from router.page.requests import Requests

Json = dict[str, Any]
# Terms of the cost that come before the first token.
BEFORE_FIRST_TOKEN: Final = ("queue_delay", "prefill")


class Routing:
    def __init__(self, records: Records, requests: Requests) -> None:
        self._records, self._requests = records, requests

    async def answer(self, query: Query) -> Json:
        """Return the newest decisions, newest first, each with how its request went once that has ended."""
        limit = query.number("limit", 60, MOST) or MOST
        wanted = pb.ListDecisionsRequest(kind=DecisionKind.ROUTING, worker=query.text("worker"), limit=limit)
        found = (await self._records.list(ROUTER, wanted)).decisions
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


def predicted_s(decision: Decision) -> float | None:
    """Return the predicted seconds from a decision to the first token; None where no worker was chosen."""
    chosen = next((each for each in decision.candidates if each.name == decision.worker), None)
    if chosen is None or chosen.cost is None:
        return None
    return sum(seconds for name, seconds in chosen.terms if name in BEFORE_FIRST_TOKEN)


def actual_s(outcome: Outcome | None) -> float | None:
    """Return the measured seconds from the arrival to the first token.

    None without one, and for a request that moved: its last decision is not the one that its first token followed.
    """
    if outcome is None or not outcome.has_first_token or outcome.moves:
        return None
    return outcome.first_token_s
