"""Transfers where the pool has groups of layers: exact contents and pages on tiny pools.

Blocks have 4 slots. One of the first group has 2 pages, one of the run 3, on disk and in host memory too. A window of 8
reads the run, behind block n those of blocks n - 2 and n - 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import key_of
from common.contracts.lease import CachedBlock, GrantBatch, Inventory
from common.contracts.transfers import Medium, Place, Transfer, TransferCosts, TransferEnd
from common.contracts.types import TRIMMED, BlockId, FrameId, KvGroup, KvGroupKind, MissReason, SequenceId
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, finish, hashes, make_ledger, play, prompt, reserve

SIZE = 4
FULL, WINDOW = KvGroup(KvGroupKind.FULL, 0, 2, ()), KvGroup(KvGroupKind.WINDOW, 8, 3, ())
STATE = KvGroup(KvGroupKind.STATE, 0, 3, ())
TOKENS = prompt(13)
KEYS = hashes(TOKENS, SIZE)
"""Three full blocks, and a token of a fourth."""
RUN = tuple([key_of(each, 1) for each in KEYS])


def grouped(run: KvGroup = WINDOW, inventory: Inventory | None = None, **options: Any) -> Ledger:
    made = make_ledger(30, SIZE, groups=(FULL, run), **({"host_frames": 60, "disk_frames": 60} | options))
    made.rebuild(inventory or Inventory())
    made.schedule()
    return made


def computed(ledger: Ledger, number: int = 0) -> GrantBatch | None:
    """Let the prompt be computed and end; return what that orders."""
    (granted,) = admit(ledger, reserve(number, TOKENS, block_size=SIZE))
    sequence = ledger.state.sequences.live[SequenceId(number)]
    tables = sequence.block_table, sequence.runs[0].table
    places = range(granted.n_shared, len(KEYS))
    seals = [(table[place], KEYS[place]) for place in places for table in tables if table[place : place + 1]]
    play(ledger, seal=tuple([each for each in seals if each[0] != TRIMMED]))
    return finish(ledger, number)


def names(batch: GrantBatch | None) -> list[tuple[int, int]]:
    """Return the group and the depth of each content that a batch transfers."""
    return [(each.group, each.depth) for each in (batch.transfers if batch is not None else ())]


def on_disk(*depths: int, run: tuple[int, ...] = ()) -> Inventory:
    """Return an inventory with blocks of the first group and of the run on disk, in frames of 60 backwards."""
    claims, groups, pages, last = list[CachedBlock](), list[int](), list[FrameId](), 60
    for group, at in ((0, depths), (1, run)):
        for depth in at:
            size = (2, 3)[group]
            frames = [FrameId(last - 1 - page) for page in range(size)]
            last -= size
            parent = KEYS[depth] if group or not depth else KEYS[depth - 1]
            claims.append(CachedBlock(frames[0], KEYS[depth], -1, 0, parent, depth))
            groups.append(group)
            pages += frames
    return Inventory(saved=tuple(claims), saved_groups=tuple(groups), saved_pages=tuple(pages))


def asked(ledger: Ledger, number: int = 1) -> GrantBatch:
    batch = play(ledger, reserve=(reserve(number, TOKENS, block_size=SIZE),))
    assert batch is not None
    return batch


def ended(ledger: Ledger, moves: tuple[Transfer, ...], end: TransferEnd = TransferEnd.DONE) -> GrantBatch | None:
    return play(ledger, ended=tuple([(each.id, end) for each in moves]))


def test_a_table_is_saved_as_far_as_a_prompt_reads_it() -> None:
    ledger = grouped()
    batch = computed(ledger)
    assert names(batch) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)], "the window behind block 3 has blocks 1 and 2"
    assert batch is not None
    first, *_, last = batch.transfers
    assert (first.num_pages, last.num_pages, last.hash, last.parent) == (2, 3, KEYS[2], KEYS[2])
    targets = [each.target.index for each in batch.transfers]
    every = [*targets, *(written for each in batch.transfers for _, written in each.others)]
    assert sorted(every) == list(range(12)), "each page has a frame of its own"
    ended(ledger, batch.transfers[:4])
    ended(ledger, batch.transfers[4:], TransferEnd.STALE)
    assert set(ledger.state.store.cache.saved) == {*KEYS, RUN[1]}
    ledger.check_invariants()


def test_of_states_the_checkpoints_that_prompts_go_on_from_are_saved_and_no_k_and_v_behind_them() -> None:
    ledger = grouped(STATE)
    batch = computed(ledger)
    assert names(batch) == [(0, 0), (0, 1), (0, 2), (1, 2)]
    without = grouped(STATE)
    admit(without, reserve(0, TOKENS, block_size=SIZE))
    table = without.state.sequences.live[SequenceId(0)].block_table
    play(without, seal=tuple(zip(table, KEYS, strict=False)))
    assert names(finish(without, 0)) == [], "there is no checkpoint"


def test_what_is_read_behind_the_deepest_boundary_comes_with_all_its_pages() -> None:
    ledger = grouped(inventory=on_disk(0, 1, 2, run=(1, 2)))
    batch = asked(ledger)
    assert (names(batch), batch.admit) == ([(0, 0), (0, 1), (1, 1), (0, 2), (1, 2)], ())
    window = batch.transfers[2]
    assert window.source == Place(Medium.DISK, FrameId(53))
    assert [read for read, _ in window.others] == [52, 51]
    assert ended(ledger, batch.transfers[:4]) is None, "it waits for all of them"
    found = ended(ledger, batch.transfers[4:])
    assert found is not None
    (granted,) = found.admit
    assert (granted.n_shared, granted.cached_tokens) == (3, 12)
    assert granted.fetched is not None
    assert (granted.fetched.blocks, granted.fetched.source) == (3, "disk")
    assert len([each for each in found.tier if each.load]) == 3 * 2 + 2 * 3
    ledger.check_invariants()


def test_a_window_that_did_not_come_is_computed_and_so_is_what_it_was_for() -> None:
    ledger = grouped(inventory=on_disk(0, 1, 2, run=(1, 2)))
    batch = asked(ledger)
    last = next(each for each in batch.transfers if (each.group, each.depth) == (1, 2))
    ended(ledger, tuple([each for each in batch.transfers if each is not last]))
    found = ended(ledger, (last,), TransferEnd.CORRUPT)
    assert found is not None
    (granted,) = found.admit
    assert (granted.n_shared, granted.miss_reason) == (0, MissReason.WINDOWED)
    assert RUN[2] not in ledger.state.store.cache.saved
    ledger.check_invariants()


def test_nothing_comes_where_no_boundary_is_reached_or_where_it_does_not_pay() -> None:
    assert names(asked(grouped(inventory=on_disk(0, 1, 2, run=(2,))))) == [], "block 1 of the window is nowhere"
    assert names(asked(grouped(inventory=on_disk(0, 1, run=(0, 1))))) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    dear = grouped(inventory=on_disk(0, 1, 2, run=(1, 2)))
    play(dear, transfer_costs=TransferCosts(1.0, 0.3))
    assert names(asked(dear)) == [], "twelve pages of 0.3 s take longer than three blocks of 1 s"
    dear = grouped(inventory=on_disk(0, 1, 2, run=(1, 2)))
    play(dear, transfer_costs=TransferCosts(1.0, 0.2))
    assert len(names(asked(dear))) == 5


def test_a_checkpoint_alone_comes_where_the_pool_has_the_rest() -> None:
    blocks = tuple([CachedBlock(BlockId(2 * n), key, n - 1, 0) for n, key in enumerate(KEYS)])
    there = on_disk(0, 1, 2, run=(2,))
    there = replace(there, cached_blocks=blocks, block_groups=(0, 0, 0), block_pages=tuple(map(BlockId, range(6))))
    ledger = grouped(STATE, there)
    batch = asked(ledger)
    assert names(batch) == [(1, 2)]
    found = ended(ledger, batch.transfers)
    assert found is not None
    assert found.admit[0].fetched is not None
    assert (found.admit[0].n_shared, found.admit[0].fetched.blocks) == (3, 3)


@pytest.mark.parametrize(
    ("groups", "pages"),
    [((0,), (59,)), ((0,), (59, 58, 57)), ((2,), (59, 58)), ((0, 1), (59, 58)), ((), ()), ((1,), (59, 58, 58))],
)
def test_an_inventory_whose_frames_on_disk_contradict_each_other_is_refused(
    groups: tuple[int, ...], pages: tuple[int, ...]
) -> None:
    claim = CachedBlock(BlockId(59), KEYS[0], -1, 0, KEYS[0], 0)
    with pytest.raises(ProtocolViolation, match="inventory"):
        grouped(inventory=Inventory(saved=(claim,), saved_groups=groups, saved_pages=tuple(map(FrameId, pages))))
