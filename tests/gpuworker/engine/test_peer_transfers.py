"""The engine's part of fetches from peers: one for each source, what came lands, and what a block takes is learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from common.contracts.clock import ManualClock
from common.contracts.transfers import FROM_PEER, Medium, PeerSource, Place, Transfer, TransferCosts, TransferEnd
from common.contracts.types import BlockHash, FrameId
from gpuworker.engine.transfers import Transfers
from gpuworker.scheduling.images import Image

RED, BLUE = (PeerSource(name, name.encode().ljust(16), "127.0.0.1:1", bytes(16), 0) for name in ("red", "blue"))


def transfer(number: int, peer: PeerSource = RED) -> Transfer:
    target = Place(Medium.HOST, FrameId(number))
    return Transfer(number, BlockHash(bytes([number]) * 16), BlockHash(b""), 0, FROM_PEER, target, peer)


class Ended(NamedTuple):
    transfer: Transfer
    image: Image | None
    end: TransferEnd


@dataclass
class Peers:
    """Stands for the client of peers: a test says what comes."""

    asked: list[tuple[PeerSource, list[int], float]] = field(default_factory=list)
    coming: list[Ended] = field(default_factory=list)
    closed: bool = False

    def fetch(self, source: PeerSource, transfers: Sequence[Transfer], patience: float) -> None:
        self.asked.append((source, [each.id for each in transfers], patience))

    def poll(self) -> Sequence[Ended]:
        taken, self.coming = self.coming, []
        return taken

    def close(self) -> None:
        self.closed = True


@dataclass
class Agent:
    """Stands for the lease agent: what was ordered and ended. It lets every image land that is not `held`."""

    reset: int = 0
    ordered: list[Transfer] = field(default_factory=list)
    void: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    ended: list[tuple[int, TransferEnd]] = field(default_factory=list)
    costs: list[TransferCosts] = field(default_factory=list)

    def take_reads(self) -> list[Transfer]:
        taken, self.ordered = self.ordered, []
        return taken

    def take_saves(self, most: int) -> list[Transfer]:
        return []

    def is_open(self, transfer: Transfer) -> bool:
        return transfer.id not in self.void

    def may_land(self, transfer: Transfer) -> bool:
        return transfer.id not in self.held

    def end_transfer(self, transfer: Transfer, end: TransferEnd) -> None:
        self.ended.append((transfer.id, end))

    def note_costs(self, costs: TransferCosts) -> None:
        self.costs.append(costs)


class Frames:
    def __init__(self) -> None:
        self.landed: list[tuple[int, bytes]] = []

    def take(self, place: Place) -> Image:
        raise AssertionError(f"nothing is saved, not even {place}")

    def land(self, frame: FrameId, image: Image, of_states: bool = False) -> None:
        self.landed.append((frame, bytes(image)))


@dataclass
class Bench:
    clock: ManualClock = field(default_factory=ManualClock)
    peers: Peers = field(default_factory=Peers)
    agent: Agent = field(default_factory=Agent)
    frames: Frames = field(default_factory=Frames)
    image_bytes: int = 2 << 20
    computing: float = 1.0

    def __post_init__(self) -> None:
        self.transfers = Transfers(self.frames, self.image_bytes, self.clock, None, self.peers)

    def turn(self) -> bool:
        return self.transfers.turn(self.agent, self.computing)  # type: ignore[arg-type]

    def fetched(self, seconds: float, *transfers: Transfer, end: TransferEnd = TransferEnd.DONE) -> None:
        """Let a fetch be ordered, and end after so many seconds."""
        self.agent.ordered = list(transfers)
        self.turn()
        self.clock.advance(seconds)
        self.peers.coming = [Ended(each, b"image" if end is TransferEnd.DONE else None, end) for each in transfers]
        while self.turn():
            pass


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.transfers.close()
    assert made.peers.closed


def test_each_source_is_asked_once_for_all_its_blocks(bench: Bench) -> None:
    bench.agent.ordered = [transfer(1), transfer(2, BLUE), transfer(3)]
    assert bench.turn()
    assert bench.peers.asked == [(RED, [1, 3], 0.5), (BLUE, [2], 0.5)]
    assert not bench.turn()


@pytest.mark.parametrize(("computing", "patience"), [(0.0, 0.5), (0.25, 0.5), (0.5, 0.75)])
def test_a_first_fetch_may_be_silent_for_a_quarter_of_what_computing_takes(computing: float, patience: float) -> None:
    bench = Bench(computing=computing)
    bench.agent.ordered = [transfer(each) for each in range(1, 7)]
    bench.turn()
    assert bench.peers.asked == [(RED, [1, 2, 3, 4, 5, 6], patience)]


def test_what_came_lands_and_what_did_not_ends_as_it_did(bench: Bench) -> None:
    bench.agent.ordered = transfers = [transfer(1), transfer(2), transfer(3)]
    bench.turn()
    ends = (TransferEnd.DONE, TransferEnd.STALE, TransferEnd.CORRUPT)
    bench.peers.coming = [Ended(each, b"one", end) for each, end in zip(transfers, ends, strict=True)]
    bench.turn()
    assert bench.agent.ended == [(2, TransferEnd.STALE), (3, TransferEnd.CORRUPT), (1, TransferEnd.DONE)]
    assert bench.frames.landed == [(1, b"one")]


def test_two_fetches_with_one_token_are_two(bench: Bench) -> None:
    """The stream breaks, and the same blocks are ordered again within a second: the token is the same."""
    first, second = [transfer(1), transfer(2)], [transfer(3), transfer(4)]
    bench.agent.ordered = first
    bench.turn()
    bench.agent.ordered, bench.agent.void = second, {1, 2}
    bench.turn()
    bench.peers.coming = [Ended(each, b"image", TransferEnd.DONE) for each in (*first, *second)]
    bench.turn()
    bench.turn()
    assert bench.agent.ended == [(3, TransferEnd.DONE), (4, TransferEnd.DONE)]
    assert bench.frames.landed == [(3, b"image"), (4, b"image")]


def test_a_turn_lands_4_mib_and_waits_for_the_first_that_may_not(bench: Bench) -> None:
    transfers = [transfer(number) for number in range(1, 6)]
    bench.agent.ordered = transfers
    bench.turn()
    bench.peers.coming = [Ended(each, b"image", TransferEnd.DONE) for each in transfers]
    bench.turn()
    assert [frame for frame, _ in bench.frames.landed] == [1, 2]
    bench.agent.held = {3}
    bench.turn()
    assert len(bench.frames.landed) == 2
    bench.agent.held = set()
    assert bench.turn()
    assert bench.turn()
    assert [frame for frame, _ in bench.frames.landed] == [1, 2, 3, 4, 5]


def test_what_failed_at_the_peer_ends_at_once(bench: Bench) -> None:
    bench.fetched(0.1, transfer(1), transfer(2), end=TransferEnd.FAILED)
    assert bench.agent.ended == [(1, TransferEnd.FAILED), (2, TransferEnd.FAILED)]
    assert not bench.frames.landed


def test_what_a_block_takes_is_learnt_from_the_second_fetch_of_a_source_on(bench: Bench) -> None:
    bench.fetched(8.0, transfer(1), transfer(2))
    assert [each.peer for each in bench.agent.costs] == [0.0]
    bench.fetched(2.0, transfer(3), transfer(4))
    bench.fetched(8.0, transfer(5), transfer(6), transfer(9), transfer(10))
    learnt = (0.9 * 2.0 + 8.0) / (0.9 * 2 + 4)
    assert [each.peer for each in bench.agent.costs] == [0.0, 1.0, pytest.approx(learnt)]
    assert [each.peer_setup for each in bench.agent.costs] == pytest.approx([0.0] * 3)
    bench.fetched(50.0, transfer(11, BLUE))
    assert bench.agent.costs[-1].peer == pytest.approx(learnt), "it has only connected"
    bench.agent.ordered = [transfer(7), transfer(8)]
    bench.turn()
    source, asked, patience = bench.peers.asked[-1]
    assert (source, asked) == (RED, [7, 8])
    assert patience == pytest.approx(4 * learnt * 2)


def test_what_each_fetch_takes_beside_its_blocks_is_learnt_and_reported(bench: Bench) -> None:
    bench.fetched(1.0, transfer(1))
    assert (bench.transfers.fetch_seconds, bench.transfers.fetch_setup_seconds) == (0.0, 0.0)
    bench.fetched(3.0, transfer(2))
    bench.fetched(6.0, *(transfer(number) for number in range(3, 7)))
    assert bench.transfers.fetch_seconds == pytest.approx(1.0)
    assert bench.transfers.fetch_setup_seconds == pytest.approx(2.0)


def test_a_fetch_lasts_until_its_last_block_has_landed(bench: Bench) -> None:
    """A sequence waits for all of it: that the host's memory is slow is a part of what fetches take."""
    bench.fetched(1.0, transfer(1))
    bench.agent.ordered = transfers = [transfer(2), transfer(3), transfer(4)]
    bench.turn()
    bench.clock.advance(1.0)
    bench.peers.coming = [Ended(each, b"image", TransferEnd.DONE) for each in transfers]
    bench.turn()
    assert (len(bench.frames.landed), bench.agent.costs[-1].peer) == (3, 0.0)
    bench.clock.advance(5.0)
    bench.turn()
    assert bench.agent.costs[-1].peer == pytest.approx(2.0)


def test_a_fetch_that_failed_teaches_nothing(bench: Bench) -> None:
    bench.fetched(0.1, transfer(1))
    bench.fetched(1.0, transfer(2))
    bench.fetched(30.0, transfer(3), transfer(4), end=TransferEnd.FAILED)
    bench.fetched(20.0, transfer(5), end=TransferEnd.STALE)
    assert bench.agent.costs[-1].peer == 1.0


def test_a_gain_is_remembered(bench: Bench) -> None:
    bench.fetched(0.1, transfer(1))
    bench.fetched(0.3, transfer(2))
    bench.clock.advance(500.0)
    bench.turn()
    assert bench.agent.costs[-1].peer == pytest.approx(0.3)


def test_after_a_minute_without_a_fetch_nobody_knows_that_it_takes_longer_than_computing(bench: Bench) -> None:
    """A block that took longer than computing it is not fetched: only so is it tried again."""
    bench.fetched(0.1, transfer(1))
    bench.fetched(9.0, transfer(2))
    bench.clock.advance(59.0)
    bench.turn()
    assert bench.agent.costs[-1].peer == 9.0
    bench.clock.advance(2.0)
    bench.turn()
    assert bench.agent.costs[-1].peer == 0.0
    bench.fetched(0.5, transfer(3))
    assert bench.agent.costs[-1].peer == 0.5
