"""A worker's port for its peers, and its end of fetches from theirs, as its options say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from common.addresses.host_port import joined_address
from common.contracts.errors import FieldViolation, InvalidConfig
from common.rpc.tls import Identity
from common.settings.options import is_loopback
from gpuworker.config import GpuWorkerSettings
from gpuworker.peers.carriers import host_key
from gpuworker.peers.client import PeerClient
from gpuworker.peers.nixl import Carriers, NixlStation
from gpuworker.peers.server import PeerServer, TakeImages, listen
from gpuworker.peers.tls import PeerTls
from gpuworker.peers.wire import PeerIdentity


class DataPort:
    """Listens from the beginning, and serves from `serve` on."""

    def __init__(self, settings: GpuWorkerSettings, tls: Identity | None, address: str) -> None:
        """`address` is where routers reach the worker: peers reach it at the same host.

        Raises InvalidConfig where the port or the carrier cannot be had.
        """
        assert settings.data_port is not None
        self._tls = PeerTls(tls.files) if tls is not None else None
        self._insecure = settings.insecure
        self._listener = listen(settings.host, settings.data_port, self._tls is not None, settings.insecure)
        port = int(self._listener.getsockname()[1])
        self.address = settings.data_address or joined_address(address.rpartition(":")[0], port)
        self._server: PeerServer | None = None
        try:
            self._nixl = _start_nixl(settings, self._tls is not None) if settings.carrier == "nixl" else None
        except BaseException:
            self._listener.close()
            raise

    def serve(
        self,
        identity: Callable[[], PeerIdentity],
        take_images: TakeImages,
        serve_keys: Callable[[], Sequence[bytes]],
        wake: Callable[[], None],
    ) -> PeerClient:
        """Serve peers, and return what fetches from them."""
        carriers = Carriers(host_key(), self._nixl)
        self._server = PeerServer(self._listener, identity, take_images, serve_keys, self._tls, carriers)
        return PeerClient(identity, wake, self._tls, self._insecure, carriers)

    def served(self) -> Counter[str]:
        """Return the images that peers have fetched so far, by carrier."""
        return Counter() if self._server is None else self._server.served().images

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        else:
            self._listener.close()
        if self._nixl is not None:
            self._nixl.close()


def _start_nixl(settings: GpuWorkerSettings, secure: bool) -> NixlStation:
    """Raises InvalidConfig."""
    if not (secure or is_loopback(settings.host)):
        what = f"is nixl, and at {settings.host} no peer proves who it is; expected TLS, or a --host on loopback"
        raise InvalidConfig(FieldViolation("--carrier", what))
    return NixlStation()
