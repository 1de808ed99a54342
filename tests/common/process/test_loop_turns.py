"""The processor time of an event loop's turns: figures of known intervals, and of a loop that was held up."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.process.loop_turns import LoopTurns


def test_figures_are_those_of_the_intervals() -> None:
    turns = LoopTurns()
    for milliseconds in range(1, 101):
        turns.add(milliseconds / 1e3)
    figures = turns.take()
    assert (figures["turns"], figures["cpu_max_ms"]) == (100, 100.0)
    assert figures["cpu_p50_ms"] == pytest.approx(50.0, rel=0.02)
    assert figures["cpu_p99_ms"] == pytest.approx(99.0, rel=0.02)


def test_figures_that_were_taken_are_forgotten() -> None:
    turns = LoopTurns()
    turns.add(2.0)
    turns.take()
    assert set(turns.take().values()) == {0.0}


def test_an_interval_of_the_timer_alone_is_none() -> None:
    turns = LoopTurns()
    turns.add(0.000_05)
    assert turns.take()["turns"] == 0


async def test_a_turn_that_computes_is_measured_whole() -> None:
    turns = LoopTurns()
    turns.start()
    await asyncio.sleep(0.005)
    began = time.thread_time()
    while time.thread_time() - began < 0.05:
        pass
    await asyncio.sleep(0.005)
    assert turns.take()["cpu_max_ms"] >= 50.0


async def test_a_turn_that_waits_costs_nothing() -> None:
    turns = LoopTurns()
    turns.start()
    await asyncio.sleep(0.005)
    turns.take()
    asyncio.get_running_loop().call_soon(time.sleep, 0.3)
    await asyncio.sleep(0.005)
    assert turns.take()["cpu_max_ms"] < 200.0
