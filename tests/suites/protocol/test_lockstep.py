"""Many sequences that stall together are served as fast as by a policy in the worker's own process."""

from __future__ import annotations

import pytest

from tests.suites.protocol.lockstep import CROWD, InProcess, split_rate


@pytest.fixture(scope="module")
def in_process() -> float:
    return InProcess(CROWD).rate()


@pytest.mark.parametrize("delay", [1, 3])
def test_reports_that_take_steps_cost_at_most_a_twentieth(in_process: float, delay: int) -> None:
    assert split_rate(CROWD, delay) >= 0.95 * in_process
