"""A suite that runs beside the tests, in a thread of its own: clients of other languages call it by its address."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from tests.suites.clients.threads import in_a_thread
from tests.support.suite import PATIENCE, Suite, running_suite

ROOT = Path(__file__).resolve().parents[3]
WORKERS = 1
# tests/conftest.py sets this for QUIRE_ALL_CLIENTS, which Quire's own programs would refuse.
ALL_CLIENTS = "PYTEST_ALL_CLIENTS"

T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """The addresses of the suite: HOST:PORT of gRPC, the URL of HTTP (without /v1), and the name of the model."""

    address: str
    http_url: str
    model: str
    suite: Suite
    loop: asyncio.AbstractEventLoop

    def run(self, work: Callable[[Suite], Awaitable[T]]) -> T:
        """Return what `work` returns; it runs on the suite's own loop, as its stubs must."""

        async def call() -> T:
            return await work(self.suite)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(PATIENCE)

    def until_all_free(self) -> None:
        """Wait until no block is in a row or leased and no request runs; fail with the counts if that never comes."""
        self.run(lambda suite: suite.until_all_free(WORKERS))


@contextmanager
def served_suite(state_dir: Path, workers: int = WORKERS, flags: Sequence[str] = ()) -> Iterator[Served]:
    """Run a suite on the demo model until the context ends; `flags` are of its workers."""
    with in_a_thread(lambda: _served(state_dir, workers, flags), 2 * PATIENCE) as served:
        yield served


@asynccontextmanager
async def _served(state_dir: Path, workers: int, more: Sequence[str]) -> AsyncIterator[Served]:
    flags = ("--kv-blocks", "1024", "--dtype", "float32", *more)
    options = StackOptions(model=CHECKPOINT, workers=workers, worker_flags=flags)
    async with running_suite(state_dir, options) as suite:
        model = (await suite.inference.GetModel(pb.GetModelRequest(), timeout=PATIENCE)).model
        yield Served(suite.stack.address, suite.stack.http_url, model, suite, asyncio.get_running_loop())


def missing(what: str, how: str) -> NoReturn:
    """Skip a test whose client is not installed, or fail it where all must be there; `how` names the make target."""
    reason = f"{what} is not installed: {how}"
    if os.environ.get(ALL_CLIENTS):
        pytest.fail(reason)
    pytest.skip(reason)
