"""OTLP over gRPC into the trace store: other services send their spans here when no collector is configured."""

from __future__ import annotations

from typing import Any

from grpc import aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from router.observe.trace_store import TraceStore


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: aio.ServicerContext[Any, Any]
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep spans; all are accepted."""
        self._store.add_otlp(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def add_otlp_receiver(store: TraceStore, server: aio.Server) -> None:
    """Serve OTLP traces on a server that is not started yet."""
    # The generated function has no types, and its stub is for the blocking server.
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(OtlpReceiver(store), server)
