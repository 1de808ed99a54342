"""Gathers the decision records of requests from the router's admin plane, which asks the KV manager for its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.json_format import MessageToDict

from cli.why.ids import request_that_begins, without_prefix
from cli.why.pages import Listed, Lister, Records, moment_of
from cli.why.source import Source, source_of, words_of
from common.contracts.errors import NotFound, Unavailable
from common.contracts.limits import MAX_LISTED_DECISIONS
from common.contracts.types import Decision, DecisionKind
from common.decisions.query import concerned
from common.wire.decision_codec import known_decisions
from quire.decision.v1 import decision_pb2 as pb
from router.contracts.session_ids import is_session_name, session_name
from router.observe.diagnosis.request_history import RequestHistory, request_history

# A router that is gone says so at once; one that is busy is asked about just that.
_PATIENCE_S: Final = 60.0
# Records of a span of time, of each kind: some 100 MiB of memory.
_MOST_ENDS: Final = 50_000
# Attributes of the router's spans.
_REQUEST_ID: Final = "quire.request_id"
_CORRELATION_ID: Final = "quire.correlation_id"
_NAMES: Final = {DecisionKind.OUTCOME: "ends of requests", DecisionKind.REJECTION: "refusals"}


@dataclass(frozen=True, slots=True)
class Ends:
    """Records that end requests, and in words which ones were not looked at."""

    records: tuple[Decision, ...]
    missing: tuple[str, ...] = ()


class Gatherer:
    """`tenant` limits all answers to the requests of one tenant; "" is all. `most` bounds the records of a span."""

    def __init__(self, source: Source | grpc.aio.Channel, tenant: str = "", most: int = _MOST_ENDS) -> None:
        self._source, self._tenant, self._most = source_of(source), tenant, most

    @property
    def bound(self) -> str:
        """The option that bounds how many records are kept."""
        return self._source.bound

    @property
    def runbook(self) -> str:
        """Where the advice on a cause is explained."""
        return self._source.runbook

    async def ends(self, since_ns: int | None = None, session: str = "") -> Ends:
        """Return the records since a time that end requests, of each kind oldest first; without a time the newest.

        `session` is the name of the one session that is asked about.
        """
        lister, listed = Lister(self._source, _PATIENCE_S), Listed()
        most = MAX_LISTED_DECISIONS if since_ns is None else self._most
        # A span that begins before 1970 is longer than any log.
        since = 0 if since_ns is None else max(1, since_ns)
        cut: list[str] = []
        for kind in (DecisionKind.OUTCOME, DecisionKind.REJECTION):
            wanted = pb.ListDecisionsRequest(kind=kind, tenant=self._tenant, since_unix_nano=since, session=session)
            found = await lister.newest(wanted, from_manager=False, limit=most)
            listed.add("router", found, since)
            cut += _cut(found, kind, most, since_ns)
        unread = (f"records of {each}" for each in self._source.missing())
        decisions = known_decisions(record for _, record in listed.records)
        return Ends(tuple(decisions), tuple(dict.fromkeys((*cut, *listed.missing, *unread))))

    async def ends_of_session(self, session: str, since_ns: int | None = None) -> Ends:
        """Return the records that end the requests of a session. `session` is its id, or its name in records."""
        names = [session_name(self._tenant, session)] + ([session] if is_session_name(session) else [])
        parts = [await self.ends(since_ns, name) for name in names]
        records = {each.decision_id: each for part in parts for each in part.records}
        return Ends(tuple(records.values()), tuple(dict.fromkeys(each for part in parts for each in part.missing)))

    async def history(self, name: str) -> RequestHistory:
        """Return the history of a request by its id, the client's own name for it, or the first characters of its id.

        Raises NotFound, and InvalidRequest when several requests begin so.
        """
        for request_id in (name, without_prefix(name)):
            if (found := await self._history(request_id)) is not None:
                return found
        lister = Lister(self._source, _PATIENCE_S)
        known = await self._correlated(name) or await request_that_begins(lister, without_prefix(name), self._tenant)
        if known and (found := await self._history(known)) is not None:
            return found
        what = f"no record of request {name}: no router here has served it, or newer records took the place of its own"
        raise NotFound(f"{what} ({self._source.bound}); `quire why --last` shows the newest one that there is")

    async def _history(self, request_id: str) -> RequestHistory | None:
        """Return the history of a request; None when no record concerns it."""
        messages, unread = await self.records(request_id)
        decisions = list(known_decisions(messages))
        own = _own_id(request_id, decisions)
        self._check_tenant(own, decisions)
        return request_history(own, decisions, unread) if decisions else None

    async def records(self, request_id: str) -> tuple[list[pb.DecisionRecord], tuple[str, ...]]:
        """Return all records that concern a request, and which services could not be asked, with the reason."""
        wanted = pb.ListDecisionsRequest(request_id=request_id, limit=MAX_LISTED_DECISIONS)
        newest = (await self._source.ListDecisions(wanted, timeout=_PATIENCE_S)).decisions
        wanted.kept = True
        kept = (await self._source.ListDecisions(wanted, timeout=_PATIENCE_S)).decisions
        wanted.kept, wanted.from_manager = False, True
        try:
            answer = await self._source.ListDecisions(wanted, timeout=_PATIENCE_S)
        except (grpc.aio.AioRpcError, Unavailable) as error:
            unread = f"the KV manager: {words_of(error)}"
            return _each_once(kept, newest), (unread, *self._source.missing())
        silent = (f"KV managers of group {each}: no answer" for each in sorted(answer.silent_groups))
        return _each_once(kept, newest, answer.decisions), (*silent, *self._source.missing())

    async def trace(self, request_id: str) -> dict[str, object] | None:
        """Return the spans of a request as JSON has them; None when it was not sampled."""
        try:
            found = await self._source.GetTrace(pb.GetTraceRequest(request_id=request_id), timeout=_PATIENCE_S)
        except (grpc.aio.AioRpcError, NotFound):
            return None
        return MessageToDict(found, preserving_proto_field_name=True)

    async def _correlated(self, name: str) -> str:
        """Return the id of the newest traced request that a client calls by this name; "" when there is none."""
        trace = await self.trace(name)
        spans = trace.get("spans", ()) if trace else ()
        assert isinstance(spans, list | tuple)
        named = (span.get("attributes", {}) for span in spans)
        found = [each.get(_REQUEST_ID, "") for each in named if each.get(_CORRELATION_ID) == name]
        return str(found[-1]) if found else ""

    def _check_tenant(self, request_id: str, decisions: Iterable[Decision]) -> None:
        owners = {each.tenant for each in decisions if each.request_id == request_id and each.tenant}
        if self._tenant and owners and self._tenant not in owners:
            what = f"request {request_id} is none of tenant {self._tenant}"
            raise NotFound(f"{what}; name its own tenant, or leave --tenant out to see the requests of all")


def _own_id(name: str, decisions: Iterable[Decision]) -> str:
    """Return the id of the newest refused request that its client calls so, where the name is the id of none."""
    refused = list[str]()
    for each in decisions:
        if name in concerned(each):
            return name
        refused.append(each.request_id)
    return refused[-1] if refused else name


def _cut(found: Records, kind: DecisionKind, most: int, since_ns: int | None) -> list[str]:
    """Return in a line which records were not looked at, because there are more than `most`."""
    if not found.has_older:
        return []
    older = f"{_NAMES[kind]} from before {moment_of(found.records[0].time_unix_nano)}"
    remedy = "--since TIME looks at all within a time" if since_ns is None else "name a shorter --since"
    return [f"{older}: the newest {most:,} alone were looked at; {remedy}"]


def _each_once(*parts: Iterable[pb.DecisionRecord]) -> list[pb.DecisionRecord]:
    """Return the records of all parts; of one that is in several parts, the last."""
    return list({each.decision_id: each for part in parts for each in part}.values())
