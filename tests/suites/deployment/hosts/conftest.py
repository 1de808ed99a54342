"""One network for all tests of this folder. They run in the order of their file, and each leaves it whole."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bench.fault_injection.hosts.network import missing
from bench.fault_injection.hosts.suite import Suite, suite_of_hosts


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Fail at once, with a short message, without what a network of hosts needs."""
    if wrong := missing():
        pytest.exit(f"a network of hosts cannot be made: {wrong}", 1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hosts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    async with suite_of_hosts(tmp_path_factory.mktemp("hosts")) as suite:
        yield suite
