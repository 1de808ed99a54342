"""The services over one socket for all tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.router.vllm_harness import Api, served_api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    async with served_api() as running:
        yield running


@pytest.fixture
def api(served: Api) -> Api:
    """The services with their script as at first."""
    return served.reset()
