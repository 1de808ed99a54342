"""Kernels are compiled in processes of their own, all at once, before the first test waits for one of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.suites.triton_compiled.workloads import Results, compiled


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError(
            "kernels that are interpreted cannot be compiled: run tests/suites/triton_compiled by themselves"
        )
    each = (item.callspec.params for item in request.session.items if isinstance(item, pytest.Function))
    wanted = dict.fromkeys((int(str(params["chip"])), str(params["name"])) for params in each)
    workers = min(4, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield {pair: pool.submit(compiled, *pair) for pair in wanted}
        pool.shutdown(cancel_futures=True)
