"""The bound on the silence of a stream's other end, in a time that the test makes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.rpc.silence import SILENCE_S, Silence, pulse_seconds
from quire.api.channel import CLIENT_KEEPALIVE_TIMEOUT_MS


def test_silence_is_over_only_when_it_is_longer_than_the_limit() -> None:
    silence = Silence(12.0, now=100.0)
    assert [silence.over(100.0 + seconds) for seconds in range(2, 13, 2)] == [False] * 6
    assert silence.over(114.0)


def test_each_message_begins_it_anew() -> None:
    silence = Silence(12.0, now=0.0)
    for now in range(2, 200, 2):
        if now % 12 == 0:
            silence.heard(float(now))
        assert not silence.over(float(now))


@pytest.mark.parametrize("pause", [5.0, 30.0, 3600.0])
def test_what_the_watcher_itself_missed_is_no_silence(pause: float) -> None:
    silence = Silence(12.0, now=0.0)
    assert not silence.over(2.0)
    assert not silence.over(2.0 + pause), "messages of that time are still unread"
    looks = [silence.over(2.0 + pause + seconds) for seconds in range(2, 13, 2)]
    assert looks[-1], "and now it has run without hearing anything"
    assert looks == sorted(looks)


def test_a_watcher_that_is_late_at_every_look_still_finds_a_silence() -> None:
    silence, now = Silence(12.0, now=0.0), 0.0
    looks = 0
    while not silence.over(now):
        now += 20.0
        looks += 1
    assert looks == 7


@given(st.lists(st.floats(0.0, 30.0), max_size=50))
def test_an_end_that_pulses_is_never_silent_however_late_the_watcher_looks(delays: list[float]) -> None:
    """It reads what came before its next look, one look late at worst."""
    silence, now = Silence(12.0, now=0.0), 0.0
    for delay in delays:
        now += silence.every + delay
        assert not silence.over(now)
        silence.heard(now)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_that_is_none_asks_for_no_pulses(limit: float) -> None:
    assert pulse_seconds(limit) is None
    with pytest.raises(ValueError, match="expected more than 0"):
        Silence(limit, 0.0)


def test_pulses_are_bounded_however_short_the_limit() -> None:
    assert pulse_seconds(1e-300) == 0.01
    assert pulse_seconds(12.0) == 2.0


def test_a_request_is_an_orphan_before_its_client_asks_another_router() -> None:
    every = pulse_seconds(SILENCE_S)
    assert every is not None
    assert SILENCE_S + every < CLIENT_KEEPALIVE_TIMEOUT_MS / 1000
