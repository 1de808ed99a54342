"""Loads of adapters that tenants ask for at run time: one of each tenant at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from common.contracts.adapters import AdapterRef, AdapterShare
from common.contracts.errors import RateLimited
from router.placement.adapters import WorkerAdapters
from router.tenants.tenancy import AdapterOwners, Tenant
from router.workers.adapters import PoolAdapters
from router.workers.pool import WorkerPool
from tests.support.waiting import until

SHARES = AdapterShare("acme", ("acme-*",)), AdapterShare("other", ("other-*",))
OWNERS = AdapterOwners(SHARES)
ACME, OTHER = (Tenant(each.tenant, adapters=each.names, owners=OWNERS) for each in SHARES)


class OneWorker:
    """A pool of one worker, whose loads a test answers."""

    def __init__(self) -> None:
        self.loads: list[asyncio.Future[None]] = []
        self.model = SimpleNamespace(worker_id="w0", adapters=WorkerAdapters({}))

    def models(self) -> list[object]:
        return [self.model]

    def client(self, model: object) -> OneWorker:
        return self

    def adapter_share(self, name: str, tenant: str) -> AdapterShare:
        return OWNERS.share_of(name) or AdapterShare(tenant)

    def load_adapter(self, wanted: AdapterRef, path: str, share: AdapterShare, folder: str) -> asyncio.Future[None]:
        self.loads.append(asyncio.get_running_loop().create_future())
        return self.loads[-1]


async def test_a_tenant_has_one_load_under_way_and_operators_have_as_many_as_they_ask_for() -> None:
    worker = OneWorker()
    manager = PoolAdapters(cast("WorkerPool", worker), ())

    def load(name: str, *by: Tenant) -> asyncio.Task[object]:
        return asyncio.create_task(manager.load_adapter(name, "x", *by))

    loads = [load("acme-1", ACME), load("other-1", OTHER), load("acme-2"), load("acme-3")]
    await until(lambda: len(worker.loads) == 4)
    with pytest.raises(RateLimited, match=r"tenant acme\.adapter_loads: a load of one of its adapters is under way"):
        await load("acme-4", ACME)
    for each in worker.loads:
        each.set_result(None)
    await asyncio.gather(*loads)
    again = load("acme-4", ACME)
    await until(lambda: len(worker.loads) == 5)
    worker.loads[-1].set_result(None)
    await again
