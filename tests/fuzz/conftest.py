"""One suite of two simulated workers for a module of fuzzing, and the loop that its clients run on."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from tests.fuzz.harness import Fuzzed
from tests.support.suite import running_suite

_WORKER = ("--simulate", "base=200us", "--kv-blocks", "2048", "--log-level", "error")
# gRPC maps some GiB that it never uses. A leak ends a process here, not the machine.
_ADDRESS_SPACE = 12 << 30
_ROUTER = ("--log-level", "error")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    """A suite that must live through all of a module."""
    folder = tmp_path_factory.mktemp("fuzz")
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=_WORKER, router_flags=_ROUTER, drain_timeout=2.0)
    with asyncio.Runner() as runner:
        stop = AsyncExitStack()
        suite = runner.run(stop.enter_async_context(running_suite(folder, options)))
        for child in suite.stack.children.values():
            if child.pid is not None:
                resource.prlimit(child.pid, resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        try:
            yield Fuzzed(suite, runner, folder)
        finally:
            runner.run(stop.aclose())
