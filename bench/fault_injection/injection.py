"""Injects a plan's faults into a running suite."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.attack.victim import Victim
from bench.fault_injection.clocks import Clocks
from bench.fault_injection.failure import InjectionFailed, patience
from bench.fault_injection.plan import (
    AMID_FETCHES,
    CLOCKS,
    FREEZE_S,
    FROZEN,
    JUMP_S,
    STOP_S,
    VICTIMS,
    WITHOUT_DISK,
    Fault,
    Kind,
)
from bench.fault_injection.streams import Stream
from common.contracts.limits import MAX_PUBLIC_MESSAGE_BYTES
from quire.client import AsyncClient
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

_CALLS: Final = 8
_PAUSE_S: Final = 0.1
_HUNGRY_CALL_S: Final = 60.0
HAD_MEMORY: Final = "NOT_FOUND"
"""How a call ends for which there was memory."""
_WORDS: Final = 80  # characters of an error
# Of a message, for what is not the name.
_REST_BYTES: Final = 1 << 10


# Calls that need memory in the process that answers them: each carries megabytes.
async def feed(dial: Callable[[], grpc.aio.Channel], became: Counter[str]) -> None:
    """Make such calls until cancelled, so many at once; count in `became` how they end, by status and words.

    Each of them has a channel of its own, which `dial` opens.
    """
    name = "x" * (MAX_PUBLIC_MESSAGE_BYTES - _REST_BYTES)

    async def one() -> None:
        # A health check of a service that nobody has: NOT_FOUND where there is memory to read the name.
        async with dial() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=_HUNGRY_CALL_S)
                except grpc.aio.AioRpcError as error:
                    became[f"{error.code().name} ({(error.details() or '-')[:_WORDS]})"] += 1
                await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(one() for _ in range(_CALLS)))


def lacked_memory(became: Counter[str]) -> bool:
    """Return whether any of the calls was refused for want of memory."""
    return any(not status.startswith(HAD_MEMORY) for status in became)


_CONNECTIONS: Final = 64
# Files that the process may still open, so that the first of the connections come through.
_LEFT: Final = 4


# Limits of a running process that are lowered for a while: no more files, memory, or bytes on disk.
@contextmanager
def lowered(pid: int, limit: int, soft: int) -> Iterator[None]:
    """Lower a soft limit of a process, and set it back, unless the process has ended."""
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (soft, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, limit, before)


@contextmanager
def without_files(pid: int, addresses: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Let a process have almost no file descriptor left, and take those by connections to its ports."""
    files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    with ExitStack() as stack:
        stack.enter_context(lowered(pid, resource.RLIMIT_NOFILE, files + _LEFT))
        for address in addresses:
            for _ in range(_CONNECTIONS):
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(address)
        yield


@contextmanager
def without_disk(pid: int) -> Iterator[None]:
    """Let a process write to no file, as on a full disk."""
    with lowered(pid, resource.RLIMIT_FSIZE, 0):
        yield


@contextmanager
def without_memory(pid: int) -> Iterator[None]:
    """Let a process get no further memory from the system: neither its address space nor its data may grow."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now = {line[0]: int(line[1]) << 10 for line in lines if line[0] in ("VmSize:", "VmData:")}
    with lowered(pid, resource.RLIMIT_AS, now["VmSize:"]), lowered(pid, resource.RLIMIT_DATA, now["VmData:"]):
        yield


_PATIENCE_S: Final = 120.0
_POLL_S: Final = 0.05
_FETCH_POLL_S: Final = 0.002
_FETCH_PATIENCE_S: Final = 10.0
_CALL_S: Final = 2.0
_GONE_STREAMS: Final = 16
_KILLED: Final = frozenset(
    {
        Kind.MANAGER_KILLED,
        Kind.ROUTER_KILLED,
        Kind.WORKER_KILLED,
        Kind.REDIS_KILLED,
        Kind.PREFILL_WORKER_KILLED,
        Kind.DECODE_WORKER_KILLED,
        Kind.FETCH_SOURCE_KILLED,
        Kind.FETCH_TARGET_KILLED,
        Kind.FETCH_MANAGER_KILLED,
    }
)
_DRAINED: Final = frozenset(
    {Kind.MANAGER_DRAINED, Kind.ROUTER_DRAINED, Kind.WORKER_DRAINED, Kind.PREFILL_WORKER_DRAINED}
)
_WITHOUT_FILES: Final = frozenset({Kind.MANAGER_WITHOUT_FILES, Kind.ROUTER_WITHOUT_FILES, Kind.WORKER_WITHOUT_FILES})
_WITHOUT_MEMORY: Final = frozenset(
    {Kind.MANAGER_WITHOUT_MEMORY, Kind.ROUTER_WITHOUT_MEMORY, Kind.WORKER_WITHOUT_MEMORY}
)
_STOPPED: Final = frozenset(
    {
        Kind.MANAGER_STOPPED,
        Kind.ROUTER_STOPPED,
        Kind.WORKER_STOPPED,
        Kind.REDIS_STOPPED,
        Kind.PREFILL_WORKER_STOPPED,
        Kind.FETCH_SOURCE_STOPPED,
        Kind.FETCH_TARGET_STOPPED,
        Kind.FETCH_MANAGER_STOPPED,
    }
)


# Waits until no stream of a round runs any more.
Ended = Callable[[], Awaitable[None]]


class Injector:
    def __init__(
        self,
        suite: Victim,
        client: AsyncClient,
        prompts: Sequence[Sequence[int]],
        workers: int,
        clocks: Clocks | None = None,
    ) -> None:
        """`prompts` are those of streams that end early. `clocks` are those of the suite's processes."""
        self._suite, self._client, self._prompts, self._workers = suite, client, prompts, workers
        self._clocks = clocks
        self.amid_fetches = 0
        """Faults that came while a worker fetched blocks."""

    async def inject(self, fault: Fault, ended: Ended) -> None:
        """Let something fail; return when the cause is over, and killed processes are there again.

        `ended` waits until no stream of the round runs any more. Raises InjectionFailed.
        """
        if fault.kind is Kind.MANAGER_GONE:
            await self._stop(fault.victim, ended)
        if fault.kind in AMID_FETCHES:
            await self._await_fetch(fault)
        for kinds, act in self._acts():
            if fault.kind in kinds:
                await act(fault.victim)

    def _acts(self) -> Iterator[tuple[Collection[Kind], Callable[[str], Awaitable[None]]]]:
        """Yield kinds of failures, and what makes them happen to a process."""
        yield _KILLED, lambda name: self._end(name, signal.SIGKILL)
        yield _DRAINED, lambda name: self._end(name, signal.SIGTERM)
        yield _STOPPED, lambda name: self._stop(name, lambda: asyncio.sleep(STOP_S))
        yield FROZEN, lambda name: self._stop(name, lambda: asyncio.sleep(FREEZE_S))
        yield _WITHOUT_MEMORY, self._starve
        yield (Kind.ALL_DRAINED,), self._roll
        yield _WITHOUT_FILES, lambda name: self._limit(without_files(self._pid(name), self._suite.addresses_of(name)))
        yield WITHOUT_DISK, lambda name: self._limit(without_disk(self._pid(name)))
        yield CLOCKS, self._jump
        yield (Kind.LEADER_KILLED,), self._kill_leader
        yield (Kind.LEADER_FENCED,), self._fence
        yield (Kind.REDIS_WIPED,), self._wipe
        yield (Kind.REDIS_OVERWRITTEN,), self._overwrite
        yield (Kind.CLIENTS_GONE,), self._leave
        yield (Kind.DEADLINES_PASSED,), self._run_out
        yield (Kind.REQUESTS_ABORTED,), self._abort

    async def _await_fetch(self, fault: Fault) -> None:
        """Wait until a worker fetches blocks, the victim itself if it is the target; say where none does for long."""
        targets = VICTIMS[Kind.FETCH_TARGET_KILLED]
        fetching = {fault.victim} if fault.victim in targets else targets
        async with self._suite.channel("kvmanager") as channel:
            stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
            end = time.monotonic() + _FETCH_PATIENCE_S
            while time.monotonic() < end:
                pools = (await stub.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=_PATIENCE_S)).pools
                if any(pool.worker_id in fetching and pool.fetching for pool in pools):
                    self.amid_fetches += 1
                    return
                await asyncio.sleep(_FETCH_POLL_S)
        print(f"  nothing was fetched for {_FETCH_PATIENCE_S:g} s; {fault} comes without", flush=True)

    def _pid(self, name: str) -> int:
        pid = self._suite.pids().get(name)
        if pid is None:
            raise InjectionFailed(f"{name} to run", f"{', '.join(self._suite.pids()) or 'nothing'} alone runs")
        return pid

    async def _limit(self, lowered: AbstractContextManager[None]) -> None:
        with lowered:
            await asyncio.sleep(STOP_S)

    async def _end(self, name: str, number: signal.Signals) -> None:
        """End a process, and wait until the suite has started it again."""
        pid = self._pid(name)
        os.kill(pid, number)

        def came() -> str:
            return f"process {pid} runs still" if name in self._suite.pids() else "it ended alone"

        async with patience(_PATIENCE_S, f"{name} to end by {number.name} and to be started again", came):
            while self._suite.pids().get(name, pid) == pid:  # noqa: ASYNC110 - the process is watched elsewhere
                await asyncio.sleep(_POLL_S)

    async def _stop(self, name: str, wait: Ended) -> None:
        """Let a process stand still for as long as `wait` takes."""
        pid = self._pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            await wait()
        finally:
            os.kill(pid, signal.SIGCONT)

    async def _roll(self, _: str) -> None:
        """Drain the routers, the workers and the manager, each after the one before is whole again."""
        for name in sorted(self._suite.pids(), key=lambda each: each.partition("-")[0] == "kvmanager"):
            if name != "redis":
                await self._end(name, signal.SIGTERM)
                await self.whole()

    async def _starve(self, name: str) -> None:
        """Let a process get no memory while large calls need some; say what became of the calls and of the process.

        That takes until the first call is refused: at first they may find memory that the process has in reserve.
        """
        pid, became, end = self._pid(name), Counter[str](), time.monotonic() + _PATIENCE_S
        with without_memory(pid):
            feeding = asyncio.create_task(feed(partial(self._suite.channel, name), became))
            try:
                await asyncio.sleep(STOP_S)
                while not (lacked_memory(became) or feeding.done() or time.monotonic() > end):
                    if self._suite.pids().get(name) != pid:
                        break
                    await asyncio.sleep(_POLL_S)
            finally:
                feeding.cancel()
                await asyncio.wait([feeding])
        if not feeding.cancelled():
            feeding.result()
        await self.whole()
        ended = "" if self._suite.pids().get(name) == pid else ", ended, and was started again"
        ends = ", ".join(f"{count} {status}" for status, count in sorted(became.items()))
        print(f"  {name} got no memory{ended}; large calls: {ends or 'none ended'}", flush=True)
        if not ended and not lacked_memory(became):
            what = "no large call was refused" if became else "no large call ended"
            raise InjectionFailed(f"{name} to refuse a large call within {_PATIENCE_S:g} s", what)

    async def _wipe(self, _: str) -> None:
        async with redis.asyncio.Redis.from_url(self._suite.redis_url) as connection:
            await connection.flushall()

    async def _overwrite(self, _: str) -> None:
        """Put nonsense in the place of every value in Redis."""
        async with redis.asyncio.Redis.from_url(self._suite.redis_url) as connection:
            async for key in connection.scan_iter():
                await connection.set(key, b"nonsense")

    async def _jump(self, name: str) -> None:
        """Set the wall clock of a process an hour ahead, then an hour back, then right."""
        assert self._clocks is not None
        for seconds in (JUMP_S, -JUMP_S, 0):
            self._clocks.shift(self._pid(name), seconds)
            await asyncio.sleep(STOP_S / 2)

    async def _kill_leader(self, _: str) -> None:
        await self._end(await self._leader(), signal.SIGKILL)

    async def _fence(self, _: str) -> None:
        """Stop the manager that leads until another one does, and let it go on: then there are two."""
        first = await self._leader()
        pid = self._pid(first)
        os.kill(pid, signal.SIGSTOP)
        try:
            await self._leader(but=first)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def _leader(self, but: str = "") -> str:
        """Return the name of the manager that leads; `but` is not asked."""
        asked = [name for name in self._suite.managers if name != but]
        async with patience(_PATIENCE_S, f"{' or '.join(asked)} to lead", lambda: "none says that it does"):
            while True:
                for name in asked:
                    if await self._leads(name):
                        return name
                await asyncio.sleep(_POLL_S)

    async def _leads(self, manager: str) -> bool:
        """Return whether a manager says that it leads. One that is alone does."""
        async with self._suite.channel(manager) as channel:
            watch = kvmanager_pb2_grpc.KvManagerServiceStub(channel).WatchLeader(
                kvmanager_pb2.WatchLeaderRequest(), timeout=_CALL_S
            )
            try:
                async for state in watch:
                    return bool(state.leads)
            except grpc.aio.AioRpcError:  # it is away, or is stopped
                return False
            finally:
                watch.cancel()
        return False

    def _streams(self) -> list[Stream]:
        rng = random.Random(len(self._prompts))
        return [Stream(rng.randrange(1 << 30), rng.choice(self._prompts)) for _ in range(_GONE_STREAMS)]

    async def _run_out(self, _: str) -> None:
        streams = self._streams()
        await asyncio.gather(*(stream.run(self._client, 2_000, timeout=0.3) for stream in streams))

    async def _leave(self, _: str) -> None:
        async with self._running(self._streams()):
            pass

    async def _abort(self, _: str) -> None:
        """End streams by their request ids, as an operator does; each must say so."""
        streams = self._streams()
        for stream in streams:
            stream.request_id = uuid.uuid4().hex
        async with self._running(streams) as tasks, self._suite.channel(self._suite.routers[0]) as channel:
            stub = rpc.InferenceServiceStub(channel)
            for stream in streams:
                await stub.Abort(pb.AbortRequest(request_id=stream.request_id), timeout=_PATIENCE_S)
            async with patience(_PATIENCE_S, "aborted streams to end", lambda: f"{sum(t.done() for t in tasks)} did"):
                await asyncio.wait(tasks)
        for stream in streams:
            if "aborted" not in stream.broken:
                raise InjectionFailed("each aborted stream to say that it was", stream.broken or "an end without error")

    @asynccontextmanager
    async def _running(self, streams: Sequence[Stream]) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Read streams in the background, from when each has tokens. At the end their clients hang up."""
        tasks = [asyncio.create_task(stream.run(self._client, 2_000)) for stream in streams]

        def came() -> str:
            broken = next((f"; one ended: {stream.broken}" for stream in streams if stream.broken), "")
            return f"{sum(bool(stream.tokens) for stream in streams)} have some{broken}"

        try:
            async with patience(_PATIENCE_S, f"{len(streams)} streams to have tokens", came):
                while not all(stream.tokens for stream in streams):  # noqa: ASYNC110 - other tasks fill them
                    await asyncio.sleep(_POLL_S)
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ afterwards

    async def whole(self) -> None:
        """Wait until each router may use all workers, and Redis answers. Raises InjectionFailed."""
        seen = dict.fromkeys(self._suite.routers, "no answer")

        def came() -> str:
            return ", ".join(f"{name}: {words}" for name, words in seen.items())

        wanted = f"{self._workers} of {self._workers} workers"
        async with patience(_PATIENCE_S, f"each router to use {wanted}", came):
            for name in seen:
                while seen[name] != wanted:
                    seen[name] = await self._seen(name)
                    if seen[name] != wanted:
                        await asyncio.sleep(_POLL_S)
        async with patience(_PATIENCE_S, "Redis to answer", lambda: "it does not"):
            while not await self._redis_answers():  # noqa: ASYNC110 - Redis tells nobody
                await asyncio.sleep(_POLL_S)

    async def _redis_answers(self) -> bool:
        async with redis.asyncio.Redis.from_url(self._suite.redis_url) as connection:
            try:
                return bool(await connection.ping())
            except redis.exceptions.RedisError:  # it has just been started, and reads its file
                return False

    async def _seen(self, router: str) -> str:
        """Return how many workers a router may use, or how it does not answer."""
        async with self._suite.channel(router) as channel:
            try:
                status = await rpc.InferenceServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5.0)
            except grpc.aio.AioRpcError as error:  # it is being started anew
                return error.code().name
        usable = [each for each in status.workers if each.state == "connected" and each.manager_attached]
        return f"{len(usable)} of {self._workers} workers"

    async def leaked(self) -> int:
        """Return how many blocks are still held when nothing runs any more; the last requests have two minutes to end.

        Raises InjectionFailed when the manager lacks the pool of a worker for so long.
        """
        end = time.monotonic() + _PATIENCE_S
        async with self._suite.channel(await self._leader()) as channel:
            stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
            while True:
                pools = (await stub.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=_PATIENCE_S)).pools
                held = sum(pool.in_use + pool.leased + pool.pinned for pool in pools)
                whole, late = len(pools) == self._workers, time.monotonic() >= end
                if whole and (late or not held):
                    return held
                if late:
                    wanted = f"the manager to have the pools of {self._workers} workers within {_PATIENCE_S:g} s"
                    raise InjectionFailed(wanted, f"those of {len(pools)}")
                await asyncio.sleep(_POLL_S)
