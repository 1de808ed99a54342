"""Prints the locked requirements of Quire with the given extras, each with the hashes of its files.

An image, and `make install`, install this list before Quire's own code. Docker rebuilds that layer only when a
dependency changes. The list has whatever the extras need, from requirements.lock, whose comments say what needs what.
torch and triton are left out: they are pinned in constraints.txt and installed after the list. With `--build` the list
has what builds Quire itself. `--ranges` prints the ranges of pyproject.toml instead, from which `make pins` writes the
lock. The script needs the standard library alone; run it beside pyproject.toml.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOCK = "requirements.lock"
_OWN_EXTRA = re.compile(r"quire-llm\[(?P<extras>[\w,-]+)\]")
_NAME = re.compile(r"[\w.-]+")
_USER = re.compile(r"    #\s+(?:via\s+)?(?P<name>(?!via$)[\w.-]+)$")


@dataclass(frozen=True, slots=True)
class Locked:
    """One package of the lock: its lines, and the names of the packages that need it."""

    lines: list[str] = field(default_factory=list)
    users: set[str] = field(default_factory=set)


def requirements(base: Sequence[str], optional: Mapping[str, Sequence[str]], extras: Sequence[str]) -> list[str]:
    """Return the base requirements and those of the extras, each once; extras that name extras are followed.

    Raises KeyError for an extra that does not exist.
    """
    found = dict.fromkeys(base)
    for extra in extras:
        for requirement in optional[extra]:
            own = _OWN_EXTRA.fullmatch(requirement)
            more = requirements((), optional, own["extras"].split(",")) if own else [requirement]
            found.update(dict.fromkeys(more))
    return list(found)


def read_lock(text: str) -> dict[str, Locked]:
    """Return the packages of a lock by name, in its order."""
    found: dict[str, Locked] = {}
    package = Locked()
    for line in text.splitlines():
        if line and not line.startswith((" ", "#")):
            package = found.setdefault(name_of(line), Locked())  # one of several markers has several entries
        if "#" not in line:
            package.lines.append(line)
        elif (user := _USER.match(line)) is not None:
            package.users.add(name_of(user["name"]))
    return found


def needed(lock: Mapping[str, Locked], wanted: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the wanted packages, and of all that these need."""
    names = set(wanted)
    while more := {name for name, package in lock.items() if name not in names and package.users & names}:
        names |= more
    for name, package in lock.items():
        if name in names:
            yield from package.lines


def name_of(requirement: str) -> str:
    """Return the name of a requirement in its normal form (PEP 503)."""
    match = _NAME.match(requirement)
    assert match is not None, f"{requirement!r} names no package"
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def main() -> None:
    """Print one requirement a line."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("extras", nargs="*", metavar="EXTRA")
    flags.add_argument("--build", action="store_true", help="add what builds Quire")
    flags.add_argument("--ranges", action="store_true", help="print ranges without what they need")
    args = flags.parse_args()
    wanted = _direct(args.extras, args.build)
    lines = wanted if args.ranges else needed(read_lock(Path(LOCK).read_text()), map(name_of, wanted))
    print(*lines, sep="\n")  # noqa: T201


def _direct(extras: Sequence[str], build: bool) -> list[str]:
    """Return what pyproject.toml names."""
    suite = tomllib.loads(Path("pyproject.toml").read_text())
    base = [*suite["project"]["dependencies"]] if extras else []
    if build:
        base += suite["build-system"]["requires"]
    return requirements(base, suite["project"]["optional-dependencies"], extras)


if __name__ == "__main__":
    main()
