"""The KV manager alone: grants under the reports of many simulated workers, rebuilds, memory, and cost as pools grow.

    python -m bench.manager --json

A manager process without Redis serves workers that send 50 reports a second each (`bench/manager_load/`). The workers
run in other processes of the same machine: where they are late, the level says nothing of the manager. CPU figures
are the manager process's own time.

    python -m bench.manager --workers 64 128 --groups 1 2 --runs 3 --sizes --json

The same workers at one manager and split over two, in turns. Figures are named after both, grant_p99_ms_64_groups_2,
and are medians of the runs. CPU is that of all managers together.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, get_args

import psutil

from bench.lib.harness import parser, progress, report
from bench.lib.workers import manager_process
from bench.manager_load.driver import RATE
from bench.manager_load.pools import growth_figures, rebuild_figures
from bench.manager_load.reporter import BLOCK_SIZE
from bench.manager_load.reports import report_figures
from common.process.python import module_command
from kvmanager.contracts.ledger_config import EvictionName

_PER_DRIVER: Final = 32
SIZES: Final = (10_000, 100_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class Level:
    """What one number of workers gave; `cpu` has the manager's seconds, `late` the part of reports sent late."""

    grants: list[float]
    reports: int
    tokens: int
    admitted: int
    cpu: float
    late: float
    seconds: float

    def figures(self) -> dict[str, float]:
        milliseconds = sorted(1000 * each for each in self.grants) or [math.nan]
        return {
            "grant_p50_ms": statistics.median(milliseconds),
            "grant_p99_ms": milliseconds[math.ceil(0.99 * len(milliseconds)) - 1],
            "grant_p999_ms": milliseconds[math.ceil(0.999 * len(milliseconds)) - 1],
            "cpu_us_per_report": 1e6 * self.cpu / self.reports,
            "cpu_us_per_token": 1e6 * self.cpu / max(1, self.tokens),
            "cpu_us_per_admitted": 1e6 * self.cpu / max(1, self.admitted),
            "reports_per_s": self.reports / self.seconds,
            "late_reports": self.late,
        }


def run_level(workers: int, sequences: int, seconds: float, groups: int = 1, per_driver: int = _PER_DRIVER) -> Level:
    """Run so many workers, split evenly over the managers of so many groups."""
    with ExitStack() as running:
        managers = [running.enter_context(manager_process(BLOCK_SIZE)) for _ in range(groups)]
        drivers = [
            _driver(managers[group][0], first, count, sequences, seconds)
            for group, first, count in split(workers, groups, per_driver)
        ]
        for each in drivers:
            _expect(each, "ATTACHED")
        for each in drivers:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        for each in drivers:
            _expect(each, "MEASURING")
        before = sum(_cpu(process) for _, process in managers)
        outputs = [each.communicate()[0] for each in drivers]
        cpu = sum(_cpu(process) for _, process in managers) - before
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    reports = sum(each["reports"] for each in found)
    return Level(
        [second for each in found for second in each["grant_seconds"]],
        reports,
        sum(each["tokens"] for each in found),
        sum(each["admitted"] for each in found),
        cpu,
        sum(each["late"] for each in found) / reports,
        max(each["seconds"] for each in found),
    )


def split(workers: int, groups: int, per_driver: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each process of workers its group, its first worker and how many it has; a process has one manager."""
    bounds = [workers * each // groups for each in range(groups + 1)]
    for group, (first, end) in enumerate(itertools.pairwise(bounds)):
        for at in range(first, end, per_driver):
            yield group, at, min(per_driver, end - at)


def level_figures(
    levels: Sequence[int], groups: Sequence[int], runs: int, sequences: int, seconds: float
) -> dict[str, float]:
    """Return the figures of each number of workers at each number of managers: medians of runs that take turns."""
    figures: dict[str, float] = {}
    for workers in levels:
        # The load is the same however it is split: as many processes of as many workers.
        per_driver = min(_PER_DRIVER, max(1, workers // max(groups)))
        found: dict[int, list[dict[str, float]]] = {each: [] for each in groups}
        for run in range(runs):
            for count in groups if run % 2 == 0 else reversed(groups):
                level = run_level(workers, sequences, seconds, count, per_driver)
                found[count].append(level.figures())
                progress(f"{workers} workers, {count} managers: {level.reports} reports", end=True)
        for count, rows in found.items():
            figures |= {f"{name}_{level_name(workers, count, groups)}": _median(rows, name) for name in rows[0]}
    return figures


def level_name(workers: int, count: int, groups: Sequence[int]) -> str:
    return str(workers) if list(groups) == [1] else f"{workers}_groups_{count}"


def _median(rows: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in rows)


def _driver(address: str, first: int, workers: int, sequences: int, seconds: float) -> subprocess.Popen[str]:
    arguments = (address, str(first), str(workers), str(sequences), str(seconds))
    command = module_command("bench.manager_load.driver", *arguments)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _expect(driver: subprocess.Popen[str], word: str) -> None:
    assert driver.stdout is not None
    line = driver.stdout.readline().strip()
    if line != word:
        raise RuntimeError(f"a process of workers said {line!r}; expected {word}")


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def core_figures(sizes: Sequence[int]) -> dict[str, float]:
    """Return the figures that need no process: rebuild, memory, a report's cost and growth by policy."""
    figures = rebuild_figures()
    policies: tuple[EvictionName, ...] = get_args(EvictionName)
    for policy in policies:
        progress(f"reports and growth, {policy}", end=True)
        figures |= report_figures(policy)
        figures |= growth_figures(policy, tuple(sizes), blocks=20_000)
    return figures


def _level_notes(levels: Sequence[int], groups: Sequence[int], sequences: int) -> dict[str, str]:
    notes: dict[str, str] = {}
    for workers, count in itertools.product(levels, groups):
        name, over = level_name(workers, count, groups), f", managers: {count}" if list(groups) != [1] else ""
        notes[f"grant_p99_ms_{name}"] = f"report to grant, {workers} workers x {sequences} sequences{over}"
        notes[f"grant_p999_ms_{name}"] = "the same, all but one of a thousand"
        notes[f"late_reports_{name}"] = f"part of reports sent late, of {workers * RATE:.0f} a second"
    return notes


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--workers", type=int, nargs="*", default=[1, 8, 32, 64, 128], help="levels")
    flags.add_argument("--sequences", type=int, default=64, help="sequences of each worker")
    flags.add_argument("--groups", type=int, nargs="+", default=[1], help="split over so many managers, in turns")
    flags.add_argument("--runs", type=int, default=1, help="runs of each level; figures are their medians")
    flags.add_argument("--seconds", type=float, default=10.0, help="measured seconds of a level")
    flags.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="pools whose blocks are timed")
    args = flags.parse_args()
    if min(args.groups) < 1 or min(args.workers, default=max(args.groups)) < max(args.groups) or args.runs < 1:
        flags.error("expected at least one run, one group, and a worker for each group")
    figures = level_figures(args.workers, args.groups, args.runs, args.sequences, args.seconds)
    if args.sizes:
        figures |= core_figures(args.sizes)
    notes = {
        "rebuild_1m_s": "CPU seconds to decode and rebuild 2^20 cached blocks of 8 workers",
        "bytes_per_block_1m": "resident memory of a cached block then",
        "core_us_per_report_utility": "CPU of a report beside gRPC, 4 workers x 64 sequences",
        **_level_notes(args.workers, args.groups, args.sequences),
    }
    report("manager", figures, notes, args.json)


if __name__ == "__main__":
    main()
