"""Who a caller is, before and after changes of the file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from common.contracts.errors import PermissionDenied, Unauthenticated
from router.tenants.directory import PeerDirectory, TenantDirectory
from router.tenants.keys import hash_of, new_key
from router.tenants.tenancy import Caller
from tests.support.waiting import until

RED, BLUE = new_key(), new_key()
# Fixed: it stands in the name of a test, which all processes of a run must agree on.
UNKNOWN = "quire_" + "x" * 43
# Bounds a hang.
PATIENCE_S = 60.0


def tenants(**keys: str) -> str:
    return "".join(f'[tenants.{name}]\nkeys = ["{hash_of(key)}"]\n' for name, key in keys.items())


def directory(folder: Path, text: str) -> TenantDirectory:
    path = folder / "tenants.toml"
    path.write_text(text)
    return TenantDirectory(path, b"k" * 32, "demo")


@asynccontextmanager
async def watched(found: TenantDirectory) -> AsyncIterator[asyncio.Event]:
    """Watch the file; gives an event that each change sets."""
    changed = asyncio.Event()
    task = asyncio.create_task(found.watch(changed.set, every=0.01))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield changed
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_a_key_names_its_tenant_whatever_the_case_of_the_scheme(tmp_path: Path) -> None:
    found = directory(tmp_path, tenants(red=RED, blue=BLUE))
    assert found.caller(f"Bearer {RED}", "10.0.0.1").tenant.name == "red"
    assert found.caller(f"bearer  {BLUE} ", "10.0.0.1").tenant.name == "blue"


@pytest.mark.parametrize(
    ("authorization", "words"),
    [
        ("", "no key"),
        ("Bearer", "no key"),
        ("Basic cmVkOnJlZA==", "no key"),
        (f"Bearer {UNKNOWN}", "not known here"),
        ("Bearer ü", "not known here"),
    ],
)
def test_anything_else_is_refused_and_not_repeated(tmp_path: Path, authorization: str, words: str) -> None:
    with pytest.raises(Unauthenticated, match=words) as refused:
        directory(tmp_path, tenants(red=RED)).caller(authorization, "10.0.0.1")
    key = authorization.partition(" ")[2]
    assert not key or key not in str(refused.value)


def test_a_tenant_may_use_the_models_that_it_is_allowed(tmp_path: Path) -> None:
    text = tenants(red=RED)
    assert directory(tmp_path, text + 'models = ["demo"]\n').caller(f"Bearer {RED}", "").tenant.name == "red"
    with pytest.raises(PermissionDenied):
        directory(tmp_path, text + 'models = ["other"]\n').caller(f"Bearer {RED}", "")


def test_a_caller_is_known_again_by_its_credential(tmp_path: Path) -> None:
    found = directory(tmp_path, tenants(red=RED, blue=BLUE))
    caller = found.caller(f"Bearer {RED}", "10.0.0.1")
    assert found.known("red", caller.credential) == caller
    assert found.known("blue", caller.credential) is None, "the key of another tenant"
    assert found.known("gone", caller.credential) is None
    assert directory(tmp_path, tenants(red=BLUE)).known("red", caller.credential) is None
    other = directory(tmp_path, tenants(red=RED) + 'models = ["other"]\n')
    assert other.known("red", caller.credential) is None
    assert PeerDirectory().known("peer 10.0.0.1", "") == PeerDirectory().caller("", "10.0.0.1")


async def test_a_changed_file_revokes_one_key_and_adds_another(tmp_path: Path) -> None:
    found = directory(tmp_path, tenants(red=RED))
    caller = found.caller(f"Bearer {RED}", "")
    assert found.is_live(caller)
    async with watched(found) as changed:
        (tmp_path / "tenants.toml").write_text(tenants(blue=BLUE) + "# changed\n")
        await changed.wait()
    assert not found.is_live(caller)
    assert found.caller(f"Bearer {BLUE}", "").tenant.name == "blue"
    with pytest.raises(Unauthenticated):
        found.caller(f"Bearer {RED}", "")


async def test_a_wrong_file_or_none_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = directory(tmp_path, tenants(red=RED))
    path = tmp_path / "tenants.toml"
    async with watched(found) as changed:
        path.unlink()
        await until(lambda: "cannot be read" in caplog.text)
        path.write_text("[tenants")
        await until(lambda: "is not valid TOML" in caplog.text)
        assert found.caller(f"Bearer {RED}", "").tenant.name == "red"
        assert not changed.is_set()
        path.write_text(tenants(red=RED, blue=BLUE))
        await changed.wait()
    assert found.caller(f"Bearer {BLUE}", "").tenant.name == "blue"


def test_without_keys_every_address_is_a_tenant_with_no_priority() -> None:
    first, second = PeerDirectory().caller("", "10.0.0.1"), PeerDirectory().caller("", "10.0.0.2")
    assert first.tenant.name != second.tenant.name
    assert (first.tenant.max_priority, first.tenant.cache_domain) == (0, b"")
    assert PeerDirectory().is_live(Caller())


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("unix", "", False),
    ],
)
def test_addresses_of_one_ipv6_network_are_one_tenant(first: str, second: str, same: bool) -> None:
    found = [PeerDirectory().caller("", host).tenant.name for host in (first, second)]
    assert (found[0] == found[1]) is same
