"""The router's process: builds the parts, serves, drains. The only module of this service that names their classes."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Final

from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry

from common.addresses.host_port import joined_address
from common.checkpoint.gguf.names import served_folder
from common.contracts.clock import SystemClock
from common.contracts.errors import InvalidRequest
from common.contracts.limits import KEPT_RECORDS_SHARE, REFUSED_RECORDS_SHARE
from common.decisions.log_metrics import LogMetrics
from common.decisions.log_writer import opened as opened_log
from common.decisions.ring import DecisionRing
from common.process.debug import dumps_on_signal
from common.process.garbage import collect_rarely, one_arena
from common.process.loop_turns import LoopTurns
from common.process.metrics import new_registry
from common.process.redis_client import QuireRedis, open_redis, refuse_unfit
from common.process.supervised import Supervisor, cancel_and_wait
from common.process.watchdog import Watchdog, Work
from common.rpc.options import CLIENTS
from common.rpc.roles import Role
from common.rpc.server import RpcServer, dialer
from common.rpc.tls import Identity, PublicCertificate
from common.service import run_service
from common.settings.config import load_or_exit
from common.telemetry.provider import setup as setup_telemetry
from common.telemetry.server_spans import server_spans
from quire.decision.v1 import decision_pb2_grpc
from quire.inference.v1 import inference_pb2_grpc
from quire.kserve.v2 import kserve_pb2_grpc
from quire.vllm.v1 import control_pb2_grpc, engine_pb2_grpc
from quire.vllm.v1 import inference_pb2_grpc as vllm_inference_pb2_grpc
from router.answers.constraints.checker import ConstraintChecker
from router.answers.reading import AnswerReader
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.answers.text.tokenizer_files import TokenizerFiles
from router.api.anthropic.app import add_messages
from router.api.grpc.admin import DECISIONS, INFERENCE, AdminPlane
from router.api.grpc.decision_servicer import DecisionServicer, PublicDecisionServicer, RecordSources
from router.api.grpc.explanation import Explanations
from router.api.grpc.manager_calls import ManagerCalls
from router.api.grpc.pins import PinParts, Pins
from router.api.grpc.refused_calls import RefusedCalls
from router.api.grpc.servicer import InferenceServicer, Routers
from router.api.http.http_server import HttpServer, bounded_connections, serve_http
from router.api.http.pages import pages
from router.api.kserve.servicer import KSERVE_SERVICE, KserveServicer
from router.api.openai.adapters import adapter_routes
from router.api.openai.app import create_app
from router.api.openai.public_metrics import PublicMetrics
from router.api.openai.responses.background import BackgroundResponses, ResponseParts
from router.api.openai.responses.store import MemoryStore, NoStore, RedisStore, ResponseStore, StoreLimits
from router.api.openai.service import HttpParts
from router.api.page.parts import Sampler, history_of, site_of
from router.api.page.site import PREFIX
from router.api.shared.call_context import Calls
from router.api.shared.metering import Meter, MeteredValidator
from router.api.vllm.control_servicer import CONTROL, ControlServicer
from router.api.vllm.engine_servicer import ENGINE, EngineServicer
from router.api.vllm.inference_servicer import INFERENCE as VLLM_INFERENCE
from router.api.vllm.inference_servicer import InferenceServicer as VllmInferenceServicer
from router.config import RouterSettings
from router.contracts.ports import PrefixIndex
from router.contracts.refusals import wrong_request_record
from router.draining import Servers, drain
from router.from_settings import (
    authenticator_of,
    batches_of,
    card_of,
    dialects_of,
    entry_rules_of,
    identity_of,
    name_of,
    what_it_waits_for,
)
from router.observe.kept_records import KeptRecords
from router.observe.metrics import RouterMetrics
from router.observe.pool_words import pages_of_block
from router.observe.recorder import Recorder
from router.observe.refusals import Refusals
from router.observe.refused_records import RefusedRecords
from router.observe.sampling import ChosenTraceIds, RequestSampler
from router.observe.siblings import Siblings
from router.observe.status import RouterStatus
from router.observe.tail_keeper import TailKeeper
from router.observe.trace_store import TraceStore
from router.observe.vllm_names import Held, HeldAdapters, VllmNames
from router.placement.adapters import AdapterNames
from router.placement.admission import AdmissionLimiter, AdmissionLimits
from router.placement.routing import Router
from router.placement.shared_load import SharedLoad
from router.requests.dispatcher import Dispatcher
from router.requests.explainer import Explainer
from router.requests.frontend import RouterFrontend
from router.requests.redis_prefix_index import NoPrefixIndex, RedisPrefixIndex
from router.requests.resumer import RequestResumer
from router.requests.validate import Validator, WatchedValidator, random_seed
from router.tenants.directory import TenantDirectory
from router.tenants.tenancy import Caller, TenantQuotas
from router.workers.adapters import PoolAdapters
from router.workers.client import RouterIdentity
from router.workers.discovery import Discovery, DiscoveryState
from router.workers.load_sharing import LoadSharing
from router.workers.pool import WorkerPool
from router.workers.readiness import Readiness

log = logging.getLogger(__name__)

# A stream of many requests; each may carry a trace of its own.
_UNTRACED: Final = (f"/{KSERVE_SERVICE}/ModelStreamInfer",)
_DISCOVERY_TIMEOUT_S: Final = 1.0
# While it fails, the router serves with the workers that it has, and reports Redis as not connected.
_DISCOVERY: Final = "discovery"
# While it fails, the page for operators shows old figures.
_HISTORY: Final = "history of figures"
# While it fails, batches stand still.
_BATCHES: Final = "batches"
# While it fails, this router hears of other routers' load by heartbeats alone.
_SHARING: Final = "load of other routers"
_ASIDE: Final = frozenset({_DISCOVERY, _HISTORY, _BATCHES, _SHARING})


class RouterProcess:
    """One router, from opening its ports to closing its last stream.

    Its parts are built from the inside out: text, records, workers, requests, and the APIs over them.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.settings, self._clock = settings, SystemClock()
        self.supervisor = Supervisor(self._report_failing)
        self._turns = LoopTurns() if settings.debug_loop_turns else None
        self._http: HttpServer | None = None
        self._batching: asyncio.Task[None] | None = None
        name, incarnation = f"router-{secrets.token_hex(4)}", secrets.token_bytes(16)
        self._name, self._new_id = name, _ids(name)
        self._load_text()
        self._keep_records(name)
        self._find_workers(RouterIdentity(name, incarnation))
        self._serve_requests()
        self._serve_grpc()
        self._serve_operators()
        self._background = BackgroundResponses()
        self._batches = batches_of(settings, self._authenticator, self._clock, self._checkpoint.max_model_len)

    def _load_text(self) -> None:
        """Read the checkpoint's text: tokenizer, template, ends; and begin to check constraints."""
        settings = self.settings
        checkpoint = read_checkpoint(served_folder(settings.model), settings.tokenizer)
        self._folder = settings.tokenizer or checkpoint.directory
        self._text = CheckpointText.load(
            self._folder, checkpoint.max_model_len, settings.chat_template, settings.chat_control_tokens
        )
        ends = self._text.ends(checkpoint.ends, checkpoint.vocab_size)
        self._checkpoint = replace(checkpoint, ends=ends)
        self._vocabulary = self._text.check_vocabulary(checkpoint.vocab_size)
        self._constraints = ConstraintChecker.load(self._folder, checkpoint.eos_token_ids)
        self._card = card_of(settings, self._checkpoint, identity_of(settings, self._checkpoint), self._text)

    def _keep_records(self, name: str) -> None:
        """Keep decisions, refusals, spans and metrics."""
        settings, clock = self.settings, self._clock
        self._registry, most_bytes = new_registry(), settings.decision_ring_bytes
        ring = DecisionRing(settings.decision_ring, most_bytes, name, clock.time_ns())
        refused = self._refused = RefusedRecords(ring, round(REFUSED_RECORDS_SHARE * most_bytes))
        kept = KeptRecords(round(KEPT_RECORDS_SHARE * most_bytes))
        self._metrics = RouterMetrics(self._registry, name_of(settings), settings.metrics_tenants, self._card.aliases)
        self._refusals = Refusals(self._metrics, refused, clock, self._new_id)
        self._log = opened_log(settings, clock)
        LogMetrics(self._registry, self._log)
        store = TraceStore(settings.span_ring, settings.span_ring_bytes)
        self._telemetry = setup_telemetry(
            "router",
            settings,
            store.add_own,
            sampler=RequestSampler(settings.trace_sample_ratio),
            ids=ChosenTraceIds(),
        )
        self._manager_calls = ManagerCalls(settings.manager, dialer(self._tls, Role.MANAGER))
        emit, decisions = self._telemetry.emit, self._manager_calls.all_decisions
        self._tail = TailKeeper(settings.objective, ring, kept, self._metrics, emit, decisions)
        self._recorder = Recorder(
            self._metrics, refused, self._telemetry.tracer, clock, self._new_id, self._tail, self._card.name
        )
        self._records = RecordSources(ring, store, kept, refused, self._recorder.tap)

    @cached_property
    def _tls(self) -> Identity | None:
        return Identity.of(self.settings)

    def _find_workers(self, router: RouterIdentity) -> None:
        """Look for workers in Redis, and keep a stream to each."""
        settings, clock = self.settings, self._clock
        self._authenticator = authenticator_of(settings, self._card.name)
        self.pool = WorkerPool(
            router,
            self._card.identity,
            clock,
            dial=dialer(self._tls, Role.WORKER),
            manager_patience=settings.manager_patience,
            adapter_names=AdapterNames(self._card.names, self._authenticator.adapter_share),
        )
        self._clients = self._redis_clients()
        self._discovery: Discovery | None = None
        self._sharing: LoadSharing | None = None
        self._index: PrefixIndex = NoPrefixIndex()
        if self._clients is not None:
            for_lookups, for_discovery = self._clients
            rules = entry_rules_of(settings)
            self._discovery = Discovery(for_discovery, self.pool, clock, settings.lease_ttl, rules)
            count = self._metrics.looked_up
            self._index = RedisPrefixIndex(for_lookups, self.pool, clock, settings.index_timeout, count=count)
            shared, noticed = SharedLoad(router.incarnation), self._metrics.noticed
            self._sharing = LoadSharing(for_discovery, self.pool, shared, clock, rules.key, noticed)
            self.pool.share_load(shared)
            self._metrics.watch_others(lambda: shared.others)
        self._redis = DiscoveryState(self._discovery, self.supervisor, _DISCOVERY)
        self._metrics.watch_workers(self.pool, self._redis)

    def _redis_clients(self) -> tuple[QuireRedis, QuireRedis] | None:
        """Return one client for lookups, with a short timeout, and one for discovery."""
        url, ca = self.settings.redis_url, self.settings.redis_ca
        if not url:
            return None
        return open_redis(url, self.settings.index_timeout, ca), open_redis(url, _DISCOVERY_TIMEOUT_S, ca)

    def _serve_requests(self) -> None:
        """Admit, place and follow requests, of whichever API."""
        settings, clock, checkpoint = self.settings, self._clock, self._checkpoint
        limits, quotas = AdmissionLimits(settings.max_queued_requests, settings.max_tokens_in_flight), TenantQuotas()
        self._admission = AdmissionLimiter(limits, quotas)
        chooser = Router(clock, self._new_id, settings.routing_seed)
        self._dispatcher = Dispatcher(
            self.pool, chooser, self._index, self._records.ring, clock, max_wait=settings.max_wait
        )
        self.frontend = RouterFrontend(
            self._dispatcher,
            self._admission,
            self._text,
            self._recorder,
            checkpoint.eos_token_ids,
            remote_prefill=settings.remote_prefill,
        )
        context = partial(self.pool.context, checkpoint.max_model_len)
        validator = Validator(
            self._text,
            checkpoint,
            self._text.has_tokenizer,
            draw_seed=random_seed if settings.seed is None else partial(int, settings.seed),
            context=context,
            constraints=self._constraints,
            open_schemas=settings.open_schemas,
        )
        validator.keeps_states, validator.adapters = self.pool.keeps_states, self.pool
        self._validator = WatchedValidator(validator, self._record_wrong_request)
        self._meter = Meter(quotas, clock, context, checkpoint.max_new_tokens, self.frontend.refuse_unread)
        self._metered = MeteredValidator(self._validator, self._meter)
        self._calls = Calls(clock, self._authenticator, self._meter)
        self.status = RouterStatus(
            self._card, self.pool, self._admission, self._redis, self.frontend, self._manager_calls, clock
        )

    def _record_wrong_request(self, request_id: str, caller: Caller, error: InvalidRequest) -> None:
        now_ns = self._clock.time_ns()
        self._refused.record(wrong_request_record(self._new_id(), now_ns, request_id, caller.owner, error))

    def _serve_grpc(self) -> None:
        """Build the public port: Quire's API, those of KServe and vLLM, and decisions of a caller's own requests."""
        settings, clock, tracer = self.settings, self._clock, self._telemetry.tracer
        self._public_tls = PublicCertificate.of(settings.public_tls_cert, settings.public_tls_key)
        self._server = RpcServer(
            [INFERENCE, DECISIONS, KSERVE_SERVICE, VLLM_INFERENCE, CONTROL, ENGINE],
            [RefusedCalls(self._refusals), server_spans(tracer, _UNTRACED)],
            self._shares,
            replace(CLIENTS, most_calls=settings.grpc_calls_per_connection),
            tls=self._public_tls,
        )
        siblings = Siblings(settings.sibling, dialer(self._tls, Role.ROUTER), settings.sibling_timeout)
        self._resumer = RequestResumer.over(self.pool, self.frontend, clock)
        self._routers = Routers(self.frontend.abort_request, siblings, self._resumer)
        files = TokenizerFiles(self._folder, settings.chat_template)
        service = InferenceServicer(
            self.frontend, self._metered, self._text, self.status, self._calls, self._routers, files
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, self._server.server)
        kserve = KserveServicer(self.frontend, self._metered, self._card, self._is_ready, self._calls, self.pool)
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve, self._server.server)
        self._add_vllm(files)
        explanations = Explanations(
            Explainer(self._dispatcher, self._admission, self.frontend, clock), self._validator, clock
        )
        self._decisions = DecisionServicer(
            self._records, siblings, self._manager_calls, explanations, self._authenticator
        )
        public = PublicDecisionServicer(self._decisions, self._calls)
        decision_pb2_grpc.add_DecisionServiceServicer_to_server(public, self._server.server)

    def _add_vllm(self, files: TokenizerFiles) -> None:
        """Add the services that gateways call vLLM by."""
        server, frontend, metered = self._server.server, self.frontend, self._metered
        generation = VllmInferenceServicer(frontend, metered, self._card, self._calls, self.pool)
        vllm_inference_pb2_grpc.add_InferenceServicer_to_server(generation, server)
        control = ControlServicer(
            self.status, self._routers, self._calls, self._name, lambda: self._admin.address, self.pool
        )
        control_pb2_grpc.add_ControlServicer_to_server(control, server)
        engine = EngineServicer(frontend, metered, self.status, self._routers, self._calls, files, self._why_not_ready)
        engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)

    def _serve_operators(self) -> None:
        """Build the admin plane: its gRPC and HTTP ports, the page, and what watches the router."""
        settings, clock, manager = self.settings, self._clock, self._manager_calls
        spans = [server_spans(self._telemetry.tracer)]
        if settings.metrics_alias == "vllm":
            self._registry.register(self._vllm_names())
        self._admin = AdminPlane(settings, self._registry, self._why_not_ready, spans, self._tls)
        parts = PinParts(self.frontend, self._validator, self._text, self._authenticator, self.pool, clock)
        store = self._records.store
        self._adapters = PoolAdapters(self.pool, self._card.names)
        pins = Pins(parts, manager)
        self._admin.add(self._decisions, store, self.status, self._routers, manager, pins, self._adapters)
        shown = pages(settings, self._folder, self.status)
        self._admin.http.add(shown)
        self._tokenizer_info = json.dumps(shown["/tokenizer_info"]()).encode() if settings.tokenizer_info else None
        self._history = history_of(Sampler(self._metrics, self.frontend, self.status), clock)
        from_elsewhere = self._tls is None
        site = site_of(self._decisions, manager, self.status, self._routers, self._history, clock, from_elsewhere)
        self._admin.http.add_site(PREFIX, site.answer)
        self.readiness = Readiness(self.pool, self._server.health, self._admin.rpc.health)
        self._watchdog = Watchdog(
            settings.stall_timeout,
            self._work,
            self._report_stall,
            self._registry,
            standstill=self.frontend.standstill,
        )

    @property
    def _shares(self) -> bool:
        """Whether other routers may listen on the same ports."""
        return self.settings.own_port is not None

    def _work(self) -> dict[str, Work]:
        return {"": Work(*self._dispatcher.waits())}

    async def _report_failing(self, failing: tuple[str, ...]) -> None:
        await self._server.health.failing(tuple([name for name in failing if name not in _ASIDE]))

    async def _report_stall(self, reason: str) -> None:
        for health in (self._server.health, self._admin.rpc.health):
            await health.stalled(reason)

    def remarks(self) -> Sequence[str]:
        """Return what an operator should know of the checkpoint's text."""
        others = [*([self._vocabulary] if self._vocabulary else []), *self._text.remarks()]
        names = {
            each: self._text.token_name(each) if self._text.has_tokenizer else "" for each in self._checkpoint.ends
        }
        ends = [f"{each} {names[each]} ({', '.join(why)})" for each, why in self._checkpoint.ends.items()]
        return [f"an answer ends with: {'; '.join(ends) or 'no token'}", *others]

    def debug_state(self) -> dict[str, object]:
        """Return the router's part of `quire debug dump`: its queue, its workers and, if measured, its loop's turns."""
        turns = {"loop_turns": self._turns.take()} if self._turns is not None else {}
        return MessageToDict(self.status.status(), preserving_proto_field_name=True) | turns

    def _response_store(self) -> ResponseStore:
        settings, bounds = self.settings, StoreLimits(seconds=self.settings.response_ttl)
        if settings.response_store == "none":
            return NoStore()
        if self._clients is None or settings.response_store == "memory":
            return MemoryStore(bounds, self._clock)
        return RedisStore(self._clients[1], bounds, self._clock)

    def _is_ready(self) -> bool:
        return not self._why_not_ready()

    def _why_not_ready(self) -> str:
        """Return why no request can be served now; "" if they can."""
        if self.frontend.leaving:
            return "the router is draining"
        if {*self.supervisor.failing} - _ASIDE:
            return "a part of the router has failed and begins anew; its log has the details"
        if self._watchdog.reason:
            return self._watchdog.reason
        return "" if self.readiness.ready else self.pool.trouble() or "a worker has just come"

    async def start(self) -> str:
        """Listen and look for workers; return the addresses. Raises InvalidConfig when a port is taken."""
        settings = self.settings
        if self._clients:
            await refuse_unfit(self._clients[1])
        port = await self._server.start(settings.host, settings.grpc_port, flag="--grpc-port", guard=self._calls.caller)
        admin = await self._admin.start()
        parts = HttpParts(
            frontend=self.frontend,
            validator=self._metered,
            codec=self._text,
            card=self._card,
            why_not_ready=self._why_not_ready,
            clock=self._clock,
            authenticator=self._authenticator,
            reader=AnswerReader(dialects_of(settings, self._text), self._text, settings.open_schemas),
            responses=ResponseParts(self._response_store(), self._background),
            model=self.status.model,
            resumer=self._resumer,
            refuses_media=settings.refuse_media,
            forces_usage=settings.force_include_usage,
            meter=self._meter,
            batches=self._batches,
            refusals=self._refusals,
            tracer=self._telemetry.tracer,
            adapters=self.pool,
        )
        asks_for_keys = isinstance(self._authenticator, TenantDirectory)
        app = create_app(
            parts,
            settings.cors_origins,
            own_names=None if asks_for_keys else settings.allowed_hosts,
            root_path=settings.root_path,
            tokenizer_info=self._tokenizer_info,
            metrics=self._public_metrics() if settings.public_metrics else None,
        )
        add_messages(app, parts)
        app.include_router(adapter_routes(self._adapters, asks_for_keys))
        connections = bounded_connections(settings.http_connections, settings.http_connections_per_peer)
        self._http = await serve_http(
            app,
            settings.host,
            settings.port,
            settings.drain_timeout,
            self._shares,
            tls=self._public_tls,
            connections=connections,
        )
        if self._log is not None:
            self._log.start(self._records.ring)
        for address in settings.worker:
            self.pool.add_worker(address)
        self.supervisor.watch_task("HTTP server", self._http.task)
        self.supervisor.run_task("readiness", self.readiness.run)
        self._manager_calls.start(self.supervisor)
        self.supervisor.run_task("watch of hung workers", self.pool.watch_workers)
        self.supervisor.run_task("watchdog", self._watchdog.run)
        self.supervisor.run_task(_HISTORY, self._history.run)
        self.supervisor.run_task("traces of kept requests", self._tail.run)
        if self._discovery is not None:
            self.supervisor.run_task(_DISCOVERY, self._discovery.run)
        if self._sharing is not None:
            self.supervisor.run_task(_SHARING, self._sharing.run)
        if (batches := self._batches) is not None:
            self._batching = self.supervisor.run_task(_BATCHES, partial(batches.runner.run, app))
        if isinstance(self._authenticator, TenantDirectory):
            directory = self._authenticator
            self.supervisor.run_task("file of tenants", partial(directory.watch, self._end_revoked))
        if self._turns is not None:
            self._turns.start()
        http = joined_address(settings.host, self._http.port)
        return f"{joined_address(settings.host, port)}, HTTP on {http}, {admin}"

    def _public_metrics(self) -> PublicMetrics:
        registry = CollectorRegistry()
        registry.register(VllmNames(self._metrics, self._card.name, self._held))
        return PublicMetrics(registry, self._clock)

    def _vllm_names(self) -> VllmNames:
        return VllmNames(self._metrics, self._card.name, self._held, self._held_adapters)

    def _held_adapters(self) -> HeldAdapters:
        running, waiting = self.frontend.adapters()
        most = max((model.adapters.max_in_memory for model in self.pool.models()), default=0)
        return HeldAdapters(running, waiting, most, self._clock.time_ns() / 1e9)

    def _held(self) -> Held:
        pages = pages_of_block(self.status.model().identity.kv_geometry)
        return Held(*self.frontend.sequences(), *self.status.blocks(), self.settings.block_size, pages)

    def _end_revoked(self) -> None:
        self.frontend.end_revoked(self._authenticator.is_live)

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish for `drain_timeout`, then stop."""
        servers = Servers(self._server, self._admin, self._http)
        if self._batching is not None:
            await cancel_and_wait(self._batching)  # another router goes on with them, or this one when it is back
        if self._http is not None:
            self.supervisor.forget_task(self._http.task)
        await drain(servers, self.frontend, self.settings.drain_timeout, self._shares, self._background.aclose)
        await self.supervisor.aclose()
        await self.pool.aclose()
        for client in self._clients or ():
            await client.aclose()
        self._text.close()
        if self._constraints is not None:
            await self._constraints.aclose()
        if self._log is not None:
            await asyncio.to_thread(self._log.close)
        await self._telemetry.aclose()


def _ids(name: str) -> Callable[[], str]:
    """Return a source of ids that differ from those of any other process."""
    numbers = itertools.count(1)
    return lambda: f"{name}-{next(numbers)}"


async def serve(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Return 1 when a part was lost that cannot be begun again, else 0."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    process = RouterProcess(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    where = await process.start()
    dumps_on_signal("router", where.partition(",")[0], settings.state_dir, process.debug_state)
    collect_rarely()
    for remark in process.remarks():
        log.info("%s", remark)
    level, waits = what_it_waits_for(settings)
    log.log(level, "listening on %s; %s", where, waits)
    lost = process.supervisor.lost
    await _any_of(process.readiness.first, stop, lost)
    if not stop.is_set() and not lost.is_set():
        workers = ", ".join(model.worker_id for model in process.pool.models())
        print(f"READY {where}, workers: {workers}", flush=True)  # noqa: T201
    await _any_of(stop, lost)
    await process.stop()
    return int(lost.is_set())


async def _any_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    one_arena()
    settings = load_or_exit(RouterSettings, argv, prog="quire-router")
    return run_service("router", settings, partial(serve, settings))
