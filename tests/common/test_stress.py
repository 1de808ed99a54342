"""`make test-stress`: what it finds, what it says, and that nothing of it stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.process import die_with_parent
from tests.support import stress
from tests.support.stress import ROOT, Run, busy, main, run_once, summary
from tests.support.waiting import wait_until

ORDERED = """
made = []
def test_makes(): made.append(1)
def test_needs_what_another_test_makes(): assert made
"""
EVERY_SECOND = """
from pathlib import Path
def test_every_second_run(request):
    runs = Path(__file__).with_suffix(".runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) % 2
"""
HANGS = """
import time
from pathlib import Path
def test_hangs():
    Path(__file__).with_suffix(".begun").touch()
    time.sleep(600)
"""


def written(folder: Path, source: str) -> str:
    (folder / "test_made_up.py").write_text(source)
    return str(folder)


def test_the_summary_has_each_test_that_ever_failed_with_its_seeds_the_most_frequent_first() -> None:
    runs = [Run(11, ("b", "c"), 1), Run(22, ("b",), 1), Run(33, ("a", "a"), 1), Run(44, (), 0)]
    assert summary(runs) == ["2 of 4: b (seeds 11 22)", "1 of 4: a (seeds 33)", "1 of 4: c (seeds 11)"]
    assert summary(runs[-1:]) == []


def test_runs_without_a_failure_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(stress, "BUSY_PER_CORE", 0)
    monkeypatch.setattr(stress, "run_once", lambda tests, seed: Run(seed, (), 0))
    assert main(["3", "tests/any"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing failed in 3 runs"


def test_a_run_that_pytest_did_not_end_is_a_failure_beside_those_of_before() -> None:
    assert summary([Run(5, ("a",), -9), Run(6, (), 5)]) == [
        "1 of 2: (pytest ended with status -9) (seeds 5)",
        "1 of 2: (pytest ended with status 5) (seeds 6)",
        "1 of 2: a (seeds 5)",
    ]


@pytest.mark.rest
def test_a_test_that_needs_another_one_before_it_passes_in_one_order_and_fails_in_the_other(tmp_path: Path) -> None:
    folder, needs = written(tmp_path, ORDERED), ("test_made_up.py::test_needs_what_another_test_makes",)
    runs: set[tuple[tuple[str, ...], int]] = set()
    for seed in range(50):
        runs.add(run_once([folder], seed)[1:])
        if len(runs) == 2:
            break
    assert runs == {((), 0), (needs, 1)}


@pytest.mark.rest
def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    assert run_once([written(tmp_path, "import nothing_of_this_name")], 1) == Run(1, ("test_made_up.py",), 2)


@pytest.mark.rest
def test_a_test_that_fails_every_second_run_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stress, "BUSY_PER_CORE", 0)
    assert main(["2", written(tmp_path, EVERY_SECOND)]) == 1
    said = capsys.readouterr().out.splitlines()
    seeds = [line.rpartition("=")[2] for line in said if line.startswith("run ")]
    assert len(set(seeds)) == 2
    assert said[-1] == f"1 of 2: test_made_up.py::test_every_second_run (seeds {seeds[1]})"


def test_the_load_is_busy_and_ends() -> None:
    before = set(psutil.Process().children())
    with busy(2):
        children = set(psutil.Process().children()) - before
        assert len(children) == 2
        wait_until(lambda: all(sum(each.cpu_times()[:2]) > 0.05 for each in children))
    assert not any(map(psutil.pid_exists, (each.pid for each in children)))


@pytest.mark.rest
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_neither_load_nor_tests(tmp_path: Path, how: signal.Signals) -> None:
    folder = written(tmp_path, HANGS)
    command = die_with_parent.command([sys.executable, "-m", "tests.support.stress", "3", folder])
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        wait_until((tmp_path / "test_made_up.begun").exists)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == stress.BUSY_PER_CORE * stress.cores() + 1
        process.send_signal(how)
        said = process.stdout.read().splitlines()
        assert process.wait(60.0) == (1 if how is signal.SIGINT else -how)
    if how is signal.SIGINT:
        assert said[-2:] == ["interrupted after 0 of 3 runs", "nothing failed in 0 runs"]
    wait_until(lambda: not any(each.is_running() for each in children))
