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
from functools import partial
from typing import Final

from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry

from common.addresses.host_port import joined_address
from common.checkpoint.gguf.names import served_folder
from common.contracts.clock import SystemClock
from common.contracts.errors import InvalidRequest
from common.contracts.limits import KEPT_RECORDS_SHARE, REFUSED_RECORDS_SHARE
from common.decisions.disk.metrics import LogMetrics
from common.decisions.disk.writer import opened as opened_log
from common.decisions.ring import DecisionRing
from common.process.allocator import one_arena
from common.process.debug import dumps_on_signal
from common.process.garbage import collect_rarely
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
from router.answers.constraints.checker import ConstraintChecker
from router.answers.reading import AnswerReader
from router.answers.text.assembler import CheckpointText
from router.answers.text.checkpoint import Checkpoint, read_checkpoint
from router.answers.text.tokenizer_files import TokenizerFiles
from router.api.anthropic.app import add_messages
from router.api.grpc.admin import DECISIONS, INFERENCE, AdminPlane
from router.api.grpc.decision_servicer import DecisionServicer, PublicDecisionServicer
from router.api.grpc.explanation import Explanations
from router.api.grpc.manager_calls import ManagerCalls
from router.api.grpc.pins import PinParts, Pins
from router.api.grpc.refused_calls import RefusedCalls
from router.api.grpc.servicer import InferenceServicer, Routers
from router.api.http.http_server import HttpServer, bounded_connections, serve_http
from router.api.http.pages import pages
from router.api.kserve.servicer import KSERVE_SERVICE, KserveServicer
from router.api.openai.app import create_app
from router.api.openai.public_metrics import PublicMetrics
from router.api.openai.responses.background import BackgroundResponses
from router.api.openai.responses.parts import ResponseParts
from router.api.openai.responses.store import MemoryStore, NoStore, RedisStore, ResponseStore, StoreLimits
from router.api.openai.service import HttpParts
from router.api.page.parts import Sampler, history_of, site_of
from router.api.page.site import PREFIX
from router.api.shared.call_context import Calls
from router.api.shared.metering import Meter, MeteredValidator
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
from router.observe.recorder import Recorder
from router.observe.refusals import Refusals
from router.observe.refused_records import RefusedRecords
from router.observe.sampling import RequestSampler
from router.observe.siblings import Siblings
from router.observe.status import RouterStatus
from router.observe.tail_keeper import TailKeeper
from router.observe.trace_ids import ChosenTraceIds
from router.observe.trace_store import TraceStore
from router.observe.vllm_names import Held, VllmNames
from router.placement.admission import AdmissionLimiter, AdmissionLimits
from router.placement.routing import Router
from router.requests.dispatcher import Dispatcher
from router.requests.explainer import Explainer
from router.requests.frontend import RouterFrontend
from router.requests.redis_prefix_index import NoPrefixIndex, RedisPrefixIndex
from router.requests.resumer import RequestResumer
from router.requests.validate import Validator, WatchedValidator, random_seed
from router.tenants.directory import TenantDirectory
from router.tenants.tenancy import Caller, TenantQuotas
from router.workers.client import RouterIdentity
from router.workers.discovery import Discovery
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
_ASIDE: Final = frozenset({_DISCOVERY, _HISTORY, _BATCHES})


class RouterProcess:
    """One router, from opening its ports to closing its last stream."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings, self._clock = settings, SystemClock()
        self._tls = Identity.of(settings)
        self._public_tls = PublicCertificate.of(settings.public_tls_cert, settings.public_tls_key)
        checkpoint = read_checkpoint(served_folder(settings.model), settings.tokenizer)
        folder = settings.tokenizer or checkpoint.directory
        self._text = CheckpointText.load(
            folder, checkpoint.max_model_len, settings.chat_template, settings.chat_control_tokens
        )
        checkpoint = replace(checkpoint, ends=self._text.ends(checkpoint.ends, checkpoint.vocab_size))
        self._ends = checkpoint.ends
        self._vocabulary = self._text.check_vocabulary(checkpoint.vocab_size)
        self._constraints = ConstraintChecker.load(folder, checkpoint.eos_token_ids)
        name, incarnation = f"router-{secrets.token_hex(4)}", secrets.token_bytes(16)
        self._registry, most, began = new_registry(), settings.decision_ring, self._clock.time_ns()
        self._new_id = _ids(name)
        self._ring = DecisionRing(most, settings.decision_ring_bytes, name, began)
        self._refused = RefusedRecords(self._ring, round(REFUSED_RECORDS_SHARE * settings.decision_ring_bytes))
        self._metrics = RouterMetrics(self._registry, name_of(settings), settings.metrics_tenants)
        self._refusals = Refusals(self._metrics, self._refused, self._clock, self._new_id)
        self._log = opened_log(settings, self._clock)
        LogMetrics(self._registry, self._log)
        self._store = TraceStore(settings.span_ring, settings.span_ring_bytes)
        sampler = RequestSampler(settings.trace_sample_ratio)
        ids = ChosenTraceIds()
        self._telemetry = setup_telemetry("router", settings, self._store.add_own, sampler=sampler, ids=ids)
        self._clients = self._redis_clients()
        self._card = card_of(settings, checkpoint, identity_of(settings, checkpoint), self._text)
        router, dial = RouterIdentity(name, incarnation), dialer(self._tls, Role.WORKER)
        self.pool = WorkerPool(
            router, self._card.identity, self._clock, dial=dial, manager_patience=settings.manager_patience
        )
        tracer = self._telemetry.tracer
        self._server = RpcServer(
            [INFERENCE, DECISIONS, KSERVE_SERVICE],
            [RefusedCalls(self._refusals), server_spans(tracer, _UNTRACED)],
            self._shares,
            replace(CLIENTS, most_calls=settings.grpc_calls_per_connection),
            tls=self._public_tls,
        )
        self._admin = AdminPlane(settings, self._registry, self._why_not_ready, [server_spans(tracer)], self._tls)
        self.supervisor = Supervisor(self._report_failing)
        self._siblings = Siblings(settings.sibling, dialer(self._tls, Role.ROUTER), settings.sibling_timeout)
        self._discovery = self._new_discovery()
        self.readiness = Readiness(self.pool, self._server.health, self._admin.rpc.health)
        self._context = lambda: self.pool.context(checkpoint.max_model_len)
        validator = Validator(
            self._text,
            checkpoint,
            self._text.has_tokenizer,
            draw_seed=random_seed if settings.seed is None else partial(int, settings.seed),
            context=self._context,
            constraints=self._constraints,
            open_schemas=settings.open_schemas,
        )
        self._validator = WatchedValidator(validator, self._record_wrong_request)
        self._authenticator = authenticator_of(settings, self._card.name)
        self._serve_requests(name, checkpoint)
        self._http: HttpServer | None = None
        self._background = BackgroundResponses()
        self._batches = batches_of(settings, self._authenticator, self._clock, checkpoint.max_model_len)
        self._batching: asyncio.Task[None] | None = None
        self._turns = LoopTurns() if settings.debug_loop_turns else None

    @property
    def _shares(self) -> bool:
        """Whether other routers may listen on the same ports."""
        return self.settings.own_port is not None

    def _record_wrong_request(self, request_id: str, caller: Caller, error: InvalidRequest) -> None:
        now_ns = self._clock.time_ns()
        self._refused.record(wrong_request_record(self._new_id(), now_ns, request_id, caller.owner, error))

    def _redis_clients(self) -> tuple[QuireRedis, QuireRedis] | None:
        """Return one client for lookups, with a short timeout, and one for discovery."""
        url, ca = self.settings.redis_url, self.settings.redis_ca
        if not url:
            return None
        return open_redis(url, self.settings.index_timeout, ca), open_redis(url, _DISCOVERY_TIMEOUT_S, ca)

    def _new_discovery(self) -> Discovery | None:
        if self._clients is None:
            return None
        rules = entry_rules_of(self.settings)
        return Discovery(self._clients[1], self.pool, self._clock, self.settings.lease_ttl, rules)

    def _redis_connected(self) -> bool:
        return self._discovery is not None and self._discovery.connected and not self._discovery_fails()

    def _discovery_fails(self) -> bool:
        return _DISCOVERY in self.supervisor.failing

    def _serving_fails(self) -> bool:
        return bool({*self.supervisor.failing} - _ASIDE)

    async def _report_failing(self, failing: tuple[str, ...]) -> None:
        await self._server.health.failing(tuple([name for name in failing if name not in _ASIDE]))

    async def _report_stall(self, reason: str) -> None:
        for health in (self._server.health, self._admin.rpc.health):
            await health.stalled(reason)

    def _serve_requests(self, name: str, checkpoint: Checkpoint) -> None:
        settings, clock = self.settings, self._clock
        metrics = self._metrics
        metrics.watch_workers(lambda: len(self.pool.models()), self._redis_connected)
        index: PrefixIndex = NoPrefixIndex()
        if self._clients:
            identity, timeout = lambda: self.pool.identity, settings.index_timeout
            index = RedisPrefixIndex(self._clients[0], identity, clock, timeout, count=metrics.looked_up)
        limits, quotas = AdmissionLimits(settings.max_queued_requests, settings.max_tokens_in_flight), TenantQuotas()
        admission = AdmissionLimiter(limits, quotas)
        new_id = self._new_id
        chooser = Router(clock, new_id, settings.routing_seed)
        dispatcher = Dispatcher(self.pool, chooser, index, self._ring, clock, max_wait=settings.max_wait)
        self._watchdog = Watchdog(
            settings.stall_timeout, lambda: {"": Work(*dispatcher.waits())}, self._report_stall, self._registry
        )
        manager = ManagerCalls(settings.manager, dialer(self._tls, Role.MANAGER))
        kept = KeptRecords(round(KEPT_RECORDS_SHARE * settings.decision_ring_bytes))
        slo, emit = settings.objective, self._telemetry.emit
        self._tail = TailKeeper(slo, self._ring, kept, metrics, emit, manager.all_decisions)
        recorder = Recorder(metrics, self._refused, self._telemetry.tracer, clock, new_id, self._tail, self._card.name)
        self.frontend = RouterFrontend(dispatcher, admission, self._text, recorder, checkpoint.eos_token_ids)
        self._meter = Meter(quotas, clock, self._context, checkpoint.max_new_tokens, self.frontend.refuse)
        self._metered = MeteredValidator(self._validator, self._meter)
        self._watchdog.standstill = self.frontend.standstill
        self.status = RouterStatus(
            self._card, self.pool, admission, self._redis_connected, lambda: self.frontend.leaving, clock
        )
        self._manager_calls, self.status.managers = manager, manager.managers
        self.status.discovery_problem = lambda: self._discovery.problem if self._discovery else ""
        calls = Calls(clock, self._authenticator, self._meter)
        self._server.health.guard = calls.caller
        folder = settings.tokenizer or checkpoint.directory
        self._resumer = RequestResumer.over(self.pool, self.frontend, clock)
        routers = Routers(self.frontend.abort, self._siblings, self._resumer)
        files = TokenizerFiles(folder, settings.chat_template)
        service = InferenceServicer(self.frontend, self._metered, self._text, self.status, calls, routers, files)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, self._server.server)
        kserve = KserveServicer(self.frontend, self._metered, self._card, self._is_ready, calls)
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve, self._server.server)
        decisions = DecisionServicer(self._ring, self._store, self._siblings, manager, recorder.tap)
        decisions.keeps(kept, self._refused)
        explainer = Explainer(dispatcher, admission, lambda: self.pool.identity, lambda: self.frontend.draining, clock)
        decisions.explains(Explanations(explainer, self._validator, clock), self._authenticator.named)
        public = PublicDecisionServicer(decisions, calls)
        decision_pb2_grpc.add_DecisionServiceServicer_to_server(public, self._server.server)
        named, identity, able = self._authenticator.named, lambda: self.pool.identity, lambda: len(self.pool.models())
        parts = PinParts(self.frontend, self._validator, self._text, named, identity, able, clock)
        self._admin.add(decisions, self._store, self.status, routers, manager, Pins(parts, manager))
        shown = pages(settings, folder, self.status.model, self.status.status)
        self._admin.http.add(shown)
        self._tokenizer_info = json.dumps(shown["/tokenizer_info"]()).encode() if settings.tokenizer_info else None
        self._history = history_of(Sampler(metrics, self.frontend, self.status), clock)
        site = site_of(decisions, manager, self.status, routers, self._history, clock, self._tls is None)
        self._admin.http.add_site(PREFIX, site.answer)

    def remarks(self) -> Sequence[str]:
        """Return what an operator should know of the checkpoint's text."""
        others = [*([self._vocabulary] if self._vocabulary else []), *self._text.remarks()]
        names = {each: self._text.token_name(each) if self._text.has_tokenizer else "" for each in self._ends}
        ends = [f"{each} {names[each]} ({', '.join(why)})" for each, why in self._ends.items()]
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
        if self._serving_fails():
            return "a part of the router has failed and begins anew; its log has the details"
        if self._watchdog.reason:
            return self._watchdog.reason
        return "" if self.readiness.ready else self.pool.trouble() or "a worker has just come"

    async def start(self) -> str:
        """Listen and look for workers; return the addresses. Raises InvalidConfig when a port is taken."""
        settings = self.settings
        if self._clients:
            await refuse_unfit(self._clients[1])
        port = await self._server.start(settings.host, settings.grpc_port, flag="--grpc-port")
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
            self._log.start(self._ring)
        for address in settings.worker:
            self.pool.add(address)
        self.supervisor.watch("HTTP server", self._http.task)
        self.supervisor.run("readiness", self.readiness.run)
        self._manager_calls.start(self.supervisor)
        self.supervisor.run("watch of hung workers", self.pool.watch)
        self.supervisor.run("watchdog", self._watchdog.run)
        self.supervisor.run(_HISTORY, self._history.run)
        self.supervisor.run("traces of kept requests", self._tail.run)
        if self._discovery is not None:
            self.supervisor.run(_DISCOVERY, self._discovery.run)
        if (batches := self._batches) is not None:
            self._batching = self.supervisor.run(_BATCHES, lambda: batches.runner.run(app))
        if isinstance(self._authenticator, TenantDirectory):
            directory = self._authenticator
            self.supervisor.run("file of tenants", lambda: directory.watch(self._end_revoked))
        if self._turns is not None:
            self._turns.start()
        http = joined_address(settings.host, self._http.port)
        return f"{joined_address(settings.host, port)}, HTTP on {http}, {admin}"

    def _public_metrics(self) -> PublicMetrics:
        registry = CollectorRegistry()
        registry.register(VllmNames(self._metrics, self._card.name, self._held))
        return PublicMetrics(registry, self._clock)

    def _held(self) -> Held:
        return Held(*self.frontend.sequences(), *self.status.blocks(), self.settings.block_size)

    def _end_revoked(self) -> None:
        self.frontend.end_revoked(self._authenticator.is_live)

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish for `drain_timeout`, then stop."""
        servers = Servers(self._server, self._admin, self._http)
        if self._batching is not None:
            await cancel_and_wait(self._batching)  # another router goes on with them, or this one when it is back
        if self._http is not None:
            self.supervisor.forget(self._http.task)
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
    return run_service("router", settings, lambda: serve(settings))
