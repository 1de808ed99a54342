"""Mutual TLS between workers: both must be workers, and the ones that they say, where their certificates have ids."""

from __future__ import annotations

import socket
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from cli.certificates.folder import CertificateFolder, Leaf
from common.contracts.transfers import TransferEnd
from common.rpc.roles import Role
from common.rpc.tls import CertificateFiles
from gpuworker.peers.carriers import host_key
from gpuworker.peers.server import ServerLimits
from gpuworker.peers.tls import PeerTls
from tests.support.certificates import expired, new_folder, renew
from tests.support.gpuworker.peers import DESTINATION, Destination, hashes_of, serving
from tests.support.gpuworker.raw_peers import HELLO, calling, ended, request_of
from tests.support.waiting import wait_until

DONE, FAILED = TransferEnd.DONE, TransferEnd.FAILED
IDS = ("worker-s", "worker-d", "worker-e")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    return new_folder(tmp_path_factory.mktemp("certs"), IDS)


def tls_of(leaf: Leaf) -> PeerTls:
    return PeerTls(CertificateFiles(leaf.cert, leaf.key, leaf.ca))


def test_two_workers_of_one_suite_share_blocks(folder: CertificateFolder) -> None:
    tls = tls_of(folder.role(Role.WORKER))
    with serving(tls=tls) as server, Destination(tls=tls) as destination:
        for _ in range(3):
            assert destination.fetched(server.port, hashes_of(40)) == [DONE] * 40
        assert server.connections() == (1, 0)


def test_the_ring_is_used_beside_tls_too(folder: CertificateFolder) -> None:
    tls = tls_of(folder.role(Role.WORKER))
    with serving(tls=tls, shared=host_key()) as server, Destination(tls=tls, host_key=host_key()) as destination:
        assert destination.fetched(server.port, hashes_of(100)) == [DONE] * 100
        assert destination.client.fetched() == {"shm": 100}


def test_certificates_with_ids_are_those_of_these_workers(folder: CertificateFolder) -> None:
    one, other = tls_of(folder.worker("worker-s")), tls_of(folder.worker("worker-d"))
    with serving(tls=one) as server, Destination(tls=other) as destination:
        assert destination.fetched(server.port, hashes_of(2)) == [DONE, DONE]


def test_another_workers_certificate_is_refused_by_the_source(
    folder: CertificateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tls=tls_of(folder.worker("worker-s"))) as server:
        with Destination(tls=tls_of(folder.worker("worker-e"))) as destination:
            assert destination.fetched(server.port, hashes_of(2)) == [FAILED] * 2
        assert server.served().refused == {"certificate": 1}
    assert "the certificate is not that of this worker" in caplog.text


def test_another_workers_certificate_is_refused_by_the_destination(
    folder: CertificateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tls=tls_of(folder.worker("worker-e"))) as server:
        with Destination(tls=tls_of(folder.worker("worker-d"))) as destination:
            assert destination.fetched(server.port, hashes_of(2)) == [FAILED] * 2
        assert server.served().images.total() == 0
    assert "its certificate is not that of this worker" in caplog.text


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.WORKER])
def test_other_roles_neither_serve_nor_fetch(folder: CertificateFolder, role: Role) -> None:
    worker, other = tls_of(folder.role(Role.WORKER)), tls_of(folder.role(role))
    with serving(tls=worker) as server, Destination(tls=other) as destination:
        assert destination.fetched(server.port, hashes_of(2)) == [FAILED] * 2
        wait_until(server.connections, lambda found: found == (0, 0))
    with serving(tls=other) as server, Destination(tls=worker) as destination:
        assert destination.fetched(server.port, hashes_of(2)) == [FAILED] * 2
        assert server.served().images.total() == 0


def test_certificates_of_another_ca_and_expired_ones_are_refused(
    folder: CertificateFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = tls_of(folder.role(Role.WORKER))
    others = [new_folder(tmp_path / "others").role(Role.WORKER), expired(folder, Role.WORKER, tmp_path / "expired")]
    with serving(tls=worker) as server:
        for leaf in others:
            with Destination(tls=tls_of(leaf)) as destination:
                assert destination.fetched(server.port, hashes_of(2)) == [FAILED] * 2
        wait_until(server.connections, lambda found: found == (0, 0))
    for leaf in others:
        with serving(tls=tls_of(leaf)) as server, Destination(tls=worker) as destination:
            assert destination.fetched(server.port, hashes_of(2)) == [FAILED] * 2
    assert "the TLS handshake failed" in caplog.text


def test_without_tls_at_one_end_nothing_is_served(folder: CertificateFolder) -> None:
    tls = tls_of(folder.role(Role.WORKER))
    with serving(tls=tls, bounds=ServerLimits(hello_seconds=5.0)) as server:
        with Destination() as destination:
            assert destination.fetched(server.port, hashes_of(2)) == [FAILED] * 2
        with calling(server, HELLO + request_of(1)) as channel:
            ended(channel)
        assert server.served().images.total() == 0
    with serving() as server, Destination(tls=tls) as destination:
        assert destination.fetched(server.port, hashes_of(2)) == [FAILED] * 2


def test_a_caller_that_begins_no_handshake_is_put_out(folder: CertificateFolder) -> None:
    bounds = ServerLimits(hello_seconds=0.1)
    with serving(tls=tls_of(folder.role(Role.WORKER)), bounds=bounds) as server, calling(server, b"\x16") as channel:
        ended(channel)


def test_nothing_older_than_tls_1_3_is_spoken(folder: CertificateFolder) -> None:
    leaf = folder.role(Role.WORKER)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.maximum_version = False, ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(leaf.cert, leaf.key)
    old.load_verify_locations(leaf.ca)
    with (
        serving(tls=tls_of(leaf)) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connected,
        pytest.raises(ssl.SSLError),
    ):
        old.wrap_socket(connected)


def test_a_caller_without_a_certificate_is_refused(folder: CertificateFolder) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(folder.role(Role.WORKER).ca)
    with serving(tls=tls_of(folder.role(Role.WORKER))) as server:
        with (
            socket.create_connection(("127.0.0.1", server.port)) as connected,
            bare.wrap_socket(connected) as secure,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            read_to_the_end(secure)
        assert server.served().images.total() == 0


def read_to_the_end(secure: ssl.SSLSocket) -> None:
    secure.sendall(HELLO + request_of(1))
    while secure.recv(1 << 16):
        pass


def test_renewed_certificates_are_taken_without_a_restart(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    tls = tls_of(folder.role(Role.WORKER))
    with serving(tls=tls) as server:
        with Destination(tls=tls) as destination:
            assert destination.fetched(server.port, hashes_of(2)) == [DONE, DONE]
        before = tls._contexts
        renew(folder, Role.WORKER)
        with Destination(replace(DESTINATION, worker_id="worker-e"), tls=tls) as destination:
            assert destination.fetched(server.port, hashes_of(2)) == [DONE, DONE]
        assert tls._contexts.version == before.version + 1
