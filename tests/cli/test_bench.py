"""`quire bench` as a person uses it, on a tiny checkpoint: real suites, a comparison, mistakes, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from cli.benchmark.advice import Alternative
from cli.benchmark.measure import Bench, Served, Wish
from cli.benchmark.plan import Run
from cli.benchmark.served import served_suite
from common.process.python import module_command
from tests.support.checkpoints import checkpoint
from tests.support.hostile import hostile_folder
from tests.support.up_harness import READY_SECONDS, quire

FLAGS = ("--dtype", "float32", "--kv-blocks", "512", "--threads", "1", "--load-format", "auto")
COMPARED = Run("streams", 2, 16, 16, 3, 1.0)


@pytest.mark.rest
def test_the_figures_of_a_model(tmp_path: Path) -> None:
    """In a folder whose packages have the names of Quire's, and with the address of a Redis that is none of its own."""
    words = (
        "bench",
        str(checkpoint("llama")),
        *FLAGS,
        "--seconds",
        "30",
        "--figures-only",
        "--json",
        "--plot",
        str(tmp_path / "plot.svg"),
    )
    environ = {"REDIS_URL": "redis://127.0.0.1:1/0"}
    done = quire(*words, environ=environ, cwd=hostile_folder(tmp_path / "hostile"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    every = {"tok_s_b1", "tok_s_b8", "tok_s_b32", "ttft_s_512", "ttft_s_1023"}
    assert set(said["figures"]) <= every
    assert len(said["figures"]) + len(said["left_out"]) >= len(every), "a figure is there, or said to be left out"
    assert said["figures"]["tok_s_b1"] > 0
    assert min(said["figures"].values()) > 0
    assert [each["name"] for each in said["limits"]] == ["memory bandwidth", "cores", "KV blocks"]
    assert said["served"]["kv_slots"] == 512 * 16
    assert said["setting"]["threads"] == 1
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    assert "starting the suite" in done.stderr
    assert not list(tmp_path.glob("hostile/.quire*")), "nothing is left in the folder"


@pytest.mark.rest
async def test_an_alternative_takes_turns_with_the_suite() -> None:
    wish = Wish(str(checkpoint("llama")), FLAGS, seconds=600.0)
    bench = Bench(wish, lambda _what, _turn: None)
    async with served_suite(wish.options) as suite:
        served = Served.of(suite, await suite.worker(), "the native CPU path")
        assert served.capacity.max_num_seqs == 64
        assert await bench._compare(served, Alternative("kv_cache_dtype", "bfloat16"), COMPARED) == ""
        why = await bench._compare(served, Alternative("block_size", "17"), COMPARED)
    [found] = bench.comparisons
    assert (len(found.before), len(found.after)) == (3, 3)
    assert min(found.ratios) > 0
    assert found.room == 1.0, "--kv-blocks gives both as many"
    assert "block" in why, "what is refused is left out, with the reason"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--seconds", "5"), "--seconds: is 5; expected 30 to 3600"),
        (("--plot", "figures.gif"), "--plot: is figures.gif; expected a file that ends with .png or .svg"),
        (("--plot", "no/such/folder/a.png"), "cannot be written; expected a file in a folder that is there"),
        (("--blok-size", "8"), "--blok-size: is not an option here; did you mean --block-size?"),
        (("no/such/model",), "--model: no/such/model is not a folder on this machine"),
    ],
)
def test_mistakes_are_found_before_anything_starts(words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    done = quire("bench", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "nothing was started" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_leaves_nothing_running() -> None:
    command = module_command("cli.main", "bench", str(checkpoint("llama")), *FLAGS)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "1 stream" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=READY_SECONDS)
    assert process.returncode == 130
    assert len(children) >= 4, "Redis, KV manager, worker, router"
    assert psutil.wait_procs(children, timeout=READY_SECONDS)[1] == []
    assert out == ""
    assert "Traceback" not in err
