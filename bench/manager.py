"""The KV manager alone: grants under the reports of many simulated workers, rebuilds, memory, and cost as pools grow.

    python -m bench.manager --json

A manager process without Redis serves workers that send 50 reports a second each (`bench/manager_load/`). The workers
run in other processes of the same machine: where they are late, the level says nothing of the manager. CPU figures
are the manager process's own time.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections.abc import Sequence
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
from kvmanager.core.config import EvictionName

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


def run_level(workers: int, sequences: int, seconds: float) -> Level:
    """Run a manager and so many workers."""
    with manager_process(BLOCK_SIZE) as (address, manager):
        firsts = range(0, workers, _PER_DRIVER)
        drivers = [_driver(address, at, min(_PER_DRIVER, workers - at), sequences, seconds) for at in firsts]
        for each in drivers:
            _expect(each, "ATTACHED")
        for each in drivers:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        for each in drivers:
            _expect(each, "MEASURING")
        before = _cpu(manager)
        outputs = [each.communicate()[0] for each in drivers]
        cpu = _cpu(manager) - before
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


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--workers", type=int, nargs="*", default=[1, 8, 32, 64, 128], help="levels")
    flags.add_argument("--sequences", type=int, default=64, help="sequences of each worker")
    flags.add_argument("--seconds", type=float, default=10.0, help="measured seconds of a level")
    flags.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="pools whose blocks are timed")
    args = flags.parse_args()
    figures: dict[str, float] = {}
    for workers in args.workers:
        level = run_level(workers, args.sequences, args.seconds)
        figures |= {f"{name}_{workers}": value for name, value in level.figures().items()}
        progress(f"{workers} workers: {level.reports} reports", end=True)
    if args.sizes:
        figures |= core_figures(args.sizes)
    notes = {
        "rebuild_1m_s": "CPU seconds to decode and rebuild 2^20 cached blocks of 8 workers",
        "bytes_per_block_1m": "resident memory of a cached block then",
        "core_us_per_report_utility": "CPU of a report beside gRPC, 4 workers x 64 sequences",
        **{f"grant_p99_ms_{n}": f"report to grant, {n} workers x {args.sequences} sequences" for n in args.workers},
        **{f"grant_p999_ms_{n}": "the same, all but one of a thousand" for n in args.workers},
        **{f"late_reports_{n}": f"part of reports sent late, of {n * RATE:.0f} a second" for n in args.workers},
    }
    report("manager", figures, notes, args.json)


if __name__ == "__main__":
    main()
