"""Numbers and names in plain words."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = (("s", 1.0), ("ms", 1e-3))


def duration(seconds: float) -> str:
    """Return seconds with about two digits: 0.4 ms, 38 ms, 1.9 s, 72 s."""
    for unit, size in _UNITS:
        value = seconds / size
        if value >= 9.95:
            return f"{value:.0f} {unit}"
        if value >= 0.95:
            return f"{value:.1f} {unit}"
    return f"{seconds / 1e-3:.1f} ms"


def percent(share: float) -> str:
    """Return a share; one that is not quite all or nothing is not written as 100 % or 0 %."""
    if 0.0 < share < 0.01:
        return "under 1 %"
    return f"{min(99, round(100 * share)) if share < 1.0 else 100} %"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return names as "a, b and c"; of many the first few and how many more there are."""
    shown = list(names[:most])
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
