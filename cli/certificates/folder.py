"""Where certificates lie: a folder for each role, with the three file names that cert-manager gives a secret too.

    ca/           ca.crt, ca.key
    router/       tls.crt, tls.key, ca.crt      and so on for the other roles
    workers/ID/   the same, for one worker alone
    public/       the same, for the router's public ports

A service needs its own folder alone: mount nothing else into its container.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.rpc.roles import Role
from common.rpc.tls import CertificateFiles, Identity


@dataclass(frozen=True, slots=True)
class Leaf:
    """The folder of one certificate."""

    path: Path

    @property
    def cert(self) -> Path:
        return self.path / "tls.crt"

    @property
    def key(self) -> Path:
        return self.path / "tls.key"

    @property
    def ca(self) -> Path:
        return self.path / "ca.crt"

    def flags(self) -> tuple[str, ...]:
        """Return the flags of a service with this certificate."""
        return "--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca)

    def identity(self) -> Identity:
        """Raises InvalidConfig when the files cannot be used."""
        return Identity(CertificateFiles(self.cert, self.key, self.ca))


@dataclass(frozen=True, slots=True)
class CertificateFolder:
    """The certificates of a deployment."""

    path: Path

    @property
    def ca_cert(self) -> Path:
        return self.path / "ca" / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.path / "ca" / "ca.key"

    def role(self, role: Role) -> Leaf:
        return Leaf(self.path / role)

    def worker(self, worker_id: str) -> Leaf:
        """Return the certificate of one worker, which no other worker's id goes with."""
        return Leaf(self.path / "workers" / worker_id)

    @property
    def public(self) -> Leaf:
        return Leaf(self.path / "public")
