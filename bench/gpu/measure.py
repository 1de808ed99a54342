"""Shared parts of the GPU benchmarks: the device, times by its own clock, a copy's bandwidth, one table and one line.

This module needs torch alone: a rented GPU host has torch, triton and transformers, and little more.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from gpuworker.runner.cuda_graphs import CudaRecorder

NO_GPU = 77  # the status that test harnesses take for "skipped"
FAILED_CHECK = 1
_COPIED = 1 << 30
_WARM_UP, _REPEATS = 5, 25
_BATCH_SECONDS = 2e-3  # seconds of one timing at least: events tick in half microseconds


@dataclass(frozen=True, slots=True)
class Figure:
    """One result: its name, its meaning, and its target, the least value (or with `at_most` the greatest)."""

    name: str
    value: float | None  # None: could not be measured, for the reason in `note`
    note: str = ""
    target: float | None = None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """ "met", "missed", or "" where there is no target."""
        if self.target is None or self.value is None:
            return ""
        return "met" if (self.value <= self.target if self.at_most else self.value >= self.target) else "missed"


def the_device(bench: str) -> torch.device:
    """Return the GPU. Without one, print that and exit with status NO_GPU."""
    if not torch.cuda.is_available():
        print(f"bench.{bench}: no CUDA device is usable here, so nothing was measured", file=sys.stderr)
        raise SystemExit(NO_GPU)
    return torch.device("cuda", torch.cuda.current_device())


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every GPU benchmark has."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--quick", action="store_true", help="correctness and the smallest sizes only")
    return flags


# ---------------------------------------------------------------- time


def seconds_of(work: Callable[[], object], warm_up: int = _WARM_UP, repeats: int = _REPEATS) -> float:
    """Return the median time of `work` on the device, in seconds, between two events.

    Short work is repeated between them, so that its launch is hidden behind the work that runs.
    """
    for _ in range(warm_up):
        work()
    inside = max(1, round(_BATCH_SECONDS / max(_between_events(work, 1), 1e-6)))
    return statistics.median(_between_events(work, inside) / inside for _ in range(repeats))


def _between_events(work: Callable[[], object], times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def graph_seconds(work: Callable[[], None]) -> float:
    """Return the median time of `work` as a CUDA graph: without the gaps that launching from Python leaves."""
    with torch.inference_mode():
        return seconds_of(CudaRecorder().record(work, run=True))


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes a second, read and written together, of a copy of 1 GiB on the device."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * _COPIED / seconds_of(lambda: target.copy_(source))


def rotation(each_bytes: int, device: torch.device) -> int:
    """Return how many buffers of so many bytes to take in turn, so that their sum is 4 times the L2 cache."""
    cached = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-4 * cached // each_bytes))


# ---------------------------------------------------------------- output


def machine(device: torch.device) -> dict[str, str | float]:
    """Return the machine's properties that the figures depend on."""
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / (1 << 30), 1),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }


def report(bench: str, device: torch.device, figures: Sequence[Figure]) -> None:
    """Print one table, and one line of JSON as the last."""
    about = machine(device)
    print(f"bench.{bench} on {about['device']}, {about['date']}, torch {about['torch']}, triton {about['triton']}")
    print(table([(f.name, _readable(f.value), _target(f), f.verdict, f.note) for f in figures]))
    print(line(bench, about, {figure.name: figure.value for figure in figures}))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of (figure, value, target, verdict, note) as text in columns."""
    head = ("figure", "value", "target", "", "what it is")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(4)]
    lines = []
    for row in (head, *rows):
        name, value, target, verdict, note = row
        cells = (name.ljust(widths[0]), value.rjust(widths[1]), target.rjust(widths[2]), verdict.ljust(widths[3]))
        lines.append("  ".join((*cells, note)).rstrip())
    return "\n".join(lines)


def line(bench: str, about: Mapping[str, str | float], figures: Mapping[str, float | None]) -> str:
    rounded = {name: None if value is None else float(f"{value:.5g}") for name, value in figures.items()}
    return json.dumps({"bench": bench, "machine": about, "figures": rounded})


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return f"{'<=' if figure.at_most else '>='} {figure.target:g}"


def _readable(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def checked(name: str, error: float, limit: float) -> None:
    """Print the distance of a result from its reference; exit with FAILED_CHECK when it is too large (or NaN)."""
    verdict = "ok" if error <= limit else "WRONG"
    print(f"check  {name:<58} error {error:8.2g}  at most {limit:g}  {verdict}", flush=True)
    if verdict != "ok":
        print(f"{name} is wrong: nothing is timed", file=sys.stderr)
        raise SystemExit(FAILED_CHECK)
