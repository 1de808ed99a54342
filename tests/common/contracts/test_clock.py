"""The moments of what is periodic."""

from __future__ import annotations

import pytest

from common.contracts.clock import until_tick


@pytest.mark.parametrize(
    ("now", "pause"), [(0.0, 4.0), (1.0, 3.0), (3.25, 0.75), (3.75, 4.25), (4.0, 4.0), (1003.0, 1.0)]
)
def test_ticks_of_all_processes_are_due_at_the_same_moments(now: float, pause: float) -> None:
    """A timer that fires a moment early does not lead to two ticks."""
    assert until_tick(now, 4.0) == pause


def test_what_has_no_period_is_due_at_once() -> None:
    assert until_tick(3.0, 0.0) == 0.0
