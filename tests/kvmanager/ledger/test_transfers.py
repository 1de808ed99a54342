"""What a ledger with a disk orders, by exact ids and frames: saves, fetches, who waits, and what their ends change."""

from __future__ import annotations

import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import ProtocolViolation
from common.contracts.lease import CachedBlock, GrantBatch, Inventory, Report
from common.contracts.transfers import FETCH_MARGIN, Fetched, TransferCosts, TransferEnd
from common.contracts.types import BlockHash, BlockId, DecisionKind, FinishReason, SequenceId
from kvmanager.contracts.block import ROOT
from kvmanager.contracts.index_events import Removed, Stored
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.transfers import MOST_SAVES, fetch_pays
from tests.support.kvmanager.ledgers import finish, hashes, make_ledger, play, prompt, reserve, seal

FIRST, SECOND, THIRD = (prompt(5 * 16 - 1, start=start) for start in (0, 500, 1000))
"""Four full blocks each, and a part of a fifth."""
DONE, STALE, CORRUPT, FAILED, LATE = TransferEnd


def made_ledger(blocks: int = 12, frames: int = 8, disk: int = 8, clock: ManualClock | None = None) -> Ledger:
    return make_ledger(blocks, clock=clock, host_frames=frames, disk_frames=disk)


def saved(tokens: list[int], *frames: int) -> tuple[CachedBlock, ...]:
    """Return the claims of a disk that has the leading blocks of a prompt in these frames."""
    keys = hashes(tokens)
    return tuple(CachedBlock(BlockId(at), keys[n], -1, 0, keys[max(0, n - 1)], n) for n, at in enumerate(frames))


def with_saved(*claims: tuple[CachedBlock, ...], blocks: int = 12, frames: int = 8, disk: int = 8) -> Ledger:
    """Return a ledger of a worker that has just started, with this on its disk."""
    made = made_ledger(blocks, frames, disk)
    made.rebuild(Inventory(saved=tuple(each for some in claims for each in some)))
    made.check_invariants()
    return made


def orders(batch: GrantBatch | None) -> list[tuple[int, int, str, int, str, int]]:
    """Return id, depth, source and target of the transfers of a batch."""
    transfers = batch.transfers if batch is not None else ()
    return [
        (m.id, m.depth, m.source.medium.name, m.source.index, m.target.medium.name, m.target.index) for m in transfers
    ]


def end(made: Ledger, *numbers: int, by: TransferEnd = DONE) -> GrantBatch | None:
    return play(made, ended=tuple((number, by) for number in numbers))


def on_disk(made: Ledger) -> dict[BlockHash, int]:
    disk = made.state.store.disk
    assert disk is not None
    return dict(disk.entries)


def waiting(made: Ledger) -> list[int]:
    return list(made.state.sequences.fetching)


def ended_table(made: Ledger, number: int, tokens: list[int]) -> GrantBatch | None:
    """Run a prompt to its end, and return the batch that answers it."""
    play(made, reserve=(reserve(number, tokens),))
    seal(made, number, hashes(tokens))
    return finish(made, number)


# ---------------------------------------------------------------- saves


def test_a_table_that_is_released_is_saved_parents_first() -> None:
    made = made_ledger()
    batch = ended_table(made, 0, FIRST)
    assert orders(batch) == [(1 + n, n, "BLOCK", n, "DISK", n) for n in range(4)]
    keys = hashes(FIRST)
    assert batch is not None
    assert [(m.hash, m.parent) for m in batch.transfers] == list(zip(keys, (ROOT, *keys[:3]), strict=True))
    assert on_disk(made) == {}, "nothing is there before it is"
    end(made, 1, 2)
    assert on_disk(made) == {keys[0]: 0, keys[1]: 1}
    end(made, 3, 4)
    assert made.pool_counts().disk_held == 4
    assert made.pool_counts().totals.transfer_ends == {"DONE": 4}
    assert orders(ended_table(made, 1, FIRST)) == [], "what the disk has is saved once"


def test_few_saves_are_open_at_once_and_the_rest_follows_as_they_end() -> None:
    long = prompt(16 * (MOST_SAVES + 3))
    made = made_ledger(blocks=80, disk=80)
    batch = ended_table(made, 0, long)
    assert [each[1] for each in orders(batch)] == list(range(MOST_SAVES))
    assert len(made.state.transfers.to_save) == 3
    assert [each[:2] for each in orders(end(made, 1, 2))] == [
        (MOST_SAVES + 1, MOST_SAVES),
        (MOST_SAVES + 2, MOST_SAVES + 1),
    ]
    assert [each[1] for each in orders(end(made, 3))] == [MOST_SAVES + 2]
    assert orders(end(made, 4)) == []


def test_what_was_evicted_meanwhile_is_saved_from_its_frame_or_not_at_all() -> None:
    long = prompt(16 * (MOST_SAVES + 2))
    for frames, source in ((60, "HOST"), (2, None)):
        made = made_ledger(blocks=MOST_SAVES + 3, frames=frames, disk=80)
        ended_table(made, 0, long)
        play(made, reserve=(reserve(1, prompt(16 * (MOST_SAVES + 2), start=5000)),))
        found = orders(end(made, 1, 2))
        assert [each[2] for each in found] == ([source] * 2 if source else [])
        assert not made.state.transfers.to_save


def test_a_save_that_ends_badly_frees_its_frame_and_nothing_behind_it_counts() -> None:
    for bad in (STALE, FAILED):
        made = made_ledger()
        ended_table(made, 0, FIRST)
        play(made, ended=((1, DONE), (2, bad), (3, DONE), (4, DONE)))
        disk = made.state.store.disk
        assert disk is not None
        assert on_disk(made) == {hashes(FIRST)[0]: 0}
        assert sorted(disk.free) == [1, 2, 3, 4, 5, 6, 7]
        assert made.pool_counts().totals.disk_stores == 1


def test_a_full_disk_gives_up_the_leaves_of_what_was_used_longest_ago() -> None:
    made = made_ledger(blocks=20, disk=5)
    ended_table(made, 0, FIRST)
    end(made, 1, 2, 3, 4)
    batch = ended_table(made, 1, SECOND)
    assert [each[2:] for each in orders(batch)] == [("BLOCK", 5 + n, "DISK", 4 - n) for n in range(4)]
    end(made, 5, 6, 7, 8)
    assert on_disk(made) == {hashes(FIRST)[0]: 0} | dict(zip(hashes(SECOND), (4, 3, 2, 1), strict=True))


def test_what_finds_no_frame_is_counted_and_not_saved() -> None:
    made = made_ledger(blocks=20, disk=2)
    assert len(orders(ended_table(made, 0, FIRST))) == 2, "both frames are to be filled"
    assert made.pool_counts().totals.unsaved == 2


def test_nothing_is_saved_where_there_is_no_disk_or_nothing_is_cached() -> None:
    assert made_ledger(frames=0).state.store.disk is None, "blocks come back by way of host memory"
    made = made_ledger()
    play(made, reserve=(reserve(0, FIRST, block_hashes=()),))
    assert orders(finish(made, 0)) == []


# ---------------------------------------------------------------- fetches


def test_a_prompt_waits_for_what_the_disk_has_and_is_admitted_with_it() -> None:
    clock = ManualClock()
    made = made_ledger(clock=clock)
    made.rebuild(Inventory(saved=saved(FIRST, 5, 2, 7, 0)))
    batch = play(made, reserve=(reserve(0, FIRST),))
    assert batch is not None
    assert batch.admit == ()
    assert orders(batch) == [(1 + n, n, "DISK", at, "HOST", n) for n, at in enumerate((5, 2, 7, 0))]
    assert (waiting(made), list(made.state.sequences.queue)) == ([0], [])
    assert made.pool_counts().fetching == made.pool_counts().waiting == 1
    clock.advance(0.25)
    assert end(made, 1, 2, 3) is None, "the last one is not there yet"
    batch = end(made, 4)
    assert batch is not None
    (granted,) = batch.admit
    assert (granted.n_shared, granted.cached_tokens) == (4, 64)
    assert granted.fetched == Fetched(4, 4, 0.25)
    assert [(each.frame, each.load) for each in batch.tier] == [(n, True) for n in range(4)]
    assert waiting(made) == []
    totals = made.pool_counts().totals
    assert (totals.fetches, totals.disk_loads) == (1, 4)
    record = next(each for each in made.drain_decisions() if each.kind is DecisionKind.GRANT)
    assert "fetched: 4 of 4 blocks came from disk in 250 ms" in record.reasons


def test_a_fetch_begins_behind_what_blocks_and_frames_have() -> None:
    keys = hashes(FIRST)
    made = made_ledger()
    frame = CachedBlock(BlockId(6), keys[1], -1, 0, keys[0], 1)
    cached = (CachedBlock(BlockId(3), keys[0], -1, 0),)
    made.rebuild(Inventory(cached_blocks=cached, frames=(frame,), saved=saved(FIRST, 0, 1, 2, 3)))
    assert orders(play(made, reserve=(reserve(0, FIRST),))) == [
        (1, 2, "DISK", 2, "HOST", 0),
        (2, 3, "DISK", 3, "HOST", 1),
    ]
    batch = end(made, 1, 2)
    assert batch is not None
    assert batch.admit[0].block_table[0] == 3
    assert [each.frame for each in batch.tier if each.load] == [6, 0, 1]
    assert batch.admit[0].fetched == Fetched(2, 2, 0.0)


def test_the_block_of_the_last_token_is_not_fetched() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    assert [each[1] for each in orders(play(made, reserve=(reserve(0, FIRST[:64]),)))] == [0, 1, 2]


def test_fetches_fill_half_of_the_frames_at_once() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3), saved(SECOND, 4, 5, 6, 7), frames=6)
    batch = play(made, reserve=(reserve(0, FIRST), reserve(1, SECOND)))
    assert [each[:2] for each in orders(batch)] == [(1, 0), (2, 1), (3, 2)]
    assert batch is not None
    assert [(each.sequence, each.n_shared) for each in batch.admit] == [(1, 0)], "there was no room to fetch for it"
    batch = end(made, 1, 2, 3)
    assert batch is not None
    assert batch.admit[0].n_shared == 3, "it does not wait again for the fourth"


def test_two_prompts_wait_for_one_fetch() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    batch = play(made, reserve=(reserve(0, FIRST), reserve(1, FIRST)))
    assert len(orders(batch)) == 4
    assert made.state.transfers.waiting == {n: [0, 1] for n in (1, 2, 3, 4)}
    batch = end(made, 1, 2, 3, 4)
    assert batch is not None
    assert [(each.sequence, each.n_shared) for each in batch.admit] == [(0, 4), (1, 4)]
    assert len(batch.tier) == 4, "blocks are loaded once"


@pytest.mark.parametrize("bad", [CORRUPT, FAILED])
def test_what_cannot_be_read_is_a_miss_and_takes_what_is_behind_it_along(bad: TransferEnd) -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    made.drain_index_events()
    play(made, reserve=(reserve(0, FIRST),))
    batch = play(made, ended=((1, DONE), (2, bad), (3, DONE), (4, DONE)))
    assert batch is not None
    assert (batch.admit[0].n_shared, batch.admit[0].fetched) == (1, Fetched(1, 4, 0.0))
    keys = hashes(FIRST)
    assert on_disk(made) == {keys[0]: 0}
    assert made.pool_counts().totals.disk_lost == 3
    gone = [(each.hash, each.depth) for each in made.drain_index_events() if isinstance(each, Removed)]
    assert gone == [(keys[3], 3), (keys[2], 2), (keys[1], 1)], "the deepest first"


@pytest.mark.parametrize("bad", [LATE, STALE])
def test_what_is_late_stays_on_disk_and_nobody_waits_for_it_twice(bad: TransferEnd) -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    play(made, reserve=(reserve(0, FIRST),))
    batch = end(made, 1, 2, 3, 4, by=bad)
    assert batch is not None
    assert (batch.admit[0].n_shared, batch.admit[0].fetched) == (0, Fetched(0, 4, 0.0))
    assert orders(batch) == []
    assert len(on_disk(made)) == 4
    assert len(orders(play(made, reserve=(reserve(1, FIRST),)))) == 0, "the first one is to fill these blocks"


def test_a_sequence_that_is_preempted_may_wait_once_more() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    play(made, reserve=(reserve(0, FIRST),))
    end(made, 1, 2, 3, 4, by=LATE)
    batch = play(made, preempted=((SequenceId(0), len(FIRST)),))
    assert [each[:2] for each in orders(batch)] == [(5, 0), (6, 1), (7, 2), (8, 3)]
    assert waiting(made) == [0]


def test_who_is_cancelled_waits_no_more_and_the_blocks_come_all_the_same() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    play(made, reserve=(reserve(0, FIRST), reserve(1, FIRST)))
    play(made, finished=((SequenceId(0), FinishReason.CANCELLED),))
    assert made.state.transfers.waiting == {n: [1] for n in (1, 2, 3, 4)}
    play(made, finished=((SequenceId(1), FinishReason.CANCELLED),))
    assert (waiting(made), made.state.sequences.live) == ([], {})
    end(made, 1, 2, 3, 4)
    assert made.pool_counts().host_held == 4
    assert made.look_up_prompt(hashes(FIRST), len(FIRST)).hit_blocks == 4


def test_the_index_hears_once_of_what_is_on_disk_and_in_frames() -> None:
    made = made_ledger()
    ended_table(made, 0, FIRST)
    assert [type(each) for each in made.drain_index_events()] == [Stored] * 4
    end(made, 1, 2, 3, 4)
    assert made.drain_index_events() == (), "blocks had them already"
    again = with_saved(saved(FIRST, 0, 1, 2, 3))
    assert {key for key, _ in again.index_snapshot().entries} == set(hashes(FIRST))
    again.drain_index_events()
    play(again, reserve=(reserve(0, FIRST),))
    end(again, 1, 2, 3, 4)
    assert again.drain_index_events() == ()


def test_one_that_waits_comes_back_to_its_place() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3), blocks=6)
    play(made, reserve=(reserve(0, SECOND),))
    assert waiting(made) == []
    play(made, reserve=(reserve(1, FIRST), reserve(2, THIRD)))
    assert (waiting(made), list(made.state.sequences.queue)) == ([1], [2])
    end(made, 1, 2, 3, 4)
    assert list(made.state.sequences.queue) == [1, 2], "it arrived before"
    batch = finish(made, 0)
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [1]


def test_one_that_would_wait_for_the_disk_passes_nobody() -> None:
    """The next one lacks blocks. A short one behind it may pass, and one whose blocks the disk has does not."""
    made = make_ledger(10, host_frames=8, disk_frames=8)
    short = prompt(17, start=900)
    made.rebuild(Inventory(saved=saved(short, 0)))
    play(made, reserve=(reserve(1, prompt(60), max_len=80),))
    assert play(made, reserve=(reserve(2, prompt(120, start=500), max_len=128),)) is None
    batch = play(made, reserve=(reserve(3, short, max_len=30),))
    assert batch is None or (batch.admit, batch.transfers) == ((), ())
    batch = play(made, reserve=(reserve(4, prompt(17, start=950), max_len=30),))
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [4]


def test_what_counts_twice_as_a_content_is_not_fetched() -> None:
    made, keys = with_saved(saved(FIRST, 0, 1, 2, 3)), hashes(FIRST)
    false = (BlockHash(b"?" * 16), *keys[1:])
    assert orders(play(made, reserve=(reserve(0, FIRST, block_hashes=false),))) == []
    made.state.store.cache.ambiguous.add(keys[2])
    assert [each[1] for each in orders(play(made, reserve=(reserve(1, FIRST),)))] == [0, 1]


def test_one_that_computes_all_its_tokens_fetches_nothing() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    assert orders(play(made, reserve=(reserve(0, FIRST, computes_all=True),))) == []


@pytest.mark.parametrize(
    ("costs", "pays"),
    [
        (None, True),
        (TransferCosts(0.0, 1.0), True),
        (TransferCosts(1.0, 0.0), True),
        (TransferCosts(1.0, 0.89), True),
        (TransferCosts(1.0, FETCH_MARGIN), False),
        (TransferCosts(1.0, 2.0), False),
        (TransferCosts(1.0, 0.5, copy=0.375), True),
        (TransferCosts(1.0, 0.5, copy=0.5), False),
    ],
    ids=str,
)
def test_a_fetch_must_be_faster_than_computing(costs: TransferCosts | None, pays: bool) -> None:
    assert fetch_pays(costs, 3) is pays
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    batch = play(made, reserve=(reserve(0, FIRST),), transfer_costs=costs)
    assert len(orders(batch)) == 4 * pays
    assert batch is not None
    assert len(batch.admit) == (not pays)


# ---------------------------------------------------------------- the frames of an open transfer


def test_no_frame_of_an_open_transfer_is_taken_and_a_landed_one_may_go() -> None:
    made = with_saved(saved(FIRST, 0, 1), blocks=6, frames=4, disk=2)
    batch = play(made, reserve=(reserve(0, FIRST),))
    assert [each[5] for each in orders(batch)] == [0, 1]
    assert orders(ended_table(made, 1, SECOND)) == [], "both frames on disk are being read"
    assert made.pool_counts().totals.unsaved == 4
    batch = play(made, reserve=(reserve(2, THIRD),))
    assert batch is not None
    assert {each.frame for each in batch.tier if not each.load} == {2, 3}
    end(made, 1, 2)
    assert made.state.store.cache.below.keys() >= set(hashes(FIRST)[:2])


def test_a_frame_on_disk_that_was_dropped_while_it_was_read_is_free_at_the_end() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    play(made, reserve=(reserve(0, FIRST),))
    end(made, 1, by=CORRUPT)
    disk = made.state.store.disk
    assert disk is not None
    assert (on_disk(made), sorted(disk.free)) == ({}, [0, 4, 5, 6, 7]), "three are still being read"
    end(made, 2, 3, 4)
    assert sorted(disk.free) == list(range(8))
    assert made.pool_counts().host_held == 0, "what came has no parent"


# ---------------------------------------------------------------- breaks, resets and the end of the disk


def test_a_reset_voids_transfers_and_ids_go_on() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    play(made, reserve=(reserve(0, FIRST),))
    made.reset_cache(1)
    made.check_invariants()
    assert (waiting(made), list(made.state.sequences.queue)) == ([], [0])
    batch = made.schedule()
    assert batch is not None
    assert (batch.reset, batch.transfers, batch.admit[0].n_shared) == (1, (), 0)
    end(made, 1, 2, 3, 4)  # they ended before the worker heard of the reset
    assert (on_disk(made), made.pool_counts().host_held) == ({}, 0)
    seal(made, 0, hashes(FIRST))
    batch = play(made, finished=((SequenceId(0), FinishReason.STOP),), reset=1)
    assert [each[0] for each in orders(batch)] == [5, 6, 7, 8]


def test_an_order_that_was_not_sent_before_a_reset_is_not_sent_after_it() -> None:
    made = made_ledger()
    play(made, reserve=(reserve(0, FIRST),))
    seal(made, 0, hashes(FIRST))
    made.apply_report(Report(finished=((SequenceId(0), FinishReason.STOP),)))
    made.reset_cache(1)
    batch = made.schedule()
    assert batch is not None
    assert (batch.reset, batch.transfers) == (1, ())


def test_after_a_break_the_inventory_says_what_the_disk_has() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    play(made, reserve=(reserve(0, FIRST),))
    keys = hashes(FIRST)
    orphan = CachedBlock(BlockId(6), hashes(SECOND)[1], -1, 0, hashes(SECOND)[0], 1)
    made.rebuild(Inventory(saved=(*saved(FIRST, 3, 1), orphan)))
    made.check_invariants()
    assert on_disk(made) == {keys[0]: 3, keys[1]: 1}, "what has no parent there is left out"
    assert made.state.transfers.open == {}
    assert waiting(made) == []
    assert orders(play(made, reserve=(reserve(1, FIRST),)))[0][:2] == (1, 0), "a session of its own"


def test_a_disk_adopts_nothing_behind_a_parent_that_is_in_a_block_alone() -> None:
    keys = hashes(FIRST)
    made = made_ledger()
    claim = CachedBlock(BlockId(2), keys[1], -1, 0, keys[0], 1)
    made.rebuild(Inventory(cached_blocks=(CachedBlock(BlockId(3), keys[0], -1, 0),), saved=(claim,)))
    made.check_invariants()
    assert on_disk(made) == {}


@pytest.mark.parametrize("claims", [saved(FIRST, 8), saved(FIRST, 1, 1)], ids=["none of them", "twice"])
def test_claims_of_a_disk_that_contradict_themselves_are_refused(claims: tuple[CachedBlock, ...]) -> None:
    with pytest.raises(ProtocolViolation, match=r"frame [18] stands twice in the inventory, or is none of 8"):
        made_ledger().rebuild(Inventory(saved=claims))


def test_a_disk_that_is_given_up_is_forgotten_and_nothing_more_is_ordered() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    made.drain_index_events()
    play(made, reserve=(reserve(0, FIRST),))
    ended_table(made, 1, SECOND)
    failed = tuple((number, FAILED) for number in made.state.transfers.open)
    batch = play(made, ended=failed, disk_closed=True)
    assert batch is not None
    assert [(each.sequence, each.n_shared) for each in batch.admit] == [(0, 0)]
    assert (on_disk(made), made.state.transfers.open, made.pool_counts().disk_held) == ({}, {}, 0)
    gone = [(each.hash, each.depth) for each in made.drain_index_events() if isinstance(each, Removed)]
    assert gone == [(key, depth) for depth, key in reversed(list(enumerate(hashes(FIRST))))]
    seal(made, 0, hashes(FIRST))
    assert orders(finish(made, 0)) == []


def test_a_save_that_ends_when_the_disk_is_given_up_changes_nothing() -> None:
    made = made_ledger()
    ended_table(made, 0, FIRST)
    play(made, ended=((1, DONE),), disk_closed=True)
    assert on_disk(made) == {}
    end(made, 2, 3)
    assert on_disk(made) == {}


def test_a_fetch_that_was_ordered_before_the_disk_was_given_up_fails_behind_it() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    play(made, reserve=(reserve(0, FIRST),))
    assert play(made, disk_closed=True) is None
    assert waiting(made) == [0]
    batch = end(made, 1, 2, 3, 4, by=FAILED)
    assert batch is not None
    assert [(each.sequence, each.n_shared) for each in batch.admit] == [(0, 0)]


def test_ends_of_transfers_that_nobody_knows_change_nothing() -> None:
    made = with_saved(saved(FIRST, 0, 1, 2, 3))
    play(made)
    before = made.pool_counts()
    assert play(made, ended=((77, DONE), (78, CORRUPT))) is None
    assert made.pool_counts() == before
