"""The version of the installed package."""

from __future__ import annotations

from common.version import quire_version


def test_the_package_is_looked_up_once() -> None:
    """The library makes cycles at each look, and every status of a service has the version."""
    assert quire_version() is quire_version()
