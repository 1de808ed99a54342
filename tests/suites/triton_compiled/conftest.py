"""Kernels are compiled in processes of their own, all at once, before the first test waits for one of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.suites.triton_compiled.compiling import CHIPS
from tests.suites.triton_compiled.workloads import WORKLOADS, Results, compiled


@pytest.fixture(scope="session")
def results() -> Iterator[Results]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError(
            "kernels that are interpreted cannot be compiled: run tests/suites/triton_compiled by themselves"
        )
    workers = min(4, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield {(chip, name): pool.submit(compiled, chip, name) for chip in CHIPS for name in WORKLOADS}
        pool.shutdown(cancel_futures=True)
