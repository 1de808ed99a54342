"""The memory of the processes of a suite over time and over requests, and whether it stays.

Each value is taken while no request runs and none is sent, so that the values of a process are of comparable states. It
is the memory that the process and its children share with no other process (USS), without clean pages of files: those
of a library are private or shared as other processes begin and end, which moved a router by 6 MiB. `settled_s` is the
age of a process from which its values count: before that, tables grow to their bounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Final, NamedTuple

import psutil

# (place, value), by place: seconds, or requests
Life = list[tuple[float, float]]
_QUANTILE: Final = statistics.NormalDist().inv_cdf(0.975)
_MOST_CORRELATED: Final = 0.95


# The slope of a figure, robust against outliers, and its 95 % confidence bounds; values may hang on each other.
# Theil's estimate (1950): the median of the slopes of all pairs of values. Sen's bounds (1968): two of these
# slopes, by the variance of Kendall's S. That variance holds for independent values. Where each value resembles the
# one before, it is multiplied by (1 + r) / (1 - r), with r the autocorrelation of the residuals at lag 1 (Yue and
# Wang 2004).
class Slope(NamedTuple):
    """Units of the value for each unit of the place. A bound is infinite where there are too few values for one."""

    middle: float
    low: float
    high: float


UNKNOWN: Final = Slope(0.0, -math.inf, math.inf)


def slope(lives: Sequence[Life]) -> Slope:
    """Return the common slope of all lives of a process; no pair has values of two lives."""
    pairs = [pair for life in lives for pair in combinations(life, 2)]
    slopes = sorted((after[1] - before[1]) / (after[0] - before[0]) for before, after in pairs if after[0] > before[0])
    if not slopes:
        return UNKNOWN
    middle = statistics.median(slopes)
    variance = sum(len(life) * (len(life) - 1) * (2 * len(life) + 5) / 18 for life in lives)
    spread = _QUANTILE * math.sqrt(variance * _inflation(lives, middle))
    first, last = math.floor((len(slopes) - spread) / 2) - 1, math.ceil((len(slopes) + spread) / 2)
    low = slopes[first] if first >= 0 else -math.inf
    high = slopes[last] if last < len(slopes) else math.inf
    return Slope(middle, low, high)


def _inflation(lives: Sequence[Life], middle: float) -> float:
    """Return by how much the variance is larger than that of independent values."""
    residuals = [_residuals(life, middle) for life in lives if life]
    squares = sum(each * each for life in residuals for each in life)
    if not squares:
        return 1.0
    together = sum(before * after for life in residuals for before, after in pairwise(life))
    correlation = min(max(0.0, together / squares), _MOST_CORRELATED)
    return (1.0 + correlation) / (1.0 - correlation)


def _residuals(life: Life, middle: float) -> list[float]:
    """Return what a line of this slope leaves of a life, with the mean taken away."""
    left = [value - middle * place for place, value in life]
    mean = statistics.fmean(left)
    return [each - mean for each in left]


MIB: Final = 1 << 20
FLAT, GROWS, OPEN = 1.0, 0.0, -1.0
# Fewer values show nothing, although a bound may be finite.
LEAST_VALUES: Final = 12


class Value(NamedTuple):
    """One look at a process: seconds and requests of the whole run so far, and what the process has."""

    seconds: float
    requests: int
    uss_mib: float
    fds: int
    threads: int


class Bounds(NamedTuple):
    """The growth up to which memory counts as flat, over time and over requests.

    A process is FLAT if the upper bounds of both slopes are no higher. It GROWS if the lower bound of one is higher.
    """

    uss_mib_per_hour: float = 10.0
    uss_bytes_per_request: float = 128.0


FLAT_UP_TO: Final = Bounds()


@dataclass(slots=True)
class _Process:
    """One life of a process: the seconds of the run at which it began, and its values."""

    began: float
    values: list[Value] = field(default_factory=list)


class MemoryWatch:
    """The values of all processes, by name and process id."""

    def __init__(self, settled_s: float, bounds: Bounds = FLAT_UP_TO) -> None:
        self._settled_s, self._bounds = settled_s, bounds
        self._lives: dict[str, dict[int, _Process]] = defaultdict(dict)

    def look(self, pids: Mapping[str, int], seconds: float, requests: int) -> None:
        """Take a value of each process."""
        for name, pid in pids.items():
            with suppress(psutil.NoSuchProcess):
                age = time.time() - psutil.Process(pid).create_time()
                self.add(name, pid, seconds - age, Value(seconds, requests, *_taken(pid)))

    def add(self, name: str, pid: int, began: float, value: Value) -> None:
        self._lives[name].setdefault(pid, _Process(began)).values.append(value)

    def figures(self) -> dict[str, float]:
        """Return what became of each process, and of all together as `memory_flat`: FLAT, GROWS or OPEN."""
        found: dict[str, float] = {}
        for name, lives in sorted(self._lives.items()):
            found |= dict(self._figures_of(name, list(lives.values())))
        verdicts = {verdict for name, verdict in found.items() if name.startswith("memory_flat_")}
        return {"memory_flat": next((each for each in _WORST if each in verdicts), OPEN)} | found

    def _figures_of(self, name: str, lives: Sequence[_Process]) -> Iterator[tuple[str, float]]:
        settled = [[each for each in life.values if each.seconds - life.began >= self._settled_s] for life in lives]
        slopes = _slopes(settled)
        yield f"memory_flat_{name}", self._verdict(settled, slopes)
        yield f"memory_values_{name}", sum(map(len, settled))
        yield f"uss_mib_{name}", lives[-1].values[-1].uss_mib
        for what, found in slopes.items():
            for suffix, value in (("", found.middle), ("_low", found.low), ("_high", found.high)):
                if found is not UNKNOWN and math.isfinite(value):
                    yield f"{what}{suffix}_{name}", value
        newest = settled[-1] or lives[-1].values
        yield f"fds_{name}", newest[-1].fds
        yield f"fds_more_{name}", newest[-1].fds - newest[0].fds
        yield f"threads_{name}", newest[-1].threads
        yield f"threads_more_{name}", newest[-1].threads - newest[0].threads

    def _verdict(self, lives: Sequence[Sequence[Value]], slopes: Mapping[str, Slope]) -> float:
        if sum(map(len, lives)) < LEAST_VALUES:
            return OPEN
        bounded = [(slopes[what], most) for what, most in self._bounds._asdict().items()]
        if any(found.low > most for found, most in bounded):
            return GROWS
        return FLAT if all(found.high <= most for found, most in bounded) else OPEN


def _slopes(lives: Sequence[Sequence[Value]]) -> dict[str, Slope]:
    """Return the slopes of the memory over time and over requests, named as the bounds."""
    by_time: list[Life] = [[(each.seconds / 3600, each.uss_mib) for each in life] for life in lives]
    by_work: list[Life] = [[(float(each.requests), MIB * each.uss_mib) for each in life] for life in lives]
    return {"uss_mib_per_hour": slope(by_time), "uss_bytes_per_request": slope(by_work)}


# What all together are is what the first of these is that some process is.
_WORST: Final = (GROWS, OPEN, FLAT)


def _taken(pid: int) -> tuple[float, int, int]:
    """Return MiB, file descriptors and threads of a process and its children."""
    uss, fds, threads = 0, 0, 0
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            uss += _own_bytes(each)
            fds += each.num_fds()
            threads += each.num_threads()
    return uss / MIB, fds, threads


def _own_bytes(process: psutil.Process) -> int:
    try:
        with open(f"/proc/{process.pid}/smaps_rollup") as rollup:
            return own_bytes(rollup.read())
    except ProcessLookupError:
        raise psutil.NoSuchProcess(process.pid) from None
    except FileNotFoundError:
        return int(process.memory_full_info().uss)


def own_bytes(rollup: str) -> int:
    """Return the bytes that a process has for itself, in memory or swapped out, from the text of its smaps_rollup."""
    found = {words[0]: int(words[1]) for line in rollup.splitlines()[1:] if len(words := line.split()) == 3}
    return 1024 * (found["Private_Dirty:"] + found["SwapPss:"])
