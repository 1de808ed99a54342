"""The router's process: builds the parts, serves, drains. The only module of this service that names their classes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final

from google.protobuf.json_format import MessageToDict
from redis.asyncio import Redis

from common.checkpoint.fingerprint import model_fingerprint
from common.clock import SystemClock
from common.decisions.ring import DecisionRing
from common.process.debug import dumps_on_signal
from common.process.garbage import collect_rarely
from common.process.metrics import MetricsServer, metrics_port, new_registry
from common.rpc.server import RpcServer
from common.service import run_service
from common.settings.config import load_or_exit
from common.telemetry.provider import setup as setup_telemetry
from common.telemetry.server_spans import server_spans
from common.types import PoolIdentity
from quire.decision.v1 import decision_pb2_grpc
from quire.inference.v1 import inference_pb2_grpc
from quire.kserve.v2 import kserve_pb2_grpc
from router.config import RouterSettings
from router.constraints.checker import ConstraintChecker
from router.core.admission import AdmissionLimiter, AdmissionLimits
from router.core.identity import UNKNOWN_ARITHMETIC, UNKNOWN_GEOMETRY
from router.core.routing import Router
from router.grpc_api.decision_servicer import DecisionServicer
from router.grpc_api.servicer import InferenceServicer
from router.kserve.servicer import KSERVE_SERVICE, KserveServicer
from router.observe.metrics import RouterMetrics
from router.observe.otlp_receiver import add_otlp_receiver
from router.observe.recorder import Recorder
from router.observe.siblings import Siblings
from router.observe.status import RouterStatus
from router.observe.trace_store import StoreExporter, TraceStore
from router.openai.app import HttpParts, create_app
from router.ports import ModelCard, PrefixIndex
from router.requests.dispatcher import Dispatcher
from router.requests.frontend import RouterFrontend
from router.requests.redis_prefix_index import LOOKUP_SECONDS, NoPrefixIndex, RedisPrefixIndex, connect
from router.requests.validate import Validator
from router.serving.http_server import HttpServer, serve_http
from router.text.assembler import CheckpointText
from router.text.checkpoint import Checkpoint, read_checkpoint
from router.workers.client import RouterIdentity
from router.workers.discovery import Discovery
from router.workers.pool import WorkerPool
from router.workers.readiness import Readiness

log = logging.getLogger(__name__)

INFERENCE: Final = "quire.inference.v1.InferenceService"
DECISIONS: Final = "quire.decision.v1.DecisionService"
# A stream of many requests; each may carry a trace of its own.
_UNTRACED: Final = (f"/{KSERVE_SERVICE}/ModelStreamInfer",)
_DISCOVERY_TIMEOUT_S: Final = 1.0
_LAST_REPLIES_S: Final = 0.5


class RouterProcess:
    """One router, from opening its ports to closing its last stream."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings, self._clock = settings, SystemClock()
        checkpoint = read_checkpoint(settings.model)
        self._text = CheckpointText.load(settings.model, checkpoint.max_model_len)
        self._constraints = ConstraintChecker.load(settings.model, checkpoint.eos_token_ids)
        self._registry, self._ring = new_registry(), DecisionRing(settings.decision_ring)
        self._store = TraceStore(settings.span_ring)
        self._telemetry = setup_telemetry("router", settings, exporter=StoreExporter(self._store))
        self._clients = self._redis_clients()
        self._card = _card(settings, checkpoint, _identity(settings, checkpoint), self._text)
        name, incarnation = f"router-{secrets.token_hex(4)}", secrets.token_bytes(16)
        self.pool = WorkerPool(RouterIdentity(name, incarnation), self._card.identity, self._clock)
        self._server = RpcServer(
            [INFERENCE, DECISIONS, KSERVE_SERVICE], [server_spans(self._telemetry.tracer, _UNTRACED)], self._shares
        )
        self._siblings = Siblings(settings.sibling)
        self._own_http = MetricsServer(self._registry, self._is_ready)
        self._discovery = self._new_discovery()
        self.readiness = Readiness(self.pool, self._server.health)
        self._validator = Validator(
            self._text,
            checkpoint,
            self._text.has_tokenizer,
            context=lambda: self.pool.context(checkpoint.max_model_len),
            constraints=self._constraints,
        )
        self._serve_requests(name, checkpoint)
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _shares(self) -> bool:
        """Whether other routers may listen on the same ports."""
        return self.settings.own_port is not None

    def _redis_clients(self) -> tuple[Redis, Redis] | None:
        """Return one client for lookups, with a short timeout, and one for discovery."""
        url = self.settings.redis_url
        return (connect(url, LOOKUP_SECONDS), connect(url, _DISCOVERY_TIMEOUT_S)) if url else None

    def _new_discovery(self) -> Discovery | None:
        if self._clients is None:
            return None
        return Discovery(self._clients[1], self.pool, self._clock, self.settings.lease_ttl)

    def _redis_connected(self) -> bool:
        return self._discovery is not None and self._discovery.connected

    def _serve_requests(self, name: str, checkpoint: Checkpoint) -> None:
        settings, clock = self.settings, self._clock
        metrics = RouterMetrics(self._registry)
        metrics.watch_workers(lambda: len(self.pool.models()), self._redis_connected)
        index: PrefixIndex = NoPrefixIndex()
        if self._clients:
            index = RedisPrefixIndex(self._clients[0], lambda: self.pool.identity, clock, count=metrics.looked_up)
        admission = AdmissionLimiter(AdmissionLimits(settings.max_queued_requests, settings.max_tokens_in_flight))
        new_id = _ids(name)
        chooser = Router(clock, new_id, settings.routing_seed)
        dispatcher = Dispatcher(self.pool, chooser, index, self._ring, clock)
        recorder = Recorder(metrics, self._ring, self._telemetry.tracer, clock, new_id)
        self.frontend = RouterFrontend(dispatcher, admission, self._text, recorder, checkpoint.eos_token_ids)
        self.status = RouterStatus(
            self._card, self.pool, admission, self._redis_connected, lambda: self.frontend.draining, clock
        )
        service = InferenceServicer(self.frontend, self._validator, self._text, self.status, clock, self._siblings)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, self._server.server)
        kserve = KserveServicer(self.frontend, self._validator, self._card, self._is_ready, clock)
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve, self._server.server)
        decisions = DecisionServicer(self._ring, self._store, self._siblings)
        decision_pb2_grpc.add_DecisionServiceServicer_to_server(decisions, self._server.server)
        add_otlp_receiver(self._store, self._server.server)

    def debug_state(self) -> dict[str, object]:
        """Return the router's part of `quire debug dump`: its queue and its workers."""
        return MessageToDict(self.status.status(), preserving_proto_field_name=True)

    def _is_ready(self) -> bool:
        return self.readiness.ready and not self.frontend.draining

    async def start(self) -> str:
        """Listen and look for workers; return the addresses. Raises InvalidConfig when a port is taken."""
        settings = self.settings
        port = await self._server.start(settings.host, settings.port, settings.own_port)
        parts = HttpParts(
            frontend=self.frontend,
            validator=self._validator,
            codec=self._text,
            card=self._card,
            registry=self._registry,
            ready=self._is_ready,
            clock=self._clock,
        )
        app = create_app(parts)
        self._http = await serve_http(app, settings.host, settings.http_port, settings.drain_timeout, self._shares)
        if settings.own_port is not None:
            await self._own_http.start(settings.host, metrics_port(None, settings.own_port))
        for address in settings.worker:
            self.pool.add(address)
        loops = [self.readiness.run(), self.pool.watch()]
        if self._discovery is not None:
            loops.append(self._discovery.run())
        self._tasks = [asyncio.create_task(each) for each in loops]
        alone = f", alone on {settings.host}:{self._server.own_port}" if self._shares else ""
        return f"{settings.host}:{port}, HTTP on {settings.host}:{self._http.port}{alone}"

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish for `drain_timeout`, then stop."""
        self.frontend.draining = True
        await self._server.health.drain()
        grace = self.settings.drain_timeout
        # New requests go to the siblings. Without siblings this router refuses them while it drains.
        closing = asyncio.create_task(self._close(grace)) if self._shares else None
        if not await self.frontend.drain(grace):
            log.warning("stopping although some requests have not finished")
        # Time for the last statuses to leave; health watchers are not waited for.
        await self._close(_LAST_REPLIES_S)
        if closing is not None:
            await closing
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.pool.aclose()
        await self._siblings.aclose()
        await self._own_http.stop()
        for client in self._clients or ():
            await client.aclose()
        self._text.close()
        if self._constraints is not None:
            self._constraints.close()
        await self._telemetry.aclose()

    async def _close(self, grace: float) -> None:
        """Stop listening; running calls have `grace` seconds."""
        http = self._http.stop() if self._http is not None else asyncio.sleep(0)
        await asyncio.gather(self._server.stop(grace), http)


def _identity(settings: RouterSettings, checkpoint: Checkpoint) -> PoolIdentity:
    """Return the parts of the pool's identity that the checkpoint and the settings give."""
    model = "" if settings.load_format == "dummy" else model_fingerprint(settings.model)
    return PoolIdentity(
        model, checkpoint.tokenizer_fingerprint, settings.block_size, UNKNOWN_GEOMETRY, arithmetic=UNKNOWN_ARITHMETIC
    )


def _card(settings: RouterSettings, checkpoint: Checkpoint, identity: PoolIdentity, text: CheckpointText) -> ModelCard:
    return ModelCard(
        name=settings.model_name or settings.model.resolve().name,
        identity=identity,
        max_model_len=checkpoint.max_model_len,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        has_chat_template=text.has_chat_template,
    )


def _ids(name: str) -> Callable[[], str]:
    """Return a source of ids that differ from those of any other process."""
    numbers = itertools.count(1)
    return lambda: f"{name}-{next(numbers)}"


async def serve(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    process = RouterProcess(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    where = await process.start()
    dumps_on_signal("router", where.partition(",")[0], settings.state_dir, process.debug_state)
    collect_rarely()
    log.info("listening on %s, waiting for a worker", where)
    waits = [asyncio.create_task(event.wait()) for event in (process.readiness.first, stop)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        workers = ", ".join(model.worker_id for model in process.pool.models())
        print(f"READY {where}, workers: {workers}", flush=True)  # noqa: T201
    await stop.wait()
    for wait in waits:
        wait.cancel()
    await process.stop()


def main(argv: Sequence[str] | None = None) -> int:
    settings = load_or_exit(RouterSettings, argv, prog="quire-router")
    return run_service("router", settings, lambda: serve(settings))


if __name__ == "__main__":
    sys.exit(main())
