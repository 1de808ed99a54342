"""The benchmark of carriers: each that it counts has carried all images; NIXL is left out without its package."""

from __future__ import annotations

import pytest

from tests.support.bench_process import run_benchmark
from tests.support.gpuworker.nixl import IS_INSTALLED

pytestmark = [pytest.mark.rest, pytest.mark.timeout(600)]


def test_every_carrier_is_measured_by_what_it_carried() -> None:
    figures, _ = run_benchmark("carriers", "--blocks", "32", "--rounds", "2")
    measured = {name.removeprefix("mb_s_") for name, value in figures.items() if name.startswith("mb_s_") and value > 0}
    assert measured == {"shm", "tcp", "tls"} | ({"nixl", "nixl_tcp"} if IS_INSTALLED else set())
