"""A worker whose ranks are on two hosts: its streams outlive the loss of a rank, of its host, and of the way there.

They move to a worker of one rank beside it, which is of the same pool.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import psutil
import pytest
import pytest_asyncio

from bench.fault_injection.hosts.network import Network
from bench.fault_injection.hosts.suite import until
from bench.fault_injection.streams import RETRY, Stream, until_tokens
from cli.demo_model import CHECKPOINT
from common.process.python import module_command
from quire.client import AsyncClient
from tests.support.load import prompts
from tests.support.reference import assert_greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")
FIRST, SECOND = "first", "second"
STREAMS, TOKENS = 8, 400
PORT: Final = 50051
_LISTEN: Final = "0A"
_ENGINE: Final = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "1024")


def address_of(words: str) -> str:
    """Return an address of /proc/net/tcp, or of tcp6, where those of IPv4 are mapped."""
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


class Pair:
    """A suite on one host, whose worker has rank 0; on the other one what runs rank 1, and starts it again."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self._folder = network, folder
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": network.address(FIRST), "MASTER_PORT": "29500"}
        self._environment = os.environ | {"QUIRE_POOL_KEY": secrets.token_hex(32)}
        self._place = place
        self._suite: asyncio.subprocess.Process | None = None
        self._whole: asyncio.subprocess.Process | None = None
        self.follower: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.ends: list[int] = []
        """How what runs rank 1 has ended each time."""

    async def start(self) -> None:
        own = ("--host", self.network.address(FIRST), "--grpc-port", str(PORT), "--insecure")
        state, ranks = ("--state-dir", str(self._folder / FIRST)), ("-tp", "2", "--rank-interface", "eth0")
        words = ("serve", str(CHECKPOINT), *own, *state, *_ENGINE, *ranks)
        self._suite = await self._start(FIRST, "0", "cli.main", *words)
        whole = ("--worker-id", "whole", "--port", "50060", "--insecure", "--model", str(CHECKPOINT))
        self._whole = await self._start(FIRST, "", "gpuworker", *whole, *_ENGINE)
        self._keeper = asyncio.create_task(self._keep())

    async def _start(self, host: str, rank: str, *words: str) -> asyncio.subprocess.Process:
        command = self.network.command(host, module_command(*words))
        with (self._folder / f"{host}.log").open("ab") as lines:
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=lines, stderr=lines,
                env=self._environment | (self._place | {"RANK": rank} if rank else {}),
            )  # fmt: skip

    async def _keep(self) -> None:
        """Start rank 1 again whenever it has ended, as a supervisor of the host does."""
        while True:
            own = ("--model", str(CHECKPOINT), "-tp", "2", "--rank-interface", "eth0")
            self.follower = await self._start(SECOND, "1", "gpuworker", *own, *_ENGINE)
            self.ends.append(await self.follower.wait())

    def rank(self) -> psutil.Process:
        """Return the process of rank 1."""
        assert self.follower is not None
        (found,) = psutil.Process(self.follower.pid).children()
        return found

    def said(self, host: str) -> str:
        return (self._folder / f"{host}.log").read_text(errors="replace")

    def listening(self, host: str) -> set[str]:
        """Return the addresses at which anything listens on a host."""
        process = self.follower if host == SECOND else self._suite
        assert process is not None
        tables = [Path(f"/proc/{process.pid}/net/{family}").read_text() for family in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        return {address_of(local.partition(":")[0]) for _, local, _, state, *_ in rows if state == _LISTEN}

    async def usable(self) -> bool:
        """Return whether the router has both workers, by its lines."""
        said = self.said(FIRST)
        last = [said.rfind(f"worker worker-0 {state}") for state in ("connected", "is not connected")]
        return last[0] > last[1] and "worker whole connected" in said

    async def aclose(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        kill = signal.SIGKILL
        for process, how in ((self._suite, signal.SIGTERM), (self.follower, kill), (self._whole, kill)):
            if process is not None and process.returncode is None:
                process.send_signal(how)
                await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    with Network((FIRST, SECOND, "client")) as network:
        running = Pair(network, tmp_path_factory.mktemp("rank-hosts"))
        try:
            await running.start()
            yield running
        finally:
            await running.aclose()
            print(running.said(FIRST)[-6000:], running.said(SECOND)[-3000:])  # noqa: T201


@asynccontextmanager
async def streams(pair: Pair) -> AsyncIterator[None]:
    """Run streams beside what the caller does, once all have tokens; each token must be that of transformers."""
    await until(pair.usable, "the router to have both workers")
    running = [Stream(0, prompt) for prompt in prompts(STREAMS, seed=7)]
    async with AsyncClient(f"{pair.network.address(FIRST)}:{PORT}", retry=RETRY, ca="") as client:
        tasks = [asyncio.create_task(each.run(client, TOKENS)) for each in running]
        await until_tokens(running, 4, tasks)
        yield
        await asyncio.gather(*tasks)
    assert [each.broken for each in running if each.broken] == []
    assert_greedy([each.prompt for each in running], [each.tokens for each in running], TOKENS)


async def ended_since(pair: Pair, ends: int) -> bool:
    return len(pair.ends) > ends


async def test_tokens_of_ranks_on_two_hosts_are_those_of_transformers(pair: Pair) -> None:
    """Ranks listen on the interface that was named alone; the worker's own port is on loopback, as in any suite."""
    async with streams(pair):
        assert pair.listening(SECOND) == {pair.network.address(SECOND)}
        assert pair.listening(FIRST) == {pair.network.address(FIRST), "127.0.0.1"}


@pytest.mark.parametrize(
    ("hit", "said"),
    [
        (lambda pair: pair.rank().kill(), "rank 1 was ended by SIGKILL"),
        (lambda pair: pair.rank().suspend(), "rank 1 stood still for 1.2 s"),
        (lambda pair: psutil.Process(pair.follower.pid).suspend(), "rank 1 stood still for 1.2 s"),
    ],
    ids=["killed", "stopped", "host-stopped"],
)
async def test_streams_outlive_a_rank_of_the_other_host(pair: Pair, hit: Callable[[Pair], None], said: str) -> None:
    before, ends = pair.said(FIRST).count(said), len(pair.ends)
    async with streams(pair):
        hit(pair)
        await until(partial(ended_since, pair, ends), "the other host to end its rank")
    assert pair.said(FIRST).count(said) > before


async def test_streams_outlive_the_way_between_the_hosts(pair: Pair) -> None:
    """Both ends find it by themselves; neither hears of the other."""
    ends = len(pair.ends)
    async with streams(pair):
        with pair.network.partition(FIRST, SECOND):
            await until(partial(ended_since, pair, ends), "the other host to end its rank")
    assert "its host cannot be reached" in pair.said(FIRST)
