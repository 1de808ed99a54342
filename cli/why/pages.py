"""Lists decision records page by page, and says which may be missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

import grpc

from cli.why.source import Source, source_of, words_of
from common.contracts.errors import Unavailable
from common.contracts.limits import MAX_LISTED_DECISIONS
from quire.decision.v1 import decision_pb2 as pb
from router.observe.diagnosis.words import count

_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Records:
    """Records of one service, oldest first; all that it made since `complete_since_ns` are still kept there.

    `bound` names the option that bounds how many are. `has_older` says that older ones match, beyond the limit.
    """

    records: tuple[pb.DecisionRecord, ...] = ()
    complete_since_ns: int = 0
    silent_routers: int = 0
    silent_groups: frozenset[str] = frozenset()
    failure: str = ""
    bound: str = "--decision-ring"
    has_older: bool = False


@dataclass
class Listed:
    """Records with their services, newest last, and in words what is missing."""

    records: list[tuple[str, pb.DecisionRecord]] = field(default_factory=list)
    missing: tuple[str, ...] = ()

    def add(self, service: str, found: Records, since_ns: int = 0) -> None:
        self.records += [(service, record) for record in found.records]
        if since_ns and found.complete_since_ns > since_ns:
            moment = moment_of(found.complete_since_ns)
            self.missing += (f"records of the {service} from before {moment}: none are kept ({found.bound})",)
        if found.silent_routers:
            self.missing += (f"{count(found.silent_routers, 'router')} did not answer",)
        if found.silent_groups:
            self.missing += (f"groups of KV managers that did not answer: {', '.join(sorted(found.silent_groups))}",)
        if found.failure:
            self.missing += (f"the KV manager: {found.failure}",)

    def newest(self, limit: int) -> Listed:
        ordered = sorted(self.records, key=lambda each: each[1].time_unix_nano)
        return Listed(ordered[-limit:] if limit else [], self.missing)


def moment_of(time_ns: int) -> str:
    """Return a time of day, with its day unless that is today."""
    moment = datetime.fromtimestamp(time_ns / 1e9).astimezone()
    return moment.strftime("%H:%M:%S" if moment.date() == datetime.now().astimezone().date() else "%Y-%m-%d %H:%M:%S")


class Lister:
    def __init__(self, source: Source | grpc.aio.Channel, patience_s: float = _PATIENCE_S) -> None:
        self._source, self._patience_s = source_of(source), patience_s

    async def newest(self, filters: pb.ListDecisionsRequest, from_manager: bool, limit: int | None = None) -> Records:
        """Return the newest `limit` records (None: all) that match, oldest first.

        A KV manager that does not answer is a `failure`; a router that does not raises.
        """
        found = Records()
        try:
            async for page in self._pages(filters, from_manager, limit):
                found = replace(
                    found,
                    records=(*page.decisions, *found.records),
                    complete_since_ns=max(found.complete_since_ns, page.complete_since_unix_nano),
                    silent_routers=max(found.silent_routers, page.silent_routers),
                    silent_groups=found.silent_groups.union(page.silent_groups),
                    has_older=bool(page.next_page_token),
                )
        except (grpc.aio.AioRpcError, Unavailable) as error:
            if not from_manager:
                raise
            return replace(found, failure=words_of(error))
        return replace(found, bound=self._source.bound)

    async def _pages(
        self, filters: pb.ListDecisionsRequest, from_manager: bool, limit: int | None
    ) -> AsyncIterator[pb.ListDecisionsResponse]:
        asked = pb.ListDecisionsRequest()
        asked.CopyFrom(filters)
        asked.from_manager, left = from_manager, limit
        while left is None or left > 0:
            asked.limit = MAX_LISTED_DECISIONS if left is None else min(left, MAX_LISTED_DECISIONS)
            page = await self._source.ListDecisions(asked, timeout=self._patience_s)
            yield page
            left = None if left is None else left - len(page.decisions)
            asked.page_token = page.next_page_token
            if not asked.page_token:
                return
