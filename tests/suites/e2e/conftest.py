"""One suite of two workers on the demo model for all files that use it; each test leaves it whole and idle."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from tests.support.suite import Suite, running_suite

WORKERS = 2


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Two workers, 1024 blocks each, float32."""
    flags = ("--kv-blocks", "1024", "--dtype", "float32", "--orphan-grace", "1")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("suite"), options) as running:
        yield running
