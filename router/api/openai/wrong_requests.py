"""Charges tenants for requests that are refused as wrong before their prompts are looked at."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.contracts.errors import Overloaded
from router.api.openai import errors
from router.api.shared.metering import Meter
from router.tenants.tenancy import Tenant

# Statuses of answers to a wrong body, model or path.
_WRONG: Final = frozenset({400, 404, 413, 415, 422})


class WrongRequestsCharged:
    """Middleware that charges a wrong request which nothing has charged so far; 429 where the rate has no room for it.

    The request's state has its caller, and its `charge` from the moment that a handler made one.
    """

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app, self._meter = app, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get("state", {}).get("caller")
        if scope["type"] != "http" or scope["method"] != "POST" or caller is None or not caller.tenant.limits.are_set:
            await self._app(scope, receive, send)
            return
        instead: Overloaded | None = None

        async def charging(message: Message) -> None:
            nonlocal instead
            if message["type"] == "http.response.start" and message["status"] in _WRONG and not _is_charged(scope):
                instead = self._refusal(caller.tenant)
            if instead is None:
                await send(message)

        await self._app(scope, receive, charging)
        if instead is not None:
            await errors.response_to(instead, scope)(scope, receive, send)

    def _refusal(self, tenant: Tenant) -> Overloaded | None:
        try:
            self._meter.wrong(tenant)
        except Overloaded as refused:
            return refused
        return None


def _is_charged(scope: Scope) -> bool:
    charge = scope["state"].get("charge")
    return charge is not None and charge.begun
