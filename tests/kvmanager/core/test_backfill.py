"""Who passes a sequence that lacks blocks, and that this one has them by the step that was foreseen."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.lease import Admit
from common.types import Decision, DecisionKind, SequenceId
from kvmanager.core.backfill import CANDIDATES, Holder, Reservation, reservation, running_holders
from kvmanager.core.ledger import Ledger
from kvmanager.core.preemption import running_sequences
from tests.support.kvmanager.fake_worker import FakeWorker
from tests.support.kvmanager.ledgers import admit, finish, make_ledger, play, prompt, reserve


def admitted(granted: tuple[Admit, ...]) -> list[int]:
    return [each.sequence for each in granted]


def granted_record(ledger: Ledger, number: int) -> Decision:
    found = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.GRANT)
    return next(each for each in found if each.request_id == f"r{number}")


def blocked_ledger(max_len: int, **options: Any) -> Ledger:
    """Return a pool of 10 blocks: a sequence of 4 runs up to `max_len`, and one that needs 8 waits."""
    ledger = make_ledger(10, **options)
    admit(ledger, reserve(1, prompt(60), max_len=max_len))
    assert admit(ledger, reserve(2, prompt(120, start=500), max_len=128)) == ()
    return ledger


# ---------------------------------------------------------------- what is foreseen


def test_a_sequence_has_its_blocks_when_enough_others_have_ended() -> None:
    holders = [Holder(steps, 3, 0, 0) for steps in (5, 9, 20)]
    assert reservation(holders, 3, 16, 0) == Reservation(5, 0)
    assert reservation(holders, 4, 16, 0) == Reservation(9, 2)
    assert reservation(holders, 9, 16, 0) == Reservation(20, 0)
    assert reservation(holders, 10, 16, 0) is None
    assert reservation([], 1, 16, 0) is None


def test_what_others_bind_until_then_is_not_free() -> None:
    grows = Holder(100, 2, 5, room=6)
    assert [grows.grown(steps, 16) for steps in (0, 6, 7, 22, 23, 1000)] == [0, 0, 1, 1, 2, 5]
    assert reservation([Holder(23, 3, 0, 0), grows], 2, 16, 0) == Reservation(100, 3)
    assert reservation([Holder(22, 3, 0, 0), grows], 2, 16, 0) == Reservation(22, 0)
    assert reservation([Holder(22, 3, 0, 0), grows], 2, 16, 1) == Reservation(100, 3), "leased ahead"


# ---------------------------------------------------------------- who passes


def test_one_that_ends_in_time_passes_and_its_record_says_whom() -> None:
    ledger = blocked_ledger(80)
    assert admitted(admit(ledger, reserve(3, prompt(10, start=900), max_len=30))) == [3]
    assert "passed r2, which it does not delay" in granted_record(ledger, 3).reasons


def test_one_that_would_end_later_waits() -> None:
    ledger = blocked_ledger(80)
    assert admit(ledger, reserve(3, prompt(20, start=900), max_len=41)) == ()
    assert list(ledger.state.queue) == [2, 3]


def test_steps_that_passed_count() -> None:
    ledger = make_ledger(10)
    first = (reserve(1, prompt(60), max_len=80), reserve(2, prompt(120, start=500), max_len=128))
    play(ledger, step=1000, reserve=first)
    play(ledger, step=1008, reserve=(reserve(3, prompt(34, start=900), max_len=48),))
    assert list(ledger.state.queue) == [2, 3], "the first has 13 steps left, and this one needs 15"
    batch = play(ledger, step=1008, reserve=(reserve(4, prompt(34, start=950), max_len=46),))
    assert batch is not None
    assert admitted(batch.admit) == [4]


def test_one_whose_blocks_are_left_over_passes_however_long_it_runs() -> None:
    ledger = make_ledger(12)
    admit(ledger, reserve(1, prompt(60), max_len=80))
    assert admit(ledger, reserve(2, prompt(128, start=500), max_len=140)) == ()
    assert admitted(admit(ledger, reserve(3, prompt(10, start=900), max_len=40))) == [3], "12 - 8 - 1 blocks are left"
    assert admit(ledger, reserve(4, prompt(10, start=950), max_len=40)) == ()


def test_one_that_could_cause_a_preemption_waits() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(60), max_len=140))
    assert admit(ledger, reserve(2, prompt(120, start=500), max_len=128)) == ()
    # The first may bind four more blocks within 61 steps. Of the six that are left, this one needs five.
    assert admit(ledger, reserve(3, prompt(10, start=900), max_len=70)) == ()
    # Within 12 steps it binds one.
    assert admitted(admit(ledger, reserve(4, prompt(60, start=950), max_len=71))) == [4]


@pytest.mark.parametrize("options", [{"backfill": False}, {"max_num_seqs": 1}])
def test_nobody_passes_without_the_option_or_without_a_place(options: dict[str, Any]) -> None:
    ledger = blocked_ledger(80, **options)
    assert admit(ledger, reserve(3, prompt(10, start=900), max_len=20)) == ()


def test_a_report_pays_for_few_candidates() -> None:
    ledger = blocked_ledger(80)
    late = [reserve(3 + n, prompt(10, start=1000 + 20 * n), max_len=96) for n in range(CANDIDATES)]
    assert admit(ledger, *late, reserve(90, prompt(10, start=9000), max_len=20)) == ()
    assert admitted(getattr(finish(ledger, 3), "admit", ())) == [90]


def test_forks_pass_with_their_copies() -> None:
    ledger = blocked_ledger(80)
    words = prompt(10, start=900)
    batch = play(
        ledger,
        reserve=(reserve(3, words, max_len=14), reserve(4, words, max_len=14, fork_of=SequenceId(3))),
    )
    assert batch is not None
    assert admitted(batch.admit) == [3, 4]
    assert batch.copy == (), "the block to copy is granted by this same batch"


def test_a_preemption_comes_before_those_that_would_pass() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(64), max_len=80), reserve(9, prompt(16, start=300), max_len=20))
    batch = play(
        ledger,
        reserve=(
            reserve(2, prompt(100, start=500), max_len=112, priority=5),
            reserve(3, prompt(10, start=900), max_len=15),
        ),
    )
    assert batch is not None
    assert len(batch.preempt) == 1
    assert batch.admit == ()


# ---------------------------------------------------------------- admission by age


def serve_one_by_one(ledger: Ledger, first: int, count: int) -> list[int]:
    """Finish the one that runs, while another of a high priority comes each time; return who was admitted."""
    order = []
    for number in range(first, first + count):
        play(ledger, reserve=(reserve(number, prompt(60, start=100 * number), priority=5),))
        (runs,) = running_sequences(ledger.state)
        batch = finish(ledger, runs.id)
        assert batch is not None
        order += admitted(batch.admit)
    return order


def test_an_old_sequence_gets_every_eighth_admission() -> None:
    ledger = make_ledger(4, max_wait=30.0)
    admit(ledger, reserve(1, prompt(60), priority=5))
    admit(ledger, reserve(2, prompt(60, start=100)), reserve(3, prompt(60, start=200)))
    assert 2 not in serve_one_by_one(ledger, 10, 20)
    ledger.state.clock.advance(30.0)  # type: ignore[attr-defined]
    order = serve_one_by_one(ledger, 40, 20)
    assert (order.index(2), order.index(3)) == (0, 8)


def test_without_a_bound_priority_alone_decides() -> None:
    ledger = make_ledger(4, max_wait=0.0)
    admit(ledger, reserve(1, prompt(60), priority=5))
    admit(ledger, reserve(2, prompt(60, start=100)))
    ledger.state.clock.advance(1e6)  # type: ignore[attr-defined]
    assert 2 not in serve_one_by_one(ledger, 10, 30)


def test_a_tenant_over_its_share_has_no_old_sequence_while_another_waits() -> None:
    ledger = make_ledger(4, max_wait=30.0, max_num_seqs=4)
    admit(ledger, *(reserve(n, prompt(10, start=100 * n), tenant="red") for n in (1, 2, 3, 4)))
    admit(ledger, reserve(5, prompt(10, start=500), tenant="red"))
    ledger.state.clock.advance(60.0)  # type: ignore[attr-defined]
    ledger.state.admitted_in_turn = 100
    admit(ledger, reserve(6, prompt(10, start=600), tenant="blue"))
    granter = ledger.policies.granter
    assert granter.next(ledger.state).id == 6
    finish(ledger, 6)
    assert granter.next(ledger.state).id == 5


# ---------------------------------------------------------------- the bound


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_next_one_has_its_blocks_by_the_step_that_was_foreseen(seed: int) -> None:
    """Sequences run to their greatest length, a huge one comes, small ones come all the time."""
    rng = random.Random(seed)
    ledger, worker = make_ledger(24, 4, watermark=0.0, prefix_caching=False), FakeWorker(24, 4)
    for _ in range(rng.randint(2, 3)):
        length = rng.randint(1, 8)
        worker.submit([rng.randrange(2) for _ in range(length)], length + rng.randint(2, 16), cached=False)
    turn(ledger, worker)
    huge = worker.submit([1] * 72, 74, cached=False)
    turn(ledger, worker)
    if ledger.state.blocked_by != "capacity":
        return
    state = ledger.state
    missing = ledger.policies.granter.missing_blocks(state, state.sequences[huge]) - state.block_pool.leased
    foreseen = reservation(
        running_holders(state.sequences.values(), state.steps, 4), missing, 4, state.config.runway_slots
    )
    assert foreseen is not None
    for step in range(foreseen.steps + 1):
        assert step <= foreseen.steps
        if rng.random() < 0.7:
            length = rng.randint(1, 4)
            worker.submit([rng.randrange(2) for _ in range(length)], length + rng.randint(2, 12), cached=False)
        turn(ledger, worker)
        if worker.live[huge].block_table:
            return
    raise AssertionError(f"it waits after {foreseen.steps} steps")


def turn(ledger: Ledger, worker: FakeWorker) -> None:
    """A step, its report, and the answer."""
    worker.step()
    ledger.apply(worker.report())
    ledger.check_invariants()
    worker.deliver(ledger.schedule())
