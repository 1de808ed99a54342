"""The engine tells subscribers of KV events what its cache has, whether or not these keep up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from gpuworker.scheduling.kv_events import CacheWatch, Change, Cleared, Removed, Stored
from gpuworker.scheduling.outcomes import AgentConfig
from tests.support.gpuworker.engine_harness import EngineDriver
from tests.support.gpuworker.fake_engine_ports import ManualRunner
from tests.support.waiting import wait_until

CONFIG = AgentConfig(num_blocks=16, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
PROMPT = [1, 2, 3, 4, 5]


class Sink:
    """Takes changes while it has room, and keeps them."""

    def __init__(self, room: bool) -> None:
        self.room, self.told = room, list[Change]()
        self.asked = threading.Event()

    def has_room(self) -> bool:
        self.asked.set()
        return self.room

    def publish(self, changes: Sequence[Change]) -> None:
        assert changes
        self.told += changes


def run(driver: EngineDriver, runner: ManualRunner, prompt: Sequence[int], steps: int) -> None:
    driver.submit(prompt, steps)
    for _ in range(steps):
        runner.step()
    driver.finish()


def test_steps_go_on_while_no_subscriber_has_room_and_all_is_told_later() -> None:
    runner, sink = ManualRunner(), Sink(room=False)
    with EngineDriver(runner, replace(CONFIG, watch=CacheWatch())) as driver:
        driver.engine.tell_changes(sink)
        run(driver, runner, PROMPT, 4)
        assert sink.asked.is_set()
        assert not sink.told
        sink.room = True
        driver.engine.wake()
        told = wait_until(lambda: list(sink.told), lambda found: len(found) == 2)
    assert [change.origin.tokens for change in told if isinstance(change, Stored)] == [(1, 2, 3, 4), (5, 7, 7, 7)]


def test_a_failed_step_tells_that_nothing_is_cached() -> None:
    runner, sink = ManualRunner(), Sink(room=True)
    with EngineDriver(runner, replace(CONFIG, watch=CacheWatch())) as driver:
        driver.engine.tell_changes(sink)
        run(driver, runner, PROMPT, 1)
        wait_until(lambda: len(sink.told), lambda count: count == 1)
        driver.submit([9, 9, 9], 20)
        runner.await_submissions(3)
        runner.fail()
        driver.finish()
        wait_until(lambda: len(sink.told), lambda count: count == 2)
        assert sink.told[-1] == Cleared()
        run(driver, runner, PROMPT, 1)
        wait_until(lambda: len(sink.told), lambda count: count == 3)
    assert sink.told[0] == sink.told[2]


def test_what_is_evicted_for_another_prompt_is_told() -> None:
    runner, sink = ManualRunner(), Sink(room=True)
    with EngineDriver(runner, replace(CONFIG, num_blocks=4, watch=CacheWatch())) as driver:
        driver.engine.tell_changes(sink)
        run(driver, runner, range(1, 10), 1)
        run(driver, runner, [6] * 9, 1)
        wait_until(lambda: len(sink.told), lambda count: count >= 5)
    assert [type(change) for change in sink.told] == [Stored, Stored, Removed, Stored, Stored]
    assert isinstance(sink.told[1], Stored)
    assert isinstance(sink.told[2], Removed)
    assert sink.told[2].hash == sink.told[1].hash, "the deeper one goes first"
