"""Makes room: frees cached blocks in the order of eviction, drops their content, and records which went and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from common.contracts.lease import DISK_REASON, HOST_REASON
from common.contracts.types import BlockHash, BlockId, Candidate, DecisionKind
from kvmanager.cache.retention_terms import Fate
from kvmanager.contracts.counts import Totals
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import transfers
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.sequence_table import SequenceTable

KEPT: Final = "host_kept"
"""The figure of an evicted block whose content a frame of the host tier keeps."""
SAVED: Final = "disk_kept"
"""The figure of one whose content the disk alone keeps."""
_NAMED: Final = 8
"""Evicted blocks that a record lists at most; its figures have the total number."""


def evict_until_free(state: LedgerState, count: int, beneficiary: Sequence | None) -> int:
    """Evict until `count` blocks are free and return how many were evicted. The caller checks that it can.

    Where the pool has groups, so many pages are free then.
    """
    missing = count - len(state.store.pool.free)
    if missing <= 0:
        return 0
    name, totals = beneficiary.name if beneficiary else "", state.totals
    retained, pinned, before = totals.retained_evictions, totals.pinned_evictions, _host_counts(totals)
    evicted, fates, free, gone = list[Candidate](), dict[str, list[str]](), state.store.pool.free, list[BlockHash]()
    while len(free) < count:
        block, depth, content = _uncache_block(state, name)
        gone.append(content)
        if len(evicted) == _NAMED:
            continue
        evicted.append(_candidate(state, block, depth))
        if (found := state.store.retention.evicted) is not None:
            fates.setdefault(found.fate.value, []).append(evicted[-1].name)
        if state.store.pool.early:
            fates.setdefault(state.store.pool.early, []).append(evicted[-1].name)
    missing = len(gone)
    figures = {"evicted": float(missing), "cached": float(state.store.pool.cached_pages), "wanted": float(count)}
    order, unit = state.store.pool.cached, "page" if state.config.groups else "block"
    reasons: tuple[str, ...] = (f"no {unit} is free", order.reason, f"policy {order.name}")
    if retained := totals.retained_evictions - retained:
        figures["retained"] = float(retained)
    if pinned := totals.pinned_evictions - pinned:
        figures["pinned"] = float(pinned)
    if state.store.tier is not None:
        kept, kept_reasons = _find_kept(state, before, gone, figures)
        reasons += kept_reasons
        marked = zip(evicted, kept, strict=False)
        evicted = [replace(each, figures=(*each.figures, (name, 1.0))) if name else each for each, name in marked]
    reasons += tuple(f"{', '.join(names)}: {fate}" for fate, names in fates.items())
    named = ", ".join(each.name for each in evicted) + (" and more" if missing > _NAMED else "")
    state.decisions.record(DecisionKind.EVICTION, named, beneficiary, reasons, figures, tuple(evicted))
    return missing


def _host_counts(totals: Totals) -> tuple[int, int, int, int]:
    """Return the counts of what went to host memory, left it for that (lost, or on disk alone), and did not go."""
    return totals.host_stores, totals.host_drops, totals.host_drops_saved, totals.host_declined


def _find_kept(
    state: LedgerState, before: tuple[int, int, int, int], gone: list[BlockHash], figures: dict[str, float]
) -> tuple[list[str], tuple[str, ...]]:
    """Return which tier keeps what was evicted, as the name of a figure, "" for none, and reasons in words.

    Add to the figures of the record what the tiers have kept and dropped since `before`.
    """
    cache = state.store.cache
    stores, lost, left, declined = (now - then for now, then in zip(_host_counts(state.totals), before, strict=True))
    kept = [KEPT if each in cache.below else SAVED if each in cache.saved else "" for each in gone]
    held, saved = kept.count(KEPT), kept.count(SAVED)
    # Those that a frame had already need no store, and are kept too.
    figures["host_stores"] = float(stores)
    figures["host_blocks"], figures[KEPT] = float(len(cache.below)), float(held)
    reasons = [f"{HOST_REASON}it keeps {held} of {len(gone)}"]
    if declined:
        figures["host_declined"] = float(declined)
        reasons.append(f"{HOST_REASON}{declined} are not stored: {_why_declined(state)}")
    if state.store.disk is not None:
        figures |= {"disk_blocks": float(len(cache.saved)), SAVED: float(saved)}
        figures |= {"host_drops": float(lost), "host_drops_saved": float(left)}
        words = f"{DISK_REASON}it keeps {saved} of the other {len(gone) - held}"
        reasons.append(words + (f", and {left} of {lost + left} that left host memory for them" if lost + left else ""))
    return kept, tuple(reasons)


def _why_declined(state: LedgerState) -> str:
    if not state.store.loads:
        return "to copy one takes longer than to compute it"
    return "copies took longer lately than what was loaded would have taken to compute"


def drop_cached_blocks(state: LedgerState) -> int:
    """Free every cached block and return how many there were.

    Frames of the host tier forget what they hold, too. An idle pool forgets all with one event. Otherwise the blocks go
    leaves first, as in an eviction. Blocks that only copies hold lose their content too; they are free once their
    copies are reported.
    """
    pool, frames = state.store.pool, len(state.store.cache.below)
    copied = _find_only_copied(state.store, state.sequences)
    dropped = len(pool.cached) + len(copied)
    state.tier_copies.clear()
    transfers.void_all(state)
    if pool.in_use:
        state.store.cache.clear_below()
        # Nothing is learned of their uses: they go for another reason than want of room.
        blocks = state.store.blocks
        # Where the pool has groups, blocks of runs go before the first group's block of the same content.
        for block in sorted(
            (*pool.cached, *copied), key=lambda each: (blocks.index[each], blocks.group[each]), reverse=True
        ):
            state.store.cache.forget_block(block)
            if block not in copied:
                pool.free_cached_block(block)
    else:
        state.store.cache.clear()
        pool.free_all_cached()
    state.store.retention.forget_cached()
    state.totals.reset_blocks += dropped
    figures = {"dropped": float(dropped), "in_use": float(state.store.pool.in_use)}
    if frames:
        figures["host_blocks"] = float(frames)
    reasons = ("an operator reset the prefix cache", "blocks in use stay")
    state.decisions.record(DecisionKind.RESET, f"{dropped} cached blocks", None, reasons, figures)
    return dropped


def _find_only_copied(store: BlockStore, sequences: SequenceTable) -> set[BlockId]:
    """Return the registered sources of copies that no block table holds."""
    blocks = store.blocks
    held = Counter(each.copy_source for each in sequences.live.values() if each.copy_source is not None)
    return {block for block, count in held.items() if blocks.refs[block] == count and blocks.hash[block]}


def evict_next(state: LedgerState, beneficiary: str = "") -> Candidate:
    """Free the next block in the order of eviction and drop its content; return the record of the block."""
    block, depth, _ = _uncache_block(state, beneficiary)
    return _candidate(state, block, depth)


def _candidate(state: LedgerState, block: BlockId, depth: int) -> Candidate:
    """Return the record of the block that was evicted last."""
    figures, retention = state.store.pool.cached.explain_choice(block), state.store.retention.evicted
    if retention is not None:
        figures += (("retention_priority", float(retention.priority)),)
    return Candidate(f"block {block}", terms=(("depth", float(depth)),), figures=figures)


def _uncache_block(state: LedgerState, beneficiary: str) -> tuple[BlockId, int, BlockHash]:
    """Free the next block in the order of eviction; return it, and the depth and the hash of what it held."""
    pool, retention, fate = state.store.pool, state.store.retention, ""
    retention.evicted = None
    block = pool.uncache_block()
    evicted, content = retention.evicted, state.store.blocks.hash[block]
    assert content is not None, "only a block that holds something is cached"
    if evicted is not None:
        fate = evicted.fate.value
        state.totals.retained_evictions += evicted.fate is Fate.RETAINED
        state.totals.pinned_evictions += evicted.fate is Fate.PINNED
    state.totals.evictions += 1
    if state.store.tier is not None:
        state.keep_below(block, pool.left, worthless=bool(pool.early))
    depth = state.store.cache.forget_block(block, beneficiary, pool.cached.mark_of(block), fate)
    state.store.note_end_before(block)
    return block, depth, content
