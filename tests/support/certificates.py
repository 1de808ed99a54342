"""Certificates for tests: a development CA in a folder, as `quire certs` makes it."""

from __future__ import annotations

from pathlib import Path

from cli.certificates.authority import Authority, Wanted, make, wanted
from cli.certificates.folder import CertificateFolder, Leaf
from common.rpc.roles import Role, dns_name


def new_folder(path: Path, worker_ids: tuple[str, ...] = ()) -> CertificateFolder:
    """Return a folder with a CA, a certificate of every role, and one for each of these workers."""
    folder = CertificateFolder(path)
    make(folder, wanted(folder, Role, worker_ids))
    return folder


def renew(folder: CertificateFolder, role: Role) -> None:
    """Write another certificate over that of a role, signed by the same CA."""
    make(folder, wanted(folder, [role]))


def expired(folder: CertificateFolder, role: Role, path: Path) -> Leaf:
    """Return a certificate of a role that ended yesterday."""
    leaf = Leaf(path)
    Authority.open(folder).issue(Wanted(leaf, (dns_name(role),)), days=-1)
    return leaf
