"""Changes of adapters for a whole pool: each goes to all connected workers, and each says what it made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from common.contracts.adapters import NAME_WORDS, AdapterRef, AdapterShare, is_adapter_name
from common.contracts.errors import (
    FieldViolation,
    InvalidRequest,
    NotFound,
    QuireError,
    QuotaViolation,
    RateLimited,
    Unavailable,
)
from router.placement.adapters import WorkerAdapter
from router.tenants.tenancy import Tenant
from router.workers.client import WorkerClient
from router.workers.pool import WorkerPool

OPERATOR: Final = Tenant(admin=True)
_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class AdapterAtWorker:
    """What one worker has of an adapter; or why not, if `error` is not empty."""

    worker_id: str
    adapter: WorkerAdapter | None = None
    error: str = ""


class AdapterManager(Protocol):
    """What operators do with adapters at run time."""

    async def load_adapter(self, name: str, path: str, by: Tenant = OPERATOR) -> list[AdapterAtWorker]: ...

    async def unload_adapter(self, name: str, by: Tenant = OPERATOR) -> None: ...

    def list_adapters(self) -> dict[str, list[AdapterAtWorker]]: ...

    def owner_of(self, name: str) -> AdapterShare:
        """Return whose own an adapter is, and what its owner may have; of nobody where it is nobody's own."""
        ...


class PoolAdapters:
    """Implements `AdapterManager` over the workers of a pool."""

    def __init__(self, pool: WorkerPool, reserved: tuple[str, ...]) -> None:
        """`reserved` are the names of the base."""
        self._pool, self._reserved = pool, reserved
        # Tenants whose load is under way: workers read one adapter after the other.
        self._loading = set[str]()

    async def load_adapter(self, name: str, path: str, by: Tenant = OPERATOR) -> list[AdapterAtWorker]:
        """Have every worker load the adapter in a folder, and call it so from now on; return what each has then.

        A name that is in use gets the new content. Raises InvalidRequest for a name that no adapter may have,
        PermissionDenied for one that the tenant may not change, RateLimited where another load of a tenant who is no
        operator is under way, Unavailable without a worker, and the first worker's reason where none could load it.
        """
        if not is_adapter_name(name):
            raise InvalidRequest(FieldViolation("lora_name", f"is {name[:64]!r}; expected {NAME_WORDS}"))
        if name in self._reserved:
            raise InvalidRequest(FieldViolation("lora_name", f"is {name!r}, which is the base; choose another name"))
        if not path:
            raise InvalidRequest(FieldViolation("lora_path", "is empty; expected a folder below --lora-dir"))
        folder, share = by.check_change(name), self._pool.adapter_share(name, by.name)
        with self._one_load_of(by):
            failed = await self._tell(lambda client: client.load_adapter(AdapterRef(name, ""), path, share, folder))
        found = self.list_adapters().get(name, [])
        loaded = [each for each in found if each.worker_id not in failed]
        if not loaded and failed:
            raise next(iter(failed.values()))
        return loaded + [AdapterAtWorker(worker, error=str(error)) for worker, error in failed.items()]

    @contextmanager
    def _one_load_of(self, by: Tenant) -> Iterator[None]:
        if by.admin:
            yield
            return
        if by.name in self._loading:
            what = "a load of one of its adapters is under way; one at a time: wait for its answer"
            raise RateLimited(QuotaViolation(f"tenant {by.name}.adapter_loads", what), _RETRY_SECONDS)
        self._loading.add(by.name)
        try:
            yield
        finally:
            self._loading.discard(by.name)

    async def unload_adapter(self, name: str, by: Tenant = OPERATOR) -> None:
        """Have every worker forget an adapter.

        Raises PermissionDenied for one that the tenant may not change, NotFound where no worker knows it, and
        Unavailable without a worker.
        """
        by.check_change(name)
        if name not in self.list_adapters():
            raise NotFound(f"adapter {name[:64]!r} is not loaded at any worker")
        failed = await self._tell(lambda client: client.unload_adapter(name))
        if error := next((each for each in failed.values() if not isinstance(each, NotFound)), None):
            raise error

    def owner_of(self, name: str) -> AdapterShare:
        return self._pool.adapter_share(name, "")

    def list_adapters(self) -> dict[str, list[AdapterAtWorker]]:
        """Return what each worker knows, by name."""
        found: dict[str, list[AdapterAtWorker]] = {}
        for model in self._pool.models():
            for name, adapter in model.adapters.by_name.items():
                found.setdefault(name, []).append(AdapterAtWorker(model.worker_id, adapter))
        return dict(sorted(found.items()))

    async def _tell(self, ask: Callable[[WorkerClient], asyncio.Future[None]]) -> dict[str, QuireError]:
        """Ask every connected worker; return the errors by worker."""
        models = list(self._pool.models())
        if not models:
            raise Unavailable("no worker is connected; try again when one is")
        failed: dict[str, QuireError] = {}
        answers = {}
        for model in models:
            try:
                answers[model.worker_id] = ask(self._pool.client(model))
            except QuireError as gone:
                failed[model.worker_id] = gone
        if answers:
            await asyncio.wait(answers.values())
        for worker, answer in answers.items():
            if isinstance(refused := answer.exception(), QuireError):
                failed[worker] = refused
        return failed
