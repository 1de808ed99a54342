"""The worker's part in the host tier: what it loads and stores, what it claims, and which orders it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, GrantBatch, TierCopy
from common.contracts.types import BlockId, SequenceId
from tests.support.gpuworker.agent_harness import Driver, blocks, keys

SIZE = 4
FIRST, SECOND = list(range(10)), list(range(50, 60))
"""Two full blocks each, and a part of a third."""


def store(block: int, frame: int) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame))


def load(block: int, frame: int) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame), load=True)


def worker_with_frames() -> Driver:
    """Return a worker that has computed a prompt in blocks 0 to 2, and has stored the first two in frames 3 and 1."""
    made = Driver(8, SIZE, host_frames=4)
    made.submit(0, FIRST, max_tokens=1)
    made.admit(0, [0, 1, 2])
    made.step()
    made.agent.apply_grant(GrantBatch(0, tier=(store(0, 3), store(1, 1))))
    return made


def grant(made: Driver, table: list[int], shared: int, *tier: TierCopy) -> None:
    admit = Admit(SequenceId(1), blocks(table), shared, shared * SIZE)
    made.agent.apply_grant(GrantBatch(made.lease_target, admit=(admit,), tier=tier))


def test_loaded_blocks_are_full_and_only_the_rest_is_computed() -> None:
    made = worker_with_frames()
    made.submit(1, FIRST)
    grant(made, [5, 6, 7], 2, load(5, 3), load(6, 1))
    plan = made.plan()
    assert plan.copies == (store(0, 3), store(1, 1), load(5, 3), load(6, 1)), "in the order of their orders"
    assert [(row.start, row.length) for row in plan.rows] == [(8, 2)]
    made.complete(plan)
    claimed = {each.block: each.hash for each in made.agent.inventory().cached_blocks}
    assert [claimed[BlockId(5)], claimed[BlockId(6)]] == list(keys(FIRST, SIZE))


def test_an_inventory_says_what_frames_hold_and_where_that_stands() -> None:
    made = worker_with_frames()
    first, second = keys(FIRST, SIZE)
    assert [(each.block, each.hash, each.parent_hash, each.depth) for each in made.agent.inventory().frames] == [
        (1, second, first, 1),
        (3, first, first, 0),
    ]


def test_a_reset_forgets_frames_and_a_later_load_is_refused() -> None:
    made = worker_with_frames()
    made.agent.apply_grant(GrantBatch(0, reset=1))
    assert made.agent.inventory().frames == ()
    made.submit(1, FIRST)
    with pytest.raises(ProtocolViolation, match="block 5 was to be loaded from frame 3, which is empty"):
        grant(made, [5, 6, 7], 1, load(5, 3))


def test_what_a_worker_has_reset_meanwhile_is_loaded_and_not_claimed() -> None:
    """The manager heard of the end of a sequence after its reset, and keeps the content of its blocks."""
    made = Driver(8, SIZE, host_frames=4)
    made.submit(0, FIRST, max_tokens=1)
    made.admit(0, [0, 1, 2])
    made.step()
    made.agent.apply_grant(GrantBatch(0, reset=1))
    made.submit(1, FIRST)
    grant(made, [5, 6, 7], 1, store(0, 2), load(5, 2))
    assert [(row.start, row.length) for row in made.plan().rows] == [(4, 6)]
    assert made.agent.inventory().frames == ()


@pytest.mark.parametrize(
    ("tier", "table", "words"),
    [
        ((load(5, 4),), [5, 6, 7], "the manager named frame 4; this worker has 4"),
        ((load(5, 0),), [5, 6, 7], "block 5 was to be loaded from frame 0, which is empty"),
        ((load(5, 1),), [5, 6, 7], "block 5 at place 0, loaded with another content"),
        ((load(4, 3),), [5, 6, 7], r"blocks \[4\] were to be loaded, and no admission shares them"),
        ((load(9, 3),), [9, 6, 7], "the manager named block 9; this worker has 0 to 7"),
        ((store(9, 0),), [5, 6, 7], "the manager named block 9; this worker has 0 to 7"),
    ],
)
def test_an_order_that_contradicts_itself_changes_nothing(
    tier: tuple[TierCopy, ...], table: list[int], words: str
) -> None:
    made = worker_with_frames()
    made.submit(1, FIRST)
    before = made.agent.inventory()
    with pytest.raises(ProtocolViolation, match=words):
        grant(made, table, 1, *tier)
    assert made.agent.inventory() == before


def test_a_block_that_a_sequence_holds_is_not_loaded() -> None:
    made = worker_with_frames()
    made.submit(1, SECOND)
    made.admit(1, [5, 6, 7])
    made.submit(2, FIRST)
    admit = Admit(SequenceId(2), blocks([6, 3, 4]), 1, SIZE)
    with pytest.raises(ProtocolViolation, match="block 6 was granted anew while the worker still holds it"):
        made.agent.apply_grant(GrantBatch(0, admit=(admit,), tier=(load(6, 3),)))


@pytest.mark.parametrize("orders", [lambda: (store(0, 3),)], ids=["store"])
def test_a_worker_without_host_memory_refuses_frames(orders: Callable[[], tuple[TierCopy, ...]]) -> None:
    made = Driver(8, SIZE)
    with pytest.raises(ProtocolViolation, match="the manager named frame 3; this worker has 0"):
        made.agent.apply_grant(GrantBatch(0, tier=orders()))
