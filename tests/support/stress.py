"""Runs tests again and again beside busy processes, in another order each time, and names those that failed.

`make test-stress TESTS=tests/router/requests TIMES=5`. A test that counts on an order of events, or on a machine that
is quick, fails here within a few runs. Each run is one pytest; four processes per core keep the cores busy meanwhile.
This module is also the plugin of pytest that writes down each failed test as it fails, so that a run which is killed
has said what failed before.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from common.process import die_with_parent

ROOT = Path(__file__).parents[2]
BUSY_PER_CORE = 4
_FILE_OF_FAILED = "STRESS_FILE_OF_FAILED"
# What pytest ends with when all tests passed, and when some failed; with anything else it did not run them all.
_PASSED, _FAILED = 0, 1


class Run(NamedTuple):
    """One run of all tests: the seed of its order, the tests that failed, and the exit status of pytest."""

    seed: int
    failed: tuple[str, ...]
    status: int


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _write_down(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _write_down(report)


def _write_down(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed:
        with Path(os.environ[_FILE_OF_FAILED]).open("a") as file:
            print(report.nodeid, file=file)


def summary(runs: Sequence[Run]) -> list[str]:
    """Return a line for each test that failed in any run, the most frequent first: how often, and in which orders."""
    seeds: dict[str, list[int]] = {}
    for run in runs:
        ended_early = () if run.status in {_PASSED, _FAILED} else (f"(pytest ended with status {run.status})",)
        for test in dict.fromkeys((*run.failed, *ended_early)):
            seeds.setdefault(test, []).append(run.seed)
    ordered = sorted(seeds.items(), key=lambda each: (-len(each[1]), each[0]))
    return [f"{len(each)} of {len(runs)}: {test} (seeds {' '.join(map(str, each))})" for test, each in ordered]


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes busy until the end of the block, or of this process."""
    command = die_with_parent.command([sys.executable, "-I", "-S", "-c", "while True: pass"])
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            running.append(subprocess.Popen(command))  # noqa: PERF401 - those of before a failure are ended
        yield
    finally:
        for each in running:
            each.kill()
        for each in running:
            each.wait()


def run_once(tests: Sequence[str], seed: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "failed"
        written.touch()
        flags = ["-q", "--no-header", "--tb=short", "-p", "tests.support.stress"]
        order = ["-p", "randomly", f"--randomly-seed={seed}"]
        command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *flags, *order, *tests]
        env = os.environ | {_FILE_OF_FAILED: str(written)}
        status = subprocess.run(die_with_parent.command(command), cwd=ROOT, env=env, check=False).returncode
        return Run(seed, tuple(dict.fromkeys(written.read_text().splitlines())), status)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(words: str) -> None:
    print(words, flush=True)  # noqa: T201


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.stress", description=__doc__)
    parser.add_argument("times", type=int, help="how often all tests run")
    parser.add_argument("tests", nargs="+", help="folders, files or tests")
    asked = parser.parse_args(arguments)
    runs: list[Run] = []
    try:
        with busy(BUSY_PER_CORE * cores()):
            for number in range(1, asked.times + 1):
                seed, began = random.SystemRandom().getrandbits(32), time.monotonic()
                _say(f"run {number} of {asked.times}, -p randomly --randomly-seed={seed}")
                runs.append(run_once(asked.tests, seed))
                _say(f"{len(runs[-1].failed)} failed in {time.monotonic() - began:.0f} s")
    except KeyboardInterrupt:
        _say(f"interrupted after {len(runs)} of {asked.times} runs")
    failed = summary(runs)
    _say("\n".join(failed) or f"nothing failed in {len(runs)} runs")
    return 1 if failed or len(runs) < asked.times else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
