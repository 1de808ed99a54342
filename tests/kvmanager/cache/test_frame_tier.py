"""The frames of host memory by themselves: what they hold, which one goes next, and what an inventory gives back."""

from __future__ import annotations

from typing import get_args

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import CachedBlocks
from common.contracts.types import BlockHash, BlockId
from kvmanager.cache.frame_tier import FrameTier
from kvmanager.contracts.block import ROOT, Blocks
from kvmanager.contracts.ledger_config import EvictionName

A, B, C, D, OTHER = (BlockHash(letter * 16) for letter in (b"a", b"b", b"c", b"d", b"x"))
CHAIN = (A, B, C, D)


def store(tier: FrameTier, *depths: int) -> list[BlockHash]:
    """Store blocks of the chain by their depths, and return what had to go for them."""
    gone = []
    for depth in depths:
        taken = tier.take_frame(CHAIN[depth], CHAIN[depth - 1] if depth else ROOT, depth)
        assert taken is not None
        gone += [taken.dropped] if taken.dropped else []
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
    assert taken is not None
    assert (taken.frame, taken.dropped, taken.depth) == (0, C, 2)
    assert tier.find_run(CHAIN, 0, 4) == [2, 1]


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
    assert tier.take_frame(OTHER, ROOT, 0) is None, "a grant uses both"
    tier.release([BlockId(1), BlockId(0)])
    taken = tier.take_frame(OTHER, ROOT, 0)
    assert taken is not None
    assert taken.dropped == B, "the tail first"


def test_a_touched_frame_goes_after_the_others() -> None:
    tier = FrameTier(2, "lru")
    tier.take_frame(A, ROOT, 0)
    tier.take_frame(OTHER, ROOT, 0)
    tier.touch(A)
    tier.touch(B)  # no frame has it
    taken = tier.take_frame(C, ROOT, 0)
    assert taken is not None
    assert taken.dropped == OTHER


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
