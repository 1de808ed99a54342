"""The worker's part in host memory where the pool has groups: contents of several frames, and orders that it refuses.

Blocks have 4 slots. One of the first group has 2 pages, one of the run 3: so many frames have they in host memory.
"""

from __future__ import annotations

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, GrantBatch, TierCopy
from common.contracts.types import BlockId, KvGroup, KvGroupKind, SequenceId
from gpuworker.scheduling.block_states import PageBlocks
from gpuworker.scheduling.frame_claims import Loads, find_loads
from tests.support.gpuworker.agent_harness import Driver, blocks, keys

FULL, WINDOW = KvGroup(KvGroupKind.FULL, 0, 2, ()), KvGroup(KvGroupKind.WINDOW, 6, 3, ())
TOKENS = list(range(6))
(KEY,) = keys(TOKENS, 4)
"""Of the only full block."""


def copies(pages: list[int], frames: list[int], load: bool = False) -> tuple[TierCopy, ...]:
    pairs = zip(blocks(pages), blocks(frames), strict=True)
    return tuple([TierCopy(page, frame, load) for page, frame in pairs])


def admission(sequence: int, table: list[int], run: list[int], pages: list[int], shared: int = 0) -> Admit:
    return Admit(SequenceId(sequence), blocks(table), shared, 4 * shared, runs=(blocks(run),), pages=blocks(pages))


STORES = (*copies([0, 1], [8, 2]), *copies([2, 3, 4], [5, 6, 7]))


def worker_with_frames() -> Driver:
    """Return a worker that has computed a full block, 0 and 1 in the first group, and has stored both its blocks."""
    made = Driver(40, groups=(FULL, WINDOW), host_frames=9)
    made.submit(0, TOKENS, max_tokens=1)
    made.agent.apply_grant(GrantBatch(0, admit=(admission(0, [0, 5], [2, 7], [1, 6, 3, 4, 8, 9]),)))
    made.step()
    made.agent.apply_grant(GrantBatch(0, tier=STORES))
    made.submit(1, TOKENS)
    return made


def load(made: Driver, *tier: TierCopy, shared: int = 1) -> None:
    """Grant the second sequence blocks 20 and 22, which are loaded, and 30 and 32 behind them."""
    admit = admission(1, [20, 30], [22, 32], [31, 33, 34], shared)
    made.agent.apply_grant(GrantBatch(0, admit=(admit,), tier=tier))


LOADS = (*copies([20, 21], [8, 2], load=True), *copies([22, 23, 24], [5, 6, 7], load=True))


def test_loaded_blocks_have_the_pages_of_their_copies_and_are_full() -> None:
    made = worker_with_frames()
    load(made, *LOADS)
    plan = made.plan()
    assert plan.copies == (*STORES, *LOADS)
    assert plan.loaded == ((SequenceId(1), 1, 5),), "one place of the prompt, in five copies"
    (row,) = plan.rows
    assert (row.start, row.length) == (4, 2)
    assert row.tables == ((20, 21, 30, 31), (22, 23, 24, 32, 33, 34))
    made.complete(plan)
    claimed = [(each.block, each.hash) for each in made.agent.inventory().cached_blocks]
    assert {(BlockId(20), KEY), (BlockId(22), KEY)} <= set(claimed)
    made.agent.check_invariants()


def test_an_inventory_names_the_group_and_the_frames_of_each_content() -> None:
    found = worker_with_frames().agent.inventory()
    assert [(each.block, each.hash, each.depth) for each in found.frames] == [(5, KEY, 0), (8, KEY, 0)]
    assert (found.frame_groups, found.frame_pages) == ((1, 0), (5, 6, 7, 8, 2))


def test_a_content_is_void_once_one_of_its_frames_is_written_over() -> None:
    made = worker_with_frames()
    made.agent.apply_grant(GrantBatch(0, tier=copies([0, 1], [4, 6])))
    found = made.agent.inventory()
    assert (found.frame_groups, found.frame_pages) == ((0, 0), (4, 6, 8, 2))
    made.agent.attached(0)
    with pytest.raises(ProtocolViolation, match="was to be loaded from frame 5, which is empty"):
        load(made, *LOADS)


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        (LOADS[:-1], r"frame 5 was to be copied in part: pages \(22, 23\) and frames \(5, 6\), of \(5, 6, 7\)"),
        ((*LOADS[:2], *copies([22, 23, 24], [5, 7, 6], load=True)), "frame 5 was to be copied in part"),
        (LOADS[2:], "block 20"),
        ((*LOADS[1:2], *LOADS[2:]), "was to be loaded from frame 2, which is empty"),
        (
            (*LOADS, *copies([35, 36], [8, 2], load=True)),
            r"blocks \[35\] were to be loaded, and no admission shares them",
        ),
        (copies([0, 2], [0, 1]), "block 0 was to be copied in part"),
        (copies([1], [0]), "block 1 was to be stored, and it is none"),
        ((*copies([20, 21], [8, 2], load=True), *copies([0, 1], [5, 4]), *LOADS[2:]), "frame 5"),
    ],
)
def test_what_is_not_all_of_a_block_is_refused(tier: tuple[TierCopy, ...], words: str) -> None:
    with pytest.raises(ProtocolViolation, match=words):
        load(worker_with_frames(), *tier)


def test_a_page_that_is_loaded_may_not_be_one_of_a_block_that_is_shared() -> None:
    made = worker_with_frames()
    tier = (*copies([20, 21], [8, 2], load=True), *copies([22, 23, 1], [5, 6, 7], load=True))
    with pytest.raises(ProtocolViolation, match="the manager grants page 1 anew, and shares block 0 of it"):
        made.agent.apply_grant(GrantBatch(0, admit=(admission(1, [0, 30], [22, 32], [31, 33, 34], 1),), tier=tier[2:]))


def test_a_store_and_a_load_of_one_batch_are_one_content() -> None:
    made = worker_with_frames()
    stores = (*copies([0, 1], [5, 0]), *copies([2, 3, 4], [1, 3, 4]))
    loads = (*copies([20, 21], [5, 0], load=True), *copies([22, 23, 24], [1, 3, 4], load=True))
    load(made, *stores, *loads)
    assert made.agent.inventory().frame_pages == (1, 3, 4, 5, 0, 8, 2)


def test_places_of_loads_are_those_of_all_tables() -> None:
    made = PageBlocks((2, 3))
    made.make_block(0, tuple(blocks([20, 21])))
    made.make_block(1, tuple(blocks([50, 51, 52])))
    admit = admission(1, [20, 40, 30], [22, 50, 32], [31, 33, 34], 2)
    batch = (*copies([50, 51, 52], [0, 1, 2], load=True), *copies([20, 21], [3, 4], load=True))
    assert list(find_loads(batch, (admit,), made)) == [Loads(SequenceId(1), 0, 2, 5)]
    assert list(find_loads(batch[:3], (admit,), made)) == [Loads(SequenceId(1), 1, 2, 3)]
