"""Replaces the OpenTelemetry collector of an operator: takes spans over OTLP."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest as Request
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse as Response
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Tee(TraceServiceServicer):
    """Counts batches by the service that sent them. `states` has the names of the spans with each trace state."""

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter()
        self.states = defaultdict[str, set[str]](set)
        self.came = asyncio.Event()
        self.endpoint = ""

    async def Export(self, request: Request, context: grpc.aio.ServicerContext[Any, Any]) -> Response:
        """Take a batch, and wake the tasks that wait for one."""
        for each in request.resource_spans:
            names = [pair.value.string_value for pair in each.resource.attributes if pair.key == "service.name"]
            self.batches.update(names)
            for span in (span for scope in each.scope_spans for span in scope.spans):
                self.states[span.trace_state].add(span.name)
        self.came.set()
        return Response()


@asynccontextmanager
async def running_tee() -> AsyncIterator[Tee]:
    """Serve on a free port; `endpoint` is the value for OTEL_EXPORTER_OTLP_ENDPOINT."""
    tee, server = Tee(), grpc.aio.server()
    add_TraceServiceServicer_to_server(tee, server)
    port = server.add_insecure_port("127.0.0.1:0")
    tee.endpoint = f"http://127.0.0.1:{port}"
    await server.start()
    try:
        yield tee
    finally:
        await server.stop(0)
