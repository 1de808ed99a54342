"""A certificate authority for development: one CA, and short-lived leaves for the roles.

Only this module imports `cryptography`; the services read PEM files and never need it.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cli.certificates.folder import CertificateFolder, Leaf
from common.contracts.errors import FieldViolation, InvalidConfig
from common.rpc.roles import Role, dns_name

CA_DAYS: Final = 3650
LEAF_DAYS: Final = 365
# A leaf that ends earlier than this is renewed by `ensure`.
RENEW_DAYS: Final = 30
# Clocks of several machines differ. One that was set to the time of another zone is up to 26 hours behind.
_SKEW: Final = timedelta(hours=26)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A certificate to make: its folder and the names that it stands for."""

    leaf: Leaf
    names: tuple[str, ...]


def wanted(
    folder: CertificateFolder, roles: Iterable[Role], worker_ids: Iterable[str] = (), public: Sequence[str] = ()
) -> list[Wanted]:
    """Return the certificates of roles, of single workers, and of public ports under the names `public`."""
    found = [Wanted(folder.role(role), (dns_name(role),)) for role in roles]
    found += [
        Wanted(folder.worker(worker_id), (dns_name(Role.WORKER), dns_name(Role.WORKER, worker_id)))
        for worker_id in worker_ids
    ]
    return [*found, *([Wanted(folder.public, tuple(public))] if public else [])]


def ensure(folder: CertificateFolder, certificates: Sequence[Wanted], days: int = LEAF_DAYS) -> list[Wanted]:
    """Make what is missing or ends within `RENEW_DAYS`; return what was made. Raises InvalidConfig without the CA."""
    due = [each for each in certificates if not _lasts(each.leaf)]
    if due:
        make(folder, due, days)
    return due


def make(folder: CertificateFolder, certificates: Iterable[Wanted], days: int = LEAF_DAYS) -> None:
    """Write certificates over those that are there, signed by the folder's CA; a new folder gets one.

    Raises InvalidConfig when the CA's key is elsewhere, or when a file cannot be written.
    """
    authority = Authority.open(folder)
    for each in certificates:
        authority.issue(each, days)


def ends_at(cert: Path) -> datetime:
    """Return when a certificate ends."""
    return x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc


def _lasts(leaf: Leaf) -> bool:
    if not (leaf.cert.exists() and leaf.key.exists() and leaf.ca.exists()):
        return False
    return ends_at(leaf.cert) - datetime.now(UTC) > timedelta(days=RENEW_DAYS)


class Authority:
    """A CA and its key."""

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._cert, self._key = cert, key

    @classmethod
    def open(cls, folder: CertificateFolder) -> Authority:
        """Return the CA of a folder, a new one where there is none. Raises InvalidConfig when its key is missing."""
        if not folder.ca_cert.exists():
            return cls._new(folder)
        try:
            key = serialization.load_pem_private_key(folder.ca_key.read_bytes(), None)
        except OSError as error:
            what = f"{folder.ca_key}: {error.strerror}; expected the key of the CA beside {folder.ca_cert.name}"
            raise InvalidConfig(FieldViolation("DIR", what)) from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(x509.load_pem_x509_certificate(folder.ca_cert.read_bytes()), key)

    @classmethod
    def _new(cls, folder: CertificateFolder) -> Authority:
        key, name = ec.generate_private_key(ec.SECP256R1()), _name("Quire development CA")
        cert = (
            _builder(name, name, key.public_key(), CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write_pair(folder.ca_cert, folder.ca_key, cert, key)
        return cls(cert, key)

    def issue(self, certificate: Wanted, days: int) -> None:
        """Write a leaf, its key and this CA's certificate to the leaf's folder."""
        leaf, key = certificate.leaf, ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        cert = (
            _builder(_name(certificate.names[-1]), self._cert.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in certificate.names]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write_pair(leaf.cert, leaf.key, cert, key)
        _write(leaf.ca, self._cert.public_bytes(serialization.Encoding.PEM), 0o644)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + timedelta(days=days)) - _SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _general(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_pair(cert_path: Path, key_path: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    _write(key_path, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), 0o600)
    _write(cert_path, cert.public_bytes(pem), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file as a whole; it never has a wider mode, not even for a moment. Raises InvalidConfig."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        unfinished.replace(path)
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}; expected a folder that you may write to"
        raise InvalidConfig(FieldViolation("DIR", what)) from None
