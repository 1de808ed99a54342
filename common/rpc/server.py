"""A gRPC server with the parts of every Quire service: limits, keepalive, health, TLS, roles, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from grpc import aio

from common.addresses.host_port import joined_address
from common.contracts.errors import PortTaken
from common.rpc.connections import Calls, leave, shut_down
from common.rpc.gone_clients import log_no_gone_clients
from common.rpc.health import Guard, Health, anybody
from common.rpc.interceptor import AroundInterceptor, ErrorsToStatuses
from common.rpc.options import SERVICES, UNMEASURED, Callers, server_options
from common.rpc.roles import ChecksRole, Role
from common.rpc.tls import Identity, ServerTls, expecting
from quire.api.channel import channel_options
from quire.api.proxy import PROXY_OPTION

log = logging.getLogger(__name__)

# Seconds for gRPC to write GOAWAY to its connections.
_GOAWAY_S: Final = 0.1

# Opens a channel to HOST:PORT.
Dial: TypeAlias = Callable[[str], aio.Channel]


class RpcServer:
    """One listening server.

    Add servicers to `.server`, then `start`, `ready` when requests can be served, `stop` at the end.
    """

    def __init__(
        self,
        services: Sequence[str],
        interceptors: Sequence[aio.ServerInterceptor] = (),
        reuse_port: bool = False,
        callers: Callers = SERVICES,
        tls: ServerTls | None = None,
        own_tls: ServerTls | None = None,
    ) -> None:
        """`services` are full names (`quire.inference.v1.InferenceService`); `interceptors` stand around all
        others, and see statuses.

        `callers` has the limits of messages and of silence. `tls` is for the port, `own_tls` for the own port. Where
        either asks callers for certificates, their roles are checked (`roles.py`).
        """
        self._tls, self._own_tls = tls, own_tls
        checked = any(each is not None and each.asks_callers for each in (tls, own_tls))
        checks = [AroundInterceptor(ChecksRole)] if checked else []
        self._calls = Calls()
        counts = AroundInterceptor(self._calls.around)
        around = [*interceptors, counts, AroundInterceptor(ErrorsToStatuses), *checks]
        log_no_gone_clients()
        self.server = aio.server(interceptors=around, options=server_options(reuse_port, callers))
        self.health = Health(services)
        self.port = self.own_port = 0

    async def start(
        self, host: str, port: int, own_port: int | None = None, flag: str = "--port", guard: Guard = anybody
    ) -> int:
        """Listen, NOT_SERVING yet, and return the port (a free one for 0). Raises PortTaken.

        The server also answers on `own_port`: where others share `port`, that one reaches this process for certain.
        `flag` is the option that names the port. Reflection answers callers who pass the `guard`.
        """
        await self.health.add_to(self.server, guard)
        self.port = self._listen(host, port, flag, self._tls)
        if own_port is not None:
            self.own_port = self._listen(host, own_port, "--own-port", self._own_tls)
        await self.server.start()
        return self.port

    async def ready(self) -> None:
        await self.health.ready()

    def _listen(self, host: str, port: int, flag: str, tls: ServerTls | None) -> int:
        try:
            if tls is None:
                return self.server.add_insecure_port(joined_address(host, port))
            return self.server.add_secure_port(joined_address(host, port), tls.server_credentials())
        except RuntimeError:
            raise PortTaken(flag, host, port) from None

    async def leave_to_others(self, seconds: float) -> None:
        """Close the port, which other processes have too, and for so many seconds each connection without a call.

        The clients' next connections are with the others. Calls that come here meanwhile are as any. gRPC itself would
        answer those that are on their way as CANCELLED.
        """
        await leave({self.port}, self._calls.by_port, seconds)

    async def send_away(self, grace: float, hold: float) -> None:
        """Stop as `stop` does, and answer the calls of the last `hold` seconds before GOAWAY only after it.

        A client that makes one call after another gets GOAWAY with the answer, and makes its next call elsewhere. A
        call that it sent between the two would be CANCELLED.
        """
        self._calls.hold()
        try:
            await asyncio.sleep(hold)
            stopping = asyncio.create_task(self.stop(grace))
            await asyncio.wait({stopping}, timeout=_GOAWAY_S)
        finally:
            self._calls.release()
        await stopping

    async def end_connections(self, seconds: float) -> None:
        """Close the port and all connections, once the running calls are over or after so many seconds.

        What they have sent gets as many seconds again to arrive. The handlers refuse what comes meanwhile. A later call
        is UNAVAILABLE to its client; while the server stops, it would be CANCELLED.
        """
        await self._calls.over(seconds)
        ended = await shut_down({self.port, self.own_port} - {0}, seconds)
        if ended.failed:
            log.warning("%d connections could not be closed; calls on them may end as CANCELLED", ended.failed)

    async def stop(self, grace: float) -> None:
        """Set NOT_SERVING, take no new RPC, and give running ones `grace` seconds before they are cancelled."""
        await self.health.drain()
        await self.server.stop(grace)


def open_channel(
    address: str,
    interceptors: Sequence[aio.ClientInterceptor] = (),
    identity: Identity | None = None,
    role: Role = Role.OPERATOR,
    by_proxy: bool = False,
) -> aio.Channel:
    """Return a channel to HOST:PORT with Quire's limits; it connects on first use and reconnects by itself.

    With an identity both ends show certificates, and the server's must name `role`. With `by_proxy` the channel goes by
    the proxy of the environment, if it names one.
    """
    limits = [*(dict(channel_options()) | dict(UNMEASURED) | {PROXY_OPTION: int(by_proxy)}).items()]
    if identity is None:
        return aio.insecure_channel(address, options=limits, interceptors=list(interceptors))
    options = [*limits, expecting(role)]
    return aio.secure_channel(address, identity.channel_credentials(), options, interceptors=list(interceptors))


def dialer(identity: Identity | None, role: Role) -> Dial:
    """Return what opens channels to servers of a role: with TLS, if this service has an identity."""
    return partial(open_channel, identity=identity, role=role)
