"""TLS of servers and channels. Certificates are files, read again when they change, so that they rotate at run time.

A server reads its files at every handshake, and a channel is opened with the files of that moment. So both take a
renewed certificate without a restart. Running streams go on with the certificate of their handshake.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, Protocol, cast

import grpc

from common.contracts.errors import FieldViolation, InvalidConfig
from common.rpc.roles import Role, dns_name

log = logging.getLogger(__name__)

_CERT, _KEY, _CA = "cert", "key", "ca"
_EXPECTED: Final = "expected PEM files that belong together (`quire certs` makes them)"


@dataclass(frozen=True, slots=True)
class Pem:
    """The content of the files at one moment; `version` rises with each change."""

    chain: bytes
    key: bytes
    roots: bytes | None
    version: int


class CertificateFiles:
    """A certificate with its key, and the certificates that sign its peers'. Threads may share it."""

    def __init__(self, cert: Path, key: Path, ca: Path | None = None, prefix: str = "--tls") -> None:
        """`prefix` begins the names of the options. Raises InvalidConfig when the files cannot be used."""
        self._paths = {_CERT: cert, _KEY: key} | ({} if ca is None else {_CA: ca})
        self._lock = Lock()
        self._seen = self._stamps()
        try:
            self._pem = self._read(1)
        except (OSError, ValueError) as error:
            where = next((name for name, path in self._paths.items() if not os.access(path, os.R_OK)), _CERT)
            raise InvalidConfig(
                FieldViolation(f"{prefix}-{where}", f"{self._paths[where]}: {error}; {_EXPECTED}")
            ) from None

    def current(self) -> Pem:
        """Return the files as they are now; where they cannot be used, as they were, with a line in the log."""
        with self._lock:
            stamps = self._stamps()
            if stamps != self._seen:
                self._seen = stamps
                self._renew()
            return self._pem

    def _renew(self) -> None:
        try:
            self._pem = self._read(self._pem.version + 1)
        except (OSError, ValueError) as error:
            what = "%s changed and cannot be used (%s); the certificate from before stays; " + _EXPECTED
            log.error(what, self._paths[_CERT], error)
        else:
            log.info("certificate %s was read again", self._paths[_CERT])

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, self._paths.values()))

    def context(self) -> ssl.SSLContext:
        """Return a server's context with the files. Raises OSError and ValueError when they do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._paths[_CERT], self._paths[_KEY], _no_password)
        if _CA in self._paths:
            context.load_verify_locations(self._paths[_CA])
        return context

    def peer_context(self, server_side: bool) -> ssl.SSLContext:
        """Return a context for mutual TLS 1.3 over plain sockets. Who the other end is, its caller finds by its names.

        Raises OSError and ValueError when the files do not belong together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._paths[_CERT], self._paths[_KEY], _no_password)
        context.load_verify_locations(self._paths[_CA])
        if server_side:
            context.num_tickets = 0  # nothing is resumed
        return context

    def _read(self, version: int) -> Pem:
        self.context()
        content = {name: path.read_bytes() for name, path in self._paths.items()}
        return Pem(content[_CERT], content[_KEY], content.get(_CA), version)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _no_password() -> str:
    raise ValueError("the key is encrypted; expected one without a passphrase")


class ServerTls(Protocol):
    """What a server needs to listen with TLS."""

    @property
    def asks_callers(self) -> bool:
        """Whether callers must show a certificate."""
        ...

    def server_credentials(self) -> grpc.ServerCredentials: ...


class TlsOptions(Protocol):
    """The options that name the certificate of a service (`TlsSettings` of `common/settings/options.py`)."""

    @property
    def tls_cert(self) -> Path | None: ...

    @property
    def tls_key(self) -> Path | None: ...

    @property
    def tls_ca(self) -> Path | None: ...


class Identity:
    """The certificate of a service between services (mTLS): both ends verify each other against one CA."""

    asks_callers = True

    def __init__(self, files: CertificateFiles) -> None:
        self.files = files

    @classmethod
    def of(cls, options: TlsOptions) -> Identity | None:
        """Return the identity that the options name; None without one. Raises InvalidConfig."""
        cert, key, ca = options.tls_cert, options.tls_key, options.tls_ca
        return None if cert is None or key is None or ca is None else cls(CertificateFiles(cert, key, ca))

    def server_credentials(self) -> grpc.ServerCredentials:
        return _server_credentials(self.files, asks_callers=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a new channel."""
        pem = self.files.current()
        return grpc.ssl_channel_credentials(pem.roots, pem.key, pem.chain)


class PublicCertificate:
    """The certificate of public ports. Clients show no certificate: keys and tokens say who they are."""

    asks_callers = False

    def __init__(self, files: CertificateFiles) -> None:
        self.files = files

    @classmethod
    def of(cls, cert: Path | None, key: Path | None) -> PublicCertificate | None:
        """Return the certificate in the two files; None without them. Raises InvalidConfig."""
        return None if cert is None or key is None else cls(CertificateFiles(cert, key, prefix="--public-tls"))

    def server_credentials(self) -> grpc.ServerCredentials:
        return _server_credentials(self.files, asks_callers=False)


def expecting(role: Role) -> tuple[str, str]:
    """Return the channel option that makes a client accept only servers of a role, at whatever address."""
    return "grpc.ssl_target_name_override", dns_name(role)


def _server_credentials(files: CertificateFiles, asks_callers: bool) -> grpc.ServerCredentials:
    """Return credentials that gRPC renews: it asks at every handshake, on a thread of its own."""
    pem = files.current()
    # gRPC takes None for "no change"; its stubs lack that.
    renewal = cast("Callable[[], grpc.ServerCertificateConfiguration]", _Renewal(files, pem.version))
    return grpc.dynamic_ssl_server_credentials(_configuration(pem), renewal, asks_callers)


class _Renewal:
    """Gives gRPC the new configuration once after each change, and None otherwise: parsing takes a millisecond."""

    def __init__(self, files: CertificateFiles, version: int) -> None:
        self._files, self._version = files, version

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        pem = self._files.current()
        if pem.version == self._version:
            return None
        self._version = pem.version
        return _configuration(pem)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], pem.roots)


class RenewedContext:
    """The TLS context of an HTTP server (Python's `ssl`), renewed at the handshake after a change."""

    def __init__(self, certificate: PublicCertificate) -> None:
        self._files = certificate.files
        self._version = self._files.current().version
        self.context = self._latest = self._files.context()
        self.context.sni_callback = self._renew

    def _renew(self, connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
        version = self._files.current().version
        if version != self._version:
            self._latest, self._version = self._files.context(), version
        connection.context = self._latest
