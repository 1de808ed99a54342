"""A prompt that diverges inside a cached block of 64 slots copies the quarters that it has in common."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import CachedBlock, Copy, GrantBatch, Inventory, Report
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId
from kvmanager.contracts.block import BlockState
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import (
    block_table,
    finish,
    hashes,
    make_ledger,
    parts,
    play,
    prompt,
    reserve,
    sealed_parts,
)

SIZE = 64
OTHER = 10_000
"""Where the tokens of a prompt that diverges go on."""


def asked(number: int, tokens: list[int], **options: Any) -> Any:
    return reserve(number, tokens, block_size=SIZE, partial_hashes=parts(tokens), **options)


def computed(ledger: Ledger, number: int, tokens: list[int]) -> None:
    """Report the full blocks of a sequence as sealed, with their partial hashes."""
    seals = tuple(zip(block_table(ledger, number), hashes(tokens, SIZE), strict=False))
    play(ledger, seal=seals, partials=sealed_parts(tokens))


def cached(tokens: list[int], num_blocks: int = 8, **options: Any) -> Ledger:
    """Return a ledger in which one sequence has computed its prompt and ended."""
    ledger = make_ledger(num_blocks, SIZE, **options)
    play(ledger, reserve=(asked(1, tokens),))
    computed(ledger, 1, tokens)
    finish(ledger, 1)
    return ledger


def common(slots: int, length: int, of: list[int]) -> list[int]:
    """Return a prompt of `length` tokens whose first `slots` are those of another one."""
    return of[:slots] + prompt(length - slots, OTHER)


def admitted(ledger: Ledger, number: int, tokens: list[int], **options: Any) -> GrantBatch:
    batch = play(ledger, reserve=(asked(number, tokens, **options),))
    assert batch is not None
    return batch


def copied(batch: GrantBatch) -> tuple[Copy, ...]:
    return batch.copy


def copy(src: int, dst: int, length: int) -> Copy:
    return Copy(BlockId(src), BlockId(dst), length)


FIRST = prompt(2 * SIZE + 1)


@pytest.mark.parametrize(
    ("slots", "wanted"), [(15, 0), (16, 16), (31, 16), (32, 32), (47, 32), (48, 48), (63, 48)], ids=str
)
def test_whole_quarters_that_two_prompts_have_in_common_are_copied(slots: int, wanted: int) -> None:
    batch = admitted(cached(FIRST), 2, common(SIZE + slots, 3 * SIZE, FIRST))
    (granted,) = batch.admit
    assert (granted.n_shared, granted.cached_tokens) == (1, SIZE + wanted)
    assert batch.copy == ((copy(1, granted.block_table[1], SIZE + wanted),) if wanted else ())


def test_a_prompt_may_diverge_inside_its_first_block() -> None:
    (granted,) = (batch := admitted(cached(FIRST), 2, common(40, 70, FIRST))).admit
    assert (granted.n_shared, granted.cached_tokens, batch.copy) == (0, 32, (copy(0, granted.block_table[0], 32),))


def test_the_last_known_token_is_computed() -> None:
    """A prompt that ends within a cached block, or with one, has its last token left."""
    for length, wanted in ((SIZE + 16, 0), (SIZE + 17, 16), (SIZE + 48, 47), (2 * SIZE, 63)):
        (granted,) = admitted(cached(FIRST), 2, FIRST[:length]).admit
        assert granted.cached_tokens == SIZE + wanted, length


def test_a_copy_takes_no_block_more_and_counts_no_hit_in_full_blocks() -> None:
    ledger = cached(FIRST)
    (granted,) = admitted(ledger, 2, common(SIZE + 48, 3 * SIZE, FIRST)).admit
    assert len(granted.block_table) == 3
    totals = ledger.pool_counts().totals
    assert (totals.prefix_hit_blocks, totals.partial_hits, totals.partial_hit_tokens) == (1, 1, 48)


def test_the_record_of_the_grant_says_what_was_copied() -> None:
    ledger = cached(FIRST)
    ledger.drain_decisions()
    admitted(ledger, 2, common(SIZE + 48, 3 * SIZE, FIRST))
    (grant,) = (each for each in ledger.drain_decisions() if each.kind.value == "grant")
    assert "partial block: 48 slots are copied from block 1" in grant.reasons
    assert dict(grant.figures)["partial_tokens"] == 48.0


# ---------------------------------------------------------------- the source


def test_the_source_is_held_until_the_copy_has_run() -> None:
    ledger = cached(FIRST)
    admitted(ledger, 2, common(SIZE + 48, 3 * SIZE, FIRST))
    assert ledger.state.sequences.live[SequenceId(2)].copy_source == 1
    before = ledger.pool_counts()
    play(ledger, copied=(SequenceId(2),))
    after = ledger.pool_counts()
    assert (after.cached - before.cached, before.in_use - after.in_use) == (1, 1)
    play(ledger, copied=(SequenceId(2), SequenceId(99)))
    assert ledger.pool_counts().cached == after.cached, "said twice, or by one that left, it is nothing"


@pytest.mark.parametrize("preempted", [False, True])
def test_a_sequence_that_leaves_before_its_copy_lets_the_source_go(preempted: bool) -> None:
    ledger = cached(FIRST)
    admitted(ledger, 2, common(SIZE + 48, 3 * SIZE, FIRST))
    ledger.apply_report(
        Report(preempted=((SequenceId(2), 3 * SIZE),))
        if preempted
        else Report(finished=((SequenceId(2), FinishReason.CANCELLED),))
    )
    ledger.check_invariants()
    assert ledger.pool_counts().in_use == 0
    assert ledger.pool_counts().cached == 2
    play(ledger, copied=(SequenceId(2),))


def test_a_preempted_sequence_copies_again() -> None:
    ledger = cached(FIRST)
    tokens = common(SIZE + 48, 3 * SIZE, FIRST)
    admitted(ledger, 2, tokens)
    batch = play(ledger, preempted=((SequenceId(2), 3 * SIZE),))
    assert batch is not None
    assert [each.length for each in batch.copy] == [SIZE + 48]
    assert ledger.pool_counts().totals.partial_hits == 1, "statistics count once a request"


def test_a_source_that_would_take_the_last_block_is_not_held() -> None:
    """Three blocks in all: one shared, one cached that is needed for the prompt's own."""
    ledger = cached(FIRST[: 2 * SIZE], num_blocks=3)
    batch = admitted(ledger, 2, common(SIZE + 48, 3 * SIZE, FIRST))
    assert (batch.copy, batch.admit[0].n_shared) == ((), 1)


def test_a_sequence_that_grows_gets_the_block_that_a_copy_holds() -> None:
    """One sequence runs and may grow; the next one copies from the last block that nobody else holds."""
    ledger = cached(FIRST[: 2 * SIZE], num_blocks=6)
    play(ledger, reserve=(asked(2, prompt(60, 90_000), max_len=200),))
    batch = admitted(ledger, 3, common(SIZE + 48, 4 * SIZE, FIRST), max_len=4 * SIZE)
    assert (batch.copy, ledger.pool_counts().free, ledger.pool_counts().cached) == ((copy(1, 3, SIZE + 48),), 0, 0)
    answer = play(ledger, stalled=(SequenceId(2),), lease_want=1, step=1)
    assert answer is not None
    assert (answer.lease, answer.preempt) == ((1,), ())
    play(ledger, bind=((SequenceId(2), BlockId(1)),), copied=(SequenceId(3),), step=2)
    assert block_table(ledger, 2)[-1] == 1, "the report of the copy lets nothing go a second time"


def test_a_late_admission_causes_no_preemption_although_a_copy_is_not_reported() -> None:
    """The admission after a copy takes what is left. The sequence that grows then gets the copy's source."""
    ledger = cached(FIRST[: 2 * SIZE], num_blocks=8)
    play(ledger, reserve=(asked(2, prompt(60, 90_000), max_len=200),))
    assert admitted(ledger, 3, common(SIZE + 48, 3 * SIZE, FIRST)).copy == (copy(1, 3, SIZE + 48),)
    (late,) = admitted(ledger, 4, prompt(2 * SIZE, 70_000)).admit
    assert (len(late.block_table), ledger.pool_counts().free, ledger.pool_counts().cached) == (2, 1, 0)
    play(ledger, lease_want=1, step=1)
    answer = play(ledger, bind=((SequenceId(2), BlockId(7)),), stalled=(SequenceId(2),), lease_want=1, step=2)
    assert answer is not None
    assert (answer.lease, answer.preempt) == ((1,), ())


def test_an_admission_gets_the_block_that_a_copy_holds() -> None:
    ledger = cached(FIRST[: 2 * SIZE], num_blocks=5)
    assert len(admitted(ledger, 2, common(SIZE + 48, 3 * SIZE, FIRST)).copy) == 1
    assert ledger.pool_counts().free + ledger.pool_counts().cached == 1
    (late,) = admitted(ledger, 3, prompt(2 * SIZE, 70_000)).admit
    assert set(late.block_table) == {4, 1}
    assert play(ledger, reserve=(asked(4, prompt(SIZE, 60_000)),)) is None
    finish(ledger, 2)
    assert ledger.state.sequences.copying == {}


def test_a_source_that_is_shared_stays_with_those_that_share_it() -> None:
    ledger = cached(FIRST[: 2 * SIZE], num_blocks=5)
    admitted(ledger, 2, FIRST[: 2 * SIZE] + prompt(SIZE, OTHER))
    admitted(ledger, 3, common(SIZE + 48, 2 * SIZE, FIRST))
    assert ledger.state.sequences.copying == {SequenceId(3): True}
    assert play(ledger, reserve=(asked(4, prompt(2 * SIZE, 60_000)),)) is None
    assert (ledger.state.sequences.copying, ledger.state.store.blocks.refs[BlockId(1)]) == ({SequenceId(3): False}, 1)


def test_a_copy_needs_no_block_more_for_a_sequence_that_grows() -> None:
    """It runs alone, and its next token needs a fourth block: the source's."""
    ledger = cached(FIRST[: 2 * SIZE], num_blocks=4)
    assert len(admitted(ledger, 2, common(SIZE + 48, 3 * SIZE, FIRST), max_len=3 * SIZE + 2).copy) == 1
    answer = play(ledger, stalled=(SequenceId(2),), lease_want=1, step=1)
    assert answer is not None
    assert answer.lease == (1,)


def test_leased_blocks_are_there_for_those_that_grow() -> None:
    ledger = cached(FIRST[: 2 * SIZE], num_blocks=6)
    play(ledger, reserve=(asked(2, prompt(60, 90_000), max_len=100),), lease_want=1)
    play(ledger, lease_want=1, step=1)
    assert ledger.pool_counts().leased == 1
    batch = play(ledger, reserve=(asked(3, common(SIZE + 48, 3 * SIZE, FIRST)),), lease_want=1, step=2)
    assert batch is not None
    assert len(batch.copy) == 1


def test_what_was_evicted_is_not_copied() -> None:
    ledger = cached(FIRST, num_blocks=4)
    large = prompt(4 * SIZE, 50_000)
    play(ledger, reserve=(asked(2, large),))
    finish(ledger, 2)
    assert ledger.state.store.cache.partials.parts == {}
    assert copied(admitted(ledger, 3, common(SIZE + 48, 3 * SIZE, FIRST))) == ()


def test_a_content_counts_only_after_the_same_parent_at_the_same_place() -> None:
    """Another worker's lie, or a collision: the parts of another block lead to no copy."""
    ledger = cached(FIRST)
    tokens = common(SIZE, 3 * SIZE, FIRST)
    lie = (*parts(tokens)[:3], *parts(FIRST)[:3], *parts(tokens)[6:])
    batch = play(ledger, reserve=(reserve(2, tokens, block_size=SIZE, partial_hashes=lie),))
    assert batch is not None
    assert batch.copy == ()


def test_a_fork_copies_its_parents_block_and_no_cached_one() -> None:
    ledger = cached(FIRST)
    tokens = common(SIZE + 48, SIZE + 60, FIRST)
    admitted(ledger, 2, tokens, max_len=200)
    batch = admitted(ledger, 3, tokens, max_len=200, fork_of=SequenceId(2))
    assert [(each.src, each.length) for each in batch.copy] == [(block_table(ledger, 2)[1], SIZE + 59)]
    assert ledger.state.sequences.live[SequenceId(3)].copy_source is None


# ---------------------------------------------------------------- where nothing is copied


@pytest.mark.parametrize("options", [{"prefix_caching": False}, {"window": SIZE}], ids=str)
def test_nothing_is_copied_where_nothing_is_cached(options: dict[str, Any]) -> None:
    ledger = cached(FIRST, **options)
    assert copied(admitted(ledger, 2, common(SIZE + 48, 2 * SIZE, FIRST))) == ()
    assert ledger.state.store.cache.partials.parts == {}


def test_a_sequence_that_computes_all_copies_nothing() -> None:
    assert copied(admitted(cached(FIRST), 2, common(SIZE + 48, 2 * SIZE, FIRST), computes_all=True)) == ()


def test_a_worker_that_gives_no_partial_hashes_gets_no_copies() -> None:
    ledger = cached(FIRST)
    batch = play(ledger, reserve=(reserve(2, common(SIZE + 48, 2 * SIZE, FIRST), block_size=SIZE),))
    assert batch is not None
    assert (batch.copy, batch.admit[0].cached_tokens) == ((), SIZE)


def test_parts_of_a_seal_that_was_ignored_are_ignored() -> None:
    ledger = make_ledger(8, SIZE)
    play(ledger, reserve=(asked(1, FIRST),), partials=sealed_parts(FIRST))
    assert ledger.state.store.cache.partials.parts == {}


@pytest.mark.parametrize("count", [7, 3000])
def test_more_partial_hashes_than_the_prompt_has_blocks_end_the_session(count: int) -> None:
    ledger = make_ledger(8, SIZE)
    many = tuple(BlockHash(bytes(16)) for _ in range(count))
    with pytest.raises(ProtocolViolation, match=f"{count} partial hashes for 70 tokens in blocks of 64; expected 3"):
        ledger.apply_report(Report(reserve=(reserve(1, prompt(70), block_size=SIZE, partial_hashes=many),)))


# ---------------------------------------------------------------- after a rebuild, after a reset


def test_parts_are_not_known_after_a_rebuild_until_a_sequence_shares_the_blocks() -> None:
    contents = hashes(FIRST, SIZE)
    ledger = make_ledger(8, SIZE)
    claims = tuple(CachedBlock(BlockId(n), each, n - 1, 1) for n, each in enumerate(contents))
    ledger.rebuild(Inventory(cached_blocks=claims))
    ledger.check_invariants()
    diverging = common(SIZE + 48, 2 * SIZE, FIRST)
    assert copied(admitted(ledger, 2, diverging)) == ()
    finish(ledger, 2)
    admitted(ledger, 3, FIRST)
    finish(ledger, 3)
    assert [each.length for each in admitted(ledger, 4, diverging).copy] == [SIZE + 48]


def test_a_reset_forgets_the_parts() -> None:
    ledger = cached(FIRST)
    ledger.reset_cache(1)
    assert ledger.state.store.cache.partials.parts == {}
    assert ledger.state.store.cache.partials.first == {}


@pytest.mark.parametrize("copies", [1, 2])
def test_a_reset_forgets_a_block_that_only_copies_hold(copies: int) -> None:
    """It stood in the index, and later prompts hit it. It is free once the copies are reported."""
    ledger = cached(FIRST, num_blocks=16)
    prompts = [FIRST[: SIZE + 48] + prompt(80, OTHER * (n + 1)) for n in range(copies)]
    diverging = [admitted(ledger, 2 + n, each).copy[0].src for n, each in enumerate(prompts)]
    assert diverging == [BlockId(1)] * copies
    dropped = ledger.reset_cache(1)
    ledger.check_invariants()
    assert (dropped, ledger.look_up_prompt(hashes(FIRST, SIZE), len(FIRST)).hit_blocks) == (1, 1)
    ledger.schedule()
    play(ledger, copied=tuple(SequenceId(2 + n) for n in range(copies)), reset=1)
    ledger.check_invariants()
    assert ledger.pool_counts().cached == 0
    assert ledger.state.store.blocks.state[BlockId(1)] is BlockState.FREE


def test_a_reset_leaves_a_source_that_a_sequence_shares() -> None:
    ledger = cached(FIRST, num_blocks=16)
    admitted(ledger, 2, FIRST)
    admitted(ledger, 3, common(SIZE + 48, 3 * SIZE, FIRST))
    assert ledger.reset_cache(1) == 0
    ledger.check_invariants()
    assert ledger.look_up_prompt(hashes(FIRST, SIZE), len(FIRST)).hit_blocks == 2
