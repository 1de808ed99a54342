"""When a worker had no KV manager that answered: killed, standing still, and the worker's own stops."""

from __future__ import annotations

import pytest

from gpuworker.scheduling.manager_silence import ManagerSilence


def attached(pulse: float | None = 1.0) -> ManagerSilence:
    """Return the silence of a manager that a worker has from second 10 on."""
    silence = ManagerSilence(0.0)
    silence.attached(10.0, pulse)
    return silence


def test_a_worker_without_a_session_has_no_manager() -> None:
    silence = attached()
    assert silence.seconds(0.0, 12.0) == 10.0
    silence.lost(11.0)
    assert silence.seconds(10.0, 13.0) == 2.0
    silence.attached(15.0, 1.0)
    assert silence.seconds(12.0, 30.0) == pytest.approx(3.0 + 15.0), "it has said nothing since then"
    silence.heard(15.5)
    assert silence.seconds(12.0, 16.0) == 3.0


def test_a_manager_that_leaves_two_pulses_unanswered_was_away_since_its_last_message() -> None:
    silence = attached()
    for second in range(11, 16):
        silence.ran(float(second))
    assert silence.seconds(11.0, 12.0) == 0.0, "two seconds of silence are bearable"
    assert silence.seconds(11.0, 15.0) == 4.0
    silence.heard(15.5)
    assert silence.seconds(10.0, 16.0) == 5.5
    assert silence.seconds(15.5, 17.0) == 0.0


def test_a_silence_before_the_end_of_a_session_counts() -> None:
    silence = attached()
    for second in range(11, 21):
        silence.ran(float(second))
    silence.lost(20.0)
    assert silence.seconds(0.0, 25.0) == 10.0 + 15.0


def test_a_worker_that_stood_still_itself_blames_nobody() -> None:
    silence = attached()
    silence.heard(11.0)
    silence.heard(19.0)
    assert silence.seconds(10.0, 20.0) == 0.0
    silence.ran(29.0)
    silence.heard(29.1)
    assert silence.seconds(10.0, 30.0) == 0.0


def test_a_manager_that_answers_no_pulses_is_away_without_a_session_alone() -> None:
    silence = attached(pulse=None)
    silence.heard(99.0)
    assert silence.seconds(10.0, 200.0) == 0.0


def test_the_latest_absences_are_remembered() -> None:
    silence = attached()
    for second in range(11, 200):
        silence.lost(second + 0.0)
        silence.attached(second + 0.5, 1.0)
    assert silence.seconds(0.0, 200.0) == 64 * 0.5
