"""Host memory where the pool has groups of layers: exact pages and frames on tiny pools.

Blocks have 4 slots. One of the first group has 2 pages, one of the run 3: so many frames have they in host memory. A
window of 8 reads the run, behind block n those of blocks n - 2 and n - 1.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import key_of
from common.contracts.lease import HOST_REASON, CachedBlock, GrantBatch, Inventory
from common.contracts.types import (
    TRIMMED,
    BlockHash,
    BlockId,
    DecisionKind,
    KvGroup,
    KvGroupKind,
    MissReason,
    SequenceId,
)
from kvmanager.contracts.index_events import Removed
from kvmanager.ledger.evicting import evict_until_free
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, finish, hashes, make_ledger, play, prompt, reserve

SIZE = 4
FULL, WINDOW = KvGroup(KvGroupKind.FULL, 0, 2, ()), KvGroup(KvGroupKind.WINDOW, 8, 3, ())
STATE = KvGroup(KvGroupKind.STATE, 0, 3, ())
TOKENS = prompt(13)
KEYS = hashes(TOKENS, SIZE)
"""Three full blocks, and a token of a fourth."""


def grouped(frames: int = 40, pages: int = 22, run: KvGroup = WINDOW) -> Ledger:
    return make_ledger(pages, SIZE, groups=(FULL, run), host_frames=frames)


def tables(ledger: Ledger, number: int) -> tuple[list[BlockId], list[BlockId]]:
    sequence = ledger.state.sequences.live[SequenceId(number)]
    return sequence.block_table, sequence.runs[0].table


def computed(ledger: Ledger, number: int = 0) -> None:
    """Let the prompt be computed behind its hits, and end."""
    (granted,) = admit(ledger, reserve(number, TOKENS, block_size=SIZE))
    first, run = tables(ledger, number)
    places = range(granted.n_shared, len(KEYS))
    seals = [(table[place], KEYS[place]) for place in places for table in (first, run) if table[place : place + 1]]
    play(ledger, seal=tuple([each for each in seals if each[0] != TRIMMED]))
    finish(ledger, number)
    ledger.drain_index_events()


def evicted(ledger: Ledger, pages: int) -> list[tuple[int, int, bool]]:
    """Evict until so many pages are free, and return the copies that this orders."""
    evict_until_free(ledger.state, pages, None)
    ledger.check_invariants()
    return [(each.block, each.frame, each.load) for each in ledger.state.take_tier_copies()]


def held(ledger: Ledger) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the frames of what host memory has, by place and group."""
    tier = ledger.state.store.tier
    assert tier is not None
    named = {key_of(key, group): (place, group) for place, key in enumerate(KEYS) for group in (0, 1)}
    return {named[key]: (frame, *tier.frames.others.get(frame, ())) for key, frame in tier.entries.items()}


def loads(batch: GrantBatch | None) -> list[tuple[int, int]]:
    assert batch is not None
    return [(each.block, each.frame) for each in batch.tier if each.load]


def asked_again(ledger: Ledger, **options: Any) -> GrantBatch:
    batch = play(ledger, reserve=(reserve(1, TOKENS, block_size=SIZE, **options),))
    assert batch is not None
    ledger.check_invariants()
    return batch


def test_each_page_of_an_evicted_block_goes_into_a_frame() -> None:
    made = grouped()
    computed(made)
    there = made.state.store.blocks
    last = made.state.store.cache.entries[key_of(KEYS[2], 1)]
    pages = (last, *there.others[last])
    assert evicted(made, len(made.state.store.pool.free) + 1) == [
        (page, frame, False) for frame, page in enumerate(pages)
    ]
    assert held(made) == {(2, 1): (0, 1, 2)}, "what stands behind the first group's block leaves before it"
    assert made.pool_counts().host_held == 3


def test_what_is_read_behind_the_hits_is_loaded_and_nothing_else() -> None:
    made = grouped()
    computed(made)
    evicted(made, 22)
    assert sorted(held(made)) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    frames = held(made)
    (granted,) = (batch := asked_again(made)).admit
    assert (granted.n_shared, granted.cached_tokens, granted.miss_reason) == (3, 12, MissReason.FULL_HIT)
    wanted = [*frames[0, 0], *frames[1, 0], *frames[2, 0], *frames[1, 1], *frames[2, 1]]
    assert [frame for _, frame in loads(batch)] == wanted, "all of the first group, and two blocks of the window"
    assert granted.runs[0][0] == TRIMMED
    others = made.state.store.blocks.others
    named = (*granted.block_table[:3], *granted.runs[0][1:3])
    assert [page for page, _ in loads(batch)] == [page for block in named for page in (block, *others[block])]
    fresh = granted.block_table[3], granted.runs[0][3]
    assert granted.pages == (*others[fresh[0]], *others[fresh[1]]), "the pages of loaded blocks stand in their copies"
    assert held(made) == frames, "they keep what they have"


def test_blocks_of_the_pool_and_frames_are_hits_together() -> None:
    made = grouped()
    computed(made)
    evicted(made, len(made.state.store.pool.free) + 1)
    (granted,) = (batch := asked_again(made)).admit
    assert granted.n_shared == 3
    (first,) = {
        frame for (place, group), frames in held(made).items() if (place, group) == (2, 1) for frame in frames[:1]
    }
    assert loads(batch)[0] == (granted.runs[0][2], first)
    *_, record = [each for each in made.drain_decisions() if each.kind is DecisionKind.GRANT]
    assert f"{HOST_REASON}1 of 3 cached blocks are loaded" in record.reasons
    assert dict(record.figures)["host_blocks"] == 1.0
    assert record.chosen.startswith("3 shared blocks, 1 of them loaded, and ")


def test_a_window_without_a_block_that_is_read_ends_the_hits() -> None:
    made = grouped(frames=6)
    computed(made)
    evicted(made, 22)
    assert sorted(held(made)) == [(0, 0), (1, 0), (2, 0)], "leaves went first, for what is before them"
    (granted,) = (batch := asked_again(made)).admit
    assert (granted.n_shared, granted.miss_reason, loads(batch)) == (0, MissReason.EVICTED, [])


def test_a_content_is_in_the_index_while_each_group_has_it_anywhere() -> None:
    made = grouped(frames=9)
    computed(made)
    evicted(made, len(made.state.store.pool.free) + 1)
    assert made.drain_index_events() == (), "a frame has the window's block"
    evicted(made, 22)
    gone = [each for each in made.drain_index_events() if isinstance(each, Removed)]
    assert [each.hash for each in gone] == [KEYS[2], KEYS[1]]
    assert {key for key, _ in made.index_snapshot().entries} == {KEYS[0]}


def test_a_reset_tells_the_index_of_each_content_once() -> None:
    made = grouped()
    computed(made)
    evicted(made, 22)
    play(made, reserve=(reserve(2, prompt(4, start=500), block_size=SIZE),))
    made.drain_index_events()
    made.reset_cache(1)
    gone = [each.hash for each in made.drain_index_events() if isinstance(each, Removed)]
    assert gone == [KEYS[2], KEYS[1], KEYS[0]]
    assert held(made) == {}
    made.check_invariants()


def test_an_inventory_brings_frames_back_with_their_groups() -> None:
    made = grouped()
    claims = (
        CachedBlock(BlockId(4), KEYS[1], -1, 0, KEYS[1], 1),
        CachedBlock(BlockId(0), KEYS[0], -1, 0, KEYS[0], 0),
        CachedBlock(BlockId(2), KEYS[1], -1, 0, KEYS[0], 1),
        CachedBlock(BlockId(9), KEYS[2], -1, 0, KEYS[2], 2),
    )
    pages = tuple(map(BlockId, (4, 5, 6, 0, 1, 2, 3, 9, 10, 11)))
    made.rebuild(Inventory(frames=claims, frame_groups=(1, 0, 0, 1), frame_pages=pages))
    made.check_invariants()
    assert held(made) == {(1, 1): (4, 5, 6), (0, 0): (0, 1), (1, 0): (2, 3)}, "the last one has no block beside it"
    for groups, given in (((1, 0, 0), pages), ((1, 0, 0, 0), pages), ((1, 0, 0, 1), pages[:-1]), ((2, 0, 0, 1), pages)):
        with pytest.raises(ProtocolViolation, match="an inventory has"):
            made.rebuild(Inventory(frames=claims, frame_groups=groups, frame_pages=given))


def with_states(frames: int = 40) -> Ledger:
    """Return a ledger with a checkpoint behind the third block of a prompt that has ended."""
    made = grouped(frames, pages=20, run=STATE)
    computed(made)
    return made


def test_a_checkpoint_is_stored_and_loaded_with_the_blocks_before_it() -> None:
    made = with_states()
    evicted(made, 20)
    assert sorted(held(made)) == [(0, 0), (1, 0), (2, 0), (2, 1)]
    frames = held(made)
    (granted,) = (batch := asked_again(made)).admit
    assert (granted.n_shared, granted.runs[0][:2]) == (3, (TRIMMED, TRIMMED))
    assert [frame for _, frame in loads(batch)] == [*frames[0, 0], *frames[1, 0], *frames[2, 0], *frames[2, 1]]
    states = made.state.store.states
    assert states is not None
    assert states.known == {KEYS[2]}, "it is one of the pool again"


def test_blocks_without_a_checkpoint_behind_them_are_not_stored() -> None:
    made = with_states()
    longer = prompt(4 * SIZE + 1)
    batch = play(made, reserve=(reserve(3, longer, block_size=SIZE),))
    assert batch is not None
    first, run = tables(made, 3)
    extra = hashes(longer, SIZE)[3]
    play(made, seal=((first[3], extra), (run[3], extra)))
    finish(made, 3)
    store = made.state.store
    superseded = store.cache.entries[key_of(KEYS[2], 1)]
    assert store.states is not None
    assert store.states.is_superseded(KEYS[2])
    copies = evicted(made, len(store.pool.free) + 1)
    assert copies == [], "a deeper checkpoint goes on from it"
    assert store.blocks.hash[superseded] is None
    evicted(made, 20)
    assert (2, 1) not in held_of(made, longer)
    assert sorted(held_of(made, longer)) == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)]


def held_of(ledger: Ledger, tokens: list[int]) -> list[tuple[int, int]]:
    tier, known = ledger.state.store.tier, hashes(tokens, SIZE)
    assert tier is not None
    named: dict[BlockHash, tuple[int, int]] = {key_of(key, g): (at, g) for at, key in enumerate(known) for g in (0, 1)}
    return [named[key] for key in tier.entries]
