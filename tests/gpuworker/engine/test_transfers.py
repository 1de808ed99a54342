"""The engine's part of transfers: what a turn takes and lands, what is late, resets, and a disk that is given up."""

from __future__ import annotations

import logging

import pytest

from common.contracts.clock import ManualClock
from common.contracts.lease import CachedBlock, GrantBatch, Report, TierCopy
from common.contracts.transfers import Medium, Place, Transfer, TransferCosts, TransferEnd
from common.contracts.types import BlockHash, BlockId, FrameId
from gpuworker.engine.transfers import Transfers
from gpuworker.scheduling.frame_claims import Claims
from gpuworker.scheduling.images import EndedTransfer, Image
from tests.support.gpuworker.agent_harness import Driver, keys, report_of

SIZE, BLOCKS = 4, 20
TOKENS = list(range(SIZE * BLOCKS + 1))
HASHES = keys(TOKENS, SIZE)
MIB = 1 << 20
DONE, STALE, CORRUPT, FAILED, LATE = TransferEnd


class Mover:
    """Ends what it is told to end, in the order in which the test says so."""

    def __init__(self) -> None:
        self.usable = True
        self.started: list[tuple[Transfer, Image | None]] = []
        self.ended: list[EndedTransfer] = []
        self.calls: list[str] = []

    def start(self, transfer: Transfer, image: Image | None = None) -> None:
        self.started.append((transfer, image))

    def poll(self) -> list[EndedTransfer]:
        ended, self.ended = self.ended, []
        return ended

    def clear(self, reset: int) -> None:
        self.calls.append(f"clear {reset}")

    def close(self) -> None:
        self.calls.append("close")

    def end(self, transfer: Transfer, end: TransferEnd = DONE) -> None:
        image = f"image {transfer.id}".encode() if end is DONE and not transfer.saves else None
        self.ended.append(EndedTransfer(transfer, image, end))


class Images:
    """Remembers what was taken and landed, each in `seconds`."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.taken: list[Place] = []
        self.landed: list[tuple[FrameId, Image]] = []
        self.seconds = 0.0

    def take(self, place: Place) -> Image:
        self.clock.advance(self.seconds)
        self.taken.append(place)
        return f"{place.medium.name} {place.index}".encode()

    def land(self, frame: FrameId, image: Image, of_states: bool = False) -> None:
        self.clock.advance(self.seconds)
        self.landed.append((frame, image))


class Side:
    """A worker whose blocks 0 to 19 hold a prompt, and its transfers with images of 1 MiB: four a turn."""

    def __init__(self, image_bytes: int = MIB, reset: int = 0) -> None:
        self.clock, self.mover = ManualClock(100.0), Mover()
        self.images = Images(self.clock)
        self.driver = Driver(24, SIZE, host_frames=BLOCKS, disk_frames=BLOCKS)
        self.agent = self.driver.agent
        self.agent.restore_saved(Claims(), reset)
        self.transfers = Transfers(self.images, image_bytes, self.clock, self.mover, reset=reset)
        self.driver.submit(0, TOKENS, max_tokens=4)
        self.driver.admit(0, list(range(BLOCKS + 1)))
        self.driver.step()
        self.report()

    def report(self) -> Report:
        return report_of(self.driver)

    def give(self, *transfers: Transfer, tier: tuple[TierCopy, ...] = (), reset: int = 0) -> None:
        self.agent.apply_grant(GrantBatch(0, tier=tier, reset=reset, transfers=transfers))

    def turn(self, compute: float = 0.0, steps_run: bool = False) -> bool:
        return self.transfers.turn(self.agent, compute, steps_run)

    def fetched(self, seconds: float, *numbers: int, compute: float = 0.0) -> None:
        """Let blocks be fetched, and land after so many seconds."""
        transfers = [fetch(number) for number in numbers]
        self.give(*transfers)
        self.turn(compute)
        self.clock.advance(seconds)
        for transfer in transfers:
            self.mover.end(transfer)
        while self.turn(compute):
            pass
        self.report()

    def started(self) -> list[int]:
        return [transfer.id for transfer, _ in self.mover.started]

    def landed(self) -> list[int]:
        return [frame for frame, _ in self.images.landed]


def save(number: int) -> Transfer:
    """Return the save of block `number`, with that id, into that frame."""
    ends = Place(Medium.BLOCK, BlockId(number)), Place(Medium.DISK, FrameId(number))
    return Transfer(number, HASHES[number], _parent(number), number, *ends)


def fetch(number: int) -> Transfer:
    """Return the fetch of what frame `number` on disk has, with that id, into that frame of host memory."""
    ends = Place(Medium.DISK, FrameId(number)), Place(Medium.HOST, FrameId(number))
    return Transfer(number, HASHES[number], _parent(number), number, *ends)


def _parent(number: int) -> BlockHash:
    return HASHES[number - 1] if number else BlockHash(b"")


def test_a_turn_takes_images_of_four_mebibytes() -> None:
    side = Side()
    side.give(*map(save, range(10)))
    assert side.turn()
    assert side.mover.started == [(save(n), f"BLOCK {n}".encode()) for n in range(4)]
    assert [side.turn(), side.turn(), side.turn()] == [True, True, False]
    assert side.started() == list(range(10))
    assert [place.index for place in side.images.taken] == list(range(10)), "each once"


@pytest.mark.parametrize(("image_bytes", "a_turn"), [(3 * MIB, 1), (64 * MIB, 1), (0, 10), (MIB // 2, 8)])
def test_one_image_at_least_is_taken_and_landed_a_turn(image_bytes: int, a_turn: int) -> None:
    side = Side(image_bytes)
    side.give(*map(save, range(10)))
    side.turn()
    assert len(side.images.taken) == a_turn
    other = Side(image_bytes)
    other.give(*map(fetch, range(10)))
    other.turn()
    assert other.started() == list(range(10)), "reading takes the engine no time"
    for transfer, _ in other.mover.started:
        other.mover.end(transfer)
    other.turn()
    assert len(other.landed()) == a_turn


def test_what_was_read_lands_in_its_order_and_is_reported_at_once() -> None:
    side = Side()
    transfers = [fetch(n) for n in range(6)]
    side.give(*transfers)
    side.turn()
    for number in (3, 0, 1, 2, 5, 4):
        side.mover.end(transfers[number])
    assert side.turn()
    assert side.images.landed == [(n, f"image {n}".encode()) for n in (3, 0, 1, 2)]
    assert side.report().ended == tuple((n, DONE) for n in (3, 0, 1, 2))
    assert side.turn()
    assert side.landed() == [3, 0, 1, 2, 5, 4]
    assert not side.turn()


def test_a_landing_waits_for_its_copy_and_those_behind_it_wait_too() -> None:
    side = Side()
    first, second = fetch(0), fetch(1)
    side.give(first, second, tier=(TierCopy(BlockId(3), FrameId(0)),))
    side.turn()
    side.mover.end(first)
    side.mover.end(second)
    side.turn()
    assert side.landed() == []
    plan = side.driver.plan()
    assert not side.turn()
    side.driver.complete(plan)
    assert side.turn()
    assert side.landed() == [0, 1]


def test_ends_of_saves_and_failures_are_reported_as_they_are() -> None:
    side = Side()
    saves, fetches = [save(n) for n in range(3)], [fetch(n) for n in range(10, 12)]
    side.give(*saves, *fetches)
    side.turn()
    for transfer, end in zip([*saves, *fetches], (DONE, FAILED, DONE, CORRUPT, FAILED), strict=True):
        side.mover.end(transfer, end)
    side.turn()
    assert side.report().ended == ((0, DONE), (1, FAILED), (2, DONE), (10, CORRUPT), (11, FAILED))
    assert [each.block for each in side.agent.inventory().saved] == [0, 2]


# ---------------------------------------------------------------- late fetches


def test_a_fetch_that_takes_half_a_second_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    transfers = [fetch(0), fetch(1)]
    assert side.transfers.patience is None, "nothing is to come"
    side.give(*transfers)
    side.turn()
    assert side.transfers.patience == 0.5
    side.clock.advance(0.5)
    assert not side.turn()
    assert side.transfers.patience == 0.0
    side.clock.advance(0.01)
    with caplog.at_level(logging.WARNING):
        assert side.turn()
    assert "the disk gave nothing for 0.5 s; 2 blocks are computed instead" in caplog.text
    assert side.report().ended == ((0, LATE), (1, LATE))
    assert side.transfers.patience is None
    side.mover.end(transfers[0])
    side.mover.end(transfers[1], CORRUPT)
    side.turn()
    assert side.landed() == [], "what comes later is dropped"


def test_each_end_renews_patience_and_slow_disks_get_four_times_what_they_take() -> None:
    side = Side()
    side.fetched(0.4, 10, 11)
    transfers = [fetch(n) for n in range(4)]
    side.give(*transfers)
    side.turn()
    side.clock.advance(0.4)
    side.mover.end(transfers[0])
    side.turn()
    assert side.transfers.patience == pytest.approx(4 * 0.2 * 3)
    side.clock.advance(2.3)
    side.turn()
    assert side.report().ended == ((0, DONE),)
    side.clock.advance(0.2)
    side.turn()
    assert side.report().ended == ((1, LATE), (2, LATE), (3, LATE))


def test_a_disk_that_hangs_is_not_asked_until_all_that_it_was_late_with_has_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However often blocks are ordered again meanwhile, no further read waits behind those that hang."""
    side = Side()
    held = [fetch(0), fetch(1)]
    side.give(*held)
    side.turn()
    side.clock.advance(0.6)
    side.turn()
    assert side.report().ended == ((0, LATE), (1, LATE))
    for number in range(2, 7):
        side.give(fetch(number))
        side.turn()
        assert side.report().ended == ((number, LATE),), "at once"
        assert side.transfers.patience is None, "nothing is to come"
    assert [transfer for transfer, _ in side.mover.started] == held
    side.mover.end(held[0])
    side.turn()
    side.give(fetch(7))
    side.turn()
    assert side.report().ended == ((7, LATE),), "one still hangs"
    side.mover.end(held[1], FAILED)
    with caplog.at_level(logging.WARNING):
        side.turn()
    assert caplog.text.count("it is asked again") == 1
    again = fetch(8)
    side.give(again)
    side.turn()
    side.mover.end(again)
    side.turn()
    assert [transfer for transfer, _ in side.mover.started] == [*held, again]
    assert side.report().ended == ((8, DONE),)
    assert side.landed() == [8]


def test_a_hang_outlives_the_session_in_which_it_began() -> None:
    """Orders of a session are void after it, but the thread that reads still hangs."""
    side = Side()
    held = fetch(0)
    side.give(held)
    side.turn()
    side.clock.advance(0.6)
    side.turn()
    side.agent.inventory()
    side.agent.attached(0)
    side.give(fetch(1))
    side.turn()
    assert [transfer for transfer, _ in side.mover.started] == [held]


def test_patience_begins_with_the_first_fetch_behind_a_pause() -> None:
    side = Side()
    side.give(fetch(0))
    side.turn()
    side.mover.end(side.mover.started[0][0])
    side.turn()
    side.clock.advance(60.0)
    side.give(fetch(1))
    side.turn()
    assert side.transfers.patience == 0.5


# ---------------------------------------------------------------- sessions, resets, the end of the disk


def test_a_reset_is_carried_out_on_disk_before_it_is_reported() -> None:
    side = Side(reset=3)
    side.turn()
    assert side.mover.calls == [], "the disk has carried that out"
    late = fetch(0)
    side.give(late)
    side.turn()
    side.mover.end(late)
    side.give(save(1), reset=4)
    side.turn()
    assert side.mover.calls == ["clear 4"]
    assert side.landed() == [], "it was void"
    assert side.started() == [0, 1], "what was ordered behind the reset counts"
    assert side.report().reset == 4
    side.turn()
    assert side.mover.calls == ["clear 4"]


def test_an_image_that_was_read_before_a_break_is_dropped() -> None:
    side = Side()
    old, new = fetch(0), fetch(0)
    side.give(old)
    side.turn()
    side.mover.end(old)
    side.agent.inventory()
    side.agent.attached(0)
    side.give(new)
    side.turn()
    assert side.landed() == []
    side.mover.end(new)
    side.turn()
    assert side.landed() == [0]
    assert side.report().ended == ((0, DONE),)


def test_a_disk_that_is_not_usable_is_given_up_once() -> None:
    side = Side()
    side.agent.restore_saved(Claims((CachedBlock(FrameId(7), HASHES[0], -1, 0, HASHES[0], 0),)), reset=0)
    transfers = [fetch(0), save(1)]
    side.give(*transfers)
    side.turn()
    side.mover.usable = False
    side.turn()
    report = side.report()
    assert (report.ended, report.disk_closed) == (((0, FAILED), (1, FAILED)), True)
    assert side.transfers.patience is None
    assert side.agent.disk_frames == 0
    side.turn()
    taken = side.agent.take_report()
    assert taken is None or not taken.disk_closed


def test_costs_are_told_when_they_have_changed_by_a_quarter() -> None:
    side = Side()
    side.fetched(0.25, 0)
    told = []
    for number, compute in enumerate([1.0, 1.2, 1.3, 1.6, 1.7], start=1):
        side.turn(compute)
        side.driver.submit(number, [1, 2, 3])  # costs alone are worth no report
        told.append(side.report().transfer_costs)
    assert told == [TransferCosts(1.0, 0.25), None, TransferCosts(1.3, 0.25), None, TransferCosts(1.7, 0.25)]


def test_what_copies_take_is_told_and_forgotten_after_ten_minutes_if_it_is_no_gain() -> None:
    """Nothing is copied then, so nothing else would say that copies are quick again."""
    side = Side()
    side.transfers.note_copies(4, 1.0)
    told = []
    for number, compute in enumerate([1.0, 0.375, 0.375], start=1):
        side.turn(compute)
        side.driver.submit(number, [1, 2, 3])
        told.append(side.report().transfer_costs)
        side.clock.now += 301.0
    assert told == [TransferCosts(1.0, 0.0, copy=0.25), TransferCosts(0.375, 0.0, copy=0.25), TransferCosts(0.375, 0.0)]


def test_a_fetch_from_disk_lasts_until_its_last_block_has_landed() -> None:
    """A sequence waits for all of it: that the host's memory is slow is a part of what fetches take."""
    side = Side()
    transfers = [fetch(n) for n in range(5)]
    side.give(*transfers)
    side.turn()
    side.clock.advance(1.0)
    for transfer in transfers:
        side.mover.end(transfer)
    side.turn()
    assert (len(side.landed()), side.transfers.read_seconds) == (4, 0.0)
    side.clock.advance(0.5)
    side.turn()
    assert side.transfers.read_seconds == pytest.approx(1.5 / 5)


def test_a_fetch_from_disk_does_not_count_its_wait_for_the_one_before() -> None:
    side = Side()
    first, second = [fetch(0), fetch(1)], [fetch(2), fetch(3)]
    side.give(*first)
    side.turn()
    side.give(*second)
    side.turn()
    side.clock.advance(2.0)
    for transfer in first:
        side.mover.end(transfer)
    side.turn()
    side.clock.advance(3.0)
    for transfer in second:
        side.mover.end(transfer)
    side.turn()
    assert side.transfers.read_seconds == pytest.approx((0.9 * 2.0 + 3.0) / (0.9 * 2 + 2))


def test_what_came_too_late_teaches_how_long_it_took_and_what_failed_teaches_nothing() -> None:
    side = Side()
    transfers = [fetch(0), fetch(1)]
    side.give(*transfers)
    side.turn()
    side.clock.advance(0.6)
    side.turn()
    assert side.report().ended == ((0, LATE), (1, LATE))
    side.clock.advance(1.4)
    for transfer in transfers:
        side.mover.end(transfer)
    side.turn()
    assert side.transfers.read_seconds == 1.0
    side.give(fetch(2), fetch(3))
    side.turn()
    side.clock.advance(30.0)
    (_, second) = (transfer for transfer, _ in side.mover.started[-2:])
    side.mover.end(side.mover.started[-2][0])
    side.mover.end(second, FAILED)
    side.turn()
    assert side.transfers.read_seconds == 1.0


def test_after_a_minute_without_a_fetch_nobody_knows_that_a_disk_is_no_gain() -> None:
    """Blocks that take longer to read than to compute are not fetched: only so are they tried again."""
    side = Side()
    side.fetched(0.6, 0, compute=1.0)
    side.clock.advance(60.0)
    side.turn(compute=1.0)
    assert side.transfers.read_seconds == pytest.approx(0.6)
    side.clock.advance(0.1)
    side.turn(compute=1.3)
    assert side.transfers.read_seconds == pytest.approx(0.6), "a gain is remembered"
    side.turn(compute=1.0)
    assert side.transfers.read_seconds == 0.0
    side.fetched(0.4, 1, compute=1.0)
    assert side.transfers.read_seconds == pytest.approx(0.4)


# ---------------------------------------------------------------- beside steps


def test_beside_steps_images_are_taken_a_few_at_a_time_and_rest_ten_times_as_long() -> None:
    side = Side(image_bytes=1 << 16)
    side.images.seconds = 0.0001
    side.give(*map(save, range(10)))
    assert side.turn(steps_run=True)
    assert side.started() == list(range(10)), "what one takes is not known yet"
    side.give(*map(save, range(10, 20)))
    assert not side.turn(steps_run=True)
    side.clock.advance(9 * 0.001 + 1e-6)
    assert side.turn(steps_run=True)
    assert side.started() == list(range(12)), "two take less than a quarter of a millisecond"
    assert side.turn()
    assert side.started() == list(range(20)), "no step runs"


def test_beside_steps_images_land_a_few_at_a_time_and_the_engine_looks_again() -> None:
    side = Side(image_bytes=1 << 16)
    side.images.seconds = 0.0001
    side.fetched(0.1, 10)
    transfers = [fetch(n) for n in range(6)]
    side.give(*transfers)
    side.turn()
    for transfer in transfers:
        side.mover.end(transfer)
    side.clock.advance(9 * 0.0001 + 1e-6)
    assert side.turn(steps_run=True)
    assert side.landed() == [10, 0, 1]
    assert not side.turn(steps_run=True)
    assert side.transfers.patience == pytest.approx(9 * 0.0002)
    side.clock.advance(9 * 0.0002 + 1e-6)
    assert side.turn(steps_run=True)
    assert side.landed() == [10, 0, 1, 2, 3]
    assert side.turn(), "no step runs"
    assert side.landed() == [10, 0, 1, 2, 3, 4, 5]
    assert side.transfers.patience is None


def test_a_landing_that_waits_for_a_copy_does_not_keep_the_engine_awake() -> None:
    side = Side()
    side.images.seconds = 0.0001
    side.fetched(0.1, 10)
    waiting = fetch(0)
    side.give(waiting, tier=(TierCopy(BlockId(3), FrameId(0)),))
    side.turn()
    side.mover.end(waiting)
    side.clock.advance(1.0)
    side.turn(steps_run=True)
    assert side.landed() == [10]
    assert side.transfers.patience is None


def test_the_mover_is_closed_with_the_engine() -> None:
    side = Side()
    side.transfers.close()
    assert side.mover.calls == ["close"]
