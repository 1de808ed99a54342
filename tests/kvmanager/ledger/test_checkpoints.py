"""A ledger whose pool has checkpoints of states: exact pages on tiny pools.

Blocks have 4 slots. One of K and V is a page, a checkpoint has 3 of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import key_of
from common.contracts.lease import Admit, CachedBlock, Inventory, InventorySequence, Report, Reserve, RetainedBlocks
from common.contracts.types import (
    TRIMMED,
    BlockId,
    DecisionKind,
    FinishReason,
    KvGroup,
    KvGroupKind,
    MissReason,
    SequenceId,
    SequencePhase,
)
from kvmanager.contracts.block import BlockState
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
    """Report K and V of a prompt's full blocks, and its checkpoints, as sealed; the latter are released with that.

    The tail stays.
    """
    seals = []
    for place, key in enumerate(hashes(tokens, SIZE)):
        seals.append((sequence(ledger, number).block_table[place], key))
        table = run_of(ledger, number).table
        if place < len(table) and table[place] != TRIMMED:
            seals.append((table[place], key))
    gone = min(len(run_of(ledger, number).table), (len(tokens) - 1) // SIZE)
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
    assert (late.n_shared, late.block_table[:2], late.runs[0][:2]) == (2, (0, 1), (TRIMMED, 3))


def test_the_index_is_told_of_places_with_a_checkpoint() -> None:
    ledger = with_states()
    lived(ledger, 1, NINE)
    assert [key for key, _ in ledger.index_snapshot().entries] == [KEYS[1]]


# ---------------------------------------------------------------- tails


def chatted(ledger: Ledger, number: int, tokens: list[int], output: int, sealed: bool = True) -> Admit:
    """Let a prompt be computed and answered, and end; with `sealed`, its tail has the states of its last full block."""
    (granted,) = admit(ledger, asked(number, tokens, len(tokens) + output))
    compute(ledger, number, tokens)
    table, known = sequence(ledger, number).block_table, [*tokens, *prompt(output, 900)]
    keys = hashes(known[:-1], SIZE)
    play(ledger, lease_want=len(keys) - len(table))
    bound = [(number, block) for block in leased(ledger)[: len(keys) - len(table)]]
    play(ledger, bind=tuple(bound), bind_groups=tuple(0 for _ in bound))
    seals = [(table[place], keys[place]) for place in range(len(tokens) // SIZE, len(keys))]
    tail = run_of(ledger, number).table[-1]
    play(ledger, seal=(*seals, *[(tail, keys[-1])] * sealed))
    finish(ledger, number)
    return granted


def leased(ledger: Ledger) -> list[int]:
    blocks = ledger.state.store.blocks
    return [number for number, of in enumerate(blocks.state) if of is BlockState.LEASED]


def test_a_sequence_that_may_fill_a_block_more_gets_a_tail() -> None:
    tables = [admit(with_states(), asked(1, NINE, length))[0].runs for length in (12, 13)]
    assert tables == [((TRIMMED, 3),), ((TRIMMED, 3, 6),)], "the token that reaches the limit is not computed"


def test_the_next_turn_goes_on_from_the_tail() -> None:
    ledger = with_states()
    chatted(ledger, 1, NINE, 12)
    (granted,) = admit(ledger, asked(2, [*NINE, *prompt(12, 900), *prompt(5, 700)]))
    assert (granted.n_shared, granted.cached_tokens) == (5, 20)
    assert granted.runs[0][:5] == (TRIMMED, TRIMMED, TRIMMED, TRIMMED, 6)


def test_a_tail_that_was_never_written_is_free_afterwards() -> None:
    ledger = with_states()
    chatted(ledger, 1, NINE, 12, sealed=False)
    assert registered(ledger)[1] == [1]
    counts = ledger.pool_counts()
    assert (counts.in_use, counts.cached) == (0, 5 + 3)


def test_a_preempted_sequence_goes_on_from_its_tail() -> None:
    ledger = with_states()
    admit(ledger, asked(1, NINE, 30))
    compute(ledger, 1, NINE)
    known = hashes([*NINE, *prompt(4, 900)], SIZE)
    batch = play(ledger, seal=((2, known[2]), (6, known[2])), preempted=((1, 13),))
    assert batch is not None
    (again,) = batch.admit
    assert (again.n_shared, again.runs[0][:3]) == (3, (TRIMMED, TRIMMED, 6))


def test_a_tail_with_a_hash_that_its_sequence_does_not_have_is_refused() -> None:
    ledger = with_states()
    admit(ledger, asked(1, prompt(8), 30))
    with pytest.raises(ProtocolViolation, match="block 5 was sealed with another hash than its prompt's"):
        play(ledger, seal=((0, KEYS[0]), (1, KEYS[1]), (5, KEYS[0])))


@pytest.mark.parametrize(
    ("pages", "max_len", "tail"), [(24, 30, True), (23, 30, False), (24, 84, True), (24, 88, False)]
)
def test_tails_take_an_eighth_of_the_pool_and_leave_room_to_grow(pages: int, max_len: int, tail: bool) -> None:
    """A tail has three pages. At 84 tokens the sequence fills 21 more, and at 88 one more than there would be."""
    ledger = with_states(pages)
    admit(ledger, asked(1, NINE, max_len))
    assert (run_of(ledger, 1).table[2:] != [], sequence(ledger, 1).has_tail) == (tail, tail)


def test_the_seal_of_a_tail_behind_a_block_that_is_not_registered_is_ignored() -> None:
    """As after a reset: K and V of the third block has no parent any more, so the manager does not know its hash."""
    ledger = with_states()
    admit(ledger, asked(1, NINE, 30))
    known = hashes([*NINE, *prompt(4, 900)], SIZE)
    play(ledger, seal=((2, known[2]), (6, known[2])))
    assert (registered(ledger), ledger.pool_counts().totals.ignored_seals) == (([], []), 2)


def test_a_tail_leaves_room_to_those_that_run() -> None:
    ledger = with_states(40)
    admit(ledger, asked(1, prompt(8, 500), 120, block_hashes=()))
    admit(ledger, asked(2, NINE, 30))
    assert not sequence(ledger, 2).has_tail, "30 pages are the first one's, and eight the second one's"


def test_a_checkpoint_that_two_sequences_leave_is_cached_once_both_have_released_it() -> None:
    ledger = with_states(200)
    admit(ledger, asked(1, NINE), asked(2, NINE))
    compute(ledger, 1, NINE)
    compute(ledger, 2, NINE)
    finish(ledger, 1, 2)
    assert ledger.pool_counts().cached == 5


def test_a_rebuild_keeps_a_tail_and_registers_it_where_it_is_sealed() -> None:
    ledger = with_states(20)
    entry = Reserve(SequenceId(1), 13, 30, block_hashes=KEYS[:3])
    tables = [tuple(map(BlockId, each)) for each in ((0, 1, 2, 9), (TRIMMED, TRIMMED, 3))]
    one = InventorySequence(entry, SequencePhase.RUNNING, 1, tables[0], runs=(tables[1],))
    claims = [CachedBlock(BlockId(place), KEYS[place], place - 1, 0) for place in range(3)]
    pages = tuple(map(BlockId, (0, 1, 2, 9, 3, 4, 5)))
    ledger.rebuild(Inventory((one,), (), tuple(claims), (0, 0, 0, 0, 1), pages))
    play(ledger, seal=((9, KEYS[3]), (3, KEYS[3])))
    assert registered(ledger) == ([0, 1, 2, 3], [3])


# ---------------------------------------------------------------- waiting for a planned checkpoint

LONGER = prompt(80)


def waited(pages: int = 200, tokens: list[int] = LONGER, **options: Any) -> Ledger:
    """Return a ledger in which a second sequence with one prompt waits for the checkpoint of the first."""
    ledger = with_states(pages, **options)
    admit(ledger, asked(1, LONGER))
    assert admit(ledger, asked(2, tokens)) == ()
    return ledger


def test_a_prompt_waits_for_a_checkpoint_that_saves_it_much() -> None:
    ledger = waited()
    assert (list(ledger.state.sequences.queue), ledger.pool_counts().waiting) == ([], 1)
    (decision,) = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.SHORTFALL)
    assert (decision.reasons, decision.beneficiary) == (("for a checkpoint of another sequence",), "r1")
    ledger.check_invariants()


def test_it_goes_on_from_there_once_it_is_sealed() -> None:
    ledger = waited()
    keys, table = hashes(LONGER, SIZE), sequence(ledger, 1).block_table
    seals = [*zip(table[:19], keys, strict=False), (run_of(ledger, 1).table[18], keys[18])]
    batch = play(ledger, seal=tuple(seals), trim=((1, 19),), trim_groups=(1,))
    assert batch is not None
    (granted,) = batch.admit
    assert (granted.sequence, granted.n_shared, granted.cached_tokens) == (2, 19, 76)


@pytest.mark.parametrize(("tokens", "waits"), [(68, False), (69, True)])
def test_it_does_not_wait_for_what_it_computes_as_soon(tokens: int, waits: bool) -> None:
    """Behind 64 tokens nothing is saved that is worth a wait."""
    ledger = with_states(200)
    admit(ledger, asked(1, prompt(tokens)))
    assert bool(admit(ledger, asked(2, prompt(tokens)))) == (not waits)


@pytest.mark.parametrize(
    "columns",
    [
        {"trim": ((1, 19),), "trim_groups": (1,)},
        {"preempted": ((1, 80),)},
        {"finished": ((1, FinishReason.CANCELLED),)},
    ],
    ids=["passed", "preempted", "left"],
)
def test_it_waits_no_longer_than_the_checkpoint_is_planned(columns: dict[str, Any]) -> None:
    ledger = waited()
    batch = play(ledger, **columns)
    assert batch is not None
    # A preempted sequence has the older place; it leaves the checkpoint now, for which the other waits no second time.
    assert [(each.sequence, each.n_shared) for each in batch.admit][-1:] == [(2, 0)]
    ledger.check_invariants()


def test_those_that_begin_to_wait_count_to_what_one_batch_admits() -> None:
    """Each of them costs a look at its whole prompt, and other workers wait for their grants meanwhile."""
    ledger = with_states(200)
    ledger.apply_report(Report(0, reserve=tuple(asked(number, LONGER) for number in range(1, 8))))
    batches = [ledger.schedule(3) for _ in range(3)]
    assert [each and len(each.admit) for each in batches] == [1, None, None]
    assert len(ledger.state.sequences.planned.awaited) == 6
    assert not ledger.has_more


def test_one_that_waits_can_leave() -> None:
    ledger = waited()
    finish(ledger, 2)
    assert ledger.pool_counts().waiting == 0
    finish(ledger, 1)
    ledger.check_invariants()


def test_others_pass_one_that_waits() -> None:
    ledger = waited()
    assert [each.sequence for each in admit(ledger, asked(3, prompt(80, 500)))] == [3]


def test_forks_wait_for_the_checkpoint_of_their_prompt() -> None:
    ledger = with_states(400)
    batch = admit(ledger, asked(1, LONGER, 100), *(asked(n, LONGER, 100, fork_of=SequenceId(1)) for n in (2, 3, 4)))
    assert [each.sequence for each in batch] == [1]
    compute(ledger, 1, LONGER)
    assert [each.n_shared for each in ledger.block_tables()] == [0, 19, 19, 19]


def test_a_prompt_that_takes_no_hits_does_not_wait() -> None:
    ledger = with_states(200)
    admit(ledger, asked(1, LONGER))
    assert len(admit(ledger, asked(2, LONGER, computes_all=True), asked(3, LONGER, block_hashes=()))) == 2


def test_one_that_shares_a_deeper_prefix_already_does_not_wait() -> None:
    ledger = with_states(400)
    lived(ledger, 1, LONGER)
    admit(ledger, asked(2, [*LONGER, *prompt(20, 500)]))
    (granted,) = admit(ledger, asked(3, [*LONGER, *prompt(20, 500)]))
    assert granted.n_shared == 19, "it saves five blocks more, and computes them"


# ---------------------------------------------------------------- what leaves first


def test_a_checkpoint_that_a_deeper_one_goes_on_from_leaves_first() -> None:
    """Four pages are needed, and three are free. The first turn's checkpoint goes, although other K and V are older."""
    ledger = with_states(17, eviction="lru")
    lived(ledger, 9, prompt(9, 300))
    lived(ledger, 1, NINE)
    lived(ledger, 2, LONG[:13])
    assert registered(ledger) == ([0, 1, 2], [1, 2])
    ledger.drain_decisions()
    admit(ledger, asked(3, prompt(14, 600), block_hashes=()))
    assert registered(ledger) == ([0, 1, 2], [2])
    (decision,) = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.EVICTION)
    assert decision.reasons[-1] == "block 9: a deeper checkpoint goes on from it"


def test_a_tail_leaves_before_older_contents_while_tails_do_not_pay() -> None:
    ledger = with_states(40, eviction="lru")
    chatted(ledger, 1, NINE, 12)
    chatted(ledger, 2, prompt(9, 300), 12)
    assert ledger.pool_counts().free == 18
    admit(ledger, asked(3, prompt(4 * 19, 600), block_hashes=()))
    states = ledger.state.store.states
    assert states is not None
    assert len(states.known) == 3
    assert registered(ledger) == ([0, 1], [1])
    assert ledger.look_up_prompt(hashes([*NINE, *prompt(12, 900)], SIZE), 21).hit_blocks == 2, "its tail is gone"


def test_k_and_v_without_a_checkpoint_at_its_end_leaves_before_checkpoints() -> None:
    """The first prompt is released first of all; the second one's output is what nobody can go on from."""
    ledger = with_states(30, eviction="lru")
    lived(ledger, 1, NINE)
    chatted(ledger, 2, prompt(9, 300), 12, sealed=False)
    ledger.drain_decisions()
    admit(ledger, asked(3, prompt(4 * (ledger.pool_counts().free + 1), 600), block_hashes=()))
    assert registered(ledger) == ([0, 1], [1])
    (decision,) = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.EVICTION)
    assert decision.reasons[-1].endswith(": no checkpoint stands at or behind it")


# ---------------------------------------------------------------- sparse tables


def test_a_run_of_checkpoints_counts_the_blocks_that_it_has() -> None:
    ledger = with_states()
    admit(ledger, asked(1, NINE, 17))
    one = sequence(ledger, 1)
    assert (one.max_blocks, one.own_blocks, one.growth) == (4, 3 + 3 + 3, 1)
    assert (ledger.state.sequences.growth, ledger.pool_counts().in_use) == (1, 9)
    compute(ledger, 1, NINE)
    assert (one.own_blocks, one.growth, run_of(ledger, 1).table) == (3 + 3, 1, [TRIMMED, TRIMMED, 6])
    assert (ledger.pool_counts().in_use, ledger.pool_counts().cached) == (6, 3)


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
        ({"trim": ((1, 4),), "trim_groups": (1,)}, "4 blocks of sequence 1 were trimmed in group 1"),
        ({"seal": ((3, KEYS[0]),)}, "block 3 was sealed with another hash than its prompt's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_report_that_no_checkpoint_follows_is_refused(columns: dict[str, Any], words: str) -> None:
    ledger = with_states()
    admit(ledger, asked(1, NINE, 20))
    with pytest.raises(ProtocolViolation, match=words):
        play(ledger, **columns)


@pytest.mark.parametrize(("share", "retained"), [(0.5, 5), (0.05, 2)])
def test_a_checkpoint_in_a_retained_range_is_retained_with_its_pages(share: float, retained: int) -> None:
    """Of 40 pages a tenant retains 20 at most, or 2: a checkpoint alone has 3."""
    ledger = with_states(retention_share=share)
    lived(ledger, 1, NINE, retention=(RetainedBlocks(0, 2, 80, 60.0),))
    assert (ledger.pool_counts().retained, ledger.pool_counts().cached) == (retained, 5)


def test_a_retained_prefix_can_be_gone_on_from_when_others_leave() -> None:
    ledger = with_states(20, retention_share=0.5)
    lived(ledger, 1, NINE, retention=(RetainedBlocks(0, 2, 80, 60.0),))
    lived(ledger, 2, prompt(9, 300))
    admit(ledger, asked(3, prompt(4 * 14, 600), block_hashes=()))
    assert ledger.look_up_prompt(KEYS[:2], 9).hit_blocks == 2


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
