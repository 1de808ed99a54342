"""A service without file descriptors, and a Redis that cannot save: streams go on, one line says so, all comes back."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import psutil
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from bench.fault_injection.injection import without_disk, without_files
from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from common.process.local_redis import LocalRedis
from tests.support.load import all_started, prompts
from tests.support.reference import assert_greedy
from tests.support.suite import PATIENCE, Suite, running_suite
from tests.support.waiting import until

WORKERS, STREAMS, COUNT = 2, 8, 96
NO_FILES, FILES = "no file descriptor is left", "there are file descriptors again"
NO_INDEX, INDEX = "the prefix index cannot be reached", "the prefix index can be reached again"

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass
class Scene:
    """A suite over a Redis whose settings a test may change."""

    suite: Suite
    redis: LocalRedis

    def pid(self, name: str) -> int:
        pid = self.suite.stack.children[name].pid
        assert pid is not None
        return pid

    def addresses(self, name: str) -> list[tuple[str, int]]:
        program, options = self.suite.stack.children[name].program, self.suite.stack.options
        ports = [int(program.address.rpartition(":")[2])]
        return [("127.0.0.1", port) for port in (ports if name != "router" else [options.grpc_port, options.port])]

    def said(self, name: str, words: str) -> int:
        """Return how many lines of a process have these words."""
        return sum(line.startswith(f"{name}: ") and words in line for line in self.suite.lines)

    async def until_said(self, name: str, words: str, times: int = 1) -> None:
        await until(lambda: self.said(name, words) >= times, seconds=PATIENCE)


async def until_at_rest(process: psutil.Process) -> None:
    """Wait until a process takes less than half of what another one takes meanwhile that never pauses.

    So it does not matter how fast the machine is, nor what else runs on it.
    """
    busy = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        async with asyncio.timeout(PATIENCE):
            share = 1.0
            while share > 0.5:
                share = await share_of(process, psutil.Process(busy.pid))
    finally:
        busy.kill()
        await busy.wait()


async def share_of(process: psutil.Process, busy: psutil.Process) -> float:
    """Return how many seconds of a processor one process takes while another one takes one."""
    used, whole = processor_seconds(process), processor_seconds(busy)
    taken = await until(lambda: processor_seconds(busy) - whole, lambda found: found >= 1.0, seconds=PATIENCE)
    return (processor_seconds(process) - used) / taken


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """Two workers, 1024 blocks each, float32, over a Redis without users."""
    flags = ("--kv-blocks", "1024", "--dtype", "float32", "--orphan-grace", "1")
    async with AsyncExitStack() as stack:
        # What it saves stays in this folder.
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("redis")))
        redis = stack.enter_context(LocalRedis())
        monkeypatch.undo()
        options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags, redis_url=redis.url)
        folder = tmp_path_factory.mktemp("resources")
        yield Scene(await stack.enter_async_context(running_suite(folder, options)), redis)


@pytest.mark.parametrize("name", ["router", "kvmanager", "worker-0"])
async def test_a_service_without_file_descriptors_says_so_once_and_comes_back(scene: Scene, name: str) -> None:
    asked = prompts(STREAMS, seed=7)
    tasks = await all_started(scene.suite, asked, COUNT)
    process = psutil.Process(scene.pid(name))
    with without_files(process.pid, scene.addresses(name)):
        await scene.until_said(name, NO_FILES)
        outcomes = await asyncio.gather(*tasks)
        await until_at_rest(process)
    await scene.until_said(name, FILES)
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)
    again = await asyncio.gather(*await all_started(scene.suite, asked, COUNT))
    assert_greedy(asked, [outcome.tokens for outcome in again], COUNT)
    await scene.suite.until_all_free(WORKERS)
    assert (scene.said(name, NO_FILES), scene.said(name, FILES)) == (1, 1)
    assert scene.suite.stack.children[name].restarts == 0


async def test_a_redis_that_cannot_save_holds_up_the_index_alone(scene: Scene) -> None:
    """It refuses every write then (stop-writes-on-bgsave-error). The manager keeps the changes for later."""
    asked = prompts(STREAMS, seed=8)
    async with Redis.from_url(scene.redis.url) as redis:

        async def unsaved() -> bool:
            return bool((await redis.info("persistence"))["rdb_last_bgsave_status"] != "ok")

        with without_disk(scene.redis.pid):
            await redis.set("changed", 1)
            await redis.config_set("save", "1 1")
            await until(unsaved, every=0.05, seconds=PATIENCE)
            tasks = await all_started(scene.suite, asked, COUNT)
            await scene.until_said("kvmanager", NO_INDEX)
            outcomes = await asyncio.gather(*tasks)
        await redis.config_set("save", "")
        await redis.bgsave()
        await scene.until_said("kvmanager", INDEX)
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], COUNT)
    await scene.suite.until_all_free(WORKERS)
    assert scene.said("kvmanager", NO_INDEX) == 1
