"""Decision records for the page: from this router and its siblings, or from the KV manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from common.contracts.types import Decision
from common.decisions.pages import bounds_of, query_of
from common.process.loop_turns import in_steps
from common.wire.decision_codec import decision_from_proto
from quire.decision.v1 import decision_pb2 as pb
from router.api.grpc.decision_servicer import DecisionServicer
from router.api.grpc.manager_calls import ManagerCalls
from router.api.page.query import Query

ROUTER, MANAGER = "router", "kvmanager"
SERVICES: Final = (ROUTER, MANAGER)
# Records in one answer: each costs some 50 microseconds of the event loop.
MOST: Final = 200
PARAMETERS: Final = frozenset(("service", "kind", "request", "worker", "tenant", "limit", "page"))

Json = dict[str, Any]


def asked(query: Query) -> tuple[str, pb.ListDecisionsRequest]:
    """Return which service is asked for which records. Raises InvalidRequest for a wrong value."""
    wanted = pb.ListDecisionsRequest(
        kind=query.text("kind"),
        request_id=query.text("request"),
        worker=query.text("worker"),
        tenant=query.text("tenant"),
        limit=query.number("limit", 100, MOST) or MOST,
        page_token=query.text("page"),
    )
    query_of(wanted)
    bounds_of(wanted.page_token)
    return query.choice("service", SERVICES), wanted


class Records:
    def __init__(self, decisions: DecisionServicer, manager: ManagerCalls) -> None:
        self._decisions, self._manager = decisions, manager

    async def list(self, service: str, wanted: pb.ListDecisionsRequest) -> pb.ListDecisionsResponse:
        """Return records of one service, newest last. Raises Unavailable when no manager answers."""
        if service == ROUTER:
            return await self._decisions.decisions(wanted)
        wanted.from_manager = True
        return await self._manager.decisions(wanted)

    async def answer(self, query: Query) -> Json:
        """Return a page of records, newest last, and where the page before begins."""
        service, wanted = asked(query)
        found = await self.list(service, wanted)
        return {
            "records": await in_steps(lambda each: record_of(each, service), found.decisions),
            "page": found.next_page_token,
            "complete_since": found.complete_since_unix_nano / 1e9,
            "silent_routers": found.silent_routers,
        }


def record_of(record: pb.DecisionRecord, service: str) -> Json:
    """Return a record as JSON; times are in seconds."""
    return {
        "id": record.decision_id,
        "service": service,
        "kind": record.kind,
        "at": record.time_unix_nano / 1e9,
        "request": record.request_id,
        "chosen": record.chosen,
        "candidates": [_candidate(each) for each in record.candidates],
        "reasons": list(record.reasons),
        "figures": finite(record.figures),
        "ages": finite(record.signal_ages),
        "victim": record.victim,
        "beneficiary": record.beneficiary,
        "trace": record.trace_id,
        "tenant": record.tenant,
        "worker": record.worker,
    }


def _candidate(each: pb.Candidate) -> Json:
    return {
        "name": each.name,
        "cost": each.cost if each.HasField("cost") and abs(each.cost) < float("inf") else None,
        "terms": finite(each.terms),
        "rejected": each.rejected,
        "figures": finite(each.figures),
    }


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that JSON can write."""
    return {name: value for name, value in sorted(figures.items()) if abs(value) < float("inf")}


async def known(records: Iterable[pb.DecisionRecord]) -> list[Decision]:
    """Return the records of kinds that this version knows; a newer sibling may have others."""
    return [each for each in await in_steps(known_or_none, records) if each is not None]


def known_or_none(record: pb.DecisionRecord) -> Decision | None:
    try:
        return decision_from_proto(record)
    except ValueError:
        return None
