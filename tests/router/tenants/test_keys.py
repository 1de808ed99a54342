"""API keys and the table that finds their tenants."""

from __future__ import annotations

import hashlib

import pytest

from router.tenants.keys import KeyTable, check_hash, hash_of, new_key


def test_a_key_is_random_and_its_hash_is_the_sha256_of_its_text() -> None:
    first, second = new_key(), new_key()
    assert first != second
    assert len(first) == len("quire_") + 43
    assert hash_of(first) == "sha256:" + hashlib.sha256(first.encode()).hexdigest()


def test_a_table_finds_the_tenant_of_a_known_key_alone() -> None:
    red, blue = new_key(), new_key()
    table = KeyTable({hash_of(red): "red", hash_of(blue): "blue"})
    found = table.find(red)
    assert found is not None
    assert found[0] == "red"
    assert red not in found[1]
    assert table.find(red + "x") is None
    assert table.find("") is None


def test_two_hashes_that_begin_alike_are_distinguished() -> None:
    key = new_key()
    digest = hash_of(key)
    twin = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    assert (KeyTable({twin: "twin", digest: "right"}).find(key) or ("",))[0] == "right"
    assert KeyTable({twin: "twin"}).find(key) is None


def test_a_credential_is_known_while_its_key_is_that_tenants() -> None:
    key = new_key()
    credential = (KeyTable({hash_of(key): "red"}).find(key) or ("", ""))[1]
    assert KeyTable({hash_of(key): "red"}).knows(credential, "red")
    assert not KeyTable({hash_of(key): "blue"}).knows(credential, "red")
    assert not KeyTable({hash_of(new_key()): "red"}).knows(credential, "red")


@pytest.mark.parametrize(
    "text", ["quire_abc", "sha256:", "sha256:" + "g" * 64, "sha256:" + "A" * 64, "md5:" + "0" * 64]
)
def test_a_text_that_is_no_hash_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        check_hash(text)
