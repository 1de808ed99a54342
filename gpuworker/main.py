"""The GPU worker's process: builds, serves and drains. Only this module of the service names concrete classes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from grpc import aio
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from common.addresses.host_port import joined_address
from common.checkpoint.hub import checkpoint_directory
from common.contracts.clock import SystemClock, until_tick
from common.contracts.errors import FieldViolation, InvalidConfig, Unavailable
from common.contracts.lease import Attach, AttachRejected, LeaseChannel, public_incarnation
from common.cpu_list import cpus_of
from common.process.advertise import reachable_address
from common.process.cores import bind
from common.process.debug import dumps_on_signal
from common.process.garbage import lasting
from common.process.metrics import MetricsServer, metrics_port, new_registry
from common.process.supervised import Supervisor
from common.process.watchdog import Watchdog, Work
from common.rpc.roles import Role
from common.rpc.server import RpcServer, dialer
from common.rpc.tls import Identity
from common.service import run_service
from common.settings.config import FAILED_STATUS, load_or_exit
from common.telemetry.provider import setup as setup_telemetry
from gpuworker.config import GpuWorkerSettings
from gpuworker.engine.engine import Engine
from gpuworker.engine.image_requests import ImageRequests
from gpuworker.engine.lease_client import LeaseClient
from gpuworker.engine.ports import EngineLoad
from gpuworker.engine.transfers import Transfers
from gpuworker.memory.disk_mover import DiskMover
from gpuworker.plane import preflight
from gpuworker.plane.adapters import AdapterStore
from gpuworker.plane.data_plane import DataPlane, default_worker_id
from gpuworker.scheduling.kv_events import CacheWatch, EventForm, spec_of
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.manager_silence import ManagerAbsence
from gpuworker.scheduling.watchdog import waits_for_a_step
from gpuworker.server.metrics import (
    CarrierCollector,
    DiskCollector,
    EngineCollector,
    KvEventCollector,
    MaskCollector,
    OrphanCollector,
    RankCollector,
    lease_round_trips,
)
from gpuworker.server.servicer import GpuWorkerServicer, Serving
from gpuworker.server.step_spans import StepSpans
from gpuworker.server.submit_check import SubmitLimits
from quire.gpuworker.v1 import gpuworker_pb2, gpuworker_pb2_grpc

if TYPE_CHECKING:
    from gpuworker.peers.wire import PeerIdentity
    from gpuworker.plane.data_port import DataPort
    from gpuworker.server.kv_event_publisher import KvEventPublisher

log = logging.getLogger(__name__)

SERVICE = "quire.gpuworker.v1.GpuWorkerService"
_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.5
_LAST_REPLIES_S = 0.5
_LAST_WORDS_S = 2.0
# Else torch.distributed prints pages of stacks while another host is not there yet.
_QUIET_TORCH = ("TORCH_CPP_LOG_LEVEL", "ERROR")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def assemble(settings: GpuWorkerSettings) -> DataPlane:
    """Return what runs the steps; torch is imported only where there is a model to run, and nothing speaks against it.

    Raises as the two do, and as `preflight` does.
    """
    if settings.simulate is not None:
        from gpuworker.simulated import plane as simulated_plane

        return simulated_plane.assemble(settings)
    directory = checkpoint_directory(settings.model, weights=settings.load_format != "dummy")
    preflight.refuse_impossible(settings, directory)
    if settings.tensor_parallel_size > 1:
        os.environ.setdefault(*_QUIET_TORCH)
    with lasting():
        from gpuworker.plane import assembly
    return assembly.assemble(settings)


class Worker:
    """The life of one worker: start, service, drain and stop."""

    def __init__(self, settings: GpuWorkerSettings, channel: LeaseChannel | None) -> None:
        self.settings, self._given_channel = settings, channel
        self._tls = Identity.of(settings)
        self._telemetry = setup_telemetry("gpuworker", settings, instance=settings.worker_id or "")
        self._servicer = GpuWorkerServicer(self._telemetry.tracer, settings.orphan_grace, self._step_spans())
        self._server = RpcServer([SERVICE], tls=self._tls)
        self._registry = new_registry()
        self._metrics = MetricsServer(self._registry, lambda: not self._why_not_healthy(), self._why_not_healthy)
        self._supervisor = Supervisor(self._server.health.failing)
        self._watchdog = Watchdog(settings.stall_timeout, self._work, self._server.health.stalled, self._registry)
        self._absence = ManagerAbsence(settings.manager_patience)
        self._no_manager = self._absence.why_not_ready(False, time.monotonic())
        self._engine: Engine | None = None
        self._client: LeaseClient | None = None
        self._adapters: AdapterStore | None = None
        self._stop = asyncio.Event()
        self._address, self._port = "", 0
        self._data_port: DataPort | None = None
        self._kv_events: KvEventPublisher | None = None

    def _attached(self) -> bool:
        return self._engine is not None and self._engine.load().manager_attached

    def _step_spans(self) -> StepSpans | None:
        return StepSpans(self._telemetry.tracer.sampling(ALWAYS_ON)) if self.settings.trace_step_ratio else None

    def _why_not_healthy(self) -> str:
        """Return why the worker takes no requests, or gets on with none; "" if it is well."""
        if self._servicer.draining:
            return "the worker is draining"
        if self._supervisor.failing:
            return "a part of the worker has failed and begins anew; its log has the details"
        if self._engine is None:
            return "the worker is loading its model"
        return self._no_manager or self._watchdog.reason

    def _work(self) -> dict[str, Work]:
        return {} if self._engine is None else {"": work_of(self._engine.load())}

    def _debug_state(self) -> dict[str, object]:
        """Return the worker's part of `quire debug dump`: the load of its engine."""
        load = None if self._engine is None else asdict(self._engine.load())
        return {"draining": self._servicer.draining, "live_sequences": self._servicer.live_sequences, "engine": load}

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Raises EngineFailure when the engine ends before that."""
        settings, loop = self.settings, asyncio.get_running_loop()
        for number in _SIGNALS:
            # Loading has nothing to drain and cannot be interrupted. SIG_DFL would not do: the kernel does not deliver
            # it to the first process of a container.
            loop.add_signal_handler(number, os._exit, 128 + number)
        self._add_servicer(self._server.server)
        port = await self._server.start(settings.host, settings.port)
        await self._metrics.start(settings.host, metrics_port(settings.metrics_port, settings.port))
        dumps_on_signal("gpuworker", joined_address(settings.host, port), settings.state_dir, self._debug_state)
        self._port = port
        await self._look_up_address()
        began = time.monotonic()
        self._kv_events = open_kv_events(settings)
        plane = await asyncio.to_thread(assemble, settings)
        # Objects of torch and transformers live on. Walking them takes 0.2 s between steps, and 0.8 s at the end.
        gc.collect()
        gc.freeze()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop.set)
        for line in plane.start_lines():
            log.info("%s", line)
        self._supervisor.run_task("watchdog", self._watchdog.run)
        await self._serve(plane, port)
        await self._until_attached()
        if not self._stop.is_set():
            await self._look_for_manager()
            self._supervisor.run_task("readiness", self._follow_manager)
            self._servicer.beat()  # for routers that connected during the attach
            took = time.monotonic() - began
            print(f"READY {self._address} {plane.facts.device_words}, loaded in {took:.1f} s", flush=True)  # noqa: T201
        await self._stop.wait()
        await self._drain()

    def _add_servicer(self, server: aio.Server) -> None:
        gpuworker_pb2_grpc.add_GpuWorkerServiceServicer_to_server(self._servicer, server)

    async def _look_up_address(self) -> None:
        """Set the address for routers. Before each session, because a container may have got another one."""
        settings = self.settings
        own = settings.advertise or await reachable_address(settings.host, self._port, *settings.manager)
        if self._address not in ("", own):
            log.warning("this worker was at %s and is at %s now", self._address, own)
        self._address = own

    async def _serve(self, plane: DataPlane, port: int) -> None:
        worker_id = self.settings.worker_id or default_worker_id(port)
        self._data_port = open_data_port(self.settings, plane, self._tls, self._address)
        new_attach = partial(self._attach_of, plane, worker_id)
        channel = self._given_channel or self._lease_client()
        watch = CacheWatch() if self._kv_events is not None else None
        new_agent = partial(LeaseAgent, replace(plane.agent_config(), watch=watch))
        engine = Engine(
            new_agent, new_attach, plane.runner, channel, self._servicer.deliver, SystemClock(), lambda: self._address
        )
        self._engine, self._watchdog.standstill = engine, engine.standstill
        self._begin_transfers(plane, engine)
        self._publish_events(plane, engine)
        if ratio := self.settings.trace_step_ratio:
            engine.record_steps(lambda: random.random() < ratio)
        loop = asyncio.get_running_loop()
        engine.ended.add_done_callback(lambda _: loop.call_soon_threadsafe(self._stop.set))
        if self._client is not None:
            await self._client.start()
        engine.start()
        EngineCollector(engine.load, self._registry)
        MaskCollector(plane.mask_lateness, self._registry)
        RankCollector(plane.rank_load, self._registry)
        plane.report_lost_rank(partial(self._end_without_rank, asyncio.get_running_loop()))
        OrphanCollector(self._servicer.orphans, self._registry)
        info = partial(self._info, plane, engine)
        limits = SubmitLimits(plane.memory.max_model_len, plane.facts.vocab_size, plane.identity)
        adapters = self._adapters = plane.served_adapters
        if adapters is not None:
            self._supervisor.run_task("watch of adapters", adapters.watch)
        self._servicer.serve(Serving(engine, info, limits, plane.memory_message(), plane.grammars, adapters))

    def _attach_of(self, plane: DataPlane, worker_id: str) -> Attach:
        attach = plane.attach(worker_id, self._address)
        if self._data_port is None:
            return attach
        return replace(attach, data_address=self._data_port.address, image_format=plane.image_format)

    def _begin_transfers(self, plane: DataPlane, engine: Engine) -> None:
        """Let the engine move blocks beside its steps, where the worker has host memory."""
        images, disk, port = plane.images, plane.disk, self._data_port
        if images is None:
            return
        size, peers = plane.image_bytes, None
        if port is not None:
            requests = ImageRequests(images, size, SystemClock(), engine.wake)
            engine.serve_images(requests)
            identity = partial(
                _peer_identity, engine, size, tuple([each.pages for each in plane.memory.groups]) or (1,)
            )
            peers = port.serve(identity, requests.ask, engine.serve_keys.accepted_keys, engine.wake)
            CarrierCollector(peers.fetched, port.served, self._registry)
        if disk is None:
            engine.transfer_by(Transfers(images, size, SystemClock(), None, peers, groups=plane.memory.groups))
        else:
            mover = DiskMover(disk, engine.wake)
            transfers = Transfers(images, size, SystemClock(), mover, peers, disk.reset, plane.memory.groups)
            DiskCollector(mover, transfers, self._registry)
            engine.transfer_by(transfers, disk.claims(), disk.reset)

    def _info(self, plane: DataPlane, engine: Engine) -> gpuworker_pb2.WorkerInfo:
        info = plane.info(engine.attach)
        if self._kv_events is not None:
            info.kv_events.CopyFrom(self._kv_events.source(self._address))
        return info

    def _publish_events(self, plane: DataPlane, engine: Engine) -> None:
        """Let the engine tell subscribers of its cache, where somebody may subscribe."""
        events, config = self._kv_events, plane.agent_config()
        if events is None:
            return
        events.start(EventForm(config.block_size, spec_of(config.groups, config.window)), engine.wake)
        engine.tell_changes(events)
        KvEventCollector(events.counts, self._registry)
        log.info("KV events are published at %s, replays at %s", events.endpoint, events.replay_endpoint or "none")

    def _lease_client(self) -> LeaseClient:
        self._client = LeaseClient(
            self.settings.manager,
            self._wake,
            self._on_refused,
            dial=dialer(self._tls, Role.MANAGER),
            supervisor=self._supervisor,
        )
        self._client.before = self._look_up_address
        self._client.on_round_trip = lease_round_trips(self._registry)
        return self._client

    def _wake(self) -> None:
        if self._engine is not None:
            self._engine.wake()

    def _on_refused(self, rejected: AttachRejected) -> None:
        what = "; ".join([rejected.reason, *map(str, rejected.mismatches)])
        log.error("the KV manager at %s refuses this worker: %s", " or ".join(self.settings.manager), what)

    async def _until_attached(self) -> None:
        while not self._attached() and not self._stop.is_set():  # noqa: ASYNC110 - it changes on the engine's thread
            await asyncio.sleep(_POLL_SECONDS)

    async def _follow_manager(self) -> None:
        """Let health say whether the worker is ready for new requests."""
        while True:
            await self._look_for_manager()
            await asyncio.sleep(until_tick(time.monotonic(), _LOOK_SECONDS))

    async def _look_for_manager(self) -> None:
        before, self._no_manager = self._no_manager, self._absence.why_not_ready(self._attached(), time.monotonic())
        if before == self._no_manager:
            return
        self._servicer.beat()
        if self._no_manager:
            log.error("not ready: %s", self._no_manager)
            await self._server.health.not_ready()
        else:
            await self._server.ready()

    def _end_without_rank(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        """End the process after the loss of a rank, for which steps wait that nothing can stop; on another thread.

        Routers hear the reason first, and keep it with the sequences that they move.
        """
        log.critical("the worker ends: %s", reason)
        told = asyncio.run_coroutine_threadsafe(self._tell_of_end(reason), loop)
        with suppress(TimeoutError):
            told.result(2 * _LAST_WORDS_S)
        logging.shutdown()
        os._exit(FAILED_STATUS)

    async def _tell_of_end(self, reason: str) -> None:
        self._servicer.fail(Unavailable(f"the worker ends: {reason}"))
        await self._server.stop(_LAST_WORDS_S)  # it waits until gRPC has sent the ends of all streams

    def _running(self) -> bool:
        """Whether any work remains that a drain must wait for."""
        return self._servicer.live_sequences > 0 and self._engine is not None and not self._engine.ended.done()

    async def _drain(self) -> None:
        """Refuse new sequences, finish the running ones or let routers move them, then return."""
        assert self._engine is not None
        self._servicer.drain(migrate=self.settings.drain == "migrate")
        self._engine.drain()
        await self._server.health.drain()
        deadline = time.monotonic() + self.settings.drain_timeout
        while self._running() and time.monotonic() < deadline:  # noqa: ASYNC110 - it has a deadline
            await asyncio.sleep(_POLL_SECONDS)
        self._servicer.close()
        await self._server.stop(_LAST_REPLIES_S)
        if self._data_port is not None:
            await asyncio.to_thread(self._data_port.close)
        if self._adapters is not None:
            self._adapters.close()
        try:
            await asyncio.to_thread(self._engine.stop)
        finally:
            if self._kv_events is not None:
                await asyncio.to_thread(self._kv_events.close)
            if self._client is not None:
                await self._client.close()
            await self._supervisor.aclose()
            await self._metrics.stop()
            await self._telemetry.aclose()


def open_data_port(
    settings: GpuWorkerSettings, plane: DataPlane, tls: Identity | None, address: str
) -> DataPort | None:
    """Return the port for peers; None without one. Raises InvalidConfig where it cannot be had."""
    if not plane.serves_peers:
        return None
    from gpuworker.plane.data_port import DataPort

    return DataPort(settings, tls, address)


def open_kv_events(settings: GpuWorkerSettings) -> KvEventPublisher | None:
    """Return what publishes KV events; None without subscribers. Raises InvalidConfig where it cannot be had."""
    if settings.kv_events is None:
        return None
    try:
        from gpuworker.server.kv_event_publisher import KvEventPublisher
    except ModuleNotFoundError as missing:
        if missing.name not in ("zmq", "msgpack"):
            raise
        what = f"needs the package {missing.name}, which is not installed: pip install 'quire-llm[events]'"
        raise InvalidConfig(FieldViolation("--kv-events", f"{what}, or leave it out")) from missing
    return KvEventPublisher(settings.kv_events, settings.kv_events_replay, settings.kv_events_topic)


def _peer_identity(engine: Engine, image_bytes: int, block_pages: tuple[int, ...]) -> PeerIdentity:
    from gpuworker.peers.wire import PeerIdentity

    attach = engine.attach
    incarnation = public_incarnation(attach.incarnation)
    return PeerIdentity(attach.worker_id, incarnation, attach.image_format, image_bytes, block_pages)


def work_of(load: EngineLoad) -> Work:
    """Return what of an engine's load the watchdog follows."""
    age, predicted = load.step_age_seconds, load.step_predicted_seconds
    return Work(waits_for_a_step(load.running, load.waiting, load.manager_attached, age, predicted), load.steps)


def run(settings: GpuWorkerSettings, channel: LeaseChannel | None = None) -> int:
    """Run a worker; over `channel` instead of a KV manager, if one is given. Return the exit status."""

    async def serve() -> None:
        await Worker(settings, channel).run()

    if settings.cpus is not None:
        bind(cpus_of(settings.cpus))
    if preflight.follows_another_host(settings, os.environ):
        return run_service("gpuworker", settings, partial(follow, settings))
    return run_service("gpuworker", settings, serve)


async def follow(settings: GpuWorkerSettings) -> None:
    """Run the ranks of this host beside those of rank 0's, which alone serves; end with it."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, os._exit, 128 + number)

    def leave_to_first() -> None:
        """From now on rank 0 drains, and the other ranks end behind it."""
        for number in _SIGNALS:
            loop.add_signal_handler(number, lambda: None)

    directory = checkpoint_directory(settings.model, weights=settings.load_format != "dummy")
    preflight.refuse_impossible(settings, directory)
    os.environ.setdefault(*_QUIET_TORCH)
    from gpuworker.plane.rank_follower import follow_first

    await asyncio.to_thread(follow_first, settings, lambda: loop.call_soon_threadsafe(leave_to_first))


def main(argv: Sequence[str] | None = None) -> int:
    return run(load_or_exit(GpuWorkerSettings, argv, prog="quire-gpuworker"))
