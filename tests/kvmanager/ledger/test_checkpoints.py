"""A ledger whose pool has checkpoints of states: exact pages on tiny pools.

Blocks have 4 slots. One of K and V is a page, a checkpoint has 3 of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, CachedBlock, Inventory, InventorySequence, Reserve, RetainedBlocks
from common.contracts.types import (
    TRIMMED,
    BlockId,
    DecisionKind,
    KvGroup,
    KvGroupKind,
    MissReason,
    SequenceId,
    SequencePhase,
)
from kvmanager.contracts.block import key_of
from kvmanager.contracts.sequence import Run, Sequence
from kvmanager.ledger.block_map import BlockUse
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, finish, free_order, hashes, make_ledger, play, prompt, reserve

SIZE = 4
FULL, STATE = KvGroup(KvGroupKind.FULL, 0, 1, ()), KvGroup(KvGroupKind.STATE, 0, 3, ())
NINE, LONG = prompt(9), prompt(25)
KEYS = hashes(LONG, SIZE)


def with_states(num_pages: int = 40, **options: Any) -> Ledger:
    return make_ledger(num_pages, SIZE, groups=(FULL, STATE), **options)


def asked(number: int, tokens: list[int], max_len: int = 0, **options: Any) -> Reserve:
    return reserve(number, tokens, max_len, block_size=SIZE, **options)


def sequence(ledger: Ledger, number: int) -> Sequence:
    return ledger.state.sequences.live[SequenceId(number)]


def run_of(ledger: Ledger, number: int) -> Run:
    return sequence(ledger, number).runs[0]


def compute(ledger: Ledger, number: int, tokens: list[int]) -> None:
    """Report K and V of a prompt's full blocks, and its checkpoints, as sealed; the latter are released with that."""
    seals = []
    for place, key in enumerate(hashes(tokens, SIZE)):
        seals.append((sequence(ledger, number).block_table[place], key))
        table = run_of(ledger, number).table
        if place < len(table) and table[place] != TRIMMED:
            seals.append((table[place], key))
    gone = len(run_of(ledger, number).table)
    play(ledger, seal=tuple(seals), trim=((number, gone),), trim_groups=(1,))


def lived(ledger: Ledger, number: int, tokens: list[int], **options: Any) -> Admit:
    """Let a prompt be computed, and end; return how it was admitted."""
    (granted,) = admit(ledger, asked(number, tokens, **options))
    compute(ledger, number, tokens)
    finish(ledger, number)
    return granted


def registered(ledger: Ledger) -> tuple[list[int], list[int]]:
    """Return the places of the long prompt whose K and V are registered, and those with a checkpoint."""
    entries = ledger.state.store.cache.entries
    kv, states = ([place for place, key in enumerate(KEYS) if key_of(key, group) in entries] for group in (0, 1))
    return kv, states


# ---------------------------------------------------------------- where checkpoints are granted


def test_a_prompt_is_granted_a_checkpoint_at_the_last_boundary_before_its_last_token() -> None:
    ledger = with_states()
    (granted,) = admit(ledger, asked(1, NINE))
    assert (granted.block_table, granted.runs, granted.pages) == ((0, 1, 2), ((TRIMMED, 3),), (4, 5))
    (decision,) = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.GRANT)
    assert (decision.chosen, dict(decision.figures)["checkpoints"]) == ("0 shared blocks and 6 fresh pages", 1.0)


@pytest.mark.parametrize(("tokens", "table"), [(3, ()), (4, ()), (5, (2,)), (8, (2,)), (12, (TRIMMED, 3))])
def test_the_checkpoint_of_a_prompt_that_ends_with_a_block_is_one_block_before(tokens: int, table: Any) -> None:
    """Else the same prompt would not hit it: its last token is computed."""
    (granted,) = admit(with_states(), asked(1, prompt(tokens)))
    assert granted.runs == (table,)


@pytest.mark.parametrize(("pages", "table"), [(3, ()), (6, ()), (7, (TRIMMED, 3))])
def test_no_checkpoint_takes_the_page_that_a_stalled_sequence_would_lack(pages: int, table: Any) -> None:
    (granted,) = admit(with_states(pages), asked(1, NINE))
    assert (granted.block_table, granted.runs) == ((0, 1, 2), (table,))


@pytest.mark.parametrize("options", [{"prefix_caching": False}, {}])
def test_where_nothing_is_cached_there_is_no_checkpoint(options: Any) -> None:
    (granted,) = admit(with_states(**options), asked(1, NINE, block_hashes=()))
    assert granted.runs == ((),)


@pytest.mark.parametrize(("pages", "places"), [(40, [3, 5]), (14, [3, 5]), (13, [5])])
def test_a_second_checkpoint_stands_where_k_and_v_of_others_end(pages: int, places: list[int]) -> None:
    """Seven pages of the second are K and V; the checkpoint at the end of its own prompt comes first."""
    ledger = with_states(pages)
    lived(ledger, 1, LONG)
    (granted,) = admit(ledger, asked(2, [*LONG[:16], *prompt(10, 500)]))
    assert (granted.n_shared, granted.miss_reason, granted.diverged_at) == (0, MissReason.UNRESUMABLE, 4)
    (run,) = granted.runs
    assert [place for place, block in enumerate(run) if block != TRIMMED] == places
    assert len(granted.pages) == 2 * len(places)


# ---------------------------------------------------------------- hits


def test_a_prompt_goes_on_from_a_checkpoint_and_leaves_the_next() -> None:
    ledger = with_states()
    lived(ledger, 1, NINE)
    assert registered(ledger) == ([0, 1], [1])
    (granted,) = admit(ledger, asked(2, LONG[:13]))
    assert (granted.n_shared, granted.cached_tokens, granted.miss_reason) == (2, 8, MissReason.DIVERGED_AT)
    assert (granted.block_table[:2], granted.runs[0][:2]) == ((0, 1), (TRIMMED, 3))
    assert len(granted.runs[0]) == 3
    assert (sequence(ledger, 2).own_blocks, run_of(ledger, 2).trimmed) == (2 + 3, 1)
    compute(ledger, 2, LONG[:13])
    assert registered(ledger) == ([0, 1, 2], [1, 2])


@pytest.mark.parametrize("tokens", [8, 9, 12])
def test_a_prompt_hits_what_it_left_itself(tokens: int) -> None:
    ledger = with_states()
    lived(ledger, 1, prompt(tokens))
    (granted,) = admit(ledger, asked(2, prompt(tokens)))
    assert granted.n_shared == (tokens - 1) // SIZE


def test_a_checkpoint_is_shared_only_once_it_is_saved() -> None:
    ledger = with_states()
    admit(ledger, asked(1, LONG[:5]))
    (second,) = admit(ledger, asked(2, LONG[:5]))
    assert (second.n_shared, second.block_table, second.runs) == (0, (5, 6), ((7,),))


def test_a_hit_that_does_not_fit_beside_the_prompts_own_blocks_is_none() -> None:
    """Behind the hit, three pages are lacking, and two are there. Without it five are needed, and seven there."""
    ledger = with_states(7)
    lived(ledger, 1, NINE)
    (granted,) = admit(ledger, asked(2, LONG[:20]))
    assert (granted.n_shared, granted.cached_tokens, len(granted.block_table)) == (0, 0, 5)
    assert (granted.miss_reason, granted.diverged_at) == (MissReason.UNRESUMABLE, 2)
    assert ledger.pool_counts().totals.prefix_hit_blocks == 0
    _, decision = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.GRANT)
    assert decision.reasons == (
        "unresumable",
        "K and V of 2 blocks are there, and no checkpoint of states, or no room for it",
    )


def test_a_sequence_that_lacks_pages_either_way_waits() -> None:
    ledger = with_states(12)
    lived(ledger, 1, NINE)
    admit(ledger, asked(2, prompt(16, 300)))
    assert admit(ledger, asked(3, LONG[:24])) == ()
    batch = finish(ledger, 2)
    assert batch is not None
    assert [(each.sequence, each.n_shared) for each in batch.admit] == [(3, 2)]


def test_a_fork_shares_only_what_has_a_checkpoint() -> None:
    ledger = with_states()
    admit(ledger, asked(1, NINE, 20))
    (early,) = admit(ledger, asked(2, NINE, 20, fork_of=SequenceId(1)))
    assert (early.n_shared, set(early.block_table) & {0, 1, 2}) == (0, set())
    compute(ledger, 1, NINE)
    (late,) = admit(ledger, asked(3, NINE, 20, fork_of=SequenceId(1)))
    assert (late.n_shared, late.block_table[:2], late.runs) == (2, (0, 1), ((TRIMMED, 3),))


def test_the_index_is_told_of_places_with_a_checkpoint() -> None:
    ledger = with_states()
    lived(ledger, 1, NINE)
    assert [key for key, _ in ledger.index_snapshot().entries] == [KEYS[1]]


# ---------------------------------------------------------------- sparse tables


def test_a_run_of_checkpoints_counts_the_blocks_that_it_has() -> None:
    ledger = with_states()
    admit(ledger, asked(1, NINE, 17))
    one = sequence(ledger, 1)
    assert (one.max_blocks, one.own_blocks, one.growth) == (4, 3 + 3, 1)
    assert (ledger.state.sequences.growth, ledger.pool_counts().in_use) == (1, 6)
    compute(ledger, 1, NINE)
    assert (one.own_blocks, one.growth, run_of(ledger, 1).table) == (3, 1, [TRIMMED, TRIMMED])
    assert (ledger.pool_counts().in_use, ledger.pool_counts().cached) == (3, 3)


def test_a_checkpoint_that_is_not_saved_is_free_once_its_sequence_leaves_or_passes_it() -> None:
    ledger = with_states(20)
    admit(ledger, asked(1, NINE))
    play(ledger, trim=((1, 2),), trim_groups=(1,))
    assert (registered(ledger), ledger.pool_counts().in_use) == (([], []), 3)
    admit(ledger, asked(2, prompt(9, 100)))
    finish(ledger, 1, 2)
    assert sorted(free_order(ledger)) == list(range(20))


def test_a_checkpoint_whose_k_and_v_are_not_sealed_is_not_registered() -> None:
    ledger = with_states()
    admit(ledger, asked(1, NINE))
    play(ledger, seal=((3, KEYS[1]),), trim=((1, 2),), trim_groups=(1,))
    assert (registered(ledger), ledger.pool_counts().totals.ignored_seals) == (([], []), 1)
    assert ledger.pool_counts().cached == 0


def test_a_checkpoint_of_a_preempted_sequence_stays_if_it_was_saved() -> None:
    ledger = with_states()
    admit(ledger, asked(1, NINE))
    seals = ((0, KEYS[0]), (1, KEYS[1]), (3, KEYS[1]))
    batch = play(ledger, seal=seals, preempted=((1, 9),))
    assert batch is not None
    (again,) = batch.admit
    assert (again.n_shared, again.block_table[:2], again.runs) == (2, (0, 1), ((TRIMMED, 3),))


def test_k_and_v_are_not_evicted_under_a_checkpoint() -> None:
    ledger = with_states(9)
    lived(ledger, 1, NINE)
    admit(ledger, asked(2, prompt(8, 100), 8, block_hashes=()))
    admit(ledger, asked(3, prompt(8, 200), 8, block_hashes=()))
    assert registered(ledger) == ([0, 1], [1])
    finish(ledger, 3)
    admit(ledger, asked(4, prompt(16, 300), 16, block_hashes=()))
    assert registered(ledger) == ([0, 1], [])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"bind": ((1, 10),), "bind_groups": (1,), "bind_pages": (11, 12)}, "in group 1, where there is no table"),
        ({"trim": ((1, 3),), "trim_groups": (1,)}, "3 blocks of sequence 1 were trimmed in group 1"),
        ({"seal": ((3, KEYS[0]),)}, "block 3 was sealed with another hash than its prompt's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_report_that_no_checkpoint_follows_is_refused(columns: dict[str, Any], words: str) -> None:
    ledger = with_states()
    admit(ledger, asked(1, NINE, 20))
    with pytest.raises(ProtocolViolation, match=words):
        play(ledger, **columns)


def test_no_checkpoint_is_retained() -> None:
    ledger = with_states(retention_share=0.5)
    lived(ledger, 1, NINE, retention=(RetainedBlocks(0, 2, 80, 60.0),))
    assert (ledger.pool_counts().retained, ledger.pool_counts().cached) == (2, 5)


# ---------------------------------------------------------------- rebuilds, and what operators see


def inventory(saved: bool) -> Inventory:
    """Return what a worker has that computes a prompt of nine tokens, and has saved its checkpoint or is to."""
    entry = Reserve(SequenceId(1), 9, 20, block_hashes=KEYS[:2])
    tables = [tuple(map(BlockId, each)) for each in ((0, 1, 2), (TRIMMED, 3))]
    one = InventorySequence(entry, SequencePhase.RUNNING, 1, tables[0], runs=(tables[1],))
    claims = [CachedBlock(BlockId(0), KEYS[0], -1, 0), CachedBlock(BlockId(1), KEYS[1], 0, 0)]
    claims += [CachedBlock(BlockId(3), KEYS[1], 1, 0)] * saved
    pages = tuple(map(BlockId, range(6)))
    return Inventory((one,), (), tuple(claims), (0, 0, 0, 1), pages)


def test_a_rebuild_keeps_a_checkpoint_that_is_to_be_saved() -> None:
    ledger = with_states(20)
    ledger.rebuild(inventory(saved=False))
    ledger.check_invariants()
    assert (run_of(ledger, 1).table, ledger.pool_counts().in_use) == ([TRIMMED, 3], 6)
    assert (registered(ledger), ledger.look_up_prompt(KEYS[:2], 9).hit_blocks) == (([0, 1], []), 0)
    play(ledger, seal=((3, KEYS[1]),), trim=((1, 2),), trim_groups=(1,))
    assert (registered(ledger), ledger.look_up_prompt(KEYS[:2], 9).hit_blocks) == (([0, 1], [1]), 2)
    assert (ledger.pool_counts().in_use, ledger.pool_counts().cached) == (3, 3)


def test_a_rebuild_registers_a_checkpoint_that_is_still_held() -> None:
    ledger = with_states(20)
    ledger.rebuild(inventory(saved=True))
    ledger.check_invariants()
    assert (registered(ledger), ledger.pool_counts().in_use) == (([0, 1], [1]), 6)
    finish(ledger, 1)
    assert (ledger.pool_counts().in_use, ledger.pool_counts().cached) == (0, 5)


def test_the_block_map_shows_the_pages_of_a_checkpoint() -> None:
    ledger = with_states(8)
    admit(ledger, asked(1, NINE, 13))
    found = ledger.block_map(0, 8, 8)
    assert list(found.uses) == [BlockUse.PENDING] * 2 + [BlockUse.FILLING] * 4 + [BlockUse.FREE] * 2
    assert [each.blocks for each in found.sequences] == [6]
    page = ledger.block_view(BlockId(5), 8)
    assert page is not None
    assert (page.block, page.index, [each.sequence for each in page.holders]) == (3, 1, [1])
    compute(ledger, 1, NINE)
    found = ledger.block_map(0, 8, 8)
    assert list(found.uses[3:6]) == [BlockUse.CACHED] * 3
    assert [each.blocks for each in found.sequences] == [3]
