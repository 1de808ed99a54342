"""A ledger whose pool has groups of layers: exact pages on tiny pools.

Blocks have 4 slots. One of the first group has 2 pages, one of the run 3: a place of both tables has 5 pages. A window
of 8 reads the run, behind block n those of blocks n - 2 and n - 1.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import key_of
from common.contracts.lease import CachedBlock, Inventory, InventorySequence, Reserve, RetainedBlocks
from common.contracts.types import (
    TRIMMED,
    BlockHash,
    BlockId,
    DecisionKind,
    KvGroup,
    KvGroupKind,
    MissReason,
    SequenceId,
    SequencePhase,
)
from kvmanager.contracts.index_events import Removed, Stored
from kvmanager.ledger.block_map import BlockUse
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, finish, free_order, hashes, make_ledger, play, prompt, reserve

SIZE = 4
FULL, WINDOW = KvGroup(KvGroupKind.FULL, 0, 2, ()), KvGroup(KvGroupKind.WINDOW, 8, 3, ())
EIGHT, LONG = prompt(8), prompt(24)
KEYS = hashes(LONG, SIZE)
RUNNING = SequencePhase.RUNNING


def grouped(num_pages: int = 40, **options: Any) -> Ledger:
    return make_ledger(num_pages, SIZE, groups=(FULL, WINDOW), **options)


def asked(number: int, tokens: list[int], max_len: int = 0, **options: Any) -> Reserve:
    return reserve(number, tokens, max_len, block_size=SIZE, **options)


def table(ledger: Ledger, number: int) -> list[BlockId]:
    return ledger.state.sequences.live[SequenceId(number)].block_table


def run(ledger: Ledger, number: int) -> list[BlockId]:
    return ledger.state.sequences.live[SequenceId(number)].runs[0].table


def seal_place(ledger: Ledger, number: int, place: int, key: BlockHash) -> None:
    """Report both blocks of a place as sealed, and trim the run."""
    gone = max(0, place - 1)
    both = ((table(ledger, number)[place], key), (run(ledger, number)[place], key))
    play(ledger, seal=both, trim=((number, gone),), trim_groups=(1,))


def bind_place(ledger: Ledger, number: int, *groups: int) -> None:
    """Lease the pages of a block in each of these groups, and bind them."""
    sizes = [(FULL, WINDOW)[group].pages for group in groups]
    play(ledger, lease_want=sum(sizes))
    leased = [BlockId(page) for page, of in enumerate(ledger.state.store.blocks.state) if of.value == "leased"]
    bound, others = [], []
    for size in sizes:
        (block, *more), leased = leased[:size], leased[size:]
        bound.append((SequenceId(number), block))
        others += more
    play(ledger, bind=tuple(bound), bind_groups=groups, bind_pages=tuple(others))


def lived(ledger: Ledger, number: int, tokens: list[int], **options: Any) -> None:
    """Let a prompt be computed behind its hits, a block a step, and end."""
    (granted,) = admit(ledger, asked(number, tokens, **options))
    for place, key in list(enumerate(hashes(tokens, SIZE)))[granted.n_shared :]:
        if place == len(run(ledger, number)):
            bind_place(ledger, number, 1)
        seal_place(ledger, number, place, key)
    finish(ledger, number)


def registered(ledger: Ledger) -> list[tuple[int, int]]:
    """Return the place and the group of every registered block of the long prompt."""
    entries = ledger.state.store.cache.entries
    return [(place, group) for place, key in enumerate(KEYS) for group in (0, 1) if key_of(key, group) in entries]


# ---------------------------------------------------------------- admission and growth


def test_an_admission_names_blocks_by_their_first_pages() -> None:
    ledger = grouped()
    (granted,) = admit(ledger, asked(1, EIGHT))
    assert (granted.block_table, granted.runs) == ((0, 2), ((4, 7),))
    assert granted.pages == (1, 3, 5, 6, 8, 9)
    assert (ledger.pool_counts().in_use, ledger.pool_counts().free) == (10, 30)
    (decision,) = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.GRANT)
    assert decision.chosen == "0 shared blocks and 10 fresh pages"


def test_a_run_is_admitted_with_what_a_window_holds() -> None:
    """A window of 8 lies in three blocks, and a step writes into one more."""
    (granted,) = admit(grouped(), asked(1, LONG))
    assert [len(granted.block_table), *map(len, granted.runs)] == [6, 4]
    assert len(granted.pages) == 6 * 1 + 4 * 2


@pytest.mark.parametrize(("tokens", "max_len", "pages"), [(8, 8, 10), (8, 13, 15), (24, 24, 24), (100, 101, 62)])
def test_what_the_pool_never_holds_is_refused_in_pages(tokens: int, max_len: int, pages: int) -> None:
    assert admit(grouped(pages), asked(1, prompt(tokens), max_len))
    ledger = grouped(pages - 1)
    batch = play(ledger, reserve=(asked(1, prompt(tokens), max_len),))
    assert batch is not None
    assert batch.cancel == (1,)
    (decision,) = ledger.drain_decisions()
    assert decision.reasons == (f"{max_len} tokens need {pages} pages; the pool has {pages - 1}",)


def test_a_prompt_waits_until_its_pages_are_there() -> None:
    ledger = grouped(19)
    admit(ledger, asked(1, EIGHT))
    assert admit(ledger, asked(2, prompt(8, 100))) == ()
    batch = finish(ledger, 1)
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [2]


def test_a_place_grows_in_both_groups() -> None:
    ledger = grouped()
    admit(ledger, asked(1, EIGHT, 13))
    batch = play(ledger, lease_want=5)
    assert batch is not None
    assert batch.lease == (10, 11, 12, 13, 14)
    assert ledger.state.sequences.growth == 5
    play(ledger, bind=((1, 10), (1, 12)), bind_groups=(0, 1), bind_pages=(11, 13, 14))
    assert (table(ledger, 1), run(ledger, 1)) == ([0, 2, 10], [4, 7, 12])
    assert (ledger.state.sequences.growth, ledger.pool_counts().leased) == (0, 0)


def test_a_stalled_sequence_is_leased_a_place() -> None:
    ledger = grouped()
    admit(ledger, asked(1, EIGHT, 20))
    batch = play(ledger, stalled=(1,), lease_want=1)
    assert batch is not None
    assert len(batch.lease) == 5


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"bind": ((1, 10),)}, "1 blocks were bound, to 0 groups"),
        ({"bind": ((1, 10),), "bind_groups": (2,), "bind_pages": (11,)}, "in group 2, where there is no table"),
        ({"bind": ((7, 10),), "bind_groups": (0,), "bind_pages": (11,)}, "bound to sequence 7 in group 0"),
        ({"bind": ((1, 10),), "bind_groups": (0,)}, "or lacks pages"),
        ({"bind": ((1, 10),), "bind_groups": (0,), "bind_pages": (11, 12)}, "2 further pages came with blocks"),
        ({"bind": ((1, 10),), "bind_groups": (0,), "bind_pages": (10,)}, "block 10 was bound although it is in_use"),
        ({"bind": ((1, 10),), "bind_groups": (0,), "bind_pages": (3,)}, "block 3 was bound although it is part"),
        ({"bind": ((1, 10),), "bind_groups": (0,), "bind_pages": (99,)}, "99"),
        ({"bind": ((1, 10),), "bind_groups": (1,), "bind_pages": (11, 12)}, "grew beyond 2 blocks in group 1"),
        ({"trim": ((1, 1),)}, "1 tables were trimmed, of 0 groups"),
        ({"trim": ((1, 1),), "trim_groups": (0,)}, "1 blocks of sequence 1 were trimmed in group 0"),
        ({"trim": ((1, 3),), "trim_groups": (1,)}, "3 blocks of sequence 1 were trimmed in group 1"),
        ({"seal": ((4, KEYS[1]),)}, "block 4 was sealed with another hash than its prompt's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_report_that_no_table_follows_is_refused(columns: dict[str, Any], words: str) -> None:
    ledger = grouped()
    admit(ledger, asked(1, EIGHT, 20))
    play(ledger, lease_want=5)
    with pytest.raises(ProtocolViolation, match=words):
        play(ledger, **columns)


# ---------------------------------------------------------------- hits


def test_a_prompt_begins_behind_the_window_of_another_one() -> None:
    ledger = grouped(60)
    lived(ledger, 1, LONG)
    assert (ledger.pool_counts().cached, ledger.pool_counts().in_use) == (6 * 2 + 6 * 3, 0)
    full, runs = ([ledger.state.store.cache.entries[key_of(key, group)] for key in KEYS] for group in (0, 1))
    (granted,) = admit(ledger, asked(2, [*LONG, 99]))
    assert granted.block_table[:6] == tuple(full)
    assert granted.runs[0][:6] == (*[TRIMMED] * 4, *runs[4:])
    assert (granted.n_shared, granted.cached_tokens, granted.miss_reason) == (6, 24, MissReason.FULL_HIT)
    assert len(granted.pages) == 1 + 2 * (len(granted.runs[0]) - 6)
    assert ledger.pool_counts().totals.prefix_hit_blocks == 6
    finish(ledger, 2)
    assert ledger.pool_counts().in_use == 0


def test_blocks_that_are_being_filled_are_shared_where_a_window_has_not_moved() -> None:
    """Behind block 3 the run's first block is not read: its third place is shared only once it is sealed."""
    ledger = grouped(80)
    admit(ledger, asked(1, LONG))
    (second,) = admit(ledger, asked(2, LONG))
    assert second.n_shared == 2
    assert (second.block_table[:2], second.runs[0][:2]) == (tuple(table(ledger, 1)[:2]), tuple(run(ledger, 1)[:2]))
    seal_place(ledger, 1, 0, KEYS[0])
    assert ledger.pool_counts().totals.prefix_hit_blocks == 1
    finish(ledger, 1)
    seal_place(ledger, 2, 1, KEYS[1])  # its filler has left, and this one has filled it
    assert registered(ledger) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_fork_shares_the_tables_of_its_parent_until_a_run_is_trimmed() -> None:
    ledger = grouped(80)
    admit(ledger, asked(1, EIGHT, 20))
    seal_place(ledger, 1, 0, KEYS[0])
    (fork,) = admit(ledger, asked(2, EIGHT, 20, fork_of=SequenceId(1)))
    # The last token is computed, so the block that holds it is no part of what is shared.
    assert (fork.block_table, fork.n_shared, fork.runs[0][0]) == ((0, 10), 1, 4)
    play(ledger, trim=((1, 1),), trim_groups=(1,))
    (late,) = admit(ledger, asked(3, EIGHT, 20, fork_of=SequenceId(1), block_hashes=()))
    assert (late.n_shared, late.miss_reason) == (0, MissReason.DISABLED)


def test_a_seal_of_a_run_counts_only_after_that_of_the_first_group() -> None:
    ledger = grouped()
    admit(ledger, asked(1, EIGHT))
    play(ledger, seal=((4, KEYS[0]),))
    assert (registered(ledger), ledger.pool_counts().totals.ignored_seals) == ([], 1)
    play(ledger, seal=((0, KEYS[0]), (4, KEYS[0])))
    assert registered(ledger) == [(0, 0), (0, 1)]


def test_the_index_is_told_of_a_content_while_every_group_has_it() -> None:
    ledger = grouped(10)
    admit(ledger, asked(1, EIGHT))
    play(ledger, seal=((0, KEYS[0]),))
    assert ledger.drain_index_events() == ()
    play(ledger, seal=((4, KEYS[0]),))
    (stored,) = ledger.drain_index_events()
    assert isinstance(stored, Stored)
    assert (stored.hash, stored.depth) == (KEYS[0], 0)
    assert [key for key, _ in ledger.index_snapshot().entries] == [KEYS[0]]
    finish(ledger, 1)
    admit(ledger, asked(2, prompt(8, 100)))
    (removed,) = ledger.drain_index_events()
    assert isinstance(removed, Removed)
    assert (removed.hash, ledger.index_snapshot().entries) == (KEYS[0], ())


# ---------------------------------------------------------------- eviction, preemption, resets


def test_a_block_of_a_run_goes_before_the_first_groups_with_all_its_pages() -> None:
    ledger = grouped(14)
    lived(ledger, 1, EIGHT)
    assert (ledger.pool_counts().cached, ledger.pool_counts().free) == (10, 4)
    (granted,) = admit(ledger, asked(2, prompt(4, 100)))
    assert registered(ledger) == [(0, 0), (0, 1), (1, 0)]
    assert (ledger.pool_counts().cached, ledger.pool_counts().free) == (7, 2)
    assert (granted.block_table, granted.runs, granted.pages) == ((10,), ((12,),), (11, 13, 7))
    (decision,) = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.EVICTION)
    assert dict(decision.figures) == {"evicted": 1, "cached": 7, "wanted": 5}


@pytest.mark.parametrize("eviction", ["lru", "frequency", "utility"])
def test_no_policy_evicts_the_first_groups_block_under_that_of_a_run(eviction: str) -> None:
    ledger = grouped(14, eviction=eviction)
    lived(ledger, 1, EIGHT)
    admit(ledger, asked(2, prompt(4, 100)))
    left = registered(ledger)
    assert len(left) == 3
    assert {(0, 0), (1, 0)} < set(left)


def test_the_reason_for_a_miss_is_that_the_block_of_a_run_was_evicted() -> None:
    ledger = grouped(14)
    lived(ledger, 1, EIGHT)
    admit(ledger, asked(2, prompt(4, 100)))
    match = ledger.look_up_prompt(KEYS[:2], 9)
    assert (match.hit_blocks, match.miss_reason, match.evicted_for) == (1, MissReason.EVICTED, "r2")


def test_victims_free_as_many_pages_as_the_stalled_ones_lack() -> None:
    """Each place takes a victim: the two pages that are left are none."""
    ledger = grouped(27)
    for number in range(1, 5):
        admit(ledger, asked(number, prompt(3, 100 * number), 20))
    bind_place(ledger, 1, 0, 1)
    assert (ledger.pool_counts().running, ledger.pool_counts().free) == (4, 2)
    batch = play(ledger, stalled=(1,), lease_want=5)
    assert batch is not None
    assert (batch.lease, batch.preempt) == ((25, 26), ()), "what was just leased may do"
    batch = play(ledger, stalled=(1, 2), lease_want=10)
    assert batch is not None
    assert [order.sequence for order in batch.preempt] == [4, 3]
    batch = play(ledger, preempted=((4, 3), (3, 3)), lease_want=10)
    assert batch is not None
    assert len(batch.lease) == 8


def test_a_reset_drops_the_blocks_of_all_groups() -> None:
    ledger = grouped(40)
    lived(ledger, 1, EIGHT)
    admit(ledger, asked(2, prompt(4, 100)))
    assert ledger.reset_cache(1) == 4
    ledger.check_invariants()
    assert (ledger.pool_counts().cached, ledger.pool_counts().free) == (0, 35)
    assert registered(ledger) == []


def test_what_is_retained_of_a_run_stays_when_it_leaves_the_window() -> None:
    ledger = grouped(34, clock=ManualClock(), retention_share=0.5)
    lived(ledger, 1, LONG, retention=(RetainedBlocks(0, 2, 80, 60.0),))
    assert ledger.pool_counts().retained == 10, "pages: two blocks of 2, two of 3"
    lived(ledger, 2, prompt(24, 600))
    assert registered(ledger) == [(0, 0), (0, 1), (1, 0), (1, 1)]


# ---------------------------------------------------------------- rebuilds


def live(number: int, num_tokens: int, block_table: tuple[int, ...], *runs: tuple[int, ...]) -> InventorySequence:
    entry = Reserve(SequenceId(number), num_tokens, 20, block_hashes=KEYS[: num_tokens // SIZE])
    tables = [tuple(map(BlockId, each)) for each in (block_table, *runs)]
    return InventorySequence(entry, RUNNING, number, tables[0], runs=tuple(tables[1:]))


def cached(block: int, key: BlockHash, parent: int = -1) -> CachedBlock:
    return CachedBlock(BlockId(block), key, parent, 0)


PAGES: dict[str, Any] = {"block_groups": (0, 1, 0, 1), "block_pages": (0, 1, 4, 5, 6, 2, 3, 7, 8, 9)}


def test_a_rebuild_restores_tables_claims_and_pages() -> None:
    ledger = grouped(20)
    claims = (cached(0, KEYS[0]), cached(2, KEYS[1], 0), cached(4, KEYS[0], 0), cached(7, KEYS[1], 1))
    ledger.rebuild(Inventory((live(1, 6, (0,), (4,)),), (BlockId(19),), claims, **PAGES))
    ledger.check_invariants()
    pool = ledger.pool_counts()
    assert (pool.in_use, pool.cached, pool.leased, pool.free) == (5, 5, 1, 9)
    assert registered(ledger) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert free_order(ledger) == [*range(10, 19), 7, 2]
    assert [key for key, _ in ledger.index_snapshot().entries] == [KEYS[0], KEYS[1]]


def test_a_claim_of_a_run_beside_no_claim_of_the_first_group_is_left_out() -> None:
    ledger = grouped(20)
    claims = (cached(0, KEYS[0]), cached(4, KEYS[0], 0), cached(7, KEYS[1], 0))
    ledger.rebuild(Inventory((), (), claims, **PAGES))
    ledger.check_invariants()
    assert registered(ledger) == [(0, 0), (0, 1)]
    assert (ledger.pool_counts().cached, ledger.pool_counts().free) == (5, 15)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"block_groups": (2,), "block_pages": (0, 1)}, "a block of group 2 of 2"),
        ({"block_groups": (1,), "block_pages": (0, 1)}, "or lacks its pages"),
        ({"block_groups": (0,), "block_pages": (0, 1, 2)}, "3 pages of blocks that have 2"),
        ({"block_groups": (0, 0), "block_pages": (0, 1, 1, 2)}, "page 1 stands in two blocks"),
        ({"block_groups": (0,), "block_pages": (0, 20)}, "20"),
        ({**PAGES, "pool": (1,)}, "block 1 is in the lease pool although it is part"),
        ({**PAGES, "sequences": (live(1, 6, (0,)),)}, "sequence 1 has 0 runs; expected 1"),
        ({**PAGES, "sequences": (live(1, 6, (4,), (0,)),)}, "block 4 stands in a table of group 0, of which it is not"),
        ({**PAGES, "sequences": (live(1, 6, (1,), (4,)),)}, "block 1 stands in a table of group 0"),
        ({**PAGES, "sequences": (live(1, 6, (TRIMMED, 2), (4, 7)),)}, "a table of the first group without some"),
        ({**PAGES, "sequences": (live(1, 6, (0,), (4, 7)),)}, "a run of 2 blocks beside a table of 1"),
        ({**PAGES, "cached_blocks": (cached(1, KEYS[0]),)}, "cached block 1 is leased, stands twice"),
        ({**PAGES, "cached_blocks": (cached(12, KEYS[0]),)}, "or lacks pages"),
        (
            {
                **PAGES,
                "sequences": (live(1, 6, (0, 2), (4, 7)),),
                "cached_blocks": (cached(0, hashes(prompt(4, 50), SIZE)[0]),),
            },
            "another hash in the inventory",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_inventory_whose_pages_contradict_each_other_is_refused(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolViolation, match=words):
        grouped(20).rebuild(Inventory(**columns))


# ---------------------------------------------------------------- what operators see


def test_each_page_has_the_use_of_its_block() -> None:
    ledger = grouped(12)
    admit(ledger, asked(1, EIGHT, 9))
    seal_place(ledger, 1, 0, KEYS[0])
    found = ledger.block_map(0, 12, 8)
    sealed, filling, free = BlockUse.SEALED, BlockUse.FILLING, BlockUse.FREE
    assert list(found.uses) == [sealed] * 2 + [filling] * 2 + [sealed] * 3 + [filling] * 3 + [free] * 2
    assert list(ledger.block_map(5, 3, 8).uses) == [sealed, sealed, filling]
    (one,) = found.sequences
    assert (one.blocks, one.max_blocks) == (10, 10)


@pytest.mark.parametrize("page", [4, 5, 6])
def test_a_page_is_shown_as_its_block(page: int) -> None:
    ledger = grouped(12)
    admit(ledger, asked(1, EIGHT, 9))
    seal_place(ledger, 1, 0, KEYS[0])
    found = ledger.block_view(BlockId(page), 8)
    assert found is not None
    assert (found.block, found.references, found.index, found.hash) == (4, 1, 0, KEYS[0])
    assert [each.sequence for each in found.holders] == [1]
