"""The Responses API on a real server, for a model that writes calls as Hermes and thoughts as Qwen3 does."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from common.contracts.errors import Unauthenticated
from router.tenants.tenancy import Caller, Tenant
from tests.support.router.http_harness import Api, served_api


class ByKey:
    """Each key is a tenant of its own."""

    def caller(self, authorization: str, host: str) -> Caller:
        if not authorization:
            raise Unauthenticated("no key")
        return Caller(Tenant(authorization), authorization)

    def is_live(self, caller: Caller) -> bool:
        return True


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    async with served_api(ByKey(), tools="hermes", reasoning="qwen3") as running:
        running.http.headers["authorization"] = "Bearer none"
        yield running
