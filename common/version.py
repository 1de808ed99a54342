"""The version of the installed package. Imports the standard library alone."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def quire_version() -> str:
    """Return the version of the package; "source" where it is not installed."""
    try:
        return version("quire-llm")
    except PackageNotFoundError:
        return "source"
