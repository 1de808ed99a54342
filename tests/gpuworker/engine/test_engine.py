"""The engine's loop by itself: a runner whose steps end when the test says so, over a ledger in the same process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest

from common.contracts.clock import ManualClock, SystemClock
from common.contracts.errors import EngineFailure
from common.contracts.lease import (
    Admit,
    Attached,
    AttachOk,
    Connected,
    Detached,
    GrantBatch,
    Granted,
    LeaseEvent,
    TierCopy,
)
from common.contracts.transfers import FROM_PEER, Medium, PeerSource, Place, Transfer, TransferEnd
from common.contracts.types import BlockHash, BlockId, FinishReason, FrameId, SequenceId
from gpuworker.engine.engine import MOST_FAILED
from gpuworker.engine.ports import Delayed, EngineOutputs
from gpuworker.engine.transfers import Transfers
from gpuworker.scheduling.batch_plan import StepNotBuilt, StepPlan, StepResult
from gpuworker.scheduling.images import EndedTransfer, Image
from gpuworker.scheduling.outcomes import AgentConfig
from tests.support.gpuworker.engine_harness import GREEDY, PATIENCE, EngineDriver
from tests.support.gpuworker.fake_engine_ports import ManualRunner, ScriptedChannel

CONFIG = AgentConfig(num_blocks=16, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
_PROMPT = 3


def test_the_next_step_is_planned_while_one_runs() -> None:
    runner = ManualRunner()
    with EngineDriver(runner, CONFIG) as driver:
        driver.submit([1, 2, 3], 4)
        runner.await_submissions(2)
        first, second = (plan for plan, _ in runner.submitted)
        assert [(row.start, row.length, row.samples) for row in first.rows] == [(0, 3, True)]
        assert [(row.start, row.length, row.samples) for row in second.rows] == [(3, 1, True)]
        for _ in range(4):
            runner.step()
        (result,) = driver.finish()
        assert (result.tokens, result.reason) == ([7] * 4, FinishReason.LENGTH)
        driver.assert_all_free()


def test_a_stop_token_ends_a_sequence_whose_next_step_is_in_flight() -> None:
    runner = ManualRunner()
    with EngineDriver(runner, CONFIG) as driver:
        driver.submit([1, 2, 3], 10, eos=[7])
        runner.await_submissions(2)
        runner.step()
        (result,) = driver.finish()
        assert (result.tokens, result.reason, result.stop_token) == ([7], FinishReason.STOP, 7)
        assert result.usage.output_tokens == 1
        runner.step()  # it was in flight; its sample is discarded
        driver.assert_all_free()
        assert result.tokens == [7]


def test_a_cancelled_sequence_is_in_no_later_plan_and_its_blocks_return_within_two_steps() -> None:
    runner = ManualRunner()
    with EngineDriver(runner, CONFIG) as driver:
        victim = driver.submit([1, 2, 3], 40)
        other = driver.submit([4, 5, 6], 40)
        runner.await_submissions(2)
        driver.engine.cancel_request(victim, FinishReason.CANCELLED)
        while driver.results[victim].reason is None:
            driver.take()
        assert driver.results[victim].reason is FinishReason.CANCELLED
        in_flight = runner.submissions
        plans = [runner.step() for _ in range(in_flight)]
        runner.await_submissions(in_flight + 1)
        later = runner.submitted[0][0]
        assert any(row.sequence == victim for plan in plans for row in plan.rows)
        assert [row.sequence for row in later.rows] == [other]
        assert in_flight <= 2
        assert victim not in runner.num_tokens
        driver.engine.cancel_request(other, FinishReason.CANCELLED)
        while runner.num_tokens:
            if runner.submitted:
                runner.step()
        driver.assert_all_free()


def test_what_the_steps_in_flight_sample_comes_before_the_end_of_a_sequence_that_is_handed_over() -> None:
    runner = ManualRunner()
    with EngineDriver(runner, CONFIG) as driver:
        moved = driver.submit([1, 2, 3], 40)
        runner.await_submissions(2)
        driver.engine.hand_over(moved)
        driver.engine.hand_over(SequenceId(99))
        runner.step()
        runner.step()
        (result,) = driver.finish()
        assert (result.tokens, result.reason) == ([7, 7], FinishReason.CANCELLED)
        assert moved not in runner.num_tokens
        driver.assert_all_free()


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers_and_the_next_one_runs() -> None:
    runner = ManualRunner()
    with EngineDriver(runner, CONFIG) as driver:
        too_large = driver.submit([1] * 10, 100)
        small = driver.submit([1, 2], 1)
        runner.step()
        driver.finish()
        assert driver.results[too_large].reason is FinishReason.ERROR
        assert "110 tokens (prompt 10) need 28 blocks of 4; the worker has 16" in driver.results[too_large].message
        assert driver.results[small].tokens == [7]


def test_a_failed_step_ends_every_sequence_and_the_engine_serves_on_as_a_new_incarnation() -> None:
    runner = ManualRunner()
    with EngineDriver(runner, CONFIG) as driver:
        lost = [driver.submit([1, 2, 3], 20), driver.submit([4, 5, 6, 7, 8], 20)]
        runner.await_submissions(2)
        runner.fail()
        driver.finish()
        assert {driver.results[sequence].reason for sequence in lost} == {FinishReason.ERROR}
        assert {driver.results[sequence].message for sequence in lost} == {"the device is gone"}
        again = driver.submit([1, 2, 3], 2)
        runner.step()
        runner.step()
        driver.finish()
        assert driver.results[again].tokens == [7, 7]
        driver.assert_all_free()


@pytest.mark.parametrize("right", [False, True], ids=["all fail", "one is right"])
def test_an_engine_whose_steps_all_fail_ends_behind_their_errors(right: bool) -> None:
    """A library that has once found no memory may fail for good; the supervisor starts another process."""
    runner, steps = ManualRunner(), 0
    driver = EngineDriver(runner, CONFIG)
    driver.engine.start()
    for number in range(MOST_FAILED):
        assert not driver.engine.ended.done(), number
        lost = driver.submit([1, 2, 3], 20)
        runner.await_submissions(steps := steps + 2)
        if right and number == MOST_FAILED - 1:
            runner.step()
            runner.await_submissions(steps := steps + 1)
        runner.fail()
        driver.finish()
        assert driver.results[lost].message == "the device is gone"
    if right:
        again = driver.submit([1, 2, 3], 1)
        runner.step()
        driver.finish()
        assert driver.results[again].tokens == [7]
        driver.engine.stop()
        return
    failure = driver.engine.ended.exception(timeout=PATIENCE)
    assert isinstance(failure, EngineFailure)
    assert str(failure) == "the last 8 steps failed, and none between them was right"
    with pytest.raises(EngineFailure, match="the engine ended early"):
        driver.engine.stop()


class FaultyLayout(ManualRunner):
    """Cannot lay a sequence out once it has three tokens of output, and runs steps without it at once.

    `known`: whether it can tell which sequence is the cause.
    """

    def __init__(self, culprit: int, known: bool) -> None:
        super().__init__()
        self._culprit, self._known = culprit, known
        self.release()

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        if any(row.sequence == self._culprit and row.start >= _PROMPT + 2 for row in plan.rows):
            raise StepNotBuilt([SequenceId(self._culprit)] if self._known else [], "a row is wrong")
        return super().submit_step(plan)


@pytest.mark.parametrize("known", [True, False])
def test_of_a_step_that_cannot_be_built_the_cause_ends_and_the_others_go_on(known: bool) -> None:
    """Where the cause is unknown, every sequence of the worker ends; a later one is served in both cases."""
    with EngineDriver(FaultyLayout(2, known), CONFIG) as driver:
        innocent, culprit = driver.submit([1] * _PROMPT, 20), driver.submit([2] * _PROMPT, 20)
        assert culprit == 2
        driver.finish()
        assert driver.results[culprit].reason is FinishReason.ERROR
        assert driver.results[culprit].message == "a row is wrong"
        expected = FinishReason.LENGTH if known else FinishReason.ERROR
        assert driver.results[innocent].reason is expected
        assert not known or driver.results[innocent].tokens == [7] * 20
        later = driver.submit([1] * _PROMPT, 5)
        driver.finish()
        assert driver.results[later].tokens == [7] * 5
        driver.assert_all_free()


@pytest.fixture
def scripted() -> tuple[EngineDriver, ScriptedChannel]:
    """An engine that is not started: the test calls its turns."""
    channel = ScriptedChannel()
    return EngineDriver(ManualRunner(), CONFIG, channel), channel


def test_nothing_is_reported_before_the_manager_answered(scripted: tuple[EngineDriver, ScriptedChannel]) -> None:
    driver, channel = scripted
    driver.submit([1, 2, 3], 4, GREEDY)
    channel.events.append(Connected())
    driver.engine.turn()
    assert [attach.session for attach, _ in channel.attached] == [1]
    assert not channel.reports
    channel.events.append(Attached(1, AttachOk(epoch=5, lease_target=0)))
    driver.engine.turn()
    assert [each.reserve.sequence for each in channel.attached[0][1].sequences] == [1]
    driver.submit([4, 5], 4, GREEDY)
    driver.engine.turn()
    assert [(session, each.sequence) for session, report in channel.reports for each in report.reserve] == [(1, 2)]


def test_each_session_begins_with_the_address_that_the_worker_has_then(
    scripted: tuple[EngineDriver, ScriptedChannel],
) -> None:
    driver, channel = scripted
    now = ["10.0.0.1:7"]
    driver.engine._address = lambda: now[0]
    channel.events.append(Connected())
    driver.engine.turn()
    now[0] = "10.0.0.2:7"
    channel.events.append(Connected())
    driver.engine.turn()
    assert [attach.address for attach, _ in channel.attached] == ["10.0.0.1:7", "10.0.0.2:7"]
    assert len({attach.incarnation for attach, _ in channel.attached}) == 1, "its cache is still there"


def test_a_manager_of_a_lower_epoch_is_refused(scripted: tuple[EngineDriver, ScriptedChannel]) -> None:
    driver, channel = scripted
    for session, epoch in ((1, 5), (2, 4)):
        channel.events.extend([Connected(), Attached(session, AttachOk(epoch, lease_target=0))])
        driver.engine.turn()
    assert channel.reconnects == 1
    assert channel.attached[1][0].epoch_seen == 5
    assert not driver.engine.load().manager_attached


def test_what_holds_a_sequence_up_is_told_before_what_ends_it() -> None:
    clock, channel, runner = ManualClock(), ScriptedChannel(), ManualRunner()
    outputs: list[EngineOutputs] = []
    driver = EngineDriver(runner, CONFIG, channel, sink=outputs.append, clock=clock)
    channel.away = [(1.0, 2.0), (5.5, 6.0)]
    channel.events.extend([Connected(), Attached(1, AttachOk(1, 0))])
    sequence = driver.submit([1, 2, 3], 10)
    driver.engine.turn()
    clock.advance(5.0)
    channel.events.append(Granted(1, GrantBatch(0, admit=(Admit(sequence, (BlockId(0),), 0),))))
    driver.engine.turn()
    assert outputs.pop().delayed == (Delayed(sequence, 0.0, 1.0),)
    for _ in range(2):  # its block is full then
        runner.step()
        driver.engine.turn()
    clock.advance(2.0)
    driver.engine.turn()
    assert not any(each.delayed for each in outputs)
    channel.events.append(Granted(1, GrantBatch(1, lease=(BlockId(1),))))
    driver.engine.turn()
    assert outputs[-1].delayed == (Delayed(sequence, 2.0, 0.5),)


def test_grants_of_an_old_session_are_dropped(scripted: tuple[EngineDriver, ScriptedChannel]) -> None:
    driver, channel = scripted
    sequence = driver.submit([1, 2, 3], 4)
    batch = GrantBatch(0, admit=(Admit(sequence, (BlockId(0),), 0),))
    channel.events.extend([Connected(), Attached(1, AttachOk(1, 0)), Detached(1), Connected(), Granted(1, batch)])
    driver.engine.turn()
    channel.events.append(Attached(2, AttachOk(1, 0)))
    channel.events.append(Granted(1, batch))
    driver.engine.turn()
    assert driver.results[sequence].cached_tokens == -1, "it was not admitted"
    assert driver.engine.load().waiting == 1


def test_a_failed_step_frees_the_batch_index_of_a_sequence_that_ended_while_the_step_still_had_it() -> None:
    runner = ManualRunner()
    with EngineDriver(runner, CONFIG) as driver:
        driver.submit([1, 2, 3], 10, eos=[7])
        runner.await_submissions(2)
        runner.step()
        (result,) = driver.finish()
        assert result.reason is FinishReason.STOP
        assert runner.num_tokens, "the second step still has it"
        runner.fail()
        again = driver.submit([1, 2, 3], 1)
        runner.step()
        driver.finish()
        assert driver.results[again].tokens == [7]
        assert not runner.num_tokens
        driver.assert_all_free()


def test_a_failed_step_ends_waiting_sequences_too_and_each_with_its_usage(
    scripted: tuple[EngineDriver, ScriptedChannel],
) -> None:
    driver, channel = scripted
    runner = driver.runner
    assert isinstance(runner, ManualRunner)
    runs, waits = driver.submit([1, 2, 3], 20), driver.submit([4] * 6, 20)
    channel.events.extend([Connected(), Attached(1, AttachOk(1, 0))])
    channel.events.append(Granted(1, GrantBatch(0, admit=(Admit(runs, (BlockId(0), BlockId(1)), 0),))))
    driver.engine.turn()
    runner.step()
    driver.engine.turn()
    runner.fail()
    driver.engine.turn()
    driver.finish()
    results = driver.results[runs], driver.results[waits]
    assert [each.reason for each in results] == [FinishReason.ERROR] * 2
    assert [(each.usage.prompt_tokens, each.usage.output_tokens) for each in results] == [(3, 1), (6, 0)]
    assert not runner.num_tokens
    assert not driver.engine._delays._waiting, "nothing of them stays behind"


def test_a_refused_request_says_how_long_its_prompt_is() -> None:
    with EngineDriver(ManualRunner(), CONFIG) as driver:
        driver.submit([1] * 10, 100)
        (result,) = driver.finish()
        assert (result.reason, result.usage.prompt_tokens) == (FinishReason.ERROR, 10)


def test_a_stop_between_the_look_and_the_sleep_is_not_missed() -> None:
    driver = EngineDriver(ManualRunner(), CONFIG)
    engine = driver.engine

    class StoppedMeanwhile(threading.Event):
        """A stop that comes at the worst moment, once: what it sets is cleared at once."""

        def clear(self) -> None:
            engine._stopping = True
            super().clear()

    engine._wake = StoppedMeanwhile()
    engine.start()
    engine.ended.result(timeout=PATIENCE)
    engine.stop()


def test_stop_takes_the_cancels_before_it_and_waits_for_no_manager(
    scripted: tuple[EngineDriver, ScriptedChannel],
) -> None:
    driver, _ = scripted
    sequences = [driver.submit([1, 2, 3], 4) for _ in range(3)]
    driver.engine.start()
    for sequence in sequences:
        driver.engine.cancel_request(sequence, FinishReason.CANCELLED)
    driver.engine.stop()
    assert [result.reason for result in driver.finish()] == [FinishReason.CANCELLED] * 3


def test_whoever_waits_for_the_engine_gets_what_ended_it(scripted: tuple[EngineDriver, ScriptedChannel]) -> None:
    driver, channel = scripted

    def poll() -> list[LeaseEvent]:
        raise RuntimeError("a bug")

    channel.poll = poll  # type: ignore[method-assign]
    driver.engine.start()
    assert isinstance(driver.engine.ended.exception(timeout=PATIENCE), RuntimeError)
    with pytest.raises(EngineFailure, match="a bug"):
        driver.engine.stop()


def test_levels_that_no_step_will_refresh_are_those_of_now(scripted: tuple[EngineDriver, ScriptedChannel]) -> None:
    driver, channel = scripted
    channel.events.extend([Connected(), Attached(1, AttachOk(1, 0))])
    for waiting in (1, 2, 3):  # within 50 ms
        driver.submit([1, 2, 3], 4)
        driver.engine.turn()
        assert driver.engine.load().waiting == waiting
    assert driver.engine.load().manager_attached
    channel.events.append(Detached(1))
    driver.engine.turn()
    assert not driver.engine.load().manager_attached


def test_an_answer_to_a_session_that_was_left_is_nobodys(scripted: tuple[EngineDriver, ScriptedChannel]) -> None:
    driver, channel = scripted
    runner = driver.runner
    assert isinstance(runner, ManualRunner)
    sequence = driver.submit([1, 2, 3], 4)
    channel.events.extend([Connected(), Attached(1, AttachOk(1, 0))])
    channel.events.append(Granted(1, GrantBatch(0, admit=(Admit(sequence, (BlockId(0),), 0),))))
    driver.engine.turn()
    channel.events.append(Connected())
    driver.engine.turn()  # it offers session 2
    runner.fail()
    channel.events.append(Attached(2, AttachOk(1, 0)))  # in answer to an inventory that holds no more
    driver.engine.turn()
    assert channel.reconnects == 1
    assert not driver.engine.load().manager_attached
    channel.events.append(Connected())
    driver.engine.turn()
    attach, inventory = channel.attached[-1]
    assert attach.session > 2
    assert attach.incarnation == driver.engine.attach.incarnation != channel.attached[0][0].incarnation
    assert not inventory.sequences


class _Peers:
    """A peer that has been asked, and from which nothing has come yet."""

    def __init__(self) -> None:
        self.coming = list[EndedTransfer]()

    def fetch(self, source: PeerSource, transfers: Sequence[Transfer], patience: float) -> None:
        self.asked = tuple(transfers)

    def poll(self) -> list[EndedTransfer]:
        found, self.coming = self.coming, []
        return found

    def close(self) -> None:
        pass


class _Frames:
    def __init__(self) -> None:
        self.landed = list[tuple[FrameId, Image]]()

    def take(self, place: Place) -> Image:
        raise AssertionError(f"nobody asks for {place}")

    def land(self, frame: FrameId, image: Image, of_states: bool = False) -> None:
        self.landed.append((frame, image))


def test_other_sequences_get_their_tokens_while_a_fetch_is_open() -> None:
    """Who waits for a fetch is in no step; the others' steps neither wait for it nor stop when it lands."""
    runner, channel, outputs = ManualRunner(), ScriptedChannel(), list[EngineOutputs]()
    config = replace(CONFIG, host_frames=2, serves_peers=True)
    driver = EngineDriver(runner, config, channel, sink=outputs.append)
    peers, frames = _Peers(), _Frames()
    driver.engine.transfer_by(Transfers(frames, 64, SystemClock(), None, peers))
    waits, runs = driver.submit([9, 9, 9, 9, 9], 2), driver.submit([1, 2, 3], 8)
    peer = PeerSource("red", bytes(16), "127.0.0.1:1", bytes(16), 0)
    ordered = Transfer(
        1, driver.hashes([9, 9, 9, 9])[0], BlockHash(b""), 0, FROM_PEER, Place(Medium.HOST, FrameId(0)), peer
    )
    admit = Admit(runs, (BlockId(0), BlockId(1), BlockId(2)), 0)
    channel.events += [Connected(), Attached(1, AttachOk(1, 0))]
    channel.events.append(Granted(1, GrantBatch(0, admit=(admit,), transfers=(ordered,))))
    driver.engine.turn()
    assert peers.asked == (ordered,)
    for _ in range(3):
        runner.step()
        driver.engine.turn()
    assert [tokens for each in outputs for tokens in each.tokens] == [(runs, (7,))] * 3
    assert driver.engine._patience is None, "nothing is to be done but what wakes the engine"
    peers.coming = [EndedTransfer(ordered, b"image", TransferEnd.DONE)]
    driver.engine.turn()
    assert frames.landed == [(0, b"image")], "a step runs"
    assert channel.reports[-1][1].ended == ((1, TransferEnd.DONE),)
    loaded = Admit(waits, (BlockId(3), BlockId(4)), 1)
    batch = GrantBatch(0, admit=(loaded,), tier=(TierCopy(BlockId(3), FrameId(0), load=True),))
    channel.events.append(Granted(1, batch))
    driver.engine.turn()
    for _ in range(3):  # two steps were planned before
        runner.step()
        driver.engine.turn()
    assert {sequence for each in outputs for sequence, _ in each.tokens} == {runs, waits}
