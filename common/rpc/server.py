"""A gRPC server with the parts of every Quire service: limits, keepalive, health, reflection, errors as statuses."""

from __future__ import annotations

from collections.abc import Sequence

from grpc import aio

from common.errors import FieldViolation, InvalidConfig
from common.rpc.health import Health
from common.rpc.interceptor import AroundInterceptor, ErrorsToStatuses
from common.rpc.options import server_options
from quire.api.channel import channel_options


class RpcServer:
    """One listening server.

    Add servicers to `.server`, then `start`, `ready` when requests can be served, `stop` at the end.
    """

    def __init__(
        self, services: Sequence[str], interceptors: Sequence[aio.ServerInterceptor] = (), reuse_port: bool = False
    ) -> None:
        """`services` are full names (`quire.inference.v1.InferenceService`); `interceptors` see statuses."""
        around = [*interceptors, AroundInterceptor(ErrorsToStatuses)]
        self.server = aio.server(interceptors=around, options=server_options(reuse_port))
        self.health = Health(services)
        self.port = self.own_port = 0

    async def start(self, host: str, port: int, own_port: int | None = None) -> int:
        """Listen, NOT_SERVING yet, and return the port (a free one for 0). Raises InvalidConfig when the port is taken.

        The server also answers on `own_port`: where others share `port`, that one reaches this process for certain.
        """
        await self.health.add_to(self.server)
        self.port = self._listen(host, port, "--port")
        if own_port is not None:
            self.own_port = self._listen(host, own_port, "--own-port")
        await self.server.start()
        return self.port

    async def ready(self) -> None:
        await self.health.ready()

    def _listen(self, host: str, port: int, flag: str) -> int:
        try:
            return self.server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            what = f"cannot listen on {host}:{port}; expected a free port of this machine (0 takes one)"
            raise InvalidConfig(FieldViolation(flag, what)) from None

    async def stop(self, grace: float) -> None:
        """Set NOT_SERVING, take no new RPC, and give running ones `grace` seconds before they are cancelled."""
        await self.health.drain()
        await self.server.stop(grace)


def open_channel(address: str, interceptors: Sequence[aio.ClientInterceptor] = ()) -> aio.Channel:
    """Return a channel to HOST:PORT with Quire's limits; it connects on first use and reconnects by itself."""
    return aio.insecure_channel(address, options=channel_options(), interceptors=list(interceptors))
