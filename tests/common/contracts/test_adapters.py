"""Names of adapters: which are a tenant's own, and what may stand for several."""

from __future__ import annotations

import pytest

from common.contracts.adapters import NOBODYS, AdapterShare, is_own_name
from common.contracts.limits import MAX_ADAPTER_NAME_CHARS


def test_own_adapters_are_those_of_a_name_or_of_how_names_begin() -> None:
    share = AdapterShare("acme", ("acme-*", "sql"))
    own = [name for name in ("acme-", "acme-1", "acme", "sql", "sql2", "sq", "xacme-1") if share.owns(name)]
    assert own == ["acme-", "acme-1", "sql"]
    assert not NOBODYS.owns("sql")


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("a", True),
        ("a*", True),
        ("a-*", True),
        ("*", False),
        ("", False),
        ("a**", False),
        ("a*b", False),
        ("-a*", False),
    ],
)
def test_what_may_stand_for_own_names(text: str, may: bool) -> None:
    assert is_own_name(text) is may


def test_own_names_are_bounded_as_names_are() -> None:
    assert is_own_name("a" * MAX_ADAPTER_NAME_CHARS + "*")
    assert not is_own_name("a" * (MAX_ADAPTER_NAME_CHARS + 1) + "*")
