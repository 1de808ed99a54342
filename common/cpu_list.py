"""Lists of cpus as Linux writes them, such as "0-3,8". Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_LARGEST_CPU: Final = 65535  # a longer list is a mistake, and would only take memory


def cpus_of(text: str) -> frozenset[int]:
    """Return the cpus of a list such as "0-3,8". Raises ValueError for other text."""
    found: set[int] = set()
    for part in filter(None, (each.strip() for each in text.split(","))):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= _LARGEST_CPU:
            raise ValueError(f"{part!r} is not a range of CPUs")
        found.update(range(first, last + 1))
    return frozenset(found)


def in_words(cpus: Iterable[int]) -> str:
    """Return cpus as a list such as "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
