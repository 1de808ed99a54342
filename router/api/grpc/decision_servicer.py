"""The router's DecisionService: decision records of all routers on its ports, and traces of the whole suite.

The admin plane has all of it. On the public plane a caller names one request by its id, and sees that request alone.
Where callers have keys the request must be one of the caller's tenant; a tenant with `admin` sees everything.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from grpc import aio

from common.contracts.errors import FieldViolation, InvalidRequest, NotFound, PermissionDenied, Unsupported
from common.decisions.merged import merged
from common.decisions.pages import bounds_of, page_of, query_of
from common.decisions.ring import DecisionRing, listed
from common.untrusted.ids import ID_WORDS, is_id
from common.wire.decision_codec import decision_to_proto
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from router.api.grpc.explanation import Explanations
from router.api.grpc.manager_calls import ManagerCalls
from router.api.shared.call_context import Calls
from router.contracts.ports import NamedCallers
from router.observe.decision_watch import DecisionWatch
from router.observe.kept_records import KeptRecords
from router.observe.own_view import concerned_ids, own_decision, own_explanation, own_spans
from router.observe.refused_records import RefusedRecords
from router.observe.request_tap import RequestTap, Tapped
from router.observe.siblings import Siblings, asked_by_sibling
from router.observe.trace_store import TraceStore
from router.tenants.tenancy import ANYONE, Caller

Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class RecordSources:
    """What a router keeps of its decisions: all of late, those of kept and of refused requests, spans, a recording."""

    ring: DecisionRing
    store: TraceStore
    kept: KeptRecords | None = None
    refused: RefusedRecords | None = None
    tap: RequestTap | None = None


class DecisionServicer(decision_pb2_grpc.DecisionServiceServicer):
    """Answers from this process's ring and store, and from those of its siblings unless a sibling asks."""

    def __init__(
        self,
        records: RecordSources,
        siblings: Siblings,
        manager: ManagerCalls | None = None,
        explanations: Explanations | None = None,
        callers: NamedCallers | None = None,
    ) -> None:
        """It answers `Explain` by `explanations`. `callers` names the caller for whom an operator asks."""
        self._ring, self._store, self._siblings, self._manager = records.ring, records.store, siblings, manager
        self._tap, self._kept, self._refused = records.tap, records.kept, records.refused
        self._watch = DecisionWatch(records.ring, siblings)
        self._explanations, self._callers = explanations, callers

    async def ListDecisions(
        self, request: decision_pb2.ListDecisionsRequest, context: Context
    ) -> decision_pb2.ListDecisionsResponse:
        """Return records, newest last; on demand those of the KV manager."""
        if request.from_manager and self._manager is not None:
            return await self._manager.decisions(request)
        return await self.decisions(request, alone=asked_by_sibling(context))

    async def WatchDecisions(
        self, request: decision_pb2.WatchDecisionsRequest, context: Context
    ) -> AsyncIterator[decision_pb2.WatchDecisionsResponse]:
        """Stream records as they are made; on demand those of the KV manager."""
        async with aclosing(self.watch(request, alone=asked_by_sibling(context))) as responses:
            async for response in responses:
                yield response

    async def watch(
        self, request: decision_pb2.WatchDecisionsRequest, alone: bool = False
    ) -> AsyncGenerator[decision_pb2.WatchDecisionsResponse, None]:
        """Yield the records of this process alone, of all routers on its ports, or of the KV manager."""
        if request.from_manager and self._manager is not None:
            stream = self._manager.watch(request)
        else:
            stream = self._watch.stream(request, alone)
        async with aclosing(stream) as responses:
            async for response in responses:
                yield response

    async def GetTrace(self, request: decision_pb2.GetTraceRequest, context: Context) -> decision_pb2.GetTraceResponse:
        """Return the spans of a trace; NOT_FOUND when no store has one."""
        return await self.trace(request, alone=asked_by_sibling(context))

    async def WatchRequests(
        self, request: decision_pb2.WatchRequestsRequest, context: Context
    ) -> AsyncIterator[decision_pb2.WatchRequestsResponse]:
        """Stream the sequences of this process alone, as they end."""
        if self._tap is None:
            raise Unsupported("this service records no requests; ask a router's admin plane")
        # The headers tell the caller that the recording has begun.
        await context.send_initial_metadata(())
        async with aclosing(self._tap.watch()) as watch:
            async for tapped in watch:
                yield _tapped_to_proto(tapped)

    async def Explain(self, request: decision_pb2.ExplainRequest, context: Context) -> decision_pb2.ExplainResponse:
        """Return what would happen to a request of the named tenant."""
        return await self.explanation(request)

    async def explanation(
        self, request: decision_pb2.ExplainRequest, caller: Caller | None = None
    ) -> decision_pb2.ExplainResponse:
        """Return what would happen to a request of a caller, or (None) of the tenant that is named."""
        if self._explanations is None:
            raise Unsupported("this service explains no requests; ask the router")
        if caller is None:
            caller = ANYONE if self._callers is None else self._callers.named(request.tenant)
        return await self._explanations.answer(request, caller)

    async def decisions(
        self, request: decision_pb2.ListDecisionsRequest, alone: bool = False
    ) -> decision_pb2.ListDecisionsResponse:
        """Return the records of this process alone, or of all routers on its ports."""
        own = self._kept_of(request) if request.kept else await page_of(self._ring, request)
        self._add_refused(request, own)
        if alone:
            return own
        others = await self._siblings.decisions(request)
        whole = merged([own, *others], bounds_of(request.page_token), listed(request.limit))
        whole.silent_routers = self._siblings.count - len(others)
        return whole

    async def trace(self, request: decision_pb2.GetTraceRequest, alone: bool = False) -> decision_pb2.GetTraceResponse:
        """Return the spans that this process has, or all routers on its ports. Raises NotFound when there are none."""
        if not request.trace_id and not request.request_id:
            raise InvalidRequest(FieldViolation("id", "is missing; expected trace_id or request_id"))
        trace_id = request.trace_id.lower()
        if alone:
            return self._store.trace(trace_id, request.request_id, request.tenant)
        if request.request_id:
            trace_id = await self._trace_of(request)
        found = await self._siblings.traces(decision_pb2.GetTraceRequest(trace_id=trace_id)) if trace_id else []
        try:
            found.append(self._store.trace(trace_id, request.request_id, request.tenant))
        except NotFound:
            if not found:
                raise
        spans = {span.span_id: span for answer in found for span in answer.spans}
        ordered = sorted(spans.values(), key=lambda span: (span.start_unix_nano, -span.end_unix_nano))
        return decision_pb2.GetTraceResponse(trace_id=trace_id, spans=ordered)

    def _kept_of(self, request: decision_pb2.ListDecisionsRequest) -> decision_pb2.ListDecisionsResponse:
        if not is_id(request.request_id):
            what = "is missing; expected the id of the request whose kept records are asked for"
            raise InvalidRequest(FieldViolation("request_id", what))
        found = self._kept.find(query_of(request)) if self._kept is not None else []
        return decision_pb2.ListDecisionsResponse(decisions=map(decision_to_proto, found), source=self._ring.source)

    def _add_refused(self, request: decision_pb2.ListDecisionsRequest, own: decision_pb2.ListDecisionsResponse) -> None:
        """Add the records of the refused request that is asked for, but for those of which the ring has its own."""
        if self._refused is None or not request.request_id or own.next_page_token or request.page_token:
            return
        known = {each.decision_id for each in own.decisions}
        found = self._refused.find(query_of(request))
        own.decisions.extend(decision_to_proto(each) for each in found if each.decision_id not in known)
        own.decisions.sort(key=lambda each: each.time_unix_nano)

    async def _trace_of(self, request: decision_pb2.GetTraceRequest) -> str:
        """Return the id of the trace that a request is in, from this router or a sibling; "" when none has it."""
        if trace_id := self._store.trace_of(request.request_id, request.tenant):
            return trace_id
        return next((answer.trace_id for answer in await self._siblings.traces(request)), "")


class PublicDecisionServicer(decision_pb2_grpc.DecisionServiceServicer):
    """Answers about one request that the caller names: there is no list of requests, and no trace by its own id.

    With keys configured each call needs one. An admin tenant gets what the admin plane answers.
    """

    def __init__(self, whole: DecisionServicer, calls: Calls) -> None:
        self._whole, self._calls = whole, calls

    async def ListDecisions(
        self, request: decision_pb2.ListDecisionsRequest, context: Context
    ) -> decision_pb2.ListDecisionsResponse:
        """Return the records about one request; to an admin tenant those about all."""
        caller = self._calls.caller(context)
        if caller.tenant.admin:
            return await self._whole.decisions(request)
        _check_named(request.request_id)
        request.tenant, request.kept = caller.owner, False
        found = await self._whole.decisions(request)
        # Records that are found by the client's name for a request are for operators: such names can be guessed.
        named = (each for each in found.decisions if request.request_id in concerned_ids(each))
        own = [own_decision(record, request.request_id) for record in named]
        return decision_pb2.ListDecisionsResponse(decisions=own)

    async def WatchDecisions(
        self, request: decision_pb2.WatchDecisionsRequest, context: Context
    ) -> AsyncIterator[decision_pb2.WatchDecisionsResponse]:
        """Stream records to an admin tenant: they show what others do. Raises PermissionDenied."""
        if not self._calls.caller(context).tenant.admin:
            what = "WatchDecisions is for operators: ask the router's admin plane, or as an admin tenant"
            raise PermissionDenied(what)
        request.from_manager = False
        async with aclosing(self._whole.watch(request)) as responses:
            async for response in responses:
                yield response

    def WatchRequests(
        self, request: decision_pb2.WatchRequestsRequest, context: Context
    ) -> AsyncIterator[decision_pb2.WatchRequestsResponse]:
        """Raise Unsupported: a log of all requests is for operators."""
        raise Unsupported("this port records no requests; ask the router's admin plane")

    async def Explain(self, request: decision_pb2.ExplainRequest, context: Context) -> decision_pb2.ExplainResponse:
        """Return what would happen to a request of the caller; an admin tenant may name another one, and sees loads."""
        caller = self._calls.caller(context)
        if caller.tenant.admin:
            return await self._whole.explanation(request, None if request.tenant else caller)
        return own_explanation(await self._whole.explanation(request, caller))

    async def GetTrace(self, request: decision_pb2.GetTraceRequest, context: Context) -> decision_pb2.GetTraceResponse:
        """Return the spans of one request; NOT_FOUND when no store has one."""
        caller = self._calls.caller(context)
        if caller.tenant.admin:
            return await self._whole.trace(request)
        _check_named(request.request_id)
        request.tenant = caller.owner
        own = own_spans(await self._whole.trace(request), request.request_id, caller.owner)
        if not own.spans:
            raise NotFound(f"no span of request {request.request_id}")
        return own


def _check_named(request_id: str) -> None:
    if not is_id(request_id):
        what = f"is not {ID_WORDS}; the public port answers about the request with exactly this id, "
        raise InvalidRequest(FieldViolation("request_id", f"{what}the admin port about all"))


def _tapped_to_proto(tapped: Tapped) -> decision_pb2.WatchRequestsResponse:
    sequence = tapped.sequence
    first = sequence.first_token_at
    return decision_pb2.WatchRequestsResponse(
        arrived=tapped.arrived,
        prompt_tokens=sequence.prompt_tokens,
        output_tokens=sequence.output_tokens,
        cached_tokens=sequence.cached_tokens,
        first_token_seconds=None if first is None else first - sequence.arrived,
        last_token_seconds=sequence.ended - sequence.arrived,
        worker_id=sequence.worker_id,
        priority=sequence.priority,
        block_size=sequence.block_size,
        blocks=tapped.blocks,
        tenant=tapped.tenant,
        lost=tapped.lost,
    )
