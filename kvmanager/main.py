"""The KV manager's process: builds everything, serves, drains. The only module of this service that names classes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, fields
from functools import partial
from typing import Final

from common.addresses.host_port import SERVER_PORT, joined_address, redis_addresses, without_login
from common.checkpoint.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.checkpoint.gguf.names import served_folder
from common.contracts.clock import SystemClock
from common.contracts.errors import StaleEpoch
from common.contracts.transfer_tokens import drawn_pool_key
from common.contracts.types import PoolIdentity
from common.decisions.log_metrics import LogMetrics
from common.decisions.log_writer import opened as opened_log
from common.decisions.ring import DecisionRing
from common.process.advertise import reachable_address
from common.process.debug import dumps_on_signal
from common.process.garbage import collect_rarely
from common.process.metrics import MetricsServer, metrics_port, new_registry
from common.process.redis_client import open_redis, refuse_unfit
from common.process.supervised import Supervisor
from common.process.watchdog import LastResort, Watchdog, Work
from common.rpc.roles import Role
from common.rpc.server import RpcServer, dialer
from common.rpc.tls import Identity
from common.service import run_service
from common.settings.config import load_or_exit
from common.settings.pool_key import pool_key_of
from common.telemetry.provider import setup as setup_telemetry
from common.telemetry.server_spans import server_spans
from kvmanager.config import KvManagerSettings
from kvmanager.contracts.ports import IndexStore, Leading
from kvmanager.group.group_lease import RedisGroupLease
from kvmanager.group.leadership import Leadership
from kvmanager.group.member import Alone, GroupMember
from kvmanager.group.processes import owner_name
from kvmanager.index.publisher import PublisherTimes
from kvmanager.index.state_file import EpochFile
from kvmanager.index.store import TIMEOUT_S, RedisIndexStore
from kvmanager.index.writer import IndexWriter
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.registry import WorkerRegistry
from kvmanager.ledger.watchdog import waits_for_a_grant
from kvmanager.service import decision_servicer, servicer
from kvmanager.service.decision_servicer import DecisionServicer
from kvmanager.service.metrics import ManagerMetrics
from kvmanager.service.servicer import KvManagerServicer
from kvmanager.sessions.attachments import Attachments
from kvmanager.sessions.handler import SessionLimits
from kvmanager.sessions.pins import OperatorPins
from quire.decision.v1 import decision_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2_grpc

log = logging.getLogger(__name__)

REPLACED_STATUS: Final = 3
_FLUSH_S: Final = 2.0
_LEAVE_S: Final = 2.0
_GRACE_S: Final = 0.5
# Objects of ledgers and records are cold when they are walked: 20,000 of them took 13 ms, and no grant left meanwhile.
# So few walks over young ones lead to one over what survived them.
_WALKS: Final = 5
# Seconds between two attempts of a standby to take the lease.
_STANDBY_POLL_S: Final = 0.25


class ManagerProcess:
    """One manager from its first port to its last write. `on_stale` is called when another manager has taken over.

    In a group, a manager that another one of the group replaces stands by instead.
    """

    def __init__(self, settings: KvManagerSettings, on_stale: Callable[[StaleEpoch], None]) -> None:
        self.settings, clock = settings, SystemClock()
        self._telemetry = setup_telemetry("kvmanager", settings)
        source, most = f"m-{secrets.token_hex(4)}", settings.decision_ring
        self.ring = DecisionRing(most, settings.decision_ring_bytes, source, clock.time_ns())
        self._log = opened_log(settings, clock)
        epoch_file = EpochFile(settings.state_dir)
        epoch_file.check()
        times = PublisherTimes(settings.prefix_ttl, settings.lease_ttl)
        self.supervisor = Supervisor(self._show)
        self.leading, self.member = self._membership(source, clock, on_stale)
        key, stale = pool_key_of(settings), on_stale if self.member is None else self.member.doubt
        opener = _store_opener(settings, self.leading)
        self.index = IndexWriter(epoch_file, opener, clock, times, stale, key, self.supervisor)
        self.index.before_writing = self.leading.writes
        manager = WorkerRegistry(settings.manager_config(), clock, _decision_ids(source))
        if settings.peer_fetch:
            manager.transfer_key = key or drawn_pool_key(secrets.token_bytes)
        self.attachments = Attachments(
            manager, self.index, self.ring, self._telemetry.tracer, self.leading, configured_identity(settings)
        )
        self.pins = OperatorPins(manager, self.index, self.leading, clock)
        self.attachments.attaching = self.pins.attaching
        self.pins.on_missed_reset = self.attachments.order_missed_reset
        self.server = self._server()

    def _membership(
        self, source: str, clock: SystemClock, on_stale: Callable[[StaleEpoch], None]
    ) -> tuple[Leading, GroupMember | None]:
        settings = self.settings
        if settings.group is None or not settings.redis_url:
            return Alone(source, clock), None
        # An attempt that Redis does not answer ends before the next one is due.
        redis = open_redis(settings.redis_url, settings.group_lease / 4, settings.redis_ca)
        owner = owner_name(source)
        lease = RedisGroupLease(redis, settings.group, owner)
        core = Leadership(owner, settings.group_lease, _STANDBY_POLL_S)
        dial = dialer(Identity.of(settings), Role.MANAGER)
        member = GroupMember(core, lease, clock, dial, self._lead, self._stand_by, on_stale)
        return member, member

    async def _lead(self, namespace: str) -> None:
        if namespace:
            await self.index.lead(namespace)

    async def _stand_by(self, why: str) -> None:
        self.attachments.stand_by(why)
        await self.index.stand_by()

    def _server(self) -> RpcServer:
        registry = new_registry()
        figures = ManagerMetrics(registry, self.attachments, self.settings.block_size)
        LogMetrics(registry, self._log)
        self.metrics = MetricsServer(registry, lambda: not self._why_not(), self._why_not, lambda: self.watchdog.reason)
        resort = LastResort(self.settings.manager_patience, self.attachments.break_stall)
        self.watchdog = Watchdog(self.settings.stall_timeout, self._work, self._report_stall, registry, resort)
        spans = server_spans(self._telemetry.tracer, untraced=(servicer.SESSION_METHOD,))
        services, identity = [servicer.SERVICE, decision_servicer.SERVICE], Identity.of(self.settings)
        server = RpcServer(services, [spans], tls=identity)
        limits, stalled = _session_limits(self.settings), lambda worker: self.watchdog.reasons.get(worker, "")
        service = KvManagerServicer(self.attachments, figures.observe_report, self.pins, limits, stalled)
        kvmanager_pb2_grpc.add_KvManagerServiceServicer_to_server(service, server.server)
        decision_pb2_grpc.add_DecisionServiceServicer_to_server(DecisionServicer(self.ring), server.server)
        return server

    def _why_not(self) -> str:
        """Return why the manager is not healthy; "" if it is."""
        if self.attachments.draining:
            return "the manager is shutting down"
        if self.supervisor.failing:
            return "a part of the manager has failed and begins anew; its log has the details"
        if self.member is not None and not self.member.settled:
            return "the manager knows of no leader of its group yet; it has to reach Redis"
        return ""

    def _work(self) -> dict[str, Work]:
        return {worker: _work_of(ledger) for worker, ledger in self.attachments.ledgers()}

    async def _show(self, failing: tuple[str, ...]) -> None:
        """Let health say whether all background tasks run."""
        await self.server.health.failing(failing)

    async def _report_stall(self, reason: str) -> None:
        """Let health say by the name `work` alone that ledgers stand still, even if all of them do.

        Other workers need the manager, and so do those that stand still: a new attach begins a ledger anew. In
        Kubernetes a manager that is not ready gets no attach.
        """
        await self.server.health.stalled(reason, serves_on=True)

    async def _ready_while_settled(self, member: GroupMember) -> None:
        """Let health say whether this manager leads its group or stands by."""
        async with aclosing(member.states()) as states:
            async for state in states:
                await (self.server.health.ready() if state.settled else self.server.health.not_ready())

    async def start(self) -> str:
        """Listen and serve; return one line about it. Raises InvalidConfig when a port is taken."""
        settings = self.settings
        if settings.redis_url:
            async with open_redis(settings.redis_url, TIMEOUT_S, settings.redis_ca) as redis:
                await refuse_unfit(redis)
        port = await self.server.start(settings.host, settings.port)
        metrics = await self.metrics.start(settings.host, metrics_port(settings.metrics_port, settings.port))
        self.supervisor.run_task("watchdog", self.watchdog.run)
        self.supervisor.run_task("pins", self.pins.run)
        self.supervisor.run_task("copies ahead of need", self.attachments.run_ahead)
        self.leading.address = settings.group_address or joined_address(settings.host, port)
        if self.member is not None:
            # In the member's task: Redis's name may be unknown for long, and a signal has to end the process meanwhile.
            self.member.start(self.supervisor, lambda: self._announced(port))
            self.supervisor.run_task("readiness", partial(self._ready_while_settled, self.member))
        else:
            await self.server.ready()
        if self._log is not None:
            self._log.start(self.ring)
        index = without_login(settings.redis_url) if settings.redis_url else "none (no Redis)"
        return (
            f"READY {joined_address(settings.host, port)} metrics on {metrics}, prefix index in {index}, "
            f"state in {settings.state_dir}"
        )

    async def _announced(self, port: int) -> str:
        """Return the address at which the other managers of the group reach this one."""
        settings = self.settings
        if settings.group_address is not None:
            return settings.group_address
        return await reachable_address(settings.host, port, *_redis_addresses(settings.redis_url))

    def debug_state(self) -> dict[str, object]:
        """Return the manager's part of `quire debug dump`: the pool of each worker's ledger, and what stands still."""
        pools = {worker: asdict(ledger.pool_counts()) for worker, ledger in self.attachments.ledgers()}
        leads, term = self.leading.leads(), self.leading.term
        epoch, draining = self.index.epoch, self.attachments.draining
        state = {
            "group": self.leading.group,
            "epoch": epoch,
            "leads": leads,
            "term": term,
            "draining": draining,
            "pools": pools,
        }
        return state | {"stalled": self.watchdog.reason}

    async def stop(self) -> None:
        """Write the pending changes, send the workers away, and stop."""
        await self.server.health.drain()
        if not await self.index.flush(_FLUSH_S):
            log.warning("stopping although the prefix index lacks some changes; the next manager publishes them")
        if self.member is not None:
            await self.member.resign()
        self.attachments.drain()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self.attachments.left()
        except TimeoutError:
            log.warning("stopping although some workers have not left")
        await self.abort(_GRACE_S)

    async def abort(self, grace: float = 0.0) -> None:
        """Stop; running calls of operators have `grace` seconds."""
        await self.server.stop(grace)
        if self.member is not None:
            await self.member.aclose()
        await self.index.close()
        await self.metrics.stop()
        if self._log is not None:
            await asyncio.to_thread(self._log.close)
        await self._telemetry.aclose()


def _work_of(ledger: Ledger) -> Work:
    pool = ledger.pool_counts()
    return Work(waits_for_a_grant(pool), (pool.totals.admissions, pool.totals.preemptions, ledger.state.worker.steps))


def configured_identity(settings: KvManagerSettings) -> dict[str, object]:
    """Return the parts of the pool's identity that are configured here; the first worker fixes the others."""
    parts: dict[str, object] = {each.name: each.default for each in fields(PoolIdentity) if each.name == "hash_version"}
    parts["block_size"] = settings.block_size
    if settings.model is not None:
        seed = settings.seed if settings.load_format == "dummy" else None
        folder = served_folder(settings.model)
        parts["model_fingerprint"] = model_fingerprint(folder, seed)
        parts["tokenizer_fingerprint"] = tokenizer_fingerprint(settings.tokenizer or folder)
    return parts


def _session_limits(settings: KvManagerSettings) -> SessionLimits:
    return SessionLimits(settings.max_inventory_messages, settings.max_inventory_bytes, settings.attach_timeout)


def _store_opener(settings: KvManagerSettings, leading: Leading) -> Callable[[str], IndexStore] | None:
    url, ca, times = settings.redis_url, settings.redis_ca, (settings.prefix_ttl, settings.lease_ttl)
    if not url:
        return None
    # A store keeps the term in which it was opened: a later one of this process is not its own.
    return lambda namespace: RedisIndexStore(
        open_redis(url, TIMEOUT_S, ca), namespace, *times, term=leading.term, group=settings.group or ""
    )


def _redis_addresses(url: str | None) -> list[str]:
    found = redis_addresses(url) if url else ()
    return [joined_address(*each) for each in found or (("127.0.0.1", SERVER_PORT),)]


def _decision_ids(source: str) -> Callable[[], str]:
    """Return ids that differ from those of any other process."""
    numbers = itertools.count(1)
    return lambda: f"{source}-{next(numbers)}"


async def serve(settings: KvManagerSettings) -> int:
    """Serve until SIGTERM or SIGINT, or until another manager takes over; return the exit status."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[StaleEpoch | None] = loop.create_future()

    def end(reason: StaleEpoch | None = None) -> None:
        if not ended.done():
            ended.set_result(reason)

    process = ManagerProcess(settings, end)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    collect_rarely(_WALKS)
    print(await process.start(), flush=True)  # noqa: T201
    address = joined_address(settings.host, process.server.port)
    dumps_on_signal("kvmanager", address, settings.state_dir, process.debug_state)
    replaced = await ended
    if replaced is None:
        await process.stop()
        return 0
    print(f"quire-kvmanager: {replaced}; this one ends", file=sys.stderr, flush=True)  # noqa: T201
    await process.abort()
    return REPLACED_STATUS


def main(argv: Sequence[str] | None = None) -> int:
    settings = load_or_exit(KvManagerSettings, argv, prog="quire-kvmanager")
    return run_service("kvmanager", settings, lambda: serve(settings))
