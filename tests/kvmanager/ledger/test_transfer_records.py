"""What records and counts say of transfers: what waits for a fetch, how transfers end, and what the disk keeps."""

from __future__ import annotations

from typing import Any

from common.contracts.clock import ManualClock
from common.contracts.lease import Admit, GrantBatch
from common.contracts.transfers import Fetched, TransferCosts, TransferEnd
from common.contracts.types import Decision, DecisionKind, MissReason
from kvmanager.contracts.block import ROOT
from kvmanager.contracts.counts import PoolCounts
from tests.support.kvmanager.ledgers import finish, hashes, make_ledger, play, prompt, reserve, seal

CHAT = prompt(49)
"""Three blocks and a token."""


class Disk:
    """A ledger of four blocks whose worker does at once what it is told, and says how its next transfers end."""

    def __init__(self, host: int = 6, disk: int = 8, blocks: int = 4, **options: Any) -> None:
        self.clock = ManualClock()
        self.ledger = make_ledger(blocks, clock=self.clock, host_frames=host, disk_frames=disk, **options)
        self._to_end: list[int] = []

    def take(self, batch: GrantBatch | None) -> tuple[Admit, ...]:
        """Note the transfers of a batch; return its admissions."""
        if batch is None:
            return ()
        self._to_end += [each.id for each in batch.transfers]
        return batch.admit

    def end(self, *ends: TransferEnd) -> tuple[Admit, ...]:
        """End all open transfers, the first ones in these ways, the others well; return what is admitted then."""
        taken, self._to_end = self._to_end, []
        known = (*ends, *[TransferEnd.DONE] * len(taken))
        return self.take(play(self.ledger, ended=tuple(zip(taken, known, strict=False))))

    def live(self, number: int, tokens: list[int]) -> None:
        """Let a prompt be admitted, computed and saved."""
        assert self.take(play(self.ledger, reserve=(reserve(number, tokens),)))
        seal(self.ledger, number, hashes(tokens))
        self.take(finish(self.ledger, number))
        self.end()

    def emptied(self) -> Disk:
        """Return a ledger whose worker has started again: it has on disk what this one has."""
        saved = self.ledger.state.store.cache.saved
        new = Disk()
        old, store = self.ledger.state.store.disk, new.ledger.state.store
        assert old is not None
        assert store.disk is not None
        for block_hash in sorted(saved, key=lambda each: old.frames.index[saved[each]]):
            at = saved[block_hash]
            assert store.disk.take_frame(block_hash, old.frames.parent[at] or ROOT, old.frames.index[at])
        return new

    @property
    def counts(self) -> PoolCounts:
        return self.ledger.pool_counts()

    def last(self, kind: DecisionKind) -> Decision:
        return [each for each in self.ledger.drain_decisions() if each.kind is kind][-1]


def saved_chat() -> Disk:
    first = Disk()
    first.live(1, CHAT)
    return first.emptied()


def wait_for(disk: Disk) -> None:
    """Let a sequence wait for the three blocks of the chat."""
    assert disk.take(play(disk.ledger, reserve=(reserve(2, CHAT),))) == ()
    disk.clock.advance(0.031)


def test_saves_are_counted_and_frames_say_what_they_hold() -> None:
    disk = Disk()
    disk.live(1, CHAT)
    counts = disk.counts
    assert (counts.disk_frames, counts.disk_held, counts.disk_closed, counts.fetching) == (8, 3, False, 0)
    assert (counts.totals.disk_stores, counts.totals.disk_loads, counts.totals.transfer_ends) == (3, 0, {"DONE": 3})


def test_a_sequence_that_waits_for_the_disk_says_so_and_what_came() -> None:
    disk = saved_chat()
    wait_for(disk)
    counts = disk.counts
    assert (counts.waiting, counts.fetching, counts.capacity, counts.deferred) == (1, 1, 0, 0)
    waits = disk.last(DecisionKind.SHORTFALL)
    assert (waits.reasons, waits.beneficiary) == (("for blocks that are fetched",), "disk")
    assert dict(waits.figures)["needed"] == 3.0
    (granted,) = disk.end()
    assert granted.fetched == Fetched(3, 3, 0.031, "disk")
    assert (granted.n_shared, disk.counts.fetching) == (3, 0)
    grant = disk.last(DecisionKind.GRANT)
    assert "fetched: 3 of 3 blocks came from disk in 31 ms" in grant.reasons
    figures = dict(grant.figures)
    assert (figures["fetched_blocks"], figures["fetch_seconds"], figures["waited_seconds"]) == (3.0, 0.031, 0.031)
    totals = disk.counts.totals
    assert (totals.fetches, totals.disk_loads, totals.disk_lost, totals.transfer_ends) == (1, 3, 0, {"DONE": 3})


def test_a_fetch_that_fails_says_how() -> None:
    disk = saved_chat()
    wait_for(disk)
    (granted,) = disk.end(TransferEnd.DONE, TransferEnd.CORRUPT, TransferEnd.LATE)
    assert (granted.fetched, granted.n_shared) == (Fetched(1, 3, 0.031, "disk"), 1)
    assert granted.miss_reason is MissReason.DIVERGED_AT
    reason = "fetched: 1 of 3 blocks came from disk in 31 ms; 1 failed their checksum, 1 did not come in time"
    assert reason in disk.last(DecisionKind.GRANT).reasons
    counts = disk.counts
    assert (counts.disk_held, counts.totals.disk_lost) == (1, 2), "what is behind a lost block is of no use"
    assert counts.totals.transfer_ends == {"DONE": 1, "CORRUPT": 1, "LATE": 1}


def test_of_two_that_wait_for_one_fetch_both_have_fetched() -> None:
    disk = saved_chat()
    assert disk.take(play(disk.ledger, reserve=(reserve(2, CHAT), reserve(3, CHAT)))) == ()
    assert disk.counts.fetching == 2
    disk.clock.advance(0.5)
    granted = disk.end()
    assert [each.fetched for each in granted[:1]] == [Fetched(3, 3, 0.5)]
    finish(disk.ledger, 2)
    later = [*granted[1:], *disk.end()]
    assert [each.fetched for each in later] == [Fetched(3, 3, 0.5)] * len(later)


def test_a_disk_that_is_given_up_has_no_frames() -> None:
    disk = Disk()
    disk.live(1, CHAT)
    play(disk.ledger, disk_closed=True)
    counts = disk.counts
    assert (counts.disk_frames, counts.disk_held, counts.disk_closed) == (0, 0, True)


def test_an_eviction_says_what_the_disk_keeps_where_host_memory_does_not() -> None:
    """The pool has four blocks, host memory one frame: of three contents that leave, the last to leave stays there."""
    disk = Disk(host=1)
    disk.live(1, CHAT)
    disk.live(2, prompt(64, 1000))
    evicted = disk.last(DecisionKind.EVICTION)
    assert evicted.reasons[-2:] == (
        "host memory: it keeps 1 of 3",
        "disk: it keeps 2 of the other 2, and 2 of 2 that left host memory for them",
    )
    figures = dict(evicted.figures)
    assert (figures["host_kept"], figures["disk_kept"], figures["disk_blocks"]) == (1.0, 2.0, 3.0)
    assert (figures["host_drops"], figures["host_drops_saved"]) == (0.0, 2.0)
    kept = [[name for name, _ in each.figures if name.endswith("_kept")] for each in evicted.candidates]
    assert kept == [["disk_kept"], ["disk_kept"], ["host_kept"]]
    totals = disk.counts.totals
    assert (totals.host_drops, totals.host_drops_saved) == (0, 2)


def test_a_prompt_is_evicted_only_where_no_tier_has_it() -> None:
    disk = Disk(host=1)
    disk.live(1, CHAT)
    disk.live(2, prompt(64, 1000))
    longer = hashes(prompt(65))
    match = disk.ledger.look_up_prompt(longer, 65)
    assert (match.hit_blocks, match.miss_reason, match.diverged_at) == (1, MissReason.UNFETCHED, 3)
    play(disk.ledger, disk_closed=True)
    match = disk.ledger.look_up_prompt(longer, 65)
    assert (match.hit_blocks, match.miss_reason) == (1, MissReason.EVICTED)


def test_a_worker_without_a_disk_says_nothing_of_it() -> None:
    disk = Disk(host=1, disk=0)
    disk.live(1, CHAT)
    disk.live(2, prompt(64, 1000))
    evicted = disk.last(DecisionKind.EVICTION)
    assert not [name for name, _ in evicted.figures if name.startswith("disk")]
    assert not [each for each in evicted.reasons if each.startswith("disk")]
    assert (disk.counts.disk_frames, disk.counts.totals.host_drops, disk.counts.totals.host_drops_saved) == (0, 2, 0)


def test_what_does_not_pay_is_no_eviction() -> None:
    """A block takes as long to read as to compute."""
    disk = Disk(host=1)
    disk.live(1, CHAT)
    disk.live(2, prompt(64, 1000))
    play(disk.ledger, transfer_costs=TransferCosts(0.01, 0.01))
    (granted,) = disk.take(play(disk.ledger, reserve=(reserve(3, CHAT),)))
    assert (granted.fetched, granted.miss_reason, granted.diverged_at) == (None, MissReason.UNFETCHED, 3)
    words = "the first 3 blocks are in the pool or in tiers, and the missing ones did not come"
    assert disk.last(DecisionKind.GRANT).reasons[:2] == ("unfetched", words)


def test_what_leaves_host_memory_for_a_fetch_is_counted() -> None:
    """Half of the four frames may be filled at once, and all of them hold what the disk has too."""
    disk = Disk(host=4, disk=16)
    for number in range(1, 4):
        disk.live(number, CHAT if number == 1 else prompt(64, 1000 * number))
    before = disk.counts
    assert before.host_held == 4
    assert disk.take(play(disk.ledger, reserve=(reserve(4, CHAT),))) == ()
    totals = disk.counts.totals
    assert (disk.counts.host_held, disk.counts.fetching) == (2, 1)
    assert (totals.host_drops, totals.host_drops_saved) == (0, before.totals.host_drops_saved + 2)
