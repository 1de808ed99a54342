"""How a sequence would be admitted: the hits of its prompt, the blocks that it needs beside them, and what is missing.

Nothing changes here. `block_granter.py` carries a plan out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from common.contracts.types import TRIMMED, BlockHash, BlockId, FrameId, MissReason, SequencePhase
from kvmanager.cache.group_match import GroupMatcher
from kvmanager.cache.prefix_cache import PrefixMatch, RememberedMatch, RunHits
from kvmanager.cache.window_match import match_in_window
from kvmanager.contracts.block import CACHED
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import checkpoints, chunked_grants
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.partial_copy import PartialCopy, partial_copy
from kvmanager.ledger.preemption import Shortage
from kvmanager.ledger.sequence_table import SequenceTable


@dataclass(frozen=True, slots=True)
class GrantPlan:
    """How a sequence would be admitted: the blocks that it shares, how many it gets, and why there are no more hits.

    `left` blocks are available then. Its block table begins with `unread` empty places, for hits that left its window:
    see `grant_blocks`. Where the pool has groups, `fresh` counts pages, and a table of each group gets `fresh_blocks`.
    At the places of `checkpoints` the sequence is to leave its states; those at `asked` ones are never superseded. With
    a `tail` it gets one block more, for the states behind its last full block. The first of its fresh blocks get what
    `frames` of the host tier hold, and so do places of `runs`.
    """

    hits: list[BlockId]
    fresh: int
    match: PrefixMatch
    left: int = 0
    unread: int = 0
    runs: tuple[RunHits, ...] = ()
    fresh_blocks: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()
    asked: frozenset[int] = frozenset()
    tail: bool = False
    frames: tuple[FrameId, ...] = ()

    @property
    def present(self) -> int:
        """Blocks that are there: hits, and those before them that the sequence does not read."""
        return self.unread + len(self.hits)

    @property
    def shared(self) -> int:
        """Blocks that the sequence does not compute: those that are there, and those that are loaded."""
        return self.present + len(self.frames)

    @property
    def loads(self) -> list[FrameId]:
        """The frames that are loaded, of every group."""
        return every_frame(self.frames, self.runs) if self.runs else list(self.frames)

    @property
    def loaded_places(self) -> int:
        """Places of the prompt at which something is loaded."""
        if not self.runs:
            return len(self.frames)
        return len({*range(self.present, self.shared), *(place for run in self.runs for place, _ in run.frames)})


class Matched(NamedTuple):
    """The blocks of a prompt that are there, the frames that hold the next ones, and what both are worth."""

    hits: list[BlockId]
    match: PrefixMatch
    frames: tuple[FrameId, ...] = ()


def match_prefix(store: BlockStore, block_hashes: Items[BlockHash], num_tokens: int, cacheable: bool) -> Matched:
    """Return the registered or pending blocks of a prompt's full blocks, and the match that they give.

        block_hashes   | 0 | 1 | 2 | 3 | 4 | 5 |  + the tokens behind the last full block
        found          | x | x | x |   |                                hits: blocks 0, 1, 2
        with a window  |   |   | x | x |                                hits: 2, 3; the match counts 4

    Where every layer has a window, the match has more hits than there are blocks: the others left the window. The block
    of the last token is never a hit, because that token's logits must be computed.
    """
    config, cache = store.config, store.cache
    if not config.prefix_caching or not cacheable:
        return Matched([], PrefixMatch(0, MissReason.DISABLED))
    full = min(num_tokens // config.block_size, len(block_hashes))
    if config.groups:
        found = GroupMatcher(cache, store.blocks, config, block_hashes, num_tokens, store.loads).match()
        return Matched(found.hits, found.match, found.frames)
    if config.window:
        return Matched(*match_in_window(cache, config, block_hashes, num_tokens, full))
    present, frames = cache.find_longest_prefix(block_hashes, full), list[FrameId]()
    if store.tier is not None and store.loads:
        frames = store.tier.find_run(block_hashes, len(present), full, cache.ambiguous)
    match = cache.explain_match(block_hashes, num_tokens, config.block_size, len(present) + len(frames))
    hits = present[: match.hit_blocks]
    return Matched(hits, match, tuple(frames[: match.hit_blocks - len(hits)]))


def find_fork_parent(sequences: SequenceTable, sequence: Sequence) -> Sequence | None:
    """Return the sequence that this one was forked from while that one holds a block table to share."""
    if sequence.fork_of is None or sequence.computes_all:
        return None
    parent = sequences.live.get(sequence.fork_of)
    if parent is None or parent.phase is SequencePhase.WAITING or parent.computes_all:
        return None
    return parent


def plan_admission(state: LedgerState, sequence: Sequence) -> GrantPlan | None:
    """Return how the sequence would be admitted; None when there are not enough blocks for all of it."""
    if not state.store.pool.available:
        return None
    plan, missing = _plan_or_remember(state, sequence)
    return None if missing > 0 else plan


def count_missing_blocks(state: LedgerState, sequence: Sequence) -> int:
    """Return how many blocks are missing for the prompt of a sequence; 0 or less when there are enough."""
    if sequence.block_table:
        return chunked_grants.missing_blocks(state, sequence)
    return _plan_or_remember(state, sequence)[1]


def measure_shortage(state: LedgerState, sequence: Sequence) -> Shortage:
    """Return what a sequence lacks that waits for blocks."""
    plan, missing = _plan_or_remember(state, sequence)
    if state.config.groups:
        return Shortage(missing, plan.left + missing, frozenset(every_hit(plan.hits, plan.runs)))
    return Shortage(missing, _count_slack(state, sequence, plan.present + plan.fresh), frozenset(plan.hits))


def _plan_or_remember(state: LedgerState, sequence: Sequence) -> tuple[GrantPlan, int]:
    """Return how the sequence would be admitted, and how many blocks are missing for that; remember a match."""
    found = find_match(state.store, sequence)
    plan, missing = plan_with_match(state, sequence, found)
    if missing > 0 and found is not state.store.remembered:
        state.store.remember_match(sequence, found)
    return plan, missing


def count_fresh_blocks(state: LedgerState, sequence: Sequence) -> int:
    if sequence.phase is SequencePhase.RUNNING:
        return chunked_grants.count_lacking(state.config, sequence)
    return plan_with_match(state, sequence, find_match(state.store, sequence))[0].fresh


def every_hit(hits: Items[BlockId], runs: Items[RunHits]) -> list[BlockId]:
    """Return the hits of all groups in the pool."""
    return [*hits, *(block for run in runs for block in run.blocks if block != TRIMMED)]


def every_frame(frames: Items[FrameId], runs: Items[RunHits]) -> list[FrameId]:
    """Return the hits of all groups in host memory."""
    return [*frames, *(frame for run in runs for _, frame in run.frames)]


def find_match(store: BlockStore, sequence: Sequence) -> RememberedMatch:
    return store.recall_match(sequence) or _match_anew(store, sequence)


def plan_with_match(state: LedgerState, sequence: Sequence, found: RememberedMatch) -> tuple[GrantPlan, int]:
    config, available = state.config, state.store.pool.available
    if config.groups:
        return _plan_in_groups(state, sequence, found)
    hits, cached_hits, unread, frames = found.hits, found.cached_hits, found.unread, found.frames
    parent = find_fork_parent(state.sequences, sequence)
    if parent is not None:
        shared = _find_shared_blocks(parent, config.hits_of(sequence.num_tokens))
        if len(shared) > unread + len(hits):
            hits, cached_hits, unread, frames = shared, 0, 0, ()
    needed = _count_wanted_blocks(state.config, sequence, unread, len(hits) + len(frames))
    fresh = needed - unread - len(hits)
    slack = _count_slack(state, sequence, needed)
    missing = fresh + slack - (available - cached_hits)
    return GrantPlan(hits, fresh, found.match, slack - missing, unread, frames=frames), missing


def _plan_in_groups(state: LedgerState, sequence: Sequence, found: RememberedMatch) -> tuple[GrantPlan, int]:
    """Return how a sequence would be admitted where the pool has groups.

    A checkpoint that is a hit takes pages beside what the sequence computes on. Where both do not fit, the sequence
    computes all: else it would wait for pages that only its own hit holds.
    """
    plan, missing = _plan_on_hits(state, sequence, found)
    hits = len(found.hits) + len(found.frames)
    if missing > 0 and hits and any(run.checkpoints for run in sequence.runs):
        without = replace(found, hits=[], frames=(), runs=_no_hits(state.config), cached_hits=0)
        other, lacking = _plan_on_hits(state, sequence, without)
        if lacking <= 0:
            return replace(other, match=PrefixMatch(0, MissReason.UNRESUMABLE, hits)), lacking
    return plan, missing


def _no_hits(config: LedgerConfig) -> tuple[RunHits, ...]:
    return tuple([RunHits(0, []) for _ in config.groups[1:]])


def _plan_on_hits(state: LedgerState, sequence: Sequence, found: RememberedMatch) -> tuple[GrantPlan, int]:
    config, parent = state.config, find_fork_parent(state.sequences, sequence)
    hits, runs, cached, frames = found.hits, found.runs, found.cached_hits, found.frames
    states = any(run.checkpoints for run in sequence.runs)
    if parent is not None and not states and not any(run.trimmed for run in parent.runs):
        most = min(config.hits_of(sequence.num_tokens), *(len(run.table) for run in parent.runs))
        shared = parent.block_table[:most]
        if len(shared) > len(hits) + len(frames):
            hits, cached, frames = shared, 0, ()
            runs = tuple([RunHits(0, run.table[: len(shared)]) for run in parent.runs])
    whole, shares = -(-sequence.num_tokens // config.block_size), len(hits) + len(frames)
    fresh = [whole - shares]
    for number, run in enumerate(runs):
        if sequence.runs[number].checkpoints:
            fresh.append(0)
            continue
        most = max(config.held_run(number, whole), len(run.blocks) + 1)
        fresh.append(min(whole, run.unread + most) - shares)
    pages = _count_pages(config, tuple(fresh)) + _pages_to_load(config, frames, runs)
    # What `_count_slack` does: a run may grow although the first table is whole.
    tables = zip(fresh, (False, *(run.checkpoints for run in sequence.runs)), strict=True)
    slack, grows = 0, any(shares + count < sequence.max_blocks for count, sparse in tables if not sparse)
    if state.sequences.running:
        slack = max(config.stall_pages * grows, config.watermark_blocks)
    missing = pages + slack - (state.store.pool.available - cached)
    plan = GrantPlan(hits, pages, found.match, slack - missing, 0, runs, tuple(fresh), frames=frames)
    if states and missing <= 0:
        plan = _with_checkpoints(config, sequence, plan, found.sealed)
    return plan, missing


def _with_checkpoints(config: LedgerConfig, sequence: Sequence, plan: GrantPlan, sealed: int) -> GrantPlan:
    """Return a plan with the checkpoints that the sequence is to leave."""
    places, asked = checkpoints.choose_places(config, sequence, plan.shared, plan.left, sealed)
    taken = config.groups[-1].pages * len(places)
    return replace(plan, fresh=plan.fresh + taken, left=plan.left - taken, checkpoints=places, asked=asked)


def add_tail(state: LedgerState, sequence: Sequence, plan: GrantPlan) -> GrantPlan:
    """Return a plan with a tail, if the sequence gets one."""
    if not checkpoints.gives_tail(state, sequence, plan.fresh, plan.left):
        return plan
    size = state.config.groups[-1].pages
    return replace(plan, fresh=plan.fresh + size, left=plan.left - size, tail=True)


def plan_part(config: LedgerConfig, sequence: Sequence, plan: GrantPlan, most: int, sealed: int) -> GrantPlan | None:
    """Return the plan of a part that takes at most so many free blocks, or pages; None: too few to begin with.

    Where layers keep states, a part has as many checkpoints as leave it enough to begin with, that of the prompt's end
    first. They are held until they are saved, so the pool must have room for them beside the whole sequence.
    """
    if not config.groups:
        if not chunked_grants.is_enough(config, most, plan.fresh):
            return None
        return replace(plan, fresh=most, left=0, frames=plan.frames[: most - 1])
    whole, spare = plan.fresh_blocks[0], _pages_beside(config, sequence)
    most -= _pages_to_load(config, plan.frames, plan.runs)
    for number in range(_count_checkpoints(config, sequence, plan, min(most, spare), sealed), -1, -1):
        taken = config.groups[-1].pages * number
        places = _count_places(config, plan, most - taken)
        if chunked_grants.is_enough(config, places, whole):
            return _part_of(config, sequence, plan, places, taken, sealed)
    return None


def _pages_beside(config: LedgerConfig, sequence: Sequence) -> int:
    """Return how many pages of the pool may be checkpoints while a sequence holds all that it ever holds at once."""
    return config.num_blocks - sequence.most_held


def _count_checkpoints(config: LedgerConfig, sequence: Sequence, plan: GrantPlan, pages: int, sealed: int) -> int:
    """Return how many checkpoints a sequence is to leave where so many pages are left for them."""
    if not config.keeps_states:
        return 0
    return len(checkpoints.choose_places(config, sequence, plan.shared, config.stall_pages + pages, sealed)[0])


def _part_of(
    config: LedgerConfig, sequence: Sequence, plan: GrantPlan, places: int, taken: int, sealed: int
) -> GrantPlan:
    """Return a plan of so many places behind the shared ones, and of checkpoints that take so many pages."""
    chosen: tuple[int, ...] = ()
    asked = frozenset[int]()
    if taken:
        left = config.stall_pages + taken
        chosen, asked = checkpoints.choose_places(config, sequence, plan.shared, left, sealed)
    fresh = tuple([min(places, count) for count in plan.fresh_blocks])
    pages = _count_pages(config, fresh) + _pages_to_load(config, plan.frames, plan.runs) + taken
    return replace(plan, fresh=pages, fresh_blocks=fresh, left=0, checkpoints=chosen, asked=asked)


def _count_places(config: LedgerConfig, plan: GrantPlan, pages: int) -> int:
    """Return how many places behind the shared ones get their blocks in every group from so many pages."""
    whole = range(plan.fresh_blocks[0] + 1)
    cost = partial(_count_pages_of_places, config, plan.fresh_blocks)
    return max(0, bisect_right(whole, pages, key=cost) - 1)


def _count_pages_of_places(config: LedgerConfig, fresh: tuple[int, ...], places: int) -> int:
    return _count_pages(config, tuple([min(places, count) for count in fresh]))


def _count_pages(config: LedgerConfig, blocks: tuple[int, ...]) -> int:
    """Return the pages of so many blocks of each group."""
    return sum(group.pages * count for group, count in zip(config.groups, blocks, strict=True))


def _pages_to_load(config: LedgerConfig, frames: Items[FrameId], runs: Items[RunHits]) -> int:
    """Return the pages of the blocks that are loaded."""
    return _count_pages(config, (len(frames), *(len(run.frames) for run in runs)))


def _count_slack(state: LedgerState, sequence: Sequence, blocks: int) -> int:
    """Return how many blocks an admission with so many leaves to the growth of those that run and its own."""
    return max(int(blocks < sequence.max_blocks), state.config.watermark_blocks) if state.sequences.running else 0


def _count_wanted_blocks(config: LedgerConfig, sequence: Sequence, unread: int, hits: int) -> int:
    """Return the places with which a sequence is admitted, `unread` empty ones and `hits` blocks included."""
    if config.holds_whole(sequence.preemptions):
        return sequence.max_blocks
    whole = -(-sequence.num_tokens // config.block_size)
    # A fork may share more than its window; its partial last block comes after that.
    return min(whole, unread + max(config.admission_blocks(sequence.num_tokens), hits + 1))


def _match_anew(store: BlockStore, sequence: Sequence) -> RememberedMatch:
    if store.config.groups:
        return _match_groups(store, sequence)
    hits, match, frames = match_prefix(store, sequence.block_hashes, sequence.num_tokens, sequence.takes_hits)
    states = store.blocks.state
    cached_hits = [states[block] for block in hits].count(CACHED)
    unread = match.hit_blocks - len(hits) - len(frames)
    return RememberedMatch(sequence.id, sequence.num_tokens, hits, match, cached_hits, unread, frames=frames)


def _match_groups(store: BlockStore, sequence: Sequence) -> RememberedMatch:
    config, blocks = store.config, store.blocks
    if not config.prefix_caching or not sequence.takes_hits:
        disabled, runs = PrefixMatch(0, MissReason.DISABLED), _no_hits(config)
        return RememberedMatch(sequence.id, sequence.num_tokens, [], disabled, 0, 0, runs)
    found = GroupMatcher(store.cache, blocks, config, sequence.block_hashes, sequence.num_tokens, store.loads).match()
    cached = sum(blocks.pages_of(block) for block in every_hit(found.hits, found.runs) if blocks.state[block] is CACHED)
    return RememberedMatch(
        sequence.id, sequence.num_tokens, found.hits, found.match, cached, 0, found.runs, found.sealed, found.frames
    )


def find_fork_source(state: LedgerState, sequence: Sequence, plan: GrantPlan, fresh: set[BlockId]) -> BlockId | None:
    """Return the block whose slots a fork's partial last block copies; None when there is nothing to copy.

    A block that this same batch grants holds nothing yet, because the worker copies before it admits.
    """
    config = state.config
    parent = find_fork_parent(state.sequences, sequence)
    index = config.hits_of(sequence.num_tokens)
    if config.groups:
        return None  # a fork computes the tokens of the partial block itself
    if parent is None or plan.shared != index or not fork_copy_length(sequence.num_tokens, config.block_size):
        return None
    source = _find_copied_block(parent, index)
    return None if source in fresh else source


def find_partial_source(store: BlockStore, sequence: Sequence, plan: GrantPlan) -> PartialCopy | None:
    """Return the part of a cached block that is copied behind the hits; None when there is nothing to copy.

    Behind frames there is none: no block whose parent is in a frame alone is in the cache.
    """
    return None if plan.frames else partial_copy(store, sequence, plan.hits, plan.left)


# ------------------------------------------------------------ forks
#
# Copy-on-write for sequences of one prompt: full blocks are shared, the partial last block is copied, never shared. A
# fork computes its last known token itself, for the logits. So a copy covers num_tokens - 1 slots. If the copy held the
# last token too, nothing would be left to compute, and the fork would wait for ever.
def _find_shared_blocks(parent: Sequence, limit: int) -> list[BlockId]:
    """Return up to `limit` leading blocks of the parent's block table. The caller checks that they are full."""
    shared = parent.block_table[:limit]
    return shared[: shared.index(TRIMMED)] if TRIMMED in shared else shared


def fork_copy_length(num_tokens: int, block_size: int) -> int:
    """Return how many leading tokens of the fork the copy covers: 0 when its last block holds only the last token."""
    return num_tokens - 1 if (num_tokens - 1) % block_size else 0


def _find_copied_block(parent: Sequence, index: int) -> BlockId | None:
    """Return the parent's block at the place of the fork's partial block; None when it has none or trimmed it."""
    if index >= len(parent.block_table) or parent.block_table[index] == TRIMMED:
        return None
    return parent.block_table[index]
