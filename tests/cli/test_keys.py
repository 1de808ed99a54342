"""`quire keys` makes keys that a router accepts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from cli.commands import keys
from cli.suite.stack import ensure_server_key
from router.tenants.directory import TenantDirectory
from router.tenants.tenants_file import read_server_key, read_tenants


def made(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run the command and return its output."""
    assert keys.main(words) == 0
    return capsys.readouterr().out


def test_a_router_accepts_the_key_of_an_appended_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tenants.toml"
    red, blue = (made(capsys, name, "--append", str(path)).split()[0] for name in ("red", "blue.2"))
    found = TenantDirectory(path, b"k" * 32, "demo")
    assert found.caller(f"Bearer {red}", "").tenant.name == "red"
    assert found.caller(f"Bearer {blue}", "").tenant.name == "blue.2"
    assert red not in path.read_text()


def test_without_a_file_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, _, rest = made(capsys, "red").partition("\n\n")
    path = tmp_path / "tenants.toml"
    path.write_text(table)
    assert rest.strip().endswith("(the key: shown once)")
    assert list(read_tenants(path, b"k" * 32).tenants) == ["red"]


def test_a_key_comes_as_json_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tenants.toml"
    found = json.loads(made(capsys, "red", "--append", str(path), "--json"))
    assert found["tenant"] == "red"
    assert found["hash"] in path.read_text()
    assert TenantDirectory(path, b"k" * 32, "demo").caller(f"Bearer {found['key']}", "").tenant.name == "red"


def test_a_tenant_that_exists_keeps_its_file_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tenants.toml"
    made(capsys, "red", "--append", str(path))
    before = path.read_text()
    assert keys.main(["red", "--append", str(path)]) == 2
    assert "has tenant red" in capsys.readouterr().err
    assert keys.main(["no name"]) == 2
    assert path.read_text() == before


def test_a_server_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "server.key"
    ensure_server_key(path)
    first = read_server_key(path)
    ensure_server_key(path)
    assert read_server_key(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
