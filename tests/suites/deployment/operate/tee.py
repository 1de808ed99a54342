"""Replaces the OpenTelemetry collector: takes spans over OTLP and gives them to the router, compressed as it does."""

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
    TraceServiceStub,
    add_TraceServiceServicer_to_server,
)


class Tee(TraceServiceServicer):
    """Counts batches by the service that sent them; passes them on once `router` is known.

    `states` has the names of the spans with each trace state.
    """

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter()
        self.states = defaultdict[str, set[str]](set)
        self.came = asyncio.Event()
        self.router: TraceServiceStub | None = None
        self.endpoint = ""

    async def Export(self, request: Request, context: grpc.aio.ServicerContext[Any, Any]) -> Response:
        """Pass a batch on, and wake the tasks that wait for one."""
        for each in request.resource_spans:
            names = [pair.value.string_value for pair in each.resource.attributes if pair.key == "service.name"]
            self.batches.update(names)
            for span in (span for scope in each.scope_spans for span in scope.spans):
                self.states[span.trace_state].add(span.name)
        if self.router is not None:
            await self.router.Export(request, timeout=5.0)
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


@asynccontextmanager
async def forwarding(tee: Tee, address: str) -> AsyncIterator[None]:
    """Let a tee pass on to a router."""
    async with grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
        tee.router = TraceServiceStub(channel)
        try:
            yield
        finally:
            tee.router = None
