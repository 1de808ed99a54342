"""The operator's file: what it may say, and every mistake in it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.contracts.adapters import AdapterShare
from common.contracts.errors import InvalidConfig, PermissionDenied
from router.tenants.keys import hash_of
from router.tenants.tenancy import Tenant, TenantLimits
from router.tenants.tenants_file import TenantTable, cache_domain, read_server_key, read_tenants

SERVER_KEY = b"k" * 32
KEY = "quire_" + "x" * 43


def read(folder: Path, text: str, server_key: bytes = SERVER_KEY) -> TenantTable:
    path = folder / "tenants.toml"
    path.write_text(text)
    return read_tenants(path, server_key)


def violations(folder: Path, text: str) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as refused:
        read(folder, text)
    return {each.field.rpartition(": ")[2]: each.description for each in refused.value.violations}


def test_a_tenant_without_options_has_the_defaults(tmp_path: Path) -> None:
    table = read(tmp_path, f'[tenants.acme]\nkeys = ["{hash_of(KEY)}"]\n')
    domain = cache_domain(SERVER_KEY, "tenant", "acme")
    assert table.tenants == {"acme": Tenant("acme", cache_domain=domain)}
    assert table.names_by_hash == {hash_of(KEY): "acme"}


def test_every_option_arrives(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        """
        [tenants.acme]
        weight = 2.5
        max_priority = 10
        models = ["demo"]
        admin = true
        requests_per_minute = 60
        tokens_per_minute = 6000
        streams = 4
        sequences = 8
        adapters = ["acme-*", "sql"]
        adapter_bytes = 1000
        """,
    )
    acme = table.tenants["acme"]
    assert (acme.weight, acme.max_priority, acme.models, acme.admin) == (2.5, 10, frozenset({"demo"}), True)
    assert acme.limits == TenantLimits(60, 6000, 4, 8)
    assert acme.adapters == ("acme-*", "sql")
    assert table.owners.share_of("sql") == AdapterShare("acme", ("acme-*", "sql"), 1000)
    acme.check_model("demo")
    with pytest.raises(PermissionDenied, match="tenant acme may not use model 'other'"):
        acme.check_model("other")


def test_domains_differ_by_tenant_by_kind_and_by_server_key(tmp_path: Path) -> None:
    text = "[tenants.a]\n[tenants.b]\n[shared.a]\n"
    tenants, elsewhere = read(tmp_path, text).tenants, read(tmp_path, text, b"other key" * 4).tenants
    domains = {tenants["a"].cache_domain, tenants["b"].cache_domain, tenants["a"].domain("a")}
    domains |= {elsewhere["a"].cache_domain, b""}
    assert len(domains) == 5
    assert {len(domain) for domain in domains} == {0, 32}


def test_a_shared_domain_is_open_to_the_tenants_that_it_names(tmp_path: Path) -> None:
    tenants = read(tmp_path, '[tenants.a]\n[tenants.b]\n[shared.all]\n[shared.one]\ntenants = ["a"]\n').tenants
    assert tenants["a"].domain("all") == tenants["b"].domain("all")
    assert tenants["a"].domain("one")
    with pytest.raises(PermissionDenied, match="shared domain 'one' is not open to this caller"):
        tenants["b"].domain("one")


def test_every_mistake_is_named_at_once_and_no_key_is_repeated(tmp_path: Path) -> None:
    found = violations(
        tmp_path,
        f"""
        rates = 1
        [tenants.acme]
        keys = ["{KEY}"]
        weight = 0
        speed = 3
        """,
    )
    assert set(found) == {"rates", "tenants.acme.keys.0", "tenants.acme.weight", "tenants.acme.speed"}
    assert found["tenants.acme.keys.0"].startswith("expected sha256: and 64 hexadecimal digits")
    assert not any(KEY in words for words in found.values())


def test_a_key_of_two_tenants_and_an_unknown_name_are_mistakes(tmp_path: Path) -> None:
    line = f'keys = ["{hash_of(KEY)}"]'
    text = f'[tenants.a]\n{line}\n[tenants.b]\n{line}\n[shared.open]\ntenants = ["c"]\n'
    assert violations(tmp_path, text) == {
        "tenants.b.keys": "has a key of tenant a too",
        "shared.open.tenants": "names 'c'; no such tenant is here",
    }


def test_names_of_adapters_belong_to_one_tenant_and_bytes_need_names(tmp_path: Path) -> None:
    def owned(*names: str) -> str:
        return "".join(f"[tenants.t{at}]\nadapters = [{name}]\n" for at, name in enumerate(names))

    clash = {"tenants.t1.adapters": "has 'b-1', which names adapters of t0 too"}
    assert violations(tmp_path, owned('"a", "b-*"', '"b-1"')) == clash
    both = {"tenants.t1.adapters": "has 'a', which names adapters of t0 too"}
    assert violations(tmp_path, owned('"a"', '"a"')) == both
    found = violations(tmp_path, owned('"a-*"', '"a-b*"'))
    assert found == {"tenants.t1.adapters": "has 'a-b*', which names adapters of t0 too"}
    assert read(tmp_path, owned('"a-*", "a-b*"', '"a", "b*"')).owners.share_of("bb") is not None
    found = violations(tmp_path, "[tenants.a]\nadapter_bytes = 5\n")
    assert found == {
        "tenants.a.adapter_bytes": 'bounds the tenant\'s own adapters, and it has none; add adapters, such as ["a-*"]'
    }
    found = violations(tmp_path, owned('"*"', '"../x"', ", ".join(f'"n{at}"' for at in range(65))))
    assert set(found) == {"tenants.t0.adapters.0", "tenants.t1.adapters.0", "tenants.t2.adapters"}
    assert "expected 1 to 128 letters, digits, dots" in found["tenants.t0.adapters.0"]


@pytest.mark.parametrize("text", ["", "[tenants]\n", "[tenants.'a b']\n", "[tenants", "\xff"])
def test_a_file_without_tenants_or_without_form_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidConfig):
        read(tmp_path, text)


def test_a_server_key_is_long_enough_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("a" * 64 + "\n")
    assert read_server_key(path) == b"a" * 64
    path.write_text("short")
    with pytest.raises(InvalidConfig, match="has 5 bytes; expected at least 32"):
        read_server_key(path)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_server_key(tmp_path / "none")
