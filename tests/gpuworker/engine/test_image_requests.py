"""What peers ask for is answered between steps, first come, first served, few bytes at a time, slower beside steps."""

from __future__ import annotations

import pytest

from common.contracts.clock import ManualClock
from common.contracts.transfers import ImageName, Medium, Place
from common.contracts.types import BlockHash, FrameId
from gpuworker.engine.image_requests import ImageRequests
from gpuworker.scheduling.images import Image

Answers = list[list[Image | None]]


def key(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


class Agent:
    """Stands for the lease agent of a worker that has the even hashes, in the block of that number."""

    def __init__(self) -> None:
        self.asked: list[list[BlockHash]] = []

    def find_images(self, names: list[ImageName]) -> list[Place | None]:
        self.asked.append([name.key for name in names])
        return [None if key[0] % 2 else Place(Medium.BLOCK, FrameId(key[0])) for key, _ in names]


class Images:
    """Takes an image in `seconds` of the clock."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.seconds = clock, 0.0

    def take(self, place: Place) -> Image:
        self.clock.advance(self.seconds)
        return f"{place.medium.name} {place.index}".encode()

    def land(self, frame: FrameId, image: Image, of_states: bool = False) -> None:
        raise AssertionError("nothing lands")


class Server:
    def __init__(self, image_bytes: int) -> None:
        self.woken, self.agent, self.clock = 0, Agent(), ManualClock(100.0)
        self.images = Images(self.clock)
        self.requests = ImageRequests(self.images, image_bytes, self.clock, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def ask(self, *numbers: int) -> Answers:
        found: Answers = []
        self.requests.ask([ImageName(key(each)) for each in numbers], lambda images: found.append(list(images)))
        return found

    def turn(self, steps_run: bool = False) -> bool:
        return self.requests.turn(self.agent, steps_run)  # type: ignore[arg-type]


def test_what_the_worker_does_not_have_is_none() -> None:
    server = Server(1 << 18)
    found = server.ask(2, 3, 4)
    assert server.woken == 1
    assert server.turn()
    assert found == [[b"BLOCK 2", None, b"BLOCK 4"]]
    assert not server.turn()


def test_a_turn_takes_1_mib_and_one_image_at_least() -> None:
    server = Server(300 << 10)
    found = server.ask(*range(2, 9))
    turns = [server.turn() for _ in range(4)]
    assert turns == [True, True, True, False]
    assert [len(each) for each in found] == [3, 3, 1]
    assert [len(each) for each in server.agent.asked] == [3, 3, 1], "the places are those of the turn"
    large = Server(5 << 20)
    found = large.ask(2, 4)
    assert [large.turn(), large.turn(), large.turn()] == [True, True, False]
    assert found == [[b"BLOCK 2"], [b"BLOCK 4"]]


def test_who_asks_first_is_answered_first() -> None:
    server = Server(1 << 20)
    first, second = server.ask(2, 4), server.ask(6)
    server.turn()
    assert (first, second) == ([[b"BLOCK 2"]], [])
    server.turn()
    server.turn()
    assert (first, second) == ([[b"BLOCK 2"], [b"BLOCK 4"]], [[b"BLOCK 6"]])


def test_beside_a_step_few_images_are_taken_and_the_next_ones_after_ten_times_that() -> None:
    server = Server(1 << 16)
    server.images.seconds = 0.0001
    found = server.ask(*range(0, 80, 2))
    assert server.requests.patience == 0.0
    assert server.turn(), "no step runs: as many as ever"
    assert [len(each) for each in found] == [16]
    assert not server.turn(steps_run=True)
    assert server.requests.patience == pytest.approx(9 * 0.0016)
    server.clock.advance(9 * 0.0016 - 1e-6)
    assert not server.turn(steps_run=True)
    server.clock.advance(2e-6)
    assert server.turn(steps_run=True)
    assert [len(each) for each in found] == [16, 2], "two take less than a quarter of a millisecond"
    assert server.requests.patience == pytest.approx(9 * 0.0002)
    assert server.turn(), "the step is over"
    assert [len(each) for each in found] == [16, 2, 16]
    server.turn()
    assert server.requests.patience is None, "nothing is asked for"


def test_what_the_worker_does_not_have_costs_no_time() -> None:
    server = Server(1 << 16)
    found = server.ask(*range(1, 65, 2))
    assert [server.turn(steps_run=True), server.turn(steps_run=True)] == [True, True]
    assert found == [[None] * 16] * 2
