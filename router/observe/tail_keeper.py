"""Keeps the requests that a tail rule names: their decision records, and a trace where sampling left them out.

Another request costs a comparison of its end with the rules. Each rule keeps a bounded number a second, so that a flood
of refusals leaves room for the other rules. A trace is built beside the requests, once the KV manager has answered with
its records; its spans go where sampled spans go.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from common.contracts.errors import QuireError
from common.contracts.limits import KEPT_TRACES_BURST, KEPT_TRACES_PER_SECOND, MAX_KEPT_RECORDS, MAX_TRACES_TO_BUILD
from common.contracts.types import Decision
from common.decisions.query import DecisionQuery
from common.decisions.ring import DecisionRing
from common.telemetry.spans import RecordedSpan
from common.wire.decision_codec import known_decisions
from quire.decision.v1 import decision_pb2 as pb
from router.observe.diagnosis.outcome import Outcome
from router.observe.kept_records import KeptRecords
from router.observe.metrics import RouterMetrics
from router.observe.record_spans import EndedRequest
from router.observe.record_trace import TraceHead, built_spans
from router.observe.sampling import Allowance
from router.observe.tail_rules import Objective, Rule, rules_for
from router.observe.trace_codec import UNREAD

Emit = Callable[[Sequence[RecordedSpan]], object]
# Returns the answers of the KV manager, in the order of the calls. Raises QuireError when it has none.
AskManager = Callable[[Sequence[pb.ListDecisionsRequest]], Awaitable[Sequence[pb.ListDecisionsResponse]]]

# Requests that end within so much time are asked about together.
_GATHERED_S: Final = 0.1
_MOST_TOGETHER: Final = 64
# Clocks of two machines may differ by so much; older records under the same id are of an earlier request.
_SKEW_NS: Final = 10_000_000_000


@dataclass(frozen=True, slots=True)
class _Kept:
    """A kept request; a sampled one has spans already, and no head."""

    head: TraceHead | None
    ended: EndedRequest


class TailKeeper:
    """`rules` decides, `keep` takes the request, `run` builds the traces."""

    def __init__(
        self,
        objective: Objective,
        ring: DecisionRing,
        records: KeptRecords,
        metrics: RouterMetrics,
        emit: Emit,
        ask: AskManager,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.objective, self._ring, self._records, self._metrics = objective, ring, records, metrics
        self._emit, self._ask = emit, ask
        self._allowances = {rule: Allowance(KEPT_TRACES_PER_SECOND, KEPT_TRACES_BURST, monotonic) for rule in Rule}
        self._waiting: deque[_Kept] = deque()
        self._came = asyncio.Event()

    def rules(self, outcome: Outcome) -> tuple[Rule, ...]:
        """Return the rules by which a request is kept; none for an ordinary one, and where all its rules are used up.

        Call it once for each request: it takes from the allowance of a rule.
        """
        found = rules_for(outcome, self.objective)
        return found if found and self._allowed(found) else ()

    def refuses(self) -> tuple[Rule, ...]:
        """Return the rules by which a request is kept that was refused at its arrival."""
        return (Rule.REFUSED,) if self._allowed((Rule.REFUSED,)) else ()

    def _allowed(self, rules: tuple[Rule, ...]) -> bool:
        room = len(self._waiting) < MAX_TRACES_TO_BUILD
        if room and any(self._allowances[rule].take() for rule in rules):
            for rule in rules:
                self._metrics.kept.labels(rule.value).inc()
            return True
        self._metrics.left_out.labels(rules[0].value).inc()
        return False

    def keep(self, head: TraceHead | None, ended: EndedRequest) -> None:
        """Keep the router's records of a request at once, and the rest soon; build a trace if it has a head."""
        found = self._ring.page(DecisionQuery(ended.request_id, since_ns=ended.began_ns), MAX_KEPT_RECORDS)
        whole = replace(ended, decisions=tuple([each for _, each in found.records]))
        self._records.add(ended.request_id, whole.decisions)
        self._waiting.append(_Kept(head, whole))
        self._came.set()

    async def run(self) -> None:
        """Build traces until cancelled."""
        while True:
            await self._came.wait()
            self._came.clear()
            await asyncio.sleep(_GATHERED_S)
            while self._waiting:
                some = [self._waiting[place] for place in range(min(_MOST_TOGETHER, len(self._waiting)))]
                await self._finish(some)
                for _ in some:
                    self._waiting.popleft()

    async def _finish(self, some: Sequence[_Kept]) -> None:
        """Add the KV manager's records to kept requests, and build their traces; without an answer, say so in them."""
        unread = ""
        answers: Sequence[pb.ListDecisionsResponse] = [pb.ListDecisionsResponse()] * len(some)
        try:
            answers = await self._ask([_call(each.ended) for each in some])
        except QuireError as error:
            unread = f"the KV manager: {str(error).partition(chr(10))[0]}"
        for each, answer in zip(some, answers, strict=True):
            silent = ", ".join(answer.silent_groups)
            missing = unread or (f"groups of KV managers that did not answer: {silent}" if silent else "")
            self._build(each, tuple(known_decisions(answer.decisions)), missing)

    def _build(self, kept: _Kept, more: tuple[Decision, ...], unread: str) -> None:
        self._records.add(kept.ended.request_id, more)
        if kept.head is None:
            return
        head = kept.head
        if unread:
            head = replace(head, attributes={**head.attributes, UNREAD: unread})
        self._emit(built_spans(head, replace(kept.ended, decisions=(*kept.ended.decisions, *more))))


def _call(ended: EndedRequest) -> pb.ListDecisionsRequest:
    since = max(0, ended.began_ns - _SKEW_NS)
    return pb.ListDecisionsRequest(request_id=ended.request_id, since_unix_nano=since, limit=MAX_KEPT_RECORDS)
