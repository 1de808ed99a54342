"""One suite that has produced some of everything that its metrics count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from tests.suites.deployment.operate.tee import Tee, running_tee
from tests.support.load import prompts
from tests.support.suite import Suite, greedy, running_suite


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tee() -> AsyncIterator[Tee]:
    """The collector of the suite."""
    async with running_tee() as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def suite(tee: Tee, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Two simulated workers with so few blocks that sequences are preempted and prefixes evicted, and with a disk."""
    disk = tmp_path_factory.mktemp("disk")
    flags = ("--kv-blocks", "80", "--simulate", "base=2ms")
    tiers = ("--host-memory", "64KiB", "--disk-cache", str(disk), "--disk-cache-size", "16MiB")
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=(*flags, *tiers))
    async with AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as environment:  # for these processes alone: the fixture outlives many tests
            environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", tee.endpoint)
            starting = running_suite(tmp_path_factory.mktemp("operate"), options)
            running = await stack.enter_async_context(starting)
        await burst(running)
        await cancelled(running)
        yield running


async def burst(suite: Suite, seed: int = 0) -> None:
    """Send more at once than the blocks hold: long prompts wait, and sequences that grow lose their rows."""
    asked = prompts(20, seed)
    long = [greedy(prompt, 20) for prompt in asked[:4]]
    growing = [greedy(prompt[-40:], 160) for prompt in asked[4:]]
    await asyncio.gather(*map(suite.generate, long + growing))


async def cancelled(suite: Suite) -> None:
    """Let one request fail: its client goes away."""
    started = asyncio.Event()
    asked = asyncio.create_task(suite.generate(greedy(prompts(1)[0], 400), first_token=started))
    await started.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
