"""Recognises callers by the key in `authorization`, and follows changes of the tenants' file."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from common.contracts.adapters import AdapterShare
from common.contracts.clock import until_tick
from common.contracts.errors import FieldViolation, InvalidConfig, InvalidRequest, PermissionDenied, Unauthenticated
from router.tenants.keys import KeyTable
from router.tenants.tenancy import Caller, Tenant, peer_caller
from router.tenants.tenants_file import TenantTable, read_tenants

log = logging.getLogger(__name__)

# Seconds between two looks at the file: a revoked key ends its streams within 5 s.
POLL_SECONDS: Final = 1.0
# Of a JWT; an API key has none.
_DOTS_OF_TOKENS: Final = 2
_NO_KEY: Final = "expected the header  authorization: Bearer KEY  (metadata in gRPC)"


class PeerDirectory:
    """The Authenticator of a router without keys: every address is a tenant of its own."""

    def named(self, tenant: str) -> Caller:
        """Return a caller of this name, for an operator's question."""
        return Caller(Tenant(tenant))

    def caller(self, authorization: str, host: str) -> Caller:
        return peer_caller(host)

    def known(self, tenant: str, credential: str) -> Caller:
        """Return a caller who was recognised before, as it is now."""
        return Caller(Tenant(tenant))

    def adapter_share(self, name: str, tenant: str) -> AdapterShare:
        """Return for whom a load of an adapter is, which a tenant's request waits for."""
        return AdapterShare(tenant)

    def is_live(self, caller: Caller) -> bool:
        return True


class TenantDirectory:
    """The Authenticator over a file of tenants. `model` is the name of the served model."""

    def __init__(self, path: Path, server_key: bytes, model: str) -> None:
        """Read the file. Raises InvalidConfig with everything that is wrong in it."""
        self._path, self._server_key, self._model = path, server_key, model
        # Taken before the file is read: a change during the reading is then seen.
        first = _stamp(path)
        self._take(read_tenants(path, server_key))
        self._stamp = (first, *self._stamps()[1:])

    def caller(self, authorization: str, host: str) -> Caller:
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated(f"no key; {_NO_KEY}")
        name, credential = self._recognise(key.strip())
        tenant = self._table.tenants.get(name)
        if tenant is None:
            raise PermissionDenied("the token's tenant is not known here; ask the operator to add it")
        tenant.check_model(self._model)
        return Caller(tenant, credential)

    def _recognise(self, key: str) -> tuple[str, str]:
        """Return the name of the tenant, and the credential."""
        if self._table.tokens is not None and key.count(".") == _DOTS_OF_TOKENS:
            return self._table.tokens.read(key)
        found = self._keys.find(key)
        if found is None:
            raise Unauthenticated(f"the key is not known here; {_NO_KEY}")
        return found

    def named(self, tenant: str) -> Caller:
        """Return a caller of this tenant, for an operator's question. Raises InvalidRequest when there is none."""
        if tenant not in self._table.tenants:
            what = f"is {tenant!r}; name the tenant that would send it: {', '.join(sorted(self._table.tenants))}"
            raise InvalidRequest(FieldViolation("tenant", what))
        return Caller(self._table.tenants[tenant], "operator")

    def known(self, tenant: str, credential: str) -> Caller | None:
        """Return a caller who was recognised before, as it is now; None where it would not be accepted any more."""
        found = self._table.tenants.get(tenant)
        if found is None or (found.models is not None and self._model not in found.models):
            return None
        caller = Caller(found, credential)
        return caller if self.is_live(caller) else None

    def adapter_share(self, name: str, tenant: str) -> AdapterShare:
        """Return for whom a load of an adapter is: its owner, or the tenant whose request waits for it."""
        return self._table.owners.share_of(name) or AdapterShare(tenant)

    def is_live(self, caller: Caller) -> bool:
        if caller.credential.startswith("key "):
            return self._keys.knows(caller.credential, caller.tenant.name)
        tokens = self._table.tokens
        return tokens is not None and tokens.knows(caller.credential) and caller.tenant.name in self._table.tenants

    async def watch(self, changed: Callable[[], None], every: float = POLL_SECONDS) -> None:
        """Read the file again whenever it changes, and call `changed`; until this task is cancelled."""
        while True:
            await asyncio.sleep(until_tick(time.monotonic(), every))
            stamp = await asyncio.to_thread(self._stamps)
            if stamp == self._stamp:
                continue
            self._stamp = stamp
            if await self._reread():
                changed()

    async def _reread(self) -> bool:
        """Return whether the file could be read. A wrong file changes nothing: the tenants of the last one stay."""
        try:
            table = await asyncio.to_thread(read_tenants, self._path, self._server_key)
        except InvalidConfig as error:
            log.error("the file of tenants is wrong; the tenants before its change stay: %s", error)
            return False
        self._take(table)
        log.info(
            "the file of tenants was read again: %d tenants, %d keys", len(table.tenants), len(table.names_by_hash)
        )
        return True

    def _stamps(self) -> tuple[object, ...]:
        """Return what changes with the file, and with the files that it names."""
        return tuple([_stamp(path) for path in (self._path, *self._table.files)])

    def _take(self, table: TenantTable) -> None:
        self._table, self._keys = table, KeyTable(table.names_by_hash)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes whenever the file is written or replaced; None while there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
