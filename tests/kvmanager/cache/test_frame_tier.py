"""The frames of host memory by themselves: what they hold, which one goes next, and what an inventory gives back."""

from __future__ import annotations

from typing import get_args
from unittest import mock

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import CachedBlocks
from common.contracts.types import BlockHash, BlockId, FrameId
from kvmanager.cache.eviction.lru import LeastRecentlyUsed
from kvmanager.cache.eviction.utility import PredictedUtility
from kvmanager.cache.frame_tier import NO_FRAME, FrameTier, Taken
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.contracts.block import CACHED, FREE, IN_USE, ROOT, Blocks
from kvmanager.contracts.ledger_config import EvictionName
from kvmanager.ledger.audit import check_frames

A, B, C, D, OTHER = (BlockHash(letter * 16) for letter in (b"a", b"b", b"c", b"d", b"x"))
CHAIN = (A, B, C, D)
NOTHING = Taken(NO_FRAME)


def dropped_of(taken: Taken) -> BlockHash:
    """Return the content that was dropped for another one; empty: none was."""
    return taken.dropped[0][0] if taken.dropped else ROOT


def store(tier: FrameTier, *depths: int) -> list[BlockHash]:
    """Store blocks of the chain by their depths, and return what had to go for them."""
    gone = []
    for depth in depths:
        taken = tier.take_frame(CHAIN[depth], CHAIN[depth - 1] if depth else ROOT, depth)
        assert taken.frame != NO_FRAME
        gone += [content for content, _ in taken.dropped]
    return gone


def claims(*rows: tuple[int, BlockHash, BlockHash, int]) -> CachedBlocks:
    frames, hashes, parents, depths = zip(*rows, strict=True)
    return CachedBlocks(list(map(BlockId, frames)), hashes, [-1] * len(rows), list(range(len(rows))), parents, depths)


@pytest.mark.parametrize("policy", get_args(EvictionName))
def test_a_chain_that_is_evicted_leaves_first_goes_leaves_first(policy: EvictionName) -> None:
    tier = FrameTier(3, policy)
    assert store(tier, 2, 1, 0) == []
    assert tier.find_run(CHAIN, 0, 4) == [2, 1, 0]
    taken = tier.take_frame(OTHER, ROOT, 0)
    assert (taken.frame, taken.dropped) == (0, ((C, 2),))
    assert tier.find_run(CHAIN, 0, 4) == [2, 1]


@pytest.mark.parametrize("policy", get_args(EvictionName))
def test_a_worthless_block_leaves_its_frame_behind_that_of_its_child(policy: EvictionName) -> None:
    """The parent came first, and was a leaf until its child was stored. Its block goes last, and is not stored anew."""
    tier, blocks = FrameTier(2, policy), Blocks(2)
    cache = PrefixCache(blocks, 8, tier=tier)
    for block, (content, parent) in enumerate(((A, ROOT), (B, A))):
        blocks.index[block] = block
        cache.register_block(BlockId(block), content, parent)
    store(tier, 0)
    for block in (1, 0):
        cache.store_below(BlockId(block), worthless=not block)
        cache.forget_block(BlockId(block))
    assert tier.find_run(CHAIN, 0, 2) == [0, 1]
    assert dropped_of(tier.take_frame(OTHER, ROOT, 0)) == B
    check_frames(tier, cache.entries)


def test_a_run_ends_where_a_hash_stands_elsewhere_or_behind_another_one() -> None:
    tier = FrameTier(4, "lru")
    store(tier, 1, 0)
    assert tier.find_run((A, B), 1, 2) == [0]
    assert tier.find_run((OTHER, B), 1, 2) == [], "behind another block"
    assert tier.find_run((A, OTHER, B), 2, 3) == [], "at another depth"
    assert tier.find_run((A, B), 0, 1) == [1]


def test_children_are_counted_before_their_parent_comes_and_when_it_has_gone() -> None:
    tier = FrameTier(4, "utility")
    store(tier, 2, 1)
    assert (tier.apart, tier.frames.children[1]) == ({A: 1}, 1)
    store(tier, 0)
    assert (tier.apart, tier.frames.children[2]) == ({}, 1)


def test_a_frame_of_a_grant_is_not_taken_and_comes_back_as_released_last() -> None:
    tier = FrameTier(2, "lru")
    store(tier, 1, 0)
    tier.hold([BlockId(1), BlockId(0)])
    assert tier.take_frame(OTHER, ROOT, 0) == NOTHING, "a grant uses both"
    tier.release([BlockId(1), BlockId(0)])
    taken = tier.take_frame(OTHER, ROOT, 0)
    assert taken.dropped == ((B, 1),), "the tail first"


def test_a_touched_frame_goes_after_the_others() -> None:
    tier = FrameTier(2, "lru")
    tier.take_frame(A, ROOT, 0)
    tier.take_frame(OTHER, ROOT, 0)
    tier.touch(A)
    tier.touch(B)  # no frame has it
    taken = tier.take_frame(C, ROOT, 0)
    assert taken.dropped == ((OTHER, 0),)


def test_an_inventory_gives_back_what_has_its_parent_and_frees_the_rest() -> None:
    tier, blocks = FrameTier(6, "lru"), Blocks(2)
    blocks.index[0], blocks.parent[0] = 0, ROOT
    rows = claims((4, C, B, 2), (1, B, A, 1), (3, OTHER, D, 3), (0, D, C, 9), (5, A, B, 7))
    for _ in tier.restore(rows, blocks, {A: BlockId(0)}):
        pass
    assert tier.entries == {B: 1, C: 4}, "no parent, a wrong depth, and a hash that a block has elsewhere are left out"
    assert list(tier.free) == [0, 2, 3, 5]
    assert list(tier.order) == [4, 1], "the deepest goes first"
    assert tier.apart == {A: 1}


@pytest.mark.parametrize("rows", [((9, A, ROOT, 0),), ((1, A, ROOT, 0), (1, B, A, 1))], ids=["none of them", "twice"])
def test_an_inventory_that_contradicts_itself_is_refused(
    rows: tuple[tuple[int, BlockHash, BlockHash, int], ...],
) -> None:
    with pytest.raises(ProtocolViolation, match=r"frame [19] stands twice in the inventory, or is none of 6"):
        for _ in FrameTier(6, "lru").restore(claims(*rows), Blocks(1), {}):
            pass


# ---------------------------------------------------------------- transfers

POLICIES = pytest.mark.parametrize("policy", get_args(EvictionName))


def expect(tier: FrameTier, *depths: int) -> list[tuple[FrameId, BlockHash]]:
    """Let frames be filled with blocks of the chain; return which, and what they held."""
    found = []
    for depth in depths:
        taken = tier.expect(CHAIN[depth], CHAIN[depth - 1] if depth else ROOT, depth)
        check_frames(tier, {})
        found.append((taken.frame, dropped_of(taken)))
    return found


def admit(tier: FrameTier, *depths: int) -> None:
    for depth in depths:
        tier.admit(CHAIN[depth])
        check_frames(tier, {})


@POLICIES
def test_what_is_expected_is_no_hit_before_it_has_come(policy: EvictionName) -> None:
    tier = FrameTier(4, policy)
    assert expect(tier, 0, 1, 2) == [(0, ROOT), (1, ROOT), (2, ROOT)]
    assert tier.find_run(CHAIN, 0, 4) == []
    assert tier.frames.state[:4] == [IN_USE, IN_USE, IN_USE, FREE]
    admit(tier, 0, 1)
    assert tier.find_run(CHAIN, 0, 4) == [0, 1]
    assert tier.frames.state[:4] == [CACHED, CACHED, IN_USE, FREE]
    assert (tier.expected, len(tier)) == ({C: 2}, 2)


@POLICIES
def test_a_frame_that_is_to_be_filled_is_not_taken_nor_is_its_parent(policy: EvictionName) -> None:
    tier = FrameTier(3, policy)
    expect(tier, 0)
    admit(tier, 0)
    expect(tier, 1)
    assert expect(tier, 2) == [(2, ROOT)]
    assert tier.expect(OTHER, ROOT, 0) == NOTHING, "one has a child that is to come, two are to be filled"
    assert tier.take_frame(OTHER, ROOT, 0) == NOTHING
    admit(tier, 1, 2)
    taken = tier.expect(OTHER, ROOT, 0)
    assert (taken.frame, taken.dropped) == (2, ((C, 2),)), "the leaf"
    check_frames(tier, {})


@POLICIES
def test_the_parent_of_one_that_does_not_come_may_go(policy: EvictionName) -> None:
    tier = FrameTier(2, policy)
    expect(tier, 0)
    admit(tier, 0)
    expect(tier, 1)
    assert tier.expect(OTHER, ROOT, 0) == NOTHING
    tier.abandon(B)
    check_frames(tier, {})
    assert (list(tier.free), tier.expected, tier.frames.children[0]) == ([1], {}, 0)
    assert expect(tier, 1) == [(1, ROOT)]
    tier.abandon(B)
    for hash_, frame in ((OTHER, 1), (D, 0)):
        taken = tier.expect(hash_, ROOT, 0)
        assert taken.frame == frame
    assert tier.entries == {}


@POLICIES
def test_a_frame_that_was_read_goes_after_its_children_whatever_the_order_of_ends(policy: EvictionName) -> None:
    tier = FrameTier(3, policy)
    expect(tier, 0, 1, 2)
    admit(tier, 0, 1, 2)
    tier.hold([FrameId(0), FrameId(1), FrameId(2)])
    assert tier.expect(OTHER, ROOT, 0) == NOTHING, "all are being read"
    for frame, content in ((1, B), (0, A), (2, C)):
        assert tier.end_read(FrameId(frame), content)
        check_frames(tier, {})
    for number, (frame, dropped) in enumerate(((2, C), (1, B), (0, A))):
        taken = tier.expect(BlockHash(bytes([number]) * 16), ROOT, 0)
        assert (taken.frame, dropped_of(taken)) == (frame, dropped)
        check_frames(tier, {})


@pytest.mark.parametrize("policy", ["lru", "utility"])
def test_a_frame_whose_child_came_after_it_and_has_gone_is_not_taken_while_it_is_read(policy: EvictionName) -> None:
    """Its block is in use, and that of its child was evicted: so it was a leaf when the child was stored."""
    tier = FrameTier(2, policy)
    store(tier, 0, 1)
    others = [BlockHash(bytes([number]) * 16) for number in range(3)]
    assert dropped_of(tier.take_frame(others[0], ROOT, 0)) == B
    tier.hold([tier.entries[A]])
    assert [dropped_of(tier.take_frame(each, ROOT, 0)) for each in others[1:]] == others[:2]
    assert tier.entries.keys() == {A, others[2]}
    check_frames(tier, {})


@pytest.mark.parametrize("where", ["nowhere", "block", "frame of host memory"])
@pytest.mark.parametrize("saved", [False, True])
def test_what_blocks_have_is_no_loss_to_host_memory_nor_to_the_disk(saved: bool, where: str) -> None:
    """It comes into a frame again once its block is evicted, and nobody has missed it."""
    host, disk, blocks = FrameTier(2, "lru"), FrameTier(1, "lru"), Blocks(1)
    cache, tier = PrefixCache(blocks, 8, tier=host, disk=disk), disk if saved else host
    if where == "block":
        cache.register_block(BlockId(0), A, ROOT)
    elif where == "frame of host memory":
        host.take_frame(A, ROOT, 0)
    if A not in tier.entries:
        tier.take_frame(A, ROOT, 0)
    with mock.patch.object(LeastRecentlyUsed, "forget_content") as forget:
        while A in tier.entries:
            cache.note_dropped(tier, tier.take_frame(BlockHash(bytes([len(tier)]) * 16), ROOT, 0))
    elsewhere = where == "block" or (saved and where != "nowhere")
    assert [each.args for each in forget.call_args_list] == [(A,)] * elsewhere


def test_a_content_that_is_no_loss_is_none_when_it_comes_back() -> None:
    tier = FrameTier(2, "utility")
    store(tier, 0)
    assert isinstance(tier.order, PredictedUtility)
    tier.order.forget_content(A)
    tier.order._guard.note_missed(A)
    assert tier.order._guard._lru_found == 0


@POLICIES
def test_nothing_is_dropped_for_a_content_that_has_no_room_all_the_same(policy: EvictionName) -> None:
    tier, large = FrameTier(6, policy, (1, 4, 7)), BlockHash(A + b"\1")
    store(tier, 0, 1)
    assert tier.take_frame(BlockHash(A + b"\2"), A, 0) == NOTHING, "it has more pages than there are frames"
    assert tier.expect(large, A, 0).dropped == ()
    assert tier.expect(BlockHash(B + b"\1"), B, 1) == NOTHING, "four of six frames are to be filled"
    assert tier.entries.keys() == {A, B}
    check_frames(tier, {})


@POLICIES
def test_a_lost_content_takes_its_descendants_along_and_spares_the_others(policy: EvictionName) -> None:
    tier = FrameTier(6, policy)
    expect(tier, 0, 1, 2, 3)
    admit(tier, 0, 1, 2, 3)
    sibling = BlockHash(b"s" * 16)
    tier.expect(sibling, A, 1)
    tier.admit(sibling)
    assert tier.drop_tree(B) == [(3, D), (2, C), (1, B)], "the deepest first"
    check_frames(tier, {})
    assert tier.entries == {A: 0, sibling: 4}
    assert sorted(tier.free) == [1, 2, 3, 5]
    assert tier.frames.children[0] == 1
    assert tier.drop_tree(B) == []


@POLICIES
def test_what_is_behind_a_lost_content_goes_although_the_content_itself_has_gone(policy: EvictionName) -> None:
    tier = FrameTier(4, policy)
    for depth in (2, 1):  # the parent is in a block
        tier.take_frame(CHAIN[depth], CHAIN[depth - 1], depth)
    assert tier.apart == {A: 1}
    assert tier.drop_tree(A) == [(2, C), (1, B)]
    check_frames(tier, {})
    assert (tier.apart, tier.entries) == ({}, {})


@POLICIES
def test_a_frame_that_is_lost_while_it_is_read_is_free_once_that_has_ended(policy: EvictionName) -> None:
    tier = FrameTier(3, policy)
    expect(tier, 0, 1)
    admit(tier, 0, 1)
    tier.hold([FrameId(0), FrameId(1)])
    assert tier.drop_tree(A) == [(1, B), (0, A)]
    assert (list(tier.free), tier.entries) == ([2], {})
    assert not tier.end_read(FrameId(1), B)
    assert list(tier.free) == [2, 1]
    assert not tier.end_read(FrameId(0), A)
    check_frames(tier, {})
    assert list(tier.free) == [2, 1, 0]
    assert not tier.end_read(FrameId(0), A), "it is free already"
    assert list(tier.free) == [2, 1, 0]


@POLICIES
def test_a_disk_takes_over_claims_behind_parents_on_disk_alone(policy: EvictionName) -> None:
    tier, blocks = FrameTier(4, policy), Blocks(2)
    blocks.index[0], blocks.parent[0] = 0, ROOT
    for _ in tier.restore(claims((1, B, A, 1), (3, C, B, 2)), blocks, {A: BlockId(0)}, alone=True):
        pass
    check_frames(tier, {})
    assert (tier.entries, sorted(tier.free)) == ({}, [0, 1, 2, 3])
    for _ in tier.restore(claims((1, B, A, 1), (3, A, A, 0)), blocks, {}, alone=True):
        pass
    check_frames(tier, {})
    assert tier.entries == {A: 3, B: 1}
