"""Simpler rules of the host tier, and the searches that notice them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from common.contracts.lease import TierCopy
from common.contracts.types import BlockId, FrameId
from gpuworker.scheduling import frame_claims
from gpuworker.scheduling.block_states import BlockStates, Content
from gpuworker.scheduling.frame_claims import FrameClaims, LoadedBlock
from kvmanager.cache.frame_tier import FrameTier, Taken
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.ledger.ledger_state import LedgerState
from tests.suites.protocol.mutant import Exhaustive, Mutant, Walks, nothing
from tests.suites.protocol.scenarios import ALL_FAULTS, RESETS

_keep_below, _take_copies = LedgerState.keep_below, LedgerState.take_tier_copies
_store_below, _check = PrefixCache.store_below, FrameClaims.check


def keep_without_an_order(state: LedgerState, block: BlockId, *given: Any, **options: Any) -> None:
    ordered = state.tier_copies.copy()
    _keep_below(state, block, *given, **options)
    state.tier_copies[:] = ordered


def load_first(state: LedgerState) -> tuple[TierCopy, ...]:
    return tuple(sorted(_take_copies(state), key=lambda each: not each.load))


def hold_none(tier: FrameTier, frames: Iterable[FrameId]) -> None:
    """Frames of a grant stay in the order of eviction."""


def release_none(tier: FrameTier, frames: Items[FrameId]) -> None:
    """They never left it."""


def fill_nothing(blocks: BlockStates, block: BlockId, content: Content | None) -> None:
    blocks.drop_claim(block)
    if content is not None:
        blocks.content[block] = content


def remember_the_first_store(frames: FrameClaims, copies: Items[TierCopy], blocks: BlockStates) -> None:
    for each in copies:
        if each.load:
            blocks.fill_with(each.block, frames.held[each.frame])
        else:
            frames.held.setdefault(each.frame, blocks.content.get(each.block))


def check_loads_only(frames: FrameClaims, *given: Any) -> dict[BlockId, LoadedBlock]:
    """A block that is to be loaded may be one that the worker still holds."""
    _check(frames, *given)
    return {}


def store_a_leaf_only(cache: PrefixCache, block: BlockId, worthless: bool = False) -> Taken | None:
    """What has children in frames is not stored when it is evicted."""
    tier, key = cache.tier, cache._blocks.hash[block]
    if tier is not None and key in tier.apart:
        return None
    return _store_below(cache, block, worthless)


TIER_MUTANTS = (
    Mutant(
        "121",
        "a frame counts as filled, and its store is not ordered",
        ((LedgerState, "keep_below", keep_without_an_order),),
        Exhaustive("frames"),
        ("I2", "I17"),
    ),
    Mutant(
        "122",
        "loads stand before the stores of their batch",
        ((LedgerState, "take_tier_copies", load_first),),
        Walks("frames"),
        ("I3", "I4", "I17", "I2"),
    ),
    Mutant(
        "123",
        "the frames of a grant may be taken for what it evicts",
        ((FrameTier, "hold", hold_none), (FrameTier, "release", release_none)),
        Walks("frames_few"),
        ("I2", "I3", "I4", "I17"),
    ),
    Mutant(
        "124",
        "a reset leaves what the manager knows of frames",
        ((PrefixCache, "clear_below", nothing),),
        Walks("frames_few", faults=(*ALL_FAULTS, *RESETS)),
        ("I1", "I2", "I5", "I11"),
    ),
    Mutant(
        "125",
        "a reset leaves what the worker claims of frames",
        ((FrameClaims, "forget_all", nothing),),
        Walks("frames", faults=(*ALL_FAULTS, *RESETS)),
        ("I11",),
    ),
    Mutant(
        "126",
        "a frame keeps the claim of its first content",
        ((FrameClaims, "apply", remember_the_first_store),),
        Walks("frames_few"),
        ("I17", "I2"),
    ),
    Mutant(
        "127",
        "a loaded block does not count as full",
        ((BlockStates, "fill_with", fill_nothing),),
        Exhaustive("frames"),
        ("I2", "I4"),
    ),
    Mutant(
        "128",
        "a parent is dropped from the host tier while frames have its children",
        ((PrefixCache, "store_below", store_a_leaf_only),),
        Exhaustive("frames"),
        ("I5", "I18"),
    ),
    Mutant(
        "129",
        "a loaded block is not compared with the place that it is for, and frames of a grant may be taken",
        (
            (frame_claims, "_check_place", nothing),
            (FrameTier, "hold", hold_none),
            (FrameTier, "release", release_none),
        ),
        Walks("frames_few"),
        ("I3", "I4", "I17", "I2"),
    ),
)
