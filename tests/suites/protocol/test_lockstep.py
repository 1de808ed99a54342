"""Many sequences that stall together are served as fast as by a policy in the worker's own process."""

from __future__ import annotations

import pytest

from tests.suites.protocol.lockstep import CROWD, LONG, InProcess, split


@pytest.fixture(scope="module")
def in_process() -> float:
    return InProcess(CROWD).rate()


@pytest.mark.parametrize("delay", [1, 3])
def test_reports_that_take_steps_cost_at_most_a_twentieth(in_process: float, delay: int) -> None:
    assert split(CROWD, delay).rate >= 0.95 * in_process


@pytest.mark.parametrize("delay", [1, 3])
def test_so_it_is_where_long_prompts_begin_with_a_part_of_their_blocks(delay: int) -> None:
    found = split(LONG, delay)
    assert found.chunked_grants >= 5, "of ten long prompts"
    assert found.rate >= 0.95 * InProcess(LONG).rate()
