"""Mutual TLS 1.3 between workers, with the certificates that they have for gRPC.

A peer must have the role `worker`. Where its certificate names ids of workers, it must be one of these.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock

from common.rpc.roles import Peer, Role, peer_of_names
from common.rpc.tls import CertificateFiles
from gpuworker.peers.channel import ChannelBroken, ChannelTimedOut


@dataclass(frozen=True, slots=True)
class _Contexts:
    version: int
    server: ssl.SSLContext
    client: ssl.SSLContext


class PeerTls:
    """Wraps sockets of both ends. The files are read again when they change. Threads may share it."""

    def __init__(self, files: CertificateFiles) -> None:
        """Raises OSError and ValueError when the files do not belong together."""
        self._files, self._lock = files, Lock()
        self._contexts = self._load()

    def accept(self, connected: socket.socket, seconds: float) -> tuple[socket.socket, Callable[[str], bool]]:
        """Return the socket with TLS, and whether its other end is the worker with an id. Raises ChannelBroken."""
        return self._wrap(self._current().server, connected, seconds, server_side=True)

    def connect(self, connected: socket.socket, seconds: float) -> tuple[socket.socket, Callable[[str], bool]]:
        """Do the same at the end that opened the connection."""
        return self._wrap(self._current().client, connected, seconds, server_side=False)

    def _wrap(
        self, context: ssl.SSLContext, connected: socket.socket, seconds: float, server_side: bool
    ) -> tuple[socket.socket, Callable[[str], bool]]:
        wrapped = None
        try:
            connected.settimeout(seconds)
            wrapped = context.wrap_socket(connected, server_side=server_side, do_handshake_on_connect=False)
            wrapped.do_handshake()
            return wrapped, partial(is_worker, _peer_of(wrapped))
        except OSError as error:
            if wrapped is not None:
                with suppress(OSError):
                    wrapped.close()
            if isinstance(error, TimeoutError):
                raise ChannelTimedOut(f"no TLS handshake in {seconds:g} s") from None
            raise ChannelBroken(f"the TLS handshake failed: {_reason_of(error)}") from None

    def _current(self) -> _Contexts:
        with self._lock:
            if self._files.current().version != self._contexts.version:
                with suppress(OSError, ValueError):  # half of the files are new: those of before stay a moment longer
                    self._contexts = self._load()
            return self._contexts

    def _load(self) -> _Contexts:
        version = self._files.current().version
        return _Contexts(
            version, self._files.peer_context(server_side=True), self._files.peer_context(server_side=False)
        )


def is_worker(peer: Peer, worker_id: str) -> bool:
    """Return whether a certificate is that of this worker: by its role, and by its ids where it names any."""
    return Role.WORKER in peer.roles and (not peer.worker_ids or worker_id in peer.worker_ids)


def _peer_of(wrapped: ssl.SSLSocket) -> Peer:
    entries = (wrapped.getpeercert() or {}).get("subjectAltName", ())
    # Of the alternative names those of hosts alone, as `peer_of` of `common/rpc/roles.py` has it.
    return peer_of_names(str(entry[1]) for entry in entries if entry[0] == "DNS")


def _reason_of(error: OSError) -> str:
    """Return OpenSSL's name of the reason, which has no text of the other end."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message or "the certificate does not hold"
    return getattr(error, "reason", None) or error.strerror or type(error).__name__
