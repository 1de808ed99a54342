"""When a long prompt begins with a part of its blocks, what it gets next, and who waits behind it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contracts.lease import Inventory, InventorySequence
from common.contracts.types import BlockId, DecisionKind, SequenceId, SequencePhase
from kvmanager.contracts.block import BlockState
from kvmanager.ledger.ledger import Ledger
from tests.support.examples import up_to
from tests.support.kvmanager.fake_worker import FakeWorker
from tests.support.kvmanager.ledgers import admit, block_table, finish, make_ledger, play, prompt, reserve

LEASED = BlockState.LEASED
HUGE = prompt(128, start=500)


def parts_ledger(num_blocks: int = 10, **options: Any) -> Ledger:
    """Return a ledger whose prompts begin with two blocks or more, and with half of those that they need."""
    return make_ledger(num_blocks, first_part=options.pop("first_part", 32), **options)


def begun_ledger(max_len: int = 80, **options: Any) -> Ledger:
    """Return a pool of 10 blocks: a sequence of 4 runs up to `max_len`; one that needs 8 has begun with a part."""
    ledger = parts_ledger(**options)
    admit(ledger, reserve(1, prompt(60), max_len=max_len))
    (begun,) = admit(ledger, reserve(2, HUGE, max_len=136))
    assert begun.sequence == 2
    return ledger


def lease_all(ledger: Ledger) -> None:
    """Let the other one end, so that all is leased that the prompt lacks."""
    finish(ledger, 1)
    assert ledger.state.store.pool.leased == 4


def bind(ledger: Ledger, number: int, *blocks: int, **columns: Any) -> Any:
    return play(ledger, bind=tuple((SequenceId(number), BlockId(block)) for block in blocks), **columns)


# ---------------------------------------------------------------- who begins


def test_a_prompt_begins_with_what_those_that_run_will_not_bind() -> None:
    ledger = begun_ledger()
    # Six blocks are free. One is for its own growth, and the other one may bind one more before it ends.
    assert len(block_table(ledger, 2)) == 4
    record = next(
        each for each in ledger.drain_decisions() if each.kind is DecisionKind.GRANT and each.request_id == "r2"
    )
    assert record.chosen == "0 shared and 4 fresh blocks"
    assert dict(record.figures)["lacking_blocks"] == 4
    assert "begins with a part of its prompt's blocks, and gets 4 others as they come free" in record.reasons


@pytest.mark.parametrize(
    "options",
    [{"chunked_grants": False}, {"runway": "max"}, {"first_part": 96}],
    ids=["off", "whole lengths", "a greater first part"],
)
def test_a_prompt_waits_where_it_may_not_begin(options: dict[str, Any]) -> None:
    ledger = parts_ledger(**options)
    admit(ledger, reserve(1, prompt(60), max_len=80))
    assert admit(ledger, reserve(2, HUGE, max_len=136)) == ()


def test_less_than_half_is_not_worth_it() -> None:
    ledger = parts_ledger()
    admit(ledger, reserve(1, prompt(90), max_len=96))
    assert admit(ledger, reserve(2, prompt(140, start=500), max_len=141)) == ()
    assert ledger.state.admission.blocked_by == "capacity"


def test_nobody_begins_while_those_that_run_may_bind_what_is_free() -> None:
    ledger = parts_ledger()
    admit(ledger, reserve(1, prompt(60), max_len=140))
    assert admit(ledger, reserve(2, HUGE, max_len=136)) == ()


def test_what_is_leased_beyond_a_part_of_the_runway_is_left_to_those_that_run() -> None:
    """The worker holds the lease, and could bind it for the prompt before it hears that the target is lower."""
    ledger = parts_ledger(20)
    admit(ledger, reserve(1, prompt(60), max_len=140))
    leased = play(ledger, lease_want=5)
    assert leased is not None
    assert len(leased.lease) == 5, "all that the first one may ever bind"
    assert admit(ledger, reserve(2, prompt(224, start=500), max_len=230)) == ()
    batch = play(ledger, lease_want=5)
    assert batch is not None
    assert (batch.admit, batch.lease_target) == ((), 2)
    batch = play(ledger, returned=leased.lease[2:], lease_want=5)
    assert batch is not None
    assert [len(each.block_table) for each in batch.admit] == [9], "of 14"


def test_who_may_not_be_preempted_again_is_admitted_whole() -> None:
    ledger = parts_ledger(max_preemptions=1)
    admit(ledger, reserve(1, prompt(60), max_len=80))
    assert len(admit(ledger, reserve(2, HUGE, max_len=136))) == 1
    play(ledger, preempted=((SequenceId(2), 128),))
    assert list(ledger.state.sequences.queue) == [2]


def test_one_prompt_begins_at_a_time() -> None:
    ledger = begun_ledger(num_blocks=30)  # everything fits: both are whole
    assert len(block_table(ledger, 2)) == 8
    ledger = begun_ledger()
    assert admit(ledger, reserve(3, prompt(60, start=900), max_len=64)) == ()
    assert ledger.state.admission.blocked_by == "prompt"


def test_grants_of_a_part_are_counted_again_after_a_preemption() -> None:
    ledger = parts_ledger()
    admit(ledger, reserve(1, prompt(60), max_len=80))
    assert ledger.pool_counts().totals.chunked_grants == 0, "it got all that its prompt takes"
    admit(ledger, reserve(2, HUGE, max_len=136))
    totals = ledger.pool_counts().totals
    assert (totals.admissions, totals.chunked_grants) == (2, 1)
    play(ledger, preempted=((SequenceId(2), 128),))
    assert len(block_table(ledger, 2)) == 4, "it began again"
    totals = ledger.pool_counts().totals
    assert (totals.admissions, totals.chunked_grants) == (3, 2)
    finish(ledger, 2)
    admit(ledger, reserve(3, prompt(10, start=900), max_len=16))
    totals = ledger.pool_counts().totals
    assert (totals.admissions, totals.chunked_grants) == (4, 2)


# ---------------------------------------------------------------- what it gets


def test_what_it_lacks_is_leased_when_the_others_end() -> None:
    ledger = begun_ledger()
    batch = play(ledger, lease_want=8)
    assert batch is not None
    assert len(batch.lease) == 2, "the block that the other one may bind, and one more"
    batch = finish(ledger, 1)
    assert batch is not None
    assert ledger.state.store.pool.leased == batch.lease_target == 4


def test_a_prompt_that_finds_no_block_is_not_stalled() -> None:
    ledger = begun_ledger()
    batch = play(ledger, stalled=(SequenceId(2),), lease_want=8)
    assert ledger.state.sequences.find_stalled() == []
    assert batch is None or not batch.preempt


def test_others_are_preempted_for_nobody_that_waits_behind_it() -> None:
    ledger = begun_ledger()
    batch = play(ledger, reserve=(reserve(3, prompt(90, start=900), max_len=100),))
    assert batch is None or not batch.preempt


def test_it_is_a_sequence_like_others_once_its_blocks_are_there() -> None:
    ledger = begun_ledger()
    lease_all(ledger)
    bind(ledger, 2, *(block for block, of in enumerate(ledger.state.store.blocks.state) if of is LEASED))
    assert ledger.state.sequences.find_begun_prompt() is None
    assert len(block_table(ledger, 2)) == 8
    assert [each.sequence for each in admit(ledger, reserve(3, prompt(10, start=900), max_len=16))] == [3]


# ---------------------------------------------------------------- who waits behind it


def test_one_that_ends_in_time_passes() -> None:
    # Four blocks are left. The first one may bind three of them in the end, and none within four steps.
    ledger = parts_ledger(12)
    admit(ledger, reserve(1, prompt(60), max_len=110))
    late, early = reserve(3, prompt(10, start=900), max_len=60), reserve(4, prompt(10, start=950), max_len=12)
    assert [each.sequence for each in admit(ledger, reserve(2, HUGE, max_len=136), late, early)] == [2, 4]
    assert ledger.state.sequences.find_begun_prompt() is not None


def test_one_with_the_same_prompt_waits_until_it_can_share_the_blocks() -> None:
    ledger = begun_ledger()
    lease_all(ledger)
    play(ledger, reserve=(reserve(3, [*HUGE, *prompt(4, start=900)], max_len=133),))
    assert ledger.state.admission.blocked_by == "prompt"
    last = bind(ledger, 2, *(block for block, of in enumerate(ledger.state.store.blocks.state) if of is LEASED))
    assert last is not None
    (admitted,) = last.admit
    assert (admitted.sequence, admitted.n_shared) == (3, 7), "nobody shares the block of a last token"


def test_a_fork_waits_until_it_can_share_the_blocks() -> None:
    ledger = begun_ledger()
    lease_all(ledger)
    options: dict[str, Any] = {"block_hashes": (), "fork_of": SequenceId(2)}
    play(ledger, reserve=(reserve(3, HUGE, max_len=136, **options),))
    assert SequenceId(3) in ledger.state.sequences.queue


def test_a_higher_priority_does_not_wait_and_takes_the_blocks() -> None:
    ledger = begun_ledger()
    batch = play(ledger, reserve=(reserve(3, prompt(96, start=900), max_len=100, priority=5),))
    assert batch is not None
    assert [order.sequence for order in batch.preempt], "the prompt is preempted for it"
    assert admit(ledger, reserve(4, prompt(10, start=950), priority=5)) == (), "an order is outstanding"


# ---------------------------------------------------------------- sessions


def test_a_rebuild_finds_the_prompt_that_lacks_blocks() -> None:
    ledger = make_ledger(10)
    huge = reserve(2, HUGE, max_len=136)
    running = InventorySequence(huge, SequencePhase.RUNNING, 1, tuple(map(BlockId, range(5))))
    ledger.rebuild(Inventory((running,), (), ()))
    ledger.check_invariants()
    part = ledger.state.sequences.find_begun_prompt()
    assert part is not None
    assert part.id == 2
    batch = play(ledger, stalled=(SequenceId(2),))
    assert batch is not None
    assert len(batch.lease) == 3


def test_a_decode_whose_last_token_has_no_block_yet_lacks_nothing() -> None:
    ledger = make_ledger(10)
    decode = InventorySequence(
        reserve(2, prompt(65), max_len=136), SequencePhase.RUNNING, 1, tuple(map(BlockId, range(4)))
    )
    ledger.rebuild(Inventory((decode,), (), ()))
    assert ledger.state.sequences.find_begun_prompt() is None


# ---------------------------------------------------------------- against whole grants


def steps_until_all_end(seed: int, chunked: bool) -> tuple[int, int]:
    """Serve small sequences and a huge one, all to their greatest lengths; return the steps and the preemptions."""
    rng = random.Random(seed)
    ledger = make_ledger(24, 4, watermark=0.0, first_part=16, chunked_grants=chunked, prefix_caching=False)
    worker = FakeWorker(24, 4)
    for number in range(12):
        tokens = [rng.randrange(2) for _ in range(72 if number == 4 else rng.randint(1, 8))]
        worker.submit(tokens, len(tokens) + rng.randint(2, 14), cached=False)
    for _ in range(500):
        worker.step(16)
        ledger.apply_report(worker.report())
        ledger.check_invariants()
        worker.deliver(ledger.schedule())
        if not worker.live:
            return worker.steps, ledger.state.totals.preemptions
    raise AssertionError("they do not end")


@settings(max_examples=up_to(60), deadline=None)
@given(seed=st.integers(0, 100_000))
def test_everybody_ends(seed: int) -> None:
    steps_until_all_end(seed, chunked=True)
