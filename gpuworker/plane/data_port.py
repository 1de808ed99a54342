"""A worker's port for its peers, and its end of fetches from theirs, as its options say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.addresses.host_port import joined_address
from common.rpc.tls import Identity
from gpuworker.config import GpuWorkerSettings
from gpuworker.peers.carriers import host_key
from gpuworker.peers.client import PeerClient
from gpuworker.peers.server import PeerServer, TakeImages, listen
from gpuworker.peers.tls import PeerTls
from gpuworker.peers.wire import PeerIdentity


class DataPort:
    """Listens from the beginning, and serves from `serve` on."""

    def __init__(self, settings: GpuWorkerSettings, tls: Identity | None, address: str) -> None:
        """`address` is where routers reach the worker: peers reach it at the same host.

        Raises InvalidConfig where the port cannot be had.
        """
        assert settings.data_port is not None
        self._tls = PeerTls(tls.files) if tls is not None else None
        self._insecure = settings.insecure
        self._listener = listen(settings.host, settings.data_port, self._tls is not None, settings.insecure)
        port = int(self._listener.getsockname()[1])
        self.address = settings.data_address or joined_address(address.rpartition(":")[0], port)
        self._server: PeerServer | None = None

    def serve(
        self,
        identity: Callable[[], PeerIdentity],
        take_images: TakeImages,
        serve_keys: Callable[[], Sequence[bytes]],
        wake: Callable[[], None],
    ) -> PeerClient:
        """Serve peers, and return what fetches from them."""
        key = host_key()
        self._server = PeerServer(self._listener, identity, take_images, serve_keys, self._tls, key)
        return PeerClient(identity, wake, self._tls, self._insecure, key)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        else:
            self._listener.close()
