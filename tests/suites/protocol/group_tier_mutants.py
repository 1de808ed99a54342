"""Simpler rules of host memory where the pool has groups, and the searches that notice them."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any
from unittest import mock

from common.contracts.lease import Inventory
from common.contracts.types import BlockHash, BlockId, FrameId
from gpuworker.scheduling import frame_claims
from gpuworker.scheduling.frame_claims import FrameClaims, Move
from gpuworker.scheduling.group_grants import GroupGrantCheck
from gpuworker.scheduling.lease_agent import LeaseAgent
from kvmanager.cache.frame_tier import FrameTier, Taken
from kvmanager.cache.group_match import GroupMatch, GroupMatcher
from kvmanager.cache.prefix_cache import PrefixCache, RunHits
from kvmanager.contracts.block import FREE
from kvmanager.ledger import block_granter, grant_plan
from kvmanager.ledger.ledger_state import LedgerState
from tests.suites.protocol.mutant import Exhaustive, Mutant, Walks, nothing
from tests.suites.protocol.scenarios import ALL_FAULTS, RESETS

_keep_below, _store_below, _leaves = LedgerState.keep_below, PrefixCache.store_below, PrefixCache._leaves
_match, _inventory, _further_pages = GroupMatcher.match, LeaseAgent.inventory, block_granter._further_pages


def keep_the_first_page(
    state: LedgerState, block: BlockId, others: Items[BlockId] = (), worthless: bool = False
) -> None:
    ordered = len(state.tier_copies)
    _keep_below(state, block, others, worthless)
    del state.tier_copies[ordered + 1 :]


def moved_in_part(copies: Items[Any], group: int, whole: tuple[BlockId, ...]) -> Move:
    """Whatever is copied counts as all of it."""
    pages, frames = tuple([each.block for each in copies]), tuple([each.frame for each in copies])
    return Move(group, pages, frames, copies[0].load)


def swap_pages(state: LedgerState, block: BlockId, others: Items[BlockId] = (), worthless: bool = False) -> None:
    _keep_below(state, block, others[::-1], worthless)


def store_without_touch(cache: PrefixCache, block: BlockId, worthless: bool = False) -> Taken | None:
    with mock.patch.object(FrameTier, "touch", nothing if worthless else FrameTier.touch):
        return _store_below(cache, block, worthless)


def free_the_first(tier: FrameTier, frame: FrameId) -> None:
    tier.frames.hash[frame], tier.frames.state[frame] = None, FREE
    tier.frames.others.pop(frame, None)
    tier.free.append(frame)


def make_by_the_first(claims: FrameClaims, group: int, frames: tuple[FrameId, ...]) -> None:
    """What a further frame was a part of counts on."""
    made = claims.made
    assert made is not None
    if (void := made.break_block(frames[0])) is not None:
        claims.held.pop(void, None)
    made.make_block(group, frames)


def frames_of_the_first_group(frames: Items[FrameId], runs: Items[RunHits]) -> list[FrameId]:
    return list(frames)


def match_without_loads(matcher: GroupMatcher) -> GroupMatch:
    """What frames of runs hold counts as there, and nobody loads it."""
    found = _match(matcher)
    return found._replace(runs=tuple([each._replace(frames=()) for each in found.runs]))


def drop_what_is_worthless(cache: PrefixCache, block: BlockId, worthless: bool = False) -> Taken | None:
    """Also if a frame has what stands behind it."""
    return None if worthless else _store_below(cache, block)


def has_a_block(cache: PrefixCache, key: BlockHash) -> bool:
    return key in cache.entries


def leave_alone(cache: PrefixCache, key: BlockHash, depth: int, going: Collection[BlockHash] = ()) -> None:
    """What goes at the same time does not count."""
    _leaves(cache, key, depth)


def name_first_frames(agent: LeaseAgent) -> Inventory:
    found = _inventory(agent)
    return replace(found, frame_pages=tuple([each.block for each in found.frames]))


def pages_behind_present(store: Any, sequence: Any, shared: int) -> tuple[BlockId, ...]:
    return _further_pages(store, sequence, sequence.n_shared)


def fill_before_loads(check: GroupGrantCheck, block: BlockId) -> int:
    return check._blocks.fill[block]


GROUP_TIER_MUTANTS = (
    Mutant(
        "186",
        "of a block of several pages, the first one alone is stored",
        ((LedgerState, "keep_below", keep_the_first_page),),
        Exhaustive("frames_compound"),
        ("I2",),
    ),
    Mutant(
        "187",
        "of a block of several pages the first one is stored, and the worker counts that as all of it",
        ((LedgerState, "keep_below", keep_the_first_page), (frame_claims, "_moved", moved_in_part)),
        Walks("frames_compound"),
        ("I2", "I3", "I4", "I17"),
    ),
    Mutant(
        "188",
        "further pages of a block are stored in another order, and the worker takes any",
        ((LedgerState, "keep_below", swap_pages), (frame_claims, "_moved", moved_in_part)),
        Walks("frames_compound"),
        ("I3", "I4", "I17"),
    ),
    Mutant(
        "189",
        "a content that leaves frees its first frame alone",
        ((FrameTier, "_set_free", free_the_first),),
        Walks("frames_compound"),
        ("I1",),
    ),
    Mutant(
        "190",
        "what a frame was a part of counts on until its first frame is written over",
        ((FrameClaims, "_make", make_by_the_first),),
        Walks("frames_three"),
        ("I2", "I17"),
    ),
    Mutant(
        "191",
        "frames of windows may be taken for what the grant that loads them evicts",
        (
            (grant_plan, "every_frame", frames_of_the_first_group),
            (frame_claims, "_check_place", nothing),
        ),
        Walks("frames_window_few"),
        ("I1", "I2", "I3", "I4", "I17"),
    ),
    Mutant(
        "192",
        "what frames of windows hold counts as a hit, and is not loaded",
        ((GroupMatcher, "match", match_without_loads),),
        Walks("frames_window"),
        ("I2",),
    ),
    Mutant(
        "193",
        "K and V that end without a checkpoint in the pool are dropped, although host memory has one",
        ((PrefixCache, "store_below", drop_what_is_worthless),),
        Walks("frames_state"),
        ("I5", "I18"),
    ),
    Mutant(
        "194",
        "the index is told what the pool has of all groups",
        ((PrefixCache, "_has", has_a_block),),
        Walks("frames_window"),
        ("I6", "I29"),
    ),
    Mutant(
        "195",
        "of what leaves host memory at once, each group is told alone",
        ((PrefixCache, "_leaves", leave_alone),),
        Walks("frames_three", faults=(*ALL_FAULTS, *RESETS)),
        ("I6",),
    ),
    Mutant(
        "196",
        "an inventory names the first frames alone",
        ((LeaseAgent, "inventory", name_first_frames),),
        Walks("frames_compound"),
        ("I2",),
    ),
    Mutant(
        "197",
        "a grant names further pages of loaded blocks too",
        ((block_granter, "_further_pages", pages_behind_present),),
        Walks("frames_compound"),
        ("I2",),
    ),
    Mutant(
        "198",
        "a loaded block is as full as its pages were before",
        ((GroupGrantCheck, "_fill_of", fill_before_loads),),
        Walks("frames_window"),
        ("I2",),
    ),
    Mutant(
        "199",
        "the frame of a block that is worth nothing stays where it was, although frames hold what is behind it",
        ((PrefixCache, "store_below", store_without_touch),),
        Walks("frames_state_window", first_seed=115),
        ("I5", "I18"),
    ),
)
