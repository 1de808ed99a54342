"""Requests for the page: those that ended last, and everything about one: diagnosis, spans and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any, Final

from common.contracts.errors import NotFound, QuireError
from common.contracts.limits import MAX_ID_CHARS
from common.contracts.types import DecisionKind
from common.process.loop_turns import in_steps
from common.untrusted.ids import ID_WORDS, is_id
from quire.decision.v1 import decision_pb2 as pb
from router.api.grpc.decision_servicer import DecisionServicer
from router.api.page.query import Query, invalid
from router.api.page.records import MANAGER, MOST, ROUTER, Records, known, record_of
from router.observe.diagnosis.outcome import Outcome, outcome_of
from router.observe.diagnosis.phases import LABELS, WORK
from router.observe.diagnosis.request_history import request_history
from router.observe.diagnosis.rules import diagnose
from router.observe.diagnosis.verdict import Diagnosis, advised

Json = dict[str, Any]
# What the HTTP APIs put before the id of a request.
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "msg_")
_MOST_SPANS: Final = 500
_ID_CHARS: Final = MAX_ID_CHARS + max(map(len, _PREFIXES))


def most_of(query: Query) -> int:
    """Return how many requests are asked for. Raises InvalidRequest."""
    return query.number("limit", 100, MOST) or MOST


def name_of(query: Query) -> str:
    """Return the id that is asked for. Raises InvalidRequest for what cannot be one."""
    name = query.needed("id")
    if not is_id(name):
        raise invalid("id", f"is not {ID_WORDS}")
    return name


class Requests:
    def __init__(self, records: Records, decisions: DecisionServicer) -> None:
        self._records, self._decisions = records, decisions

    async def ended(self, limit: int) -> list[tuple[str, Outcome]]:
        """Return the requests that ended last, oldest first."""
        wanted = pb.ListDecisionsRequest(kind=DecisionKind.OUTCOME, limit=limit)
        found = await known((await self._records.list(ROUTER, wanted)).decisions)
        return await in_steps(lambda each: (each.request_id, outcome_of(each)), found)

    async def listed(self, query: Query) -> Json:
        """Return the requests that ended last, newest first."""
        found = await self.ended(most_of(query))
        return {"requests": await in_steps(lambda each: ended_of(*each), reversed(found))}

    async def one(self, query: Query) -> Json:
        """Return everything about one request. Raises NotFound when no record concerns it."""
        name = name_of(query)
        for request_id in dict.fromkeys((name, _without_prefix(name))):
            if not is_id(request_id):
                raise invalid("id", f"is not {ID_WORDS}")
            records, unread = await self._all(request_id)
            if records:
                return await self._whole(request_id, records, unread)
        what = f"no record of request {name[:_ID_CHARS]}: no router here has served it, or newer records took its place"
        raise NotFound(f"{what} (--decision-ring)")

    async def _all(self, request_id: str) -> tuple[list[tuple[str, pb.DecisionRecord]], tuple[str, ...]]:
        """Return all records that concern a request, with their services, and which service could not be asked."""
        found = await self._records.list(ROUTER, pb.ListDecisionsRequest(request_id=request_id, limit=MOST))
        records, unread = [(ROUTER, each) for each in found.decisions], list[str]()
        try:
            found = await self._records.list(MANAGER, pb.ListDecisionsRequest(request_id=request_id, limit=MOST))
            records += [(MANAGER, each) for each in found.decisions]
        except QuireError as error:
            unread.append(f"the KV manager: {str(error).partition(chr(10))[0]}")
        return records, tuple(unread)

    async def _whole(
        self, request_id: str, records: Sequence[tuple[str, pb.DecisionRecord]], unread: tuple[str, ...]
    ) -> Json:
        history = request_history(request_id, await known(record for _, record in records), unread)
        ordered = sorted(records, key=lambda each: each[1].time_unix_nano)
        found = diagnose(history)
        return {
            "request": request_id,
            "began": history.began_ns / 1e9,
            "diagnosis": diagnosis_of(found),
            "timeline": timeline_of(found, history.outcome),
            "outcome": ended_of(request_id, history.outcome) if history.outcome is not None else None,
            "records": await in_steps(lambda each: record_of(each[1], each[0]), ordered),
            "spans": await self._spans(request_id),
        }

    async def _spans(self, request_id: str) -> list[Json]:
        """Return the spans of a request's trace, by their start; none where it was not sampled."""
        try:
            found = await self._decisions.trace(pb.GetTraceRequest(request_id=request_id))
        except NotFound:
            return []
        return await in_steps(_span, found.spans[:_MOST_SPANS])


def _without_prefix(name: str) -> str:
    return next((name.removeprefix(each) for each in _PREFIXES if name.startswith(each)), name)


def _span(span: pb.Span) -> Json:
    return {
        "id": span.span_id,
        "parent": span.parent_span_id,
        "service": span.service,
        "name": span.name,
        "start": span.start_unix_nano / 1e9,
        "end": span.end_unix_nano / 1e9,
        "status": span.status_message or span.status,
        "attributes": dict(sorted(span.attributes.items())),
    }


def ended_of(request_id: str, outcome: Outcome) -> Json:
    """Return one line about a request that ended."""
    return {
        "request": request_id,
        "at": outcome.time_ns / 1e9,
        "tenant": outcome.tenant,
        "worker": outcome.worker,
        "ended": outcome.ended,
        "failure": outcome.failure,
        "first_token_s": outcome.first_token_s if outcome.has_first_token else None,
        "total_s": outcome.total_s,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": outcome.output_tokens,
        "miss": outcome.miss,
        "preemptions": outcome.preemptions,
        "moves": outcome.moves,
    }


def timeline_of(found: Diagnosis, outcome: Outcome | None) -> list[Json]:
    """Return when each phase was, one after the other until the end: by the same seconds as the verdict."""
    if outcome is None:
        return []
    begins = outcome.time_ns / 1e9 - outcome.total_s
    ends = accumulate((each.seconds for each in found.phases), initial=begins)
    return [
        {"phase": each.phase, "label": LABELS[each.phase], "start": start, "end": end}
        for each, (start, end) in zip(found.phases, pairwise(ends), strict=True)
    ]


def diagnosis_of(found: Diagnosis) -> Json:
    """Return a diagnosis as JSON, with the advice that counts and the words of the phases."""
    whole = asdict(found)
    whole["advised"] = [{"text": each.advice.text, "link": each.advice.link()} for each in advised(found)]
    for phase, of in zip(whole["phases"], found.phases, strict=True):
        phase["label"], phase["is_work"] = LABELS[of.phase], of.phase in WORK
    return whole
