"""Injects a plan's faults into a running suite."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Final

import grpc
import redis.asyncio

from bench.attack.victim import Victim
from bench.fault_injection.plan import FREEZE_S, FROZEN, STOP_S, Fault, Kind
from bench.fault_injection.streams import Stream
from common.rpc.server import open_channel
from quire.client import AsyncClient
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

_PATIENCE_S: Final = 120.0
_POLL_S: Final = 0.05
_GONE_STREAMS: Final = 16
_KILLED: Final = frozenset({Kind.MANAGER_KILLED, Kind.ROUTER_KILLED, Kind.WORKER_KILLED, Kind.REDIS_KILLED})
_DRAINED: Final = frozenset({Kind.MANAGER_DRAINED, Kind.ROUTER_DRAINED, Kind.WORKER_DRAINED})
_STOPPED: Final = frozenset({Kind.MANAGER_STOPPED, Kind.ROUTER_STOPPED, Kind.WORKER_STOPPED, Kind.REDIS_STOPPED})


class Injector:
    def __init__(self, suite: Victim, client: AsyncClient, prompts: Sequence[Sequence[int]], workers: int) -> None:
        """`prompts` are those of streams that end early."""
        self._suite, self._client, self._prompts, self._workers = suite, client, prompts, workers

    async def inject(self, fault: Fault) -> None:
        """Let something fail; return when the cause is over, and killed processes are there again."""
        if fault.kind in _KILLED:
            await self._end(fault.victim, signal.SIGKILL)
        elif fault.kind in _DRAINED:
            await self._end(fault.victim, signal.SIGTERM)
        elif fault.kind in _STOPPED | FROZEN:
            await self._stop(fault.victim, FREEZE_S if fault.kind in FROZEN else STOP_S)
        elif fault.kind is Kind.REDIS_WIPED:
            async with redis.asyncio.Redis.from_url(self._suite.redis_url) as connection:
                await connection.flushall()
        elif fault.kind is Kind.CLIENTS_GONE:
            await self._leave()
        elif fault.kind is Kind.DEADLINES_PASSED:
            streams = self._streams()
            await asyncio.gather(*(stream.run(self._client, 2_000, timeout=0.3) for stream in streams))

    async def _end(self, name: str, number: signal.Signals) -> None:
        """End a process, and wait until the suite has started it again."""
        pid = self._suite.pids()[name]
        os.kill(pid, number)
        async with asyncio.timeout(_PATIENCE_S):
            while self._suite.pids().get(name, pid) == pid:  # noqa: ASYNC110 - the process is watched elsewhere
                await asyncio.sleep(_POLL_S)

    async def _stop(self, name: str, seconds: float) -> None:
        pid = self._suite.pids()[name]
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def _streams(self) -> list[Stream]:
        rng = random.Random(len(self._prompts))
        return [Stream(rng.randrange(1 << 30), rng.choice(self._prompts)) for _ in range(_GONE_STREAMS)]

    async def _leave(self) -> None:
        streams = self._streams()
        tasks = [asyncio.create_task(stream.run(self._client, 2_000)) for stream in streams]
        async with asyncio.timeout(_PATIENCE_S):
            while not all(stream.tokens for stream in streams):  # noqa: ASYNC110 - other tasks fill them
                await asyncio.sleep(_POLL_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ afterwards

    async def whole(self) -> None:
        """Wait until each router may use all workers, and every process runs."""
        async with asyncio.timeout(_PATIENCE_S):
            for address in self._suite.admin_addresses:
                while not await self._sees_all(address):  # noqa: ASYNC110 - it is asked over the network
                    await asyncio.sleep(_POLL_S)

    async def _sees_all(self, address: str) -> bool:
        async with open_channel(address) as channel:
            try:
                status = await rpc.InferenceServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5.0)
            except grpc.aio.AioRpcError:  # it is being started anew
                return False
        usable = [each for each in status.workers if each.state == "connected" and each.manager_attached]
        return len(usable) == self._workers

    async def leaked(self) -> int:
        """Return how many blocks are still held when nothing runs any more; the last requests have a minute to end."""
        end = time.monotonic() + _PATIENCE_S
        async with open_channel(self._suite.manager_address) as channel:
            stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
            while True:
                pools = (await stub.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=_PATIENCE_S)).pools
                held = sum(pool.in_use + pool.leased + pool.pinned for pool in pools)
                if (not held and len(pools) == self._workers) or time.monotonic() >= end:
                    return held
                await asyncio.sleep(_POLL_S)
