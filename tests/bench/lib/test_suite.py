"""The served suite of the benchmarks: real processes, a client of the public API, a cold cache by a new salt."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from bench.lib.checkpoints import SMALL, checkpoint
from bench.lib.workloads import make
from bench.serve import bench_options, suite_flags
from bench.tracing import DECLINED, WANTED
from cli.benchmark.requests import equal_requests
from cli.benchmark.served import ServedSuite, processor_seconds, served_suite

SHAPE = {**SMALL, "vocab_size": 32000, "num_hidden_layers": 2}


def test_options_become_flags_of_the_suite() -> None:
    options = {"prefix_caching": False, "threads": None, "block_size": 16, "deterministic": True}
    assert suite_flags(options) == ["--no-prefix-caching", "--block-size", "16", "--deterministic"]


def test_a_level_is_that_of_the_workers() -> None:
    args = argparse.Namespace(block_size=16, threads=1, level="avx2", trace_sample_ratio=0.0)
    flags = bench_options("model", "auto", args, "float32", caching=True)
    assert flags[flags.index("--cpu-level") + 1] == "avx2"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[ServedSuite]:
    """A suite that traces the requests that want it."""
    args = argparse.Namespace(block_size=16, threads=1, level=None, trace_sample_ratio=1.0)
    with checkpoint(None, SHAPE) as (folder, load_format):
        options = bench_options(str(folder), load_format, args, "float32", caching=True)
        async with served_suite(options) as suite:
            yield suite


@pytest.mark.asyncio(loop_scope="module")
async def test_a_workload_goes_through_all_processes(served: ServedSuite) -> None:
    workload = make("W3", scale=0.01)
    (seconds, first), (_, again), (_, cold) = [await served.run(workload, salt) for salt in ("a", "a", "b")]
    assert served.start_seconds > 0
    assert served.peak_rss().keys() == {"redis", "kvmanager", "worker-0", "router"}
    assert min(served.peak_rss().values()) > 1.0
    assert list(first) == ["c00t0", "c00t1", "c00t2", "c00t3"]
    assert [len(record.tokens) for record in first.values()] == [48] * 4
    assert seconds >= max(record.times[-1] for record in first.values()) - first["c00t0"].submitted
    tokens = [[record.tokens for record in run.values()] for run in (first, again, cold)]
    assert tokens[0] == tokens[1] == tokens[2]
    cached = [[record.cached_tokens for record in run.values()] for run in (first, again, cold)]
    assert cached[0] == cached[2] == [0, 96, 208, 320], "the history before a turn but its last token, in blocks of 16"
    assert cached[1] == [48, 160, 272, 384], "its own prompt but the last token"


@pytest.mark.asyncio(loop_scope="module")
async def test_one_suite_traces_the_requests_that_want_it_and_no_others(served: ServedSuite) -> None:
    workload, named = equal_requests(40, 4, 2, 0), "0af7651916cd43dd8448eb211c80319c"
    found = {}
    for flag in (WANTED, DECLINED):
        traceparent = f"00-{named}-b7ad6b7169203331-{flag}"
        _, records = await served.run(workload, flag, partial(str, traceparent))
        found[flag] = {record.trace_id for record in records.values()}
    assert found == {WANTED: {named}, DECLINED: {""}}


def test_the_processor_time_of_a_process_grows_with_its_work() -> None:
    before, own = processor_seconds(os.getpid()), time.process_time()
    while time.process_time() < own + 0.05:
        pass
    assert processor_seconds(os.getpid()) - before >= 0.03
