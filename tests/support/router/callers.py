"""Authenticators for tests: to one every call is of one tenant, which may set any priority; the other knows no key."""

from __future__ import annotations

from common.contracts.errors import Unauthenticated
from router.tenants.tenancy import Caller, Tenant


class OneCaller:
    def __init__(self, tenant: Tenant | None = None) -> None:
        self._caller = Caller(tenant or Tenant("test", max_priority=100))

    def caller(self, authorization: str, host: str) -> Caller:
        return self._caller

    def known(self, tenant: str, credential: str) -> Caller | None:
        """Return the caller, if it is of this name."""
        return self._caller if self._caller.tenant.name == tenant else None

    def is_live(self, caller: Caller) -> bool:
        return True


class Closed:
    """An authenticator that knows no key."""

    def caller(self, authorization: str, host: str) -> Caller:
        raise Unauthenticated("a key is missing")

    def known(self, tenant: str, credential: str) -> Caller | None:
        return None

    def is_live(self, caller: Caller) -> bool:
        return False
