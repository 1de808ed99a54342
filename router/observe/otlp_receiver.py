"""OTLP over gRPC into the trace store: other services send their spans here, whatever collector has them too."""

from __future__ import annotations

import logging
from typing import Any, Final

from grpc import aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from common.contracts.limits import MALFORMED_LINE_SECONDS, MAX_EXPORTED_SPANS
from common.untrusted.rare_lines import RareLines
from router.observe.trace_store import TraceStore

log = logging.getLogger(__name__)

OTLP: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
# How a certificate names its holder, the best one first. Of other names a holder may choose as many as it likes.
_NAMES: Final = ("peer_dns", "x509_common_name")


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._lines = RareLines(MALFORMED_LINE_SECONDS)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: aio.ServicerContext[Any, Any]
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep the spans that there is room for; the answer counts the others."""
        sender = sender_of(context)
        left_out = _leave_out(request)
        refused = left_out + self._store.add_otlp(request, sender)
        response = trace_service_pb2.ExportTraceServiceResponse()
        if refused:
            response.partial_success.rejected_spans = refused
            held_back = self._lines.next()
            if held_back is not None:
                extra = {"sender": sender, "refused": refused, "held_back": held_back}
                log.warning("refused spans: too many in one message or trace", extra=extra)
        return response


def sender_of(context: aio.ServicerContext[Any, Any]) -> str:
    """Return the name in the certificate of a peer, else its host: connections and ports cost a peer nothing."""
    names = context.auth_context() or {}
    for key in _NAMES:
        for name in names.get(key, ()):
            return bytes(name).decode(errors="replace")
    return context.peer().rpartition(":")[0] or "unknown"


def _leave_out(request: trace_service_pb2.ExportTraceServiceRequest) -> int:
    """Remove the spans beyond what one message may have; return how many they were."""
    room, removed = MAX_EXPORTED_SPANS, 0
    for scope in (scope for each in request.resource_spans for scope in each.scope_spans):
        count = len(scope.spans)
        del scope.spans[room:]
        removed += count - len(scope.spans)
        room -= len(scope.spans)
    return removed


def add_otlp_receiver(store: TraceStore, server: aio.Server) -> None:
    """Serve OTLP traces on a server that is not started yet."""
    # The generated function has no types, and its stub is for the blocking server.
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(OtlpReceiver(store), server)
