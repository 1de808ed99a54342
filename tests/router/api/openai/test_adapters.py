"""Who may load adapters over HTTP, and what the answers say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request

from common.contracts.adapters import NOBODYS, AdapterShare
from common.contracts.errors import PermissionDenied
from router.api.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest, adapter_routes
from router.placement.adapters import WorkerAdapter
from router.tenants.tenancy import AdapterOwners, Caller, Tenant
from router.workers.adapters import OPERATOR, AdapterAtWorker


class Manager:
    """Records changes; a load works at one worker, and fails at another one."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, ...]] = []

    async def load_adapter(self, name: str, path: str, by: Tenant = OPERATOR) -> list[AdapterAtWorker]:
        self.changes.append(("load", name, path, by.check_change(name)))
        return [AdapterAtWorker("w0", WorkerAdapter("1" * 64)), AdapterAtWorker("w1", error="no such folder")]

    async def unload_adapter(self, name: str, by: Tenant = OPERATOR) -> None:
        by.check_change(name)
        self.changes.append(("unload", name))

    def list_adapters(self) -> dict[str, list[AdapterAtWorker]]:
        return {}

    def owner_of(self, name: str) -> AdapterShare:
        return NOBODYS


def called(admin: bool, **options: Any) -> Request:
    caller = Caller(Tenant("t", admin=admin, **options))
    return cast("Request", SimpleNamespace(state=SimpleNamespace(caller=caller)))


def endpoints(manager: Manager, asks_for_keys: bool) -> tuple[Any, Any]:
    load, unload = (cast("Any", route).endpoint for route in adapter_routes(manager, asks_for_keys).routes)
    return load, unload


@pytest.mark.parametrize(("asks_for_keys", "admin"), [(True, True), (False, False)])
async def test_operators_load_and_whoever_calls_where_there_are_no_keys(asks_for_keys: bool, admin: bool) -> None:
    manager = Manager()
    load, unload = endpoints(manager, asks_for_keys)
    answer = await load(LoadAdapterRequest(lora_name="sql", lora_path="team/sql"), called(admin))
    assert answer.body == b"adapter 'sql' is loaded on w0; w1: no such folder"
    await unload(UnloadAdapterRequest(lora_name="sql"), called(admin))
    assert manager.changes == [("load", "sql", "team/sql", ""), ("unload", "sql")]


async def test_a_tenant_changes_its_own_from_its_own_folder() -> None:
    manager, names = Manager(), ("t-*",)
    load, unload = endpoints(manager, asks_for_keys=True)
    by = called(admin=False, adapters=names, owners=AdapterOwners([AdapterShare("t", names)]))
    await load(LoadAdapterRequest(lora_name="t-sql", lora_path="t/sql"), by)
    await unload(UnloadAdapterRequest(lora_name="t-sql"), by)
    with pytest.raises(PermissionDenied, match=r"^tenant t loads and unloads its own adapters alone: t-\*$"):
        await load(LoadAdapterRequest(lora_name="sql", lora_path="t/sql"), by)
    assert manager.changes == [("load", "t-sql", "t/sql", "t"), ("unload", "t-sql")]


async def test_other_tenants_change_nothing() -> None:
    manager = Manager()
    load, unload = endpoints(manager, asks_for_keys=True)
    with pytest.raises(
        PermissionDenied, match="by tenants with `admin = true`, and by those with `adapters` of their own"
    ):
        await load(LoadAdapterRequest(lora_name="sql", lora_path="x"), called(admin=False))
    with pytest.raises(PermissionDenied):
        await unload(UnloadAdapterRequest(lora_name="sql"), called(admin=False))
    assert manager.changes == []
