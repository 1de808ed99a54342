"""What a ledger orders of prefixes that nobody waits for: what it takes on, in which parts, when, and when it stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from common.contracts.clock import ManualClock
from common.contracts.hashing import key_of
from common.contracts.lease import AHEAD_REASON, CachedBlock, GrantBatch, Inventory
from common.contracts.transfers import FROM_PEER, Medium, PeerSource, Transfer, TransferCosts, TransferEnd
from common.contracts.types import BlockHash, BlockId, DecisionKind, FrameId, KvGroup, KvGroupKind
from kvmanager.contracts.block import ROOT
from kvmanager.contracts.ports import Reach
from kvmanager.ledger import ahead
from kvmanager.ledger.ahead_table import AheadKind, Answer, Outcome
from tests.support.kvmanager.ledgers import admit, finish, hashes, make_ledger, play, prompt, reserve, run_through, seal

TALK = prompt(20 * 16 + 1)
KEYS = hashes(TALK)
OTHER = hashes(prompt(3 * 16 + 1, start=900))
PREFETCH = AheadKind.PREFETCH


class Source:
    """A peer that has so many leading blocks of each prompt."""

    worker_id, ahead = "source", 0

    def __init__(self, blocks: int) -> None:
        self.blocks, self.served = blocks, list[list[BlockHash]]()

    def __call__(self, reach: Reach) -> tuple[Source, int] | None:
        count = reach(self)
        return (self, count) if count else None

    def find_run(self, keys: Sequence[BlockHash], first: int, end: int) -> int:
        return max(0, min(self.blocks, end) - first)

    def has_content(self, key: BlockHash, parent: BlockHash, depth: int) -> bool:
        return depth < self.blocks

    def has_any(self, keys: frozenset[BlockHash]) -> bool:
        return self.blocks > 0

    def serve(self, keys: Sequence[BlockHash]) -> PeerSource:
        self.served.append(list(keys))
        return PeerSource("source", bytes(16), "source:7000", b"t" * 16, len(self.served))


class Made:
    """A ledger with frames, a disk and a peer, and the time of its clock."""

    def __init__(self, blocks: int = 20, frames: int = 32, disk: int = 0, **options: Any) -> None:
        self.clock, self.source = ManualClock(), Source(blocks)
        self.ledger = make_ledger(24, clock=self.clock, host_frames=frames, disk_frames=8, **options)
        saved = tuple(CachedBlock(BlockId(n), KEYS[n], -1, 0, KEYS[max(0, n - 1)], n) for n in range(disk))
        self.ledger.rebuild(Inventory(saved=saved))
        self.ledger.state.peers = self.source
        self.ledger.schedule()

    def wish(self, keys: Sequence[BlockHash], kind: AheadKind = PREFETCH) -> tuple[Answer, list[Transfer]]:
        answer = self.ledger.wish_prefix(kind, keys, "somebody asks")
        return answer, self.turn()

    def turn(self) -> list[Transfer]:
        return ordered(self.ledger.schedule())

    def end(self, moves: Sequence[Transfer], by: TransferEnd = TransferEnd.DONE) -> list[Transfer]:
        return ordered(play(self.ledger, ended=tuple((each.id, by) for each in moves)))

    @property
    def frames(self) -> list[BlockHash]:
        tier = self.ledger.state.store.tier
        assert tier is not None
        return list(tier.entries)

    def records(self) -> list[tuple[str, tuple[str, ...], dict[str, float]]]:
        found = [each for each in self.ledger.drain_decisions() if each.kind is DecisionKind.PREFETCH]
        return [(each.chosen, each.reasons, dict(each.figures)) for each in found]


def ordered(batch: GrantBatch | None) -> list[Transfer]:
    return list(batch.transfers) if batch is not None else []


def depths(moves: Sequence[Transfer]) -> list[int]:
    return [each.depth for each in moves]


# ---------------------------------------------------------------- parts


def test_a_prefix_comes_in_parts_parents_first_and_each_needs_the_one_before() -> None:
    made = Made()
    answer, moves = made.wish(KEYS[:7])
    assert answer == (Outcome.ACCEPTED, 0, 7, "")
    assert [(each.hash, each.depth, each.source) for each in moves] == [(KEYS[n], n, FROM_PEER) for n in range(4)]
    assert {each.target.medium for each in moves} == {Medium.HOST}
    assert made.end(moves[:3]) == [], "one of the part is still on its way"
    moves = made.end(moves[3:])
    assert depths(moves) == [4, 5, 6]
    assert made.source.served == [list(KEYS[:4]), list(KEYS[4:7])], "a token is for the blocks of one part"
    assert made.end(moves) == []
    assert made.frames == list(KEYS[:7])
    assert made.ledger.pool_counts().ahead == 0
    assert made.ledger.pool_counts().totals.ahead_loads == {"prefetch": 7}


def test_a_pause_follows_a_part_that_is_nine_times_as_long() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:8])
    made.clock.advance(2.0)
    assert (made.end(moves), made.ledger.part_due) == ([], False)
    made.clock.advance(17.9)
    assert (made.turn(), made.ledger.part_due) == ([], False)
    made.clock.advance(0.2)
    assert made.ledger.part_due
    assert depths(made.turn()) == [4, 5, 6, 7]
    assert not made.ledger.part_due, "it is under way"


def test_a_prompt_is_granted_with_what_came_and_what_is_on_its_way() -> None:
    made = Made(blocks=8)
    _, moves = made.wish(KEYS[:8])
    further = made.end(moves)
    batch = play(made.ledger, reserve=(reserve(0, TALK[: 8 * 16 + 1]),))
    assert batch is None, "it waits for the second part, which is on its way, and orders nothing"
    batch = play(made.ledger, ended=tuple((each.id, TransferEnd.DONE) for each in further))
    assert batch is not None
    assert [each.cached_tokens for each in batch.admit] == [8 * 16]
    assert made.source.served == [list(KEYS[:4]), list(KEYS[4:8])]


def test_nothing_is_ordered_while_a_sequence_waits_for_a_transfer() -> None:
    made = Made(blocks=3)
    moves = ordered(play(made.ledger, reserve=(reserve(0, TALK[: 3 * 16 + 1]),)))
    assert depths(moves) == [0, 1, 2]
    made.source.blocks = 20
    answer, further = made.wish(OTHER)
    assert (answer.outcome, further) == (Outcome.ACCEPTED, [])
    further = made.end(moves)
    assert [each.hash for each in further] == list(OTHER)
    batch = play(made.ledger, reserve=(reserve(1, prompt(3 * 16 + 1, start=500)),))
    assert depths(ordered(batch)) == [0, 1, 2], "what nobody waits for delays no fetch"


def test_what_comes_ahead_takes_no_room_from_fetches() -> None:
    """Half of eight frames may be filled by fetches at once: four blocks, whatever else is on its way."""
    made = Made(frames=8)
    _, moves = made.wish(KEYS[:2])
    assert depths(moves) == [0]
    batch = play(made.ledger, reserve=(reserve(1, prompt(5 * 16 + 1, start=500)),))
    assert depths(ordered(batch)) == [0, 1, 2, 3]


def test_a_block_that_did_not_come_ends_the_wish_and_what_came_stays() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:8])
    play(made.ledger, ended=((moves[1].id, TransferEnd.STALE),))
    assert made.end([moves[0], *moves[2:]]) == []
    assert made.frames == [KEYS[0]], "the others lack the block before"
    assert made.ledger.pool_counts().ahead == 0
    assert [each[0] for each in made.records()] == ["prefetch: accepted", "prefetch: 1 of 8 blocks came"]


def test_wishes_come_one_after_the_other() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:3])
    answer, further = made.wish(OTHER, AheadKind.REPLICA)
    assert (answer.outcome, further) == (Outcome.ACCEPTED, [])
    further = made.end(moves)
    assert [each.hash for each in further] == list(OTHER)
    made.end(further)
    assert made.ledger.pool_counts().totals.ahead_loads == {"prefetch": 3, "replica": 3}


def test_the_disk_is_a_source_too_and_goes_first_where_runs_are_equal() -> None:
    made = Made(blocks=4, disk=4)
    _, moves = made.wish(KEYS[:4])
    assert [each.source.medium for each in moves] == [Medium.DISK] * 4
    made = Made(blocks=4, disk=2)
    _, moves = made.wish(KEYS[:4])
    assert [each.source.medium for each in moves] == [Medium.PEER] * 4


def test_a_wish_ends_where_nobody_has_the_next_block_and_begins_behind_what_is_there() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:8])
    made.source.blocks = 0
    made.ledger.state.peers = None
    made.end(moves)
    assert made.ledger.pool_counts().ahead == 0
    assert made.records()[-1][1] == (
        "somebody asks",
        "neither its disk nor another worker has the next block, block 4 of it",
    )
    made = Made()
    made.ledger.state.peers = None
    run_through(made.ledger, 0, TALK[: 6 * 16 + 1])
    made.ledger.state.peers = made.source
    answer, moves = made.wish(KEYS[:8])
    assert (answer, depths(moves)) == ((Outcome.ACCEPTED, 6, 2, ""), [6, 7])


# ---------------------------------------------------------------- what is taken on


def test_a_quarter_of_host_memory_is_for_all_wishes_together() -> None:
    made = Made()
    answer, _ = made.wish(KEYS[:10])
    assert answer == (Outcome.CLIPPED, 0, 8, "it has room for 8 blocks ahead of need")
    answer, _ = made.wish(OTHER)
    busy = "8 blocks are on their way to it, of at most 0.25 of 32 frames; ask again later"
    assert answer == (Outcome.REFUSED, 0, 0, busy)
    assert made.ledger.pool_counts().ahead == 1


def test_a_part_that_nobody_has_is_left_out() -> None:
    made = Made(blocks=5)
    answer, _ = made.wish(KEYS[:8])
    assert answer == (Outcome.CLIPPED, 0, 5, "nobody has block 5 of it")
    made = Made(blocks=0)
    answer, moves = made.wish(KEYS[:8])
    assert answer == (Outcome.REFUSED, 0, 0, "neither its disk nor another worker has the next block, block 0 of it")
    assert moves == []


def test_what_is_there_or_on_its_way_is_not_ordered_again() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:4])
    assert made.wish(KEYS[:3]) == ((Outcome.ACCEPTED, 0, 0, "it is on its way already"), [])
    made.end(moves)
    assert made.wish(KEYS[:4]) == ((Outcome.ACCEPTED, 4, 0, "all of it is there"), [])
    assert made.source.served == [list(KEYS[:4])]


def test_eight_prefixes_are_on_their_way_at_most() -> None:
    made = Made(frames=64)
    for number in range(ahead.MOST_WISHES):
        answer, _ = made.wish(hashes(prompt(17, start=1000 * number)))
        assert answer.outcome is Outcome.ACCEPTED
    answer, _ = made.wish(OTHER)
    assert answer == (Outcome.REFUSED, 0, 0, "8 prefixes are on their way to it; ask again later")


def test_a_worker_without_host_memory_refuses() -> None:
    answer = make_ledger(8).wish_prefix(PREFETCH, KEYS, "somebody asks")
    assert answer.outcome is Outcome.REFUSED
    assert "expected one that has --host-memory" in answer.why


WINDOW = (KvGroup(KvGroupKind.FULL, 0, 1, ()), KvGroup(KvGroupKind.WINDOW, 32, 2, ()))


def test_where_the_pool_has_groups_what_is_read_at_the_end_comes_in_parts() -> None:
    made = Made(frames=128, groups=WINDOW)
    answer, first = made.wish(KEYS)
    assert answer == (Outcome.ACCEPTED, 0, len(KEYS), "")
    made.clock.advance(1.0)
    assert made.end(first) == [], "a pause follows"
    made.clock.advance(100.0)
    rest = made.turn()
    ordered_of = Counter((each.group, each.num_pages) for each in (*first, *rest))
    assert ordered_of == {(0, 1): len(KEYS), (1, 2): 2}, "a window of 32 tokens is two blocks"
    made.end(rest[:-1])
    assert made.ledger.look_up_prompt(KEYS, 16 * len(KEYS) + 1).hit_blocks < len(KEYS)
    made.end(rest[-1:])
    assert made.ledger.look_up_prompt(KEYS, 16 * len(KEYS) + 1).hit_blocks == len(KEYS)
    assert made.wish(KEYS)[0] == (Outcome.ACCEPTED, len(KEYS), 0, "all of it is there")


def test_a_prefix_in_groups_is_clipped_to_where_a_prompt_could_go_on() -> None:
    made = Made(blocks=3, frames=128, groups=WINDOW)
    answer, _ = made.wish(KEYS)
    assert (answer.outcome, answer.blocks) == (Outcome.CLIPPED, 3)
    assert answer.why.endswith("no prompt could go on from a deeper block than 3")
    assert Made(blocks=0, frames=128, groups=WINDOW).wish(KEYS)[0].outcome is Outcome.REFUSED
    few = Made(frames=16, groups=WINDOW).wish(KEYS)[0]
    assert few == (Outcome.CLIPPED, 0, 1, "it has room for 4 pages ahead of need")


# ---------------------------------------------------------------- what a grant says of it


def test_a_grant_says_which_of_its_loaded_blocks_came_ahead_of_need() -> None:
    """The pin of an operator and the rule of replication are told apart; what comes with the prompt is neither."""
    made = Made()
    for keys, kind in ((KEYS[:2], PREFETCH), (KEYS[:3], AheadKind.REPLICA)):
        _, moves = made.wish(keys, kind)
        made.end(moves)
    batch = play(made.ledger, reserve=(reserve(1, prompt(3 * 16 + 1)),))
    assert batch is not None
    assert len(batch.admit) == 1
    (grant,) = [each for each in made.ledger.drain_decisions() if each.kind is DecisionKind.GRANT]
    of_them = "of the 3 loaded blocks came before a request asked for them"
    said = [each for each in grant.reasons if each.startswith(AHEAD_REASON)]
    assert said == [f"{AHEAD_REASON}2 {of_them} (prefetch)", f"{AHEAD_REASON}1 {of_them} (replica)"]


def test_what_was_computed_meanwhile_did_not_come_ahead_of_need() -> None:
    """A sequence that computes the prefix seals it while the first part is under way; the fifth block is its own."""
    made = Made()
    made.ledger.state.peers = None
    admit(made.ledger, reserve(1, prompt(5 * 16 + 1)))
    made.ledger.state.peers = made.source
    _, moves = made.wish(KEYS[:5])
    seal(made.ledger, 1, KEYS[:5])
    made.end(moves)
    assert made.frames == list(KEYS[:4])
    assert list(made.ledger.state.ahead.came) == list(KEYS[:4])


def test_what_has_left_host_memory_since_or_a_reset_has_voided_did_not_come_ahead_of_need() -> None:
    made = Made(frames=8, blocks=2)
    _, moves = made.wish(KEYS[:2])
    while moves:
        moves = made.end(moves)
    assert list(made.ledger.state.ahead.came) == list(KEYS[:2])
    made.ledger.state.peers = None
    for number in range(1, 5):  # what leaves the pool takes their frames
        run_through(made.ledger, number, prompt(12 * 16, start=1000 * number))
    assert len(made.ledger.state.ahead.came) < 2
    made.ledger.reset_cache(1)
    assert made.ledger.state.ahead.came == {}


def test_where_the_pool_has_groups_only_what_came_is_said_to_have_come() -> None:
    """K and V of all blocks are in host memory, and those of the window's last two blocks come ahead of need."""
    made = Made(frames=128, groups=WINDOW)
    inventory = Inventory(
        frames=tuple(CachedBlock(FrameId(n), KEYS[n], -1, 0, KEYS[max(0, n - 1)], n) for n in range(4)),
        frame_groups=(0,) * 4,
        frame_pages=tuple(map(FrameId, range(4))),
    )
    made.ledger.rebuild(inventory)
    made.ledger.state.peers = made.source
    made.ledger.schedule()
    _, moves = made.wish(KEYS[:4])
    assert [(each.group, each.depth) for each in moves] == [(1, 2), (1, 3)]
    made.end(moves)
    assert made.ledger.state.ahead.came == {key_of(KEYS[n], 1): PREFETCH for n in (2, 3)}
    made.ledger.check_invariants()
    batch = play(made.ledger, reserve=(reserve(1, prompt(4 * 16 + 1)),))
    assert batch is not None
    assert batch.admit[0].n_shared == 4
    (grant,) = [each for each in made.ledger.drain_decisions() if each.kind is DecisionKind.GRANT]
    of_them = "of the 4 loaded blocks came before a request asked for them"
    assert [each for each in grant.reasons if each.startswith(AHEAD_REASON)] == [
        f"{AHEAD_REASON}2 {of_them} (prefetch)"
    ]


@pytest.mark.parametrize("worthless", [True, False])
def test_what_leaves_host_memory_beside_the_order_of_eviction_is_forgotten_too(worthless: bool) -> None:
    """Its block is worth nothing, or all behind a block goes that gets no frame, for grants read every frame."""
    made = Made(frames=8, blocks=2)
    state = made.ledger.state
    state.peers = None
    run_through(made.ledger, 1, prompt(16 + 1))
    state.peers = made.source
    _, moves = made.wish(KEYS[:2])
    assert depths(moves) == [1]
    made.end(moves)
    assert state.ahead.came == {KEYS[1]: PREFETCH}
    tier, entries = state.store.tier, state.store.cache.entries
    assert tier is not None
    if worthless:
        run_through(made.ledger, 2, prompt(2 * 16 + 1))
        state.keep_below(entries[KEYS[1]], worthless=True)
    else:
        tier.hold([tier.entries[KEYS[1]]])
        for number in range(7):
            tier.expect(BlockHash(bytes([number]) * 16), ROOT, 0)
        state.keep_below(entries[KEYS[0]])
    assert KEYS[1] not in tier.entries
    assert state.ahead.came == {}


def test_what_of_a_part_had_come_when_the_worker_drained_is_counted() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:4])
    made.end(moves[:3])
    play(made.ledger, draining=True)
    assert made.ledger.pool_counts().totals.ahead_loads == {"prefetch": 3}
    assert list(made.ledger.state.ahead.came) == list(KEYS[:3])


# ---------------------------------------------------------------- ends


def test_a_reset_forgets_what_is_to_come_and_what_comes_then_is_not_there() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:8])
    made.ledger.reset_cache(1)
    assert made.turn() == []
    assert made.end(moves) == []
    assert (made.frames, made.ledger.pool_counts().ahead) == ([], 0)


def test_a_session_that_begins_anew_knows_of_no_wish() -> None:
    made = Made()
    made.wish(KEYS[:8])
    made.ledger.rebuild(Inventory())
    made.ledger.check_invariants()
    assert (made.turn(), made.ledger.pool_counts().ahead) == ([], 0)


def test_who_leaves_while_it_waits_for_such_a_transfer_ends_nothing() -> None:
    made = Made(blocks=4)
    _, moves = made.wish(KEYS[:4])
    play(made.ledger, reserve=(reserve(0, TALK[: 4 * 16 + 1]),))
    finish(made.ledger, 0)
    made.end(moves)
    assert made.frames == list(KEYS[:4])


@pytest.mark.parametrize("frames", [12, 16])
def test_frames_that_came_ahead_are_evicted_as_any_other(frames: int) -> None:
    made = Made(frames=frames)
    answer, moves = made.wish(KEYS[:3])
    while moves:
        moves = made.end(moves)
    assert made.frames == list(KEYS[: answer.blocks])
    made.ledger.state.peers = None
    for number in range(3):
        run_through(made.ledger, number, prompt(20 * 16 + 1, start=1000 * (number + 1)))
        made.ledger.check_invariants()
    assert not set(KEYS[:3]) & set(made.frames)
    assert made.ledger.state.totals.host_drops >= answer.blocks


def test_records_say_who_asked_what_was_there_and_what_came() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:4])
    made.clock.advance(0.5)
    made.end(moves)
    assert made.records() == [
        ("prefetch: accepted", ("somebody asks",), {"asked": 4.0, "there": 0.0, "blocks": 4.0}),
        (
            "prefetch: 4 of 4 blocks came",
            ("somebody asks", "all of it is there"),
            {"blocks": 4.0, "came": 4.0, "seconds": 0.5},
        ),
    ]


def test_where_loads_do_not_pay_nothing_comes_ahead_of_need_until_they_do() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:5])
    made.records()
    cheap, dear = (TransferCosts(compute=0.010, read=0.0, copy=copy) for copy in (0.002, 0.020))
    assert ordered(play(made.ledger, transfer_costs=dear)) == []
    words = "to load a block from its host memory takes longer than to compute it"
    assert [(chosen, reasons[1]) for chosen, reasons, _ in made.records()] == [
        ("prefetch: 0 of 5 blocks came", words),
    ]
    assert made.end(moves) == []
    refused = (Outcome.REFUSED, 0, 0, f"{words}; expected one where that pays")
    assert made.wish(KEYS[:5]) == (refused, [])
    play(made.ledger, transfer_costs=cheap)
    answer, _ = made.wish(KEYS[:5])
    assert (answer.outcome, answer.there) == (Outcome.ACCEPTED, len(moves))


def test_a_worker_that_drains_gets_nothing_more_and_what_is_on_its_way_comes() -> None:
    made = Made()
    _, moves = made.wish(KEYS[:5])
    made.wish(OTHER, AheadKind.REPLICA)
    made.end(moves[:1])
    made.records()
    assert ordered(play(made.ledger, draining=True)) == []
    assert [(chosen, reasons[1]) for chosen, reasons, _ in made.records()] == [
        ("prefetch: 1 of 5 blocks came", "the worker drains"),
        ("replica: 0 of 3 blocks came", "the worker drains"),
    ]
    assert made.end(moves[1:]) == []
    assert (made.frames, made.ledger.pool_counts().ahead) == (list(KEYS[:4]), 0)
    made.clock.advance(3600.0)
    refused = (Outcome.REFUSED, 0, 0, "the worker drains; expected one that takes new requests")
    assert made.wish(KEYS[:5]) == (refused, [])
    assert not made.ledger.part_due
