"""An Authenticator for tests: every call is of one tenant, which may set any priority."""

from __future__ import annotations

from router.core.tenancy import Caller, Tenant


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
