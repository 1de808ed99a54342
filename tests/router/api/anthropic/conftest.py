"""The HTTP API on a real server, one for all tests of a module; a test begins with the script as at first."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.router.http_harness import Api, served_api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    """Serve a model that writes calls as Hermes does, and thoughts as DeepSeek's do."""
    async with served_api(tools="hermes", reasoning="deepseek_r1") as running:
        yield running


@pytest.fixture
def api(served: Api) -> Api:
    served.reset()
    return served
