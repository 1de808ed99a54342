"""What of a worker's sequences should go on, and what explains that they do not."""

from __future__ import annotations

import pytest

from gpuworker.scheduling.watchdog import waits_for_a_step


@pytest.mark.parametrize(
    ("running", "waiting", "attached", "age", "predicted", "waits"),
    [
        pytest.param(0, 0, True, 0.0, 0.0, False, id="nothing to do"),
        pytest.param(2, 0, True, 0.0, 0.0, True, id="sequences run, and no step does"),
        pytest.param(0, 3, True, 0.0, 0.0, True, id="sequences wait for a manager that is there"),
        pytest.param(0, 3, False, 0.0, 0.0, False, id="sequences wait for a manager that is away"),
        pytest.param(2, 0, False, 0.0, 0.0, False, id="sequences run and their leases are used up"),
        pytest.param(2, 0, True, 3.0, 0.5, False, id="a step runs, six times as long as predicted"),
        pytest.param(2, 0, True, 5.1, 0.5, True, id="a step runs, more than ten times as long"),
        pytest.param(1, 0, True, 59.0, 0.0, False, id="a first step, without a prediction"),
        pytest.param(1, 0, True, 61.0, 0.0, True, id="a first step that takes more than a minute"),
    ],
)
def test_what_waits_for_a_step(
    running: int, waiting: int, attached: bool, age: float, predicted: float, waits: bool
) -> None:
    assert bool(waits_for_a_step(running, waiting, attached, age, predicted)) is waits


def test_the_words_count() -> None:
    assert waits_for_a_step(2, 3, True) == "2 sequences run and 3 wait, and no step has ended"
