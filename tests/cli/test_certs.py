"""`quire certs`: what it writes, who may read it, and what it refuses to overwrite."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from cli.certificates.authority import LEAF_DAYS, RENEW_DAYS, Wanted, ensure, make, wanted
from cli.certificates.folder import CertificateFolder, Leaf
from cli.commands.certs import main
from common.contracts.errors import InvalidConfig
from common.rpc.roles import Role


def names(leaf: Leaf) -> list[str]:
    cert = x509.load_pem_x509_certificate(leaf.cert.read_bytes())
    found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in found]


def days_left(leaf: Leaf) -> int:
    cert = x509.load_pem_x509_certificate(leaf.cert.read_bytes())
    return round((cert.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1))


@pytest.fixture
def folder(tmp_path: Path) -> CertificateFolder:
    """A folder in which the command has run."""
    assert main([str(tmp_path / "certs")]) == 0
    return CertificateFolder(tmp_path / "certs")


def test_every_role_gets_a_certificate_of_one_ca(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CertificateFolder(tmp_path / "certs")
    assert main([str(folder.path)]) == 0
    said = capsys.readouterr().out
    for role in Role:
        leaf = folder.role(role)
        assert names(leaf) == [f"{role}.quire.internal"]
        assert leaf.ca.read_bytes() == folder.ca_cert.read_bytes()
        assert days_left(leaf) == LEAF_DAYS
        assert f"{leaf.path}  {role}.quire.internal  until 20" in said
        leaf.identity()
    assert f"keep {folder.ca_key} to yourself" in said


def test_what_was_written_comes_as_json_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CertificateFolder(tmp_path / "certs")
    assert main([str(folder.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ca"] == str(folder.ca_cert)
    assert {each["path"] for each in found["written"]} == {str(folder.role(role).path) for role in Role}


def test_a_certificate_is_valid_for_a_clock_that_is_a_day_behind(folder: CertificateFolder) -> None:
    behind = datetime.now(UTC) - timedelta(days=1)
    for path in (folder.ca_cert, *(folder.role(role).cert for role in Role)):
        assert x509.load_pem_x509_certificate(path.read_bytes()).not_valid_before_utc < behind


def test_only_the_owner_reads_the_keys(folder: CertificateFolder) -> None:
    for key in (folder.ca_key, *(folder.role(role).key for role in Role)):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700


def test_nothing_is_written_over_unless_it_is_forced(
    folder: CertificateFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before, ca = folder.role(Role.WORKER).cert.read_bytes(), folder.ca_cert.read_bytes()
    assert main([str(folder.path)]) == 2
    assert "exist; --force writes over them, --if-needed makes what is missing" in capsys.readouterr().err
    assert folder.role(Role.WORKER).cert.read_bytes() == before
    assert main([str(folder.path), "--force"]) == 0
    assert folder.role(Role.WORKER).cert.read_bytes() != before
    assert folder.ca_cert.read_bytes() == ca


def test_a_worker_gets_a_certificate_of_its_own_beside_the_others(folder: CertificateFolder) -> None:
    before = folder.role(Role.WORKER).cert.read_bytes()
    assert main([str(folder.path), "--worker-id", "worker-0", "--worker-id", "gpu.7", "--days", "30"]) == 0
    assert names(folder.worker("worker-0")) == ["worker.quire.internal", "worker-0.worker.quire.internal"]
    assert days_left(folder.worker("gpu.7")) == 30
    assert folder.role(Role.WORKER).cert.read_bytes() == before


def test_public_ports_get_the_names_of_the_host(folder: CertificateFolder) -> None:
    assert main([str(folder.path), "--public-name", "llm.example", "--public-name", "10.0.0.7"]) == 0
    assert names(folder.public) == ["localhost", "127.0.0.1", "::1", "llm.example", "10.0.0.7"]


@pytest.mark.parametrize("word", ["../worker", "A", "a/b", "", "a-", "*"])
def test_an_id_that_no_name_may_have_is_refused(tmp_path: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "certs"), "--worker-id", word])
    assert "expected 1 to 63 of a-z" in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_if_needed_makes_what_is_missing_or_ends_soon(folder: CertificateFolder) -> None:
    kept = folder.role(Role.ROUTER).cert.read_bytes()
    folder.role(Role.WORKER).key.unlink()
    make(folder, wanted(folder, [Role.MANAGER]), days=RENEW_DAYS - 1)
    assert main([str(folder.path), "--if-needed"]) == 0
    assert [days_left(folder.role(role)) for role in (Role.WORKER, Role.MANAGER)] == [LEAF_DAYS] * 2
    assert folder.role(Role.ROUTER).cert.read_bytes() == kept
    assert ensure(folder, wanted(folder, Role)) == []


def test_a_ca_whose_key_is_elsewhere_signs_nothing(folder: CertificateFolder) -> None:
    folder.ca_key.unlink()
    todo: list[Wanted] = wanted(folder, [], ["worker-0"])
    with pytest.raises(InvalidConfig, match=r"expected the key of the CA beside ca\.crt"):
        make(folder, todo)
    assert not folder.worker("worker-0").path.exists()
