"""Prints the dependencies of the given extras and of quire-client, for an image layer without Quire's own code.

An image installs this list first. Docker rebuilds that layer only when a dependency changes, not with every line of
code. `--without NAME` leaves a package out. The script needs the standard library alone; run it beside pyproject.toml
and protos/pyproject.toml.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_OWN_EXTRA = re.compile(r"quire\[(?P<extras>[\w,-]+)\]")
_NAME = re.compile(r"[\w.-]+")


def requirements(
    base: Sequence[str], optional: Mapping[str, Sequence[str]], extras: Sequence[str], without: Sequence[str] = ()
) -> list[str]:
    """Return the base requirements and those of the extras, each once; extras that name extras are followed.

    Raises KeyError for an extra that does not exist.
    """
    found = dict.fromkeys(base)
    for extra in extras:
        for requirement in optional[extra]:
            own = _OWN_EXTRA.fullmatch(requirement)
            more = requirements((), optional, own["extras"].split(",")) if own else [requirement]
            found.update(dict.fromkeys(more))
    return [each for each in found if _name(each) not in without]


def _name(requirement: str) -> str:
    match = _NAME.match(requirement)
    assert match is not None, f"{requirement!r} names no package"
    return match[0]


def main() -> None:
    """Print one requirement a line."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("extras", nargs="+", metavar="EXTRA")
    flags.add_argument("--without", action="append", default=[], metavar="NAME")
    args = flags.parse_args()
    suite, client = (_project(folder) for folder in (Path(), Path("protos")))
    base = [*client["dependencies"], *suite["dependencies"]]
    without = [client["name"], *args.without]
    print(*requirements(base, suite["optional-dependencies"], args.extras, without), sep="\n")  # noqa: T201


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


if __name__ == "__main__":
    main()
