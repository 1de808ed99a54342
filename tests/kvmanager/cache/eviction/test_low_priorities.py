"""Which blocks a low retention priority counts for when a sequence is preempted, admitted late, or rebuilt."""

from __future__ import annotations

from typing import Any

from common.contracts.lease import CachedBlock, Inventory, InventorySequence, Reserve, RetainedBlocks
from common.contracts.types import SequenceId, SequencePhase
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, finish, hashes, make_ledger, play, prompt, reserve, run_through, seal

SIZE = 4
LONG = prompt(32)
KEYS = hashes(LONG, SIZE)
LOW = (RetainedBlocks(0, 1 << 30, 10, 60.0),)


def low(number: int, **options: Any) -> Reserve:
    """Return a request with a token more than the prompt, all of a low priority."""
    return reserve(number, [*LONG, 7], block_size=SIZE, retention=LOW, **options)


def priorities(ledger: Ledger) -> list[int | None]:
    """Return the priority with which each block of the prompt is held; None: the usual one."""
    state = ledger.state
    held = [state.store.retention.held.get(state.store.cache.entries[key]) for key in KEYS]
    return [None if each is None else each.priority for each in held]


def test_a_preempted_sequence_keeps_its_low_priority() -> None:
    """After the preemption its own blocks are hits."""
    ledger = make_ledger(40, SIZE)
    admit(ledger, low(1))
    seal(ledger, 1, KEYS)
    batch = play(ledger, preempted=((1, 33),))
    assert batch is not None
    assert batch.admit[0].n_shared == 8
    finish(ledger, 1)
    assert priorities(ledger) == [10] * 8


def test_a_preempted_sequence_lowers_nothing_that_another_request_computed() -> None:
    ledger = make_ledger(40, SIZE)
    run_through(ledger, 1, LONG[:16], SIZE)
    admit(ledger, low(2))
    seal(ledger, 2, KEYS)
    play(ledger, preempted=((2, 33),))
    finish(ledger, 2)
    assert priorities(ledger) == [None] * 4 + [10] * 4


def test_a_fork_that_is_admitted_after_its_parent_left_keeps_their_low_priority() -> None:
    ledger = make_ledger(40, SIZE, max_num_seqs=1)
    assert len(admit(ledger, low(1), low(2, fork_of=1), low(3, fork_of=1))) == 1
    seal(ledger, 1, KEYS)
    finish(ledger, 1)
    finish(ledger, 2)
    finish(ledger, 3)
    assert priorities(ledger) == [10] * 8


def test_a_fork_that_is_admitted_while_its_parent_waits_again_keeps_their_low_priority() -> None:
    ledger = make_ledger(40, SIZE, max_num_seqs=1)
    admit(ledger, low(1))
    admit(ledger, low(2, fork_of=1, priority=1))
    seal(ledger, 1, KEYS)
    play(ledger, preempted=((1, 33),))
    assert ledger.state.sequences.live[SequenceId(2)].phase is SequencePhase.RUNNING
    finish(ledger, 2)
    finish(ledger, 1)
    assert priorities(ledger) == [10] * 8


def test_forks_that_came_and_went_leave_nothing() -> None:
    ledger = make_ledger(40, SIZE, max_num_seqs=1)
    admit(ledger, low(1), low(2, fork_of=1), low(3, fork_of=1))
    parent = ledger.state.sequences.live[SequenceId(1)]
    assert parent.forks == {2, 3}
    finish(ledger, 2)
    assert parent.forks == {3}
    finish(ledger, 1)
    assert parent.forks == set()
    finish(ledger, 3)


def test_after_a_rebuild_a_sequence_lowers_what_it_computes_from_then_on_alone() -> None:
    """Who had computed the other blocks is not known any more; here it was another request."""
    ledger = make_ledger(40, SIZE)
    run_through(ledger, 1, LONG, SIZE)
    (granted,) = admit(ledger, low(2))
    cached = tuple(CachedBlock(granted.block_table[at], key, at - 1, 1) for at, key in enumerate(KEYS))
    live = InventorySequence(low(2), SequencePhase.RUNNING, 0, granted.block_table)
    ledger.rebuild(Inventory((live,), (), cached))
    finish(ledger, 2)
    assert priorities(ledger) == [None] * 8
