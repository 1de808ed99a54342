"""A suite as local processes: Redis, KV manager, GPU workers, router.

They start together, and each waits for those that it needs. Managers and routers start once Redis answers: until then
its port may be another process's, and they would send their passwords there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.certificates.folder import CertificateFolder
from cli.suite.ports import picks_ports, with_picked_ports
from cli.suite.programs import (
    REDIS,
    Program,
    StackOptions,
    admin_address,
    leaf_of,
    redis_program,
    router_address,
    server_key_path,
    service_programs,
    worker_ids,
    worker_programs,
)
from cli.suite.worker_cpus import unused_nodes
from common.addresses.host_port import is_sentinel_url, joined_address, redis_addresses
from common.backoff import Backoff
from common.contracts.errors import FieldViolation, InvalidConfig, Unavailable
from common.process import die_with_parent
from common.process.local_redis import LocalRedis
from common.process.ports import free_ports
from common.process.redis_users import RedisUrls, RedisUsers
from common.process.topology import here
from common.rpc.roles import Role
from common.rpc.server import open_channel
from common.settings.config import PORT_TAKEN_STATUS, REFUSED_STATUS
from quire.inference.v1 import inference_pb2, inference_pb2_grpc

_BACKOFF = Backoff(first=0.5, longest=30.0)  # seconds between restarts
_STABLE_SECONDS = 30.0
_KEPT_LINES = 20
_LONGEST_LINE = 1 << 20
# What a Redis says whose port another process has; the services end with PORT_TAKEN_STATUS.
_PORT_TAKEN_WORDS = "Address already in use"


# One supervised child process: its output is passed on, it restarts with back-off, and it stops by pid.
class Child:
    """Keeps one program running until `stop`. `say(name, line)` gets every line and event of it.

    `patience` is the time between SIGTERM and SIGKILL in seconds. A program that ends with REFUSED_STATUS, or before
    `ready` is set, would end the same way again: `on_failed` is called, and the program is not restarted.
    """

    def __init__(
        self,
        program: Program,
        say: Callable[[str, str], None],
        patience: float = 10.0,
        on_failed: Callable[[Child], None] = lambda _: None,
    ) -> None:
        self.program = program
        self._say, self._patience, self._on_failed = say, patience, on_failed
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False
        self.ready = False
        self.restarts = 0
        self.port_taken = False  # whether it ended because another process has its port
        self.refused = False  # whether it ended because it refuses its options
        self.last_lines: list[str] = []

    @property
    def pid(self) -> int | None:
        """The process id while the program runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Send SIGTERM so that the program drains, kill it if it does not end, and restart it no more."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._patience):
                    await process.wait()
            except TimeoutError:
                self._say(self.program.name, f"did not stop within {self._patience:g} s; killing it")
                self.kill()
                await process.wait()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def kill(self) -> None:
        """Send SIGKILL, and restart the program no more."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _spawn(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *die_with_parent.command([*self.program.command, *self.program.flags]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LONGEST_LINE,
            env=os.environ | self.program.environment,
            start_new_session=True,
        )

    async def _keep(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            process = self._process
            assert process is not None
            await self._pass_lines_on(process)
            code = await process.wait()
            if self._stopping:
                return
            self.port_taken = code == PORT_TAKEN_STATUS or any(_PORT_TAKEN_WORDS in line for line in self.last_lines)
            self.refused = code == REFUSED_STATUS
            if self.refused or not self.ready:
                self._say(self.program.name, f"{_ended(code)}; it is not started again")
                self._on_failed(self)
                return
            if time.monotonic() - began > _STABLE_SECONDS:
                failures = 0
            failures += 1
            pause = _BACKOFF.pause(failures)
            self._say(self.program.name, f"{_ended(code)}; starting it again in {pause:.1f} s")
            await asyncio.sleep(pause)
            self.restarts += 1
            await self._spawn()
            if self.program.quiet:  # the other programs print READY themselves
                self._say(self.program.name, f"started again on {self.program.address}")

    async def _pass_lines_on(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.last_lines = [*self.last_lines[1 - _KEPT_LINES :], line]
            if not self.program.quiet:
                self._say(self.program.name, line)


def _ended(code: int) -> str:
    if code == REFUSED_STATUS:
        return "refused its options"
    if code == PORT_TAKEN_STATUS:
        return "found its port taken"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


_PATIENCE_S: Final = 2.0


# Whether somebody listens at a Redis URL, in words for the first line of a suite's start. Standard library only.
def redis_words(url: str) -> str:
    """Return the state of the Redis at a URL, "" for none; the URL's login stays out of it."""
    if not url:
        return "none; flags name the workers"
    address = url.rpartition("@")[2].partition("?")[0]
    of = "the master that Sentinels name, " if is_sentinel_url(url) else ""
    problem = _problem(url)
    if problem is None:
        return f"ready at {of}{address}"
    return f"nothing answers at {address} ({problem}): prompts are routed without the prefix index until it does"


def _problem(url: str) -> str | None:
    """Return why nobody listens; None when somebody does. One Sentinel is enough."""
    problem = None
    try:
        for address in redis_addresses(url) or (urlsplit(url).path,):
            try:
                _connect(address)
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
            else:
                return None
    except ValueError as error:
        return str(error)
    return problem


def _connect(address: tuple[str, int] | str) -> None:
    if isinstance(address, tuple):
        socket.create_connection(address, _PATIENCE_S).close()
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PATIENCE_S)
        probe.connect(address)


_RANDOM_BYTES = 32


# The key of a suite's routers that separates tenants' cached blocks.
def ensure_server_key(path: Path) -> None:
    """Write a random key that its owner alone can read, unless there is a file already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(opened, "w") as file:
        file.write(secrets.token_hex(_RANDOM_BYTES) + "\n")


__all__ = ["Stack", "StackOptions", "free_ports"]

Say = Callable[[str, str], None]

_POLL_SECONDS: Final = 0.05
# Starts with ports that the suite picked; another process may take one before its owner listens there.
_PICKS: Final = 4
# Seconds that a service may need beyond its drain_timeout to write its last lines.
_LAST_REPLIES_SECONDS: Final = 5.0
# By service; Redis is none.
_STOP_ORDER: Final = {"router": 0, "gpuworker": 1, "kvmanager": 2, "": 3}
_ROLES: Final = {"router": Role.ROUTER, "gpuworker": Role.WORKER, "kvmanager": Role.MANAGER}


class Stack:
    """Starts, watches and stops the processes of one suite; use it as an async context manager.

    `options` has the ports that the suite uses: it picks a free one for each 0 that it is given, and picks again when
    another process takes one before its owner listens. `shows` is whether `say` prints the lines of processes; errors
    then do not repeat them. `failed` is set when a process ended and is not started again; `failure()` returns its
    error.
    """

    def __init__(self, options: StackOptions, say: Say, shows: bool = False) -> None:
        self._given, self._say, self._shows = options, say, shows
        self.options = with_picked_ports(options)
        self.children: dict[str, Child] = {}
        self.failed = asyncio.Event()
        self._failing: Child | None = None
        self.redis = RedisUrls.same(options.redis_url or "")

    @property
    def address(self) -> str:
        """HOST:PORT of the router's gRPC port."""
        return router_address(self.options)

    @property
    def admin_address(self) -> str:
        """HOST:PORT of the router's admin plane."""
        return admin_address(self.options)

    @property
    def http_url(self) -> str:
        """URL of the router's HTTP port."""
        return f"http://{joined_address(self.options.host, self.options.port)}"

    @property
    def redis_url(self) -> str:
        """The URL with which an operator reaches Redis; services have other users."""
        return self.redis.operator

    async def __aenter__(self) -> Stack:
        try:
            await self.start()
        except BaseException:  # a cancelled start must leave nothing running either
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start every process and wait until it is healthy. Raises Unavailable with the lines of one that is not.

        Certificates are made first, where they are missing. Raises InvalidConfig when that is impossible.
        """
        for left in reversed(range(_PICKS)):
            try:
                await self._start_all()
                return
            except Unavailable:
                if not left or not self._lost_a_picked_port():
                    raise
            self._say("quire", "another process took a port that was picked; trying others")
            await self.stop()
            self._failing, self.options = None, with_picked_ports(self._given)
            self.failed.clear()

    def _lost_a_picked_port(self) -> bool:
        """Whether the start failed for a port of the suite's own choice; it always chooses that of its Redis."""
        child = self._failing
        return child is not None and child.port_taken and (child.program.name == REDIS or picks_ports(self._given))

    async def _start_all(self) -> None:
        if self.options.certs is not None:
            await asyncio.to_thread(_ensure_certificates, CertificateFolder(self.options.certs), self.options)
        if self.options.tenants is not None:
            ensure_server_key(server_key_path(self.options))
        if advice := unused_nodes(self.options.workers, any(self.options.worker_cpus), here()):
            self._say("quire", advice)
        workers = worker_programs(self.options)
        for program in workers:  # first, because they take the longest
            await self._start(program)
        if self.options.redis_url is None:
            await self._or_failed(self._start_redis())
        self._say(REDIS, await asyncio.to_thread(redis_words, self.redis.operator))
        control, data = service_programs(self.options, self.redis)
        for program in (*control, *data):
            if program not in workers:
                await self._start(program)
        await self._or_failed(self._ready([*control, *data]))

    async def stop(self) -> None:
        """Drain the router, then the workers, the manager and Redis: each stops before those that it needs."""
        for step in range(1 + max(_STOP_ORDER.values())):
            group = [child for child in self.children.values() if _STOP_ORDER[child.program.service] == step]
            await asyncio.gather(*(child.stop() for child in group))
        self.children.clear()

    def kill(self) -> None:
        for child in self.children.values():
            child.kill()

    async def _start(self, program: Program) -> Child:
        child = Child(program, self._say, self.options.drain_timeout + _LAST_REPLIES_SECONDS, self._on_failed)
        self.children[program.name] = child
        await child.start()
        return child

    def failure(self) -> Unavailable:
        """Return the error of the process that ended and is not started again."""
        assert self._failing is not None
        return Unavailable(f"{self._failing.program.name} cannot run{self._last_words(self._failing)}")

    @property
    def refused(self) -> bool:
        """Whether a service refused its options, and the suite failed for that."""
        return self._failing is not None and self._failing.refused

    def _last_words(self, child: Child) -> str:
        """Return the last lines of a process; where they were printed, only that they were."""
        shown = self._shows and not child.program.quiet
        return "; its lines above say why" if shown else f":\n{_words(child)}"

    def _on_failed(self, child: Child) -> None:
        self._failing = child
        self.failed.set()

    async def _or_failed(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Wait for a result, or raise the failure of a process that is not started again."""
        wait, failed = asyncio.create_task(waiting), asyncio.create_task(self.failed.wait())
        try:
            await asyncio.wait({wait, failed}, return_when=asyncio.FIRST_COMPLETED)
            if wait.done():
                return wait.result()
            raise self.failure()
        finally:
            for task in (wait, failed):
                task.cancel()
            await asyncio.gather(wait, failed, return_exceptions=True)

    def channel(self, program: Program) -> grpc.aio.Channel:
        """Return a channel to a service, as its operator."""
        leaf = leaf_of(self.options, Role.OPERATOR)
        identity = None if leaf is None else leaf.identity()
        return open_channel(program.address, identity=identity, role=_ROLES[program.service])

    # ------------------------------------------------------------ health

    def _not_ready(self, child: Child) -> Unavailable:
        patience = f"within {self.options.ready_seconds:g} s"
        return Unavailable(f"{child.program.name} did not become ready {patience}{self._last_words(child)}")

    async def _start_redis(self) -> None:
        users = RedisUsers()
        server = LocalRedis(users=users, acl_file=users.write_acl(self.options.state_dir / "redis.acl"))
        child = await self._start(redis_program(server))
        deadline = time.monotonic() + self.options.ready_seconds
        while child.pid is None or not await asyncio.to_thread(server.answers, child.pid):
            if time.monotonic() > deadline:
                raise self._not_ready(child)
            await asyncio.sleep(_POLL_SECONDS / 5)
        child.ready, self.redis = True, server.urls

    async def _ready(self, programs: Sequence[Program]) -> None:
        for program in programs:
            await self._healthy(self.children[program.name])
        for program in programs:
            if program.service == "router":
                await self._connected(program)

    async def _healthy(self, child: Child) -> None:
        deadline = time.monotonic() + self.options.ready_seconds
        async with self.channel(child.program) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                with suppress(grpc.aio.AioRpcError):
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        child.ready = True
                        return
                await asyncio.sleep(_POLL_SECONDS)
        raise self._not_ready(child)

    async def _connected(self, program: Program) -> None:
        """Wait until a router sees every worker attached to its manager. A router is healthy with one worker."""
        async with self.channel(program) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async with asyncio.timeout(self.options.ready_seconds):
                while True:
                    with suppress(grpc.aio.AioRpcError):  # a router that has no processor answers later
                        status = await stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=5.0)
                        usable = [each for each in status.workers if each.state == "connected"]
                        if sum(each.manager_attached for each in usable) >= self.options.workers:
                            return
                    await asyncio.sleep(_POLL_SECONDS)


def _ensure_certificates(folder: CertificateFolder, options: StackOptions) -> None:
    """Make what is missing or ends soon; each worker gets a certificate of its own. Raises InvalidConfig."""
    try:
        from cli.certificates.authority import ensure, wanted
    except ModuleNotFoundError as missing:
        what = f"certificates need {missing.name}; install quire-llm[cli], or give --insecure to start without TLS"
        raise InvalidConfig(FieldViolation("--insecure", what)) from None
    roles = [Role.ROUTER, Role.MANAGER, Role.OPERATOR]
    ensure(folder, wanted(folder, roles, worker_ids(options)))


def _words(child: Child) -> str:
    return "\n".join(f"    {line}" for line in child.last_lines)
