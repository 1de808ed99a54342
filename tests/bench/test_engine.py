"""The engine's benchmark on a small model: conversations go on, a salt makes the cache cold, both paths draw alike."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import pytest

from bench import engine
from bench.lib.checkpoints import SMALL
from bench.lib.models import data_plane, plane_worker
from bench.lib.workers import BenchWorker
from cli.benchmark.requests import Request, Workload
from gpuworker.native import library as native
from gpuworker.plane.assembly import ModelPlane

SHAPE = {**SMALL, "vocab_size": 32000, "num_hidden_layers": 2}
OPTIONS = {"dtype": "float32", "kv_blocks": 256, "max_num_seqs": 8, "max_model_len": 512, "threads": 1}


def conversations() -> Workload:
    """Two conversations of two turns."""
    said = {(index, turn): [10 + index, 20 + turn] * 16 for index in range(2) for turn in range(2)}
    first = [Request(f"c{index}t0", said[index, 0], 8, index, 0) for index in range(2)]
    return Workload("turns", first, 2, said)


@pytest.fixture(scope="module")
def plane() -> ModelPlane:
    return data_plane(None, SHAPE, **OPTIONS)


@pytest.fixture(scope="module")
def running(plane: ModelPlane) -> Iterator[tuple[BenchWorker, engine.TimedRunner]]:
    worker, runner = engine.engine(plane)
    with worker:
        yield worker, runner


def test_conversations_go_on_with_what_was_drawn(running: tuple[BenchWorker, engine.TimedRunner]) -> None:
    run = running[0].drive(conversations(), salt="a")
    assert sorted(run.records) == ["c00t1", "c01t1", "c0t0", "c1t0"]
    for index in range(2):
        first, second = run.records[f"c{index}t0"], run.records[f"c{index:02d}t1"]
        assert second.request.prompt == [*first.request.prompt, *first.tokens, *[10 + index, 21] * 16]
        assert second.cached_tokens == 32, "32 + 8 tokens before it, in blocks of 16"
        assert second.submitted >= first.times[-1]
    assert (run.tokens, run.prompt_tokens, run.cached_tokens) == (4 * 8, 2 * 32 + 2 * 72, 64)


def test_a_new_salt_sees_a_cold_cache_and_draws_the_same(running: tuple[BenchWorker, engine.TimedRunner]) -> None:
    worker, workload = running[0], Workload("one", conversations().initial)
    runs = [worker.drive(workload, salt=salt) for salt in ("b", "b", "c")]
    assert [run.cached_tokens for run in runs] == [0, 2 * 16, 0]
    tokens = [[record.tokens for record in run.records.values()] for run in runs]
    assert tokens[0] == tokens[1] == tokens[2]


def test_where_the_time_went_adds_up(running: tuple[BenchWorker, engine.TimedRunner]) -> None:
    worker, runner = running
    runner.reset()
    run = worker.drive(conversations(), salt="d")
    found = engine.shares(run, runner)
    assert found["steps"] >= 2 * 8
    parts = {name: share for name, share in found.items() if name.startswith("share_")}
    assert sum(parts.values()) == pytest.approx(1.0)
    assert min(parts.values()) >= 0.0
    assert parts.keys() <= engine.SHARE_NOTES.keys()
    assert parts.keys() > {"share_rest_of_step", "share_between_steps"}


def test_one_model_runs_on_caches_of_several_block_sizes(plane: ModelPlane) -> None:
    outputs = []
    for block_size in (4, 64):
        with plane_worker(plane, block_size) as worker:
            assert worker.config.num_blocks * block_size == 256 * 16
            outputs.append([record.tokens for record in worker.drive(conversations()).records.values()])
    assert outputs[0] == outputs[1]


@pytest.mark.skipif(native.best() is None, reason="no native library: there is one path alone")
def test_both_paths_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "data_plane", partial(data_plane, shape=SHAPE))
    flags = {"model": None, "prefix_caching": "on", "block_size": 16, "threads": 1}
    args = argparse.Namespace(**flags, workload=["W3"], seed=0, scale=0.01, dtype="float32")
    assert engine.check(args) == {"W3": {"agreement": 1.0, "tokens": 4 * 48}}
