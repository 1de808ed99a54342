"""Peers as processes: a driver that speaks as the peers' do, stopped between its runs, and ended with its children."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from bench.comparison.peer_process import PeerOptions, PeerProcess, missing
from common.contracts.errors import Unavailable
from tests.support.waiting import until

DRIVER = """
    import json, subprocess, sys
    words = sys.argv[1:]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("loading", flush=True)
    print("READY", flush=True)
    for index, line in enumerate(sys.stdin):
        workload, scale = line.split()
        if workload == "W9":
            sys.exit("no such workload")
        print(json.dumps({"workload": workload, "scale": float(scale), "words": words, "child": child.pid}), flush=True)
        if index == 0:
            with open(words[words.index("--outputs") + 1], "w") as file:
                json.dump({"r0": {"prompt": 2, "ids": [5, 6]}}, file)
"""


@pytest.fixture
def options(tmp_path: Path) -> PeerOptions:
    """A peers folder whose `hf` environment has this Python, and a driver that computes nothing."""
    (tmp_path / "hf/bin").mkdir(parents=True)
    (tmp_path / "hf/bin/python").symlink_to(sys.executable)
    (tmp_path / "bench_naive.py").write_text(textwrap.dedent(DRIVER))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return PeerOptions(tmp_path, tmp_path, dtype="bfloat16", prefix_caching=True)


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_driver_answers_each_run_and_keeps_the_tokens_of_the_first(options: PeerOptions) -> None:
    async with PeerProcess("naive", options) as peer:
        assert peer.start_seconds > 0
        found = await peer.run("W3", 0.5)
        assert (found["workload"], found["scale"]) == ("W3", 0.5)
        assert found["words"][:7] == ["--stdin", "--model", "model", "--dtype", "bfloat16", "--prefix-caching", "on"]
        assert peer.first_outputs() == {"r0": [5, 6]}
        assert (await peer.run("W4", 1.0))["workload"] == "W4"


async def test_between_runs_all_its_processes_are_stopped(options: PeerOptions) -> None:
    async with PeerProcess("naive", options) as peer:
        child = psutil.Process((await peer.run("W3", 1.0))["child"])
        driver = child.parent()
        assert driver is not None
        await until(lambda: [each.status() for each in (driver, child)] == [psutil.STATUS_STOPPED] * 2)


async def test_nothing_of_it_is_left_behind(options: PeerOptions) -> None:
    async with PeerProcess("naive", options) as peer:
        child = psutil.Process((await peer.run("W3", 1.0))["child"])
    await until(lambda: not alive(child))


async def test_an_engine_that_outlives_its_driver_is_ended_too(options: PeerOptions) -> None:
    async with PeerProcess("naive", options) as peer:
        child = psutil.Process((await peer.run("W3", 1.0))["child"])
        with pytest.raises(Unavailable, match="no such workload"):
            await peer.run("W9", 1.0)
    await until(lambda: not alive(child))


async def test_a_driver_that_ends_is_reported_with_its_last_words(options: PeerOptions) -> None:
    with pytest.raises(Unavailable, match="no such workload"):
        async with PeerProcess("naive", options) as peer:
            await peer.run("W9", 1.0)


async def test_one_that_cannot_start_is_reported_with_its_last_words(options: PeerOptions) -> None:
    (options.folder / "bench_naive.py").write_text("raise SystemExit('no transformers here')")
    with pytest.raises(Unavailable, match="no transformers here"):
        async with PeerProcess("naive", options):
            pass


def test_what_a_folder_lacks_is_named(options: PeerOptions) -> None:
    assert list(missing(options.folder, ["naive"], "model")) == []
    lacking = [Path(each).name for each in missing(options.folder, ["naive", "vllm"], "other")]
    assert lacking == ["python", "bench_vllm.py", "config.json"]
