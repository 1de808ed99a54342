"""Blocks that move in a replay: exact times of each medium, what is late or gone, and what links are shared by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli.replay.figures import figures_of
from cli.replay.links import DEFAULT_LINKS, USUAL, LinkRates, Links, Moves, parse_links
from cli.replay.policies import RoundRobin
from cli.replay.simulation import Replay, ReplayOptions, replay
from cli.replay.trace import Arrival, Trace
from cli.replay.worker import Timing
from common.contracts.transfers import FROM_PEER, ImageName, Medium, PeerSource, Place, Transfer, TransferEnd
from common.contracts.types import BlockHash, FrameId, KvGroup, KvGroupKind
from gpuworker.scheduling.step_costs import StepCosts

COSTS = StepCosts(base=0.01, decode=0.001, prefill=0.01)
"""A block of sixteen tokens is computed in 160 ms."""
IMAGE = 1024 * 16
RATES = LinkRates(host=IMAGE / 0.002, disk=IMAGE / 0.003, peer=IMAGE / 0.004, setup=0.005, token=1024.0)
"""A block is copied in 2 ms, read in 3 ms, and comes from a peer in 4 ms."""
ONE = ReplayOptions(num_blocks=64, timing=Timing(COSTS, message=0.0, index=0.0))
TWO = replace(ONE, workers=2, router=RoundRobin, moves=Moves(64, peers=True, rates=RATES))
TALK = (1, 2, 3, 4)


def step(computed: int) -> float:
    return COSTS.base + COSTS.decode + (computed - 1) * COSTS.prefill


def replayed(options: ReplayOptions, *arrivals: Arrival) -> Replay:
    return replay(Trace(arrivals, 16), options)


def test_the_usual_rates_and_others() -> None:
    assert parse_links(DEFAULT_LINKS) == USUAL == LinkRates(8e9, 1e9, 1e9, 0.001, 131072.0)
    found = parse_links("peer=2.5GB/s, setup=0us,token=12KiB,host=500MB/s")
    assert found == LinkRates(5e8, 1e9, 2.5e9, 0.0, 12288.0)


@pytest.mark.parametrize(
    "text", ["", "peer=1", "peer=1GB", "peer=1GB/s,peer=2GB/s", "setup=1GB/s", "net=1GB/s", "disk=0GB/s", "token=0KiB"]
)
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"host=8GB/s,disk=1GB/s|expected more than nothing"):
        parse_links(text)


def test_blocks_of_another_worker_come_over_its_link_and_then_by_a_step() -> None:
    found = replayed(TWO, Arrival(0.0, 64, 4, TALK), Arrival(5.0, 64, 4, TALK)).requests
    assert [each.worker for each in found] == ["worker-0", "worker-1"]
    assert [each.first_token_s for each in found] == pytest.approx([step(64), 0.005 + 3 * 0.004 + 3 * 0.002 + step(16)])
    assert [(each.cached_tokens, each.peer_tokens, each.host_tokens) for each in found] == [(0, 0, 0), (48, 48, 0)]


def test_two_that_ask_one_worker_at_once_share_what_it_sends() -> None:
    """The last block of the second one comes behind all those of the first."""
    three = replace(TWO, workers=3)
    asked = (Arrival(0.0, 64, 4, TALK), Arrival(5.0, 64, 4, TALK), Arrival(5.0, 64, 4, TALK))
    _, first, second = replayed(three, *asked).requests
    assert {first.worker, second.worker} == {"worker-1", "worker-2"}
    assert first.first_token_s == pytest.approx(0.005 + 3 * 0.004 + 3 * 0.002 + step(16))
    assert second.first_token_s == pytest.approx(0.005 + 6 * 0.004 + 3 * 0.002 + step(16))


def test_a_fetch_of_which_nothing_comes_for_too_long_is_computed() -> None:
    """Nothing was learnt yet, so it is given up after half a second."""
    slow = replace(TWO, moves=Moves(64, peers=True, rates=replace(RATES, peer=IMAGE / 0.6)))
    found = replayed(slow, Arrival(0.0, 64, 4, TALK), Arrival(5.0, 64, 4, TALK)).requests
    assert found[1].first_token_s == pytest.approx(0.005 + 0.5 + step(64))
    assert (found[1].cached_tokens, found[1].peer_tokens) == (0, 0)


def test_what_leaves_the_pool_comes_back_from_host_memory_or_is_lost_without_it() -> None:
    """Three other prompts of twenty blocks fill a pool of 24, and each of their steps copies what must leave."""
    others = [Arrival(5.0 * n, 320, 4, tuple(range(100 * n, 100 * n + 20))) for n in (1, 2, 3)]
    asked = (Arrival(0.0, 64, 4, TALK), *others, Arrival(30.0, 64, 4, TALK))
    small = replace(ONE, num_blocks=24)
    alone = replayed(small, *asked).requests[-1]
    assert alone.first_token_s == pytest.approx(step(64))
    assert alone.cached_tokens == 0
    kept = replayed(replace(small, moves=Moves(256, rates=RATES)), *asked).requests
    assert (kept[-1].cached_tokens, kept[-1].host_tokens, kept[-1].peer_tokens) == (48, 48, 0)
    stored = round(((kept[-1].first_token_s or 0.0) - 3 * 0.002 - step(16)) / 0.002, 6)
    assert stored == int(stored) >= 0, "and a copy for each block that leaves for it"
    assert (kept[1].first_token_s or 0.0) - step(320) == pytest.approx(0.0, abs=0.011)


def test_what_leaves_host_memory_too_comes_back_from_disk() -> None:
    others = [Arrival(5.0 * n, 320, 4, tuple(range(100 * n, 100 * n + 20))) for n in range(1, 6)]
    asked = (Arrival(0.0, 64, 4, TALK), *others, Arrival(60.0, 64, 4, TALK))
    small = replace(ONE, num_blocks=24, moves=Moves(8, 512, rates=RATES))
    last = replayed(small, *asked).requests[-1]
    assert (last.cached_tokens, last.disk_tokens, last.host_tokens) == (48, 48, 0)
    assert (last.first_token_s or 0.0) >= 3 * 0.003 + 3 * 0.002 + step(16)


def test_where_copies_are_slower_than_computing_host_memory_changes_nothing_but_what_shows_that() -> None:
    """A block is copied in 200 ms, and computed in 160: a few steps copy before that is known."""
    slow = replace(RATES, host=IMAGE / 0.2)
    others = [Arrival(5.0 * n, 320, 4, tuple(range(100 * n, 100 * n + 20))) for n in (1, 2, 3, 4, 5)]
    asked = (Arrival(0.0, 64, 4, TALK), *others, Arrival(60.0, 64, 4, TALK))
    small = replace(ONE, num_blocks=24)
    alone, slowed = (replayed(each, *asked).requests for each in (small, replace(small, moves=Moves(256, rates=slow))))
    assert slowed[-1].cached_tokens == 0
    assert slowed[-1].first_token_s == pytest.approx(step(64))
    later = [b.finished_at != pytest.approx(a.finished_at) for a, b in zip(alone, slowed, strict=True)]
    assert 1 <= sum(later) <= 2


FULL = KvGroup(KvGroupKind.FULL, 0, 1, (0,))
WINDOW = KvGroup(KvGroupKind.WINDOW, 32, 3, (1,))
"""Of a block's K and V it has three quarters: a page is a quarter of what a block has in all layers."""


def test_pages_of_windows_come_as_far_as_the_last_hit_reads_them() -> None:
    """Of three blocks the window behind the last one reads two: 3 + 2 x 3 pages, and then the step copies as many."""
    paged = replace(TWO, num_blocks=256, groups=(FULL, WINDOW))
    first, second = replayed(paged, Arrival(0.0, 64, 4, TALK), Arrival(5.0, 64, 4, TALK)).requests
    assert first.first_token_s == pytest.approx(step(64))
    assert (second.worker, second.cached_tokens, second.peer_tokens) == ("worker-1", 48, 48)
    assert second.first_token_s == pytest.approx(0.005 + 9 * 0.001 + 9 * 0.0005 + step(16))


def test_pages_of_windows_come_back_from_host_memory_and_from_disk() -> None:
    others = [Arrival(5.0 * n, 320, 4, tuple(range(100 * n, 100 * n + 20))) for n in range(1, 6)]
    asked = (Arrival(0.0, 64, 4, TALK), *others, Arrival(60.0, 64, 4, TALK))
    small = replace(ONE, num_blocks=96, groups=(FULL, WINDOW))
    assert replayed(small, *asked).requests[-1].cached_tokens == 0
    kept = replayed(replace(small, moves=Moves(1024, rates=RATES)), *asked).requests[-1]
    assert (kept.cached_tokens, kept.host_tokens) == (48, 48)
    saved = replayed(replace(small, moves=Moves(48, 2048, rates=RATES)), *asked).requests[-1]
    assert (saved.cached_tokens, saved.disk_tokens, saved.host_tokens) == (48, 48, 0)
    assert (saved.first_token_s or 0.0) >= 9 * 0.00075 + 9 * 0.0005 + step(16)


def test_equal_runs_are_equal_and_moves_make_others() -> None:
    asked = tuple(Arrival(0.05 * n, 64 + 16 * (n % 5), 8, (n % 7, *range(50, 53))) for n in range(60))
    runs = [replayed(replace(TWO, num_blocks=16, seed=1), *asked) for _ in range(2)]
    assert runs[0].digest == runs[1].digest
    assert runs[0].digest != replayed(replace(TWO, num_blocks=16, seed=1, moves=None), *asked).digest
    assert all(each.finished_at is not None for each in runs[0].requests)


def test_the_share_of_hits_is_told_by_where_they_were() -> None:
    found = figures_of(replayed(TWO, Arrival(0.0, 64, 4, TALK), Arrival(5.0, 64, 4, TALK), Arrival(9.0, 64, 4, TALK)))
    shares = [found[f"hit_{place}_share"] for place in ("pool", "host", "disk", "peer")]
    assert shares == pytest.approx([48 / 192, 0.0, 0.0, 48 / 192])
    assert sum(shares) == pytest.approx(found["hit_share"])
    assert "hit_pool_share" not in figures_of(replayed(ONE, Arrival(0.0, 64, 4, TALK)))


# ---------------------------------------------------------------- links alone


class Timers:
    """A clock, and calls at its times."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[tuple[float, object]]()

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def call_at(self, when: float, callback: object) -> None:
        self.calls.append((when, callback))

    def run(self, until: float) -> None:
        while due := [each for each in self.calls if each[0] <= until]:
            first = min(due, key=lambda each: each[0])
            self.calls.remove(first)
            self.now = first[0]
            first[1]()  # type: ignore[operator]
        self.now = until


class Held:
    """Stands for a lease agent that has some contents."""

    def __init__(self, *keys: bytes) -> None:
        self._keys = keys

    def find_images(self, names: list[ImageName]) -> list[Place | None]:
        return [Place(Medium.HOST, FrameId(1)) if each.key in self._keys else None for each in names]


def test_a_source_sends_what_it_has_by_then_and_the_rest_is_stale() -> None:
    timers = Timers()
    links = Links(Moves(8, peers=True, rates=RATES), 16, timers, timers)
    _, requests = links.connect("source", lambda: None)
    links.connect("asks", lambda: None)
    keys = [BlockHash(bytes([n] * 16)) for n in range(3)]
    peer = PeerSource("source", b"", "", b"", 0)
    moves = [
        Transfer(n, key, keys[0], n, FROM_PEER, Place(Medium.HOST, FrameId(n)), peer) for n, key in enumerate(keys)
    ]
    fetches = links.fetches("asks", lambda: None)
    fetches.fetch(peer, moves, 0.5)
    timers.run(0.005)
    while requests.turn(Held(keys[0], keys[2])):  # type: ignore[arg-type]
        pass
    assert [(each.transfer.id, each.end) for each in fetches.poll()] == [(1, TransferEnd.STALE)]
    timers.run(0.0089)
    assert list(fetches.poll()) == []
    timers.run(0.02)
    assert [(each.transfer.id, each.end) for each in fetches.poll()] == [(0, TransferEnd.DONE), (2, TransferEnd.DONE)]
