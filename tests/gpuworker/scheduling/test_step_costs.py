"""The costs of a simulated step, and the numbers that seeds are derived with."""

from __future__ import annotations

import pytest

from gpuworker.scheduling.splitmix64 import GOLDEN, splitmix64
from gpuworker.scheduling.step_costs import DEFAULT_COSTS, StepCosts, parse_costs


def test_a_step_costs_its_base_its_rows_and_its_positions() -> None:
    costs = parse_costs("base=8ms, decode=4us,prefill=2us")
    assert costs == StepCosts(0.008, 4e-6, 2e-6)
    assert costs.of(10, 100) == pytest.approx(0.00824)
    assert parse_costs("decode=1s") == StepCosts(decode=1.0)


@pytest.mark.parametrize("text", ["", "base", "base=5", "base=5ms,base=6ms", "speed=1ms", "base=-1ms"])
def test_another_form_is_refused_with_the_right_one(text: str) -> None:
    with pytest.raises(ValueError, match=f"expected terms of {DEFAULT_COSTS}"):
        parse_costs(text)


def test_splitmix64_gives_the_published_numbers() -> None:
    """The first two outputs of the generator that starts at 0, in Vigna's reference implementation."""
    assert splitmix64(GOLDEN) == 0xE220A8397B1DCDAF
    assert splitmix64(2 * GOLDEN) == 0x6E789E6AA1B965F4
    assert splitmix64((1 << 64) + GOLDEN) == splitmix64(GOLDEN)
