"""Prints what the extras of pyproject.toml named on the command line install, for a layer without Quire's own code.

An image installs this list first: the layer is made again only when a dependency changes, not with every line of code.
`--without NAME` leaves a package out. Standard library alone; run beside pyproject.toml.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    print(*requirements(project["dependencies"], optional, args.extras, args.without), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
