"""Who may load adapters over HTTP, and what the answers say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request

from common.contracts.errors import PermissionDenied
from router.api.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest, adapter_routes
from router.placement.adapters import WorkerAdapter
from router.tenants.tenancy import Caller, Tenant
from router.workers.adapters import AdapterAtWorker


class Manager:
    """Records changes; a load works at one worker, and fails at another one."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, ...]] = []

    async def load_adapter(self, name: str, path: str) -> list[AdapterAtWorker]:
        self.changes.append(("load", name, path))
        return [AdapterAtWorker("w0", WorkerAdapter("1" * 64)), AdapterAtWorker("w1", error="no such folder")]

    async def unload_adapter(self, name: str) -> None:
        self.changes.append(("unload", name))

    def list_adapters(self) -> dict[str, list[AdapterAtWorker]]:
        return {}


def called(admin: bool) -> Request:
    return cast("Request", SimpleNamespace(state=SimpleNamespace(caller=Caller(Tenant("t", admin=admin)))))


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
    assert manager.changes == [("load", "sql", "team/sql"), ("unload", "sql")]


async def test_other_tenants_change_nothing() -> None:
    manager = Manager()
    load, unload = endpoints(manager, asks_for_keys=True)
    with pytest.raises(PermissionDenied, match="`admin = true` alone"):
        await load(LoadAdapterRequest(lora_name="sql", lora_path="x"), called(admin=False))
    with pytest.raises(PermissionDenied):
        await unload(UnloadAdapterRequest(lora_name="sql"), called(admin=False))
    assert manager.changes == []
