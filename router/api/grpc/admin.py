"""The router's admin plane: spans from the other services, decisions and traces of all, status and metrics.

It has ports of its own, so that a network can keep clients away from it. No request is served here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
from grpc import aio
from prometheus_client import CollectorRegistry

from common.addresses.host_port import joined_address
from common.contracts.adapters import AdapterShare
from common.process.metrics import MetricsServer
from common.rpc.server import RpcServer
from common.rpc.tls import Identity
from quire.decision.v1 import decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from router.api.grpc.codec import model_to_proto
from router.api.grpc.decision_servicer import DecisionServicer
from router.api.grpc.manager_calls import MANAGER, ManagerCalls
from router.api.grpc.pins import Pins
from router.api.grpc.servicer import Routers, StatusSource
from router.api.shared.call_context import Context
from router.config import RouterSettings
from router.observe.otlp_receiver import OTLP, add_otlp_receiver
from router.observe.siblings import asked_by_sibling
from router.observe.trace_store import TraceStore
from router.workers.adapters import AdapterAtWorker, AdapterManager

INFERENCE: Final = "quire.inference.v1.InferenceService"
DECISIONS: Final = "quire.decision.v1.DecisionService"


class AdminPlane:
    """A gRPC server and an HTTP server. `add` what it serves, then `start`."""

    def __init__(
        self,
        settings: RouterSettings,
        registry: CollectorRegistry,
        why_not_ready: Callable[[], str],
        interceptors: Sequence[aio.ServerInterceptor],
        tls: Identity | None,
    ) -> None:
        self._settings, services = settings, [INFERENCE, DECISIONS, MANAGER, OTLP]
        self._asks_callers = tls is not None
        self.rpc = RpcServer(services, interceptors, settings.own_port is not None, tls=tls, own_tls=tls)
        self.http = MetricsServer(registry, lambda: not why_not_ready(), why_not_ready)

    def add(
        self,
        decisions: DecisionServicer,
        store: TraceStore,
        status: StatusSource,
        routers: Routers,
        manager: ManagerCalls,
        pins: Pins,
        adapters: AdapterManager,
    ) -> None:
        decision_pb2_grpc.add_DecisionServiceServicer_to_server(decisions, self.rpc.server)
        add_otlp_receiver(store, self.rpc.server)
        _add_operators(_OperatorServicer(status, routers, pins, self.http, adapters), self.rpc.server)
        manager.add_to(self.rpc.server)
        self.http.add_actions({"/reset_prefix_cache": manager.reset_page}, from_elsewhere=not self._asks_callers)

    async def start(self) -> str:
        """Listen; return the addresses in words. Raises InvalidConfig when a port is taken."""
        settings, host = self._settings, self._settings.admin_host
        await self.rpc.start(host, settings.used_admin_port, settings.own_port, "--admin-port")
        await self.http.start(host, settings.used_admin_http_port, "--admin-http-port")
        alone = f", alone on {joined_address(host, self.rpc.own_port)}" if settings.own_port is not None else ""
        return f"admin on {self.address}, metrics on {joined_address(host, self.http.port)}{alone}"

    @property
    def address(self) -> str:
        """HOST:PORT of the gRPC port, once it listens."""
        return joined_address(self._settings.admin_host, self.rpc.port)

    async def stop(self, grace: float) -> None:
        await asyncio.gather(self.rpc.stop(grace), self.http.stop())


class _OperatorServicer:
    """The methods of InferenceService that operators and siblings call."""

    def __init__(
        self, status: StatusSource, routers: Routers, pins: Pins, http: MetricsServer, adapters: AdapterManager
    ) -> None:
        self._adapters = adapters
        self._status, self._routers, self._http = status, routers, http
        self.pin, self.prefetch = pins.pin, pins.prefetch

    async def model(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return model_to_proto(self._status.model())

    async def status(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Return queue and workers; the requests are those of all routers on these ports, unless a sibling asks."""
        status = self._status.status()
        if not asked_by_sibling(context):
            await self._routers.add_to(status)
        status.admin_http_port = self._http.port
        return status

    async def loads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Return the load of each worker, and the requests of all routers on these ports."""
        loads = self._status.loads(request.worker_id)
        if not asked_by_sibling(context):
            await self._routers.add_to(loads)
        return loads

    async def load_adapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        found = await self._adapters.load_adapter(request.name, request.path)
        return pb.LoadAdapterResponse(adapter=self._adapter(request.name, found))

    async def unload_adapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        await self._adapters.unload_adapter(request.name)
        return pb.UnloadAdapterResponse()

    async def list_adapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        found = self._adapters.list_adapters()
        return pb.ListAdaptersResponse(adapters=[self._adapter(name, each) for name, each in found.items()])

    def _adapter(self, name: str, workers: Sequence[AdapterAtWorker]) -> pb.LoadedAdapter:
        return _adapter_to_proto(name, workers, self._adapters.owner_of(name))

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End requests of this process alone when a sibling asks, else of all routers on these ports."""
        if asked_by_sibling(context):
            return pb.AbortResponse(aborted=self._routers.abort_here(request))
        return await self._routers.abort(request)


def _adapter_to_proto(name: str, workers: Sequence[AdapterAtWorker], owner: AdapterShare) -> pb.LoadedAdapter:
    found = [
        pb.AdapterAtWorker(
            worker_id=each.worker_id,
            fingerprint=each.adapter.fingerprint if each.adapter is not None else "",
            rank=each.adapter.rank if each.adapter is not None else 0,
            num_bytes=each.adapter.num_bytes if each.adapter is not None else 0,
            in_memory=each.adapter is not None and each.adapter.in_memory,
            error=each.error,
        )
        for each in workers
    ]
    return pb.LoadedAdapter(name=name, workers=found, tenant=owner.tenant, tenant_max_bytes=owner.max_bytes)


def _add_operators(servicer: _OperatorServicer, server: aio.Server) -> None:
    """Serve these methods of the service; gRPC answers UNIMPLEMENTED to the others."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "GetModel": grpc.unary_unary_rpc_method_handler(
            servicer.model, pb.GetModelRequest.FromString, pb.GetModelResponse.SerializeToString
        ),
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            servicer.status, pb.GetStatusRequest.FromString, pb.GetStatusResponse.SerializeToString
        ),
        "GetLoads": grpc.unary_unary_rpc_method_handler(
            servicer.loads, pb.GetLoadsRequest.FromString, pb.GetLoadsResponse.SerializeToString
        ),
        "Abort": grpc.unary_unary_rpc_method_handler(
            servicer.abort, pb.AbortRequest.FromString, pb.AbortResponse.SerializeToString
        ),
        "Pin": grpc.unary_unary_rpc_method_handler(
            servicer.pin, pb.PinRequest.FromString, pb.PinResponse.SerializeToString
        ),
        "Prefetch": grpc.unary_unary_rpc_method_handler(
            servicer.prefetch, pb.PrefetchRequest.FromString, pb.PrefetchResponse.SerializeToString
        ),
        "LoadAdapter": grpc.unary_unary_rpc_method_handler(
            servicer.load_adapter, pb.LoadAdapterRequest.FromString, pb.LoadAdapterResponse.SerializeToString
        ),
        "UnloadAdapter": grpc.unary_unary_rpc_method_handler(
            servicer.unload_adapter, pb.UnloadAdapterRequest.FromString, pb.UnloadAdapterResponse.SerializeToString
        ),
        "ListAdapters": grpc.unary_unary_rpc_method_handler(
            servicer.list_adapters, pb.ListAdaptersRequest.FromString, pb.ListAdaptersResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, handlers),))
