"""The ledger's invariants, counted from scratch. A broken one is a bug of the manager or the worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import group_in, hash_in, key_of
from common.contracts.lease import DEFAULT_RETENTION_PRIORITY
from common.contracts.transfers import Transfer
from common.contracts.types import TRIMMED, BlockHash, BlockId, SequencePhase
from kvmanager.cache.frame_tier import FrameTier
from kvmanager.cache.retention import PINNED_PRIORITY
from kvmanager.contracts.block import ROOT, BlockState
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.sequence_table import SequenceTable


class InvariantBroken(ProtocolViolation):
    """The figures of a ledger disagree with each other; the message names them."""

    reason = "INVARIANT_BROKEN"


def audit(state: LedgerState) -> None:
    """Check everything. Raises InvariantBroken at the first disagreement."""
    _states(state.store)
    _references(state.store, state.sequences)
    _prefix_map(state.store)
    _states_of_layers(state.store)
    _tiers(state.store)
    _transfers(state)
    _pending(state.store)
    _remembered(state.store, state.sequences)
    _sequences(state.store, state.sequences)
    _retention(state.store)


def _check(holds: bool, words: str) -> None:
    """Raise InvariantBroken unless a check holds. Words that name a block are made where they are needed, in a loop."""
    if not holds:
        raise InvariantBroken(words)


_HELD = BlockState.IN_USE, BlockState.CACHED


def _states(store: BlockStore) -> None:
    """Check that each block has one state: lists and counters agree with the block's own fields."""
    pool, state_of = store.pool, store.blocks.state
    states = Counter(state_of)
    free, cached = list(pool.free), list(pool.cached)
    _check(
        len(free) == len(pool.free) == states[BlockState.FREE],
        "the free list's length is not the number of free blocks",
    )
    _check(
        len(cached) == len(pool.cached) == states[BlockState.CACHED],
        "the eviction order does not hold the cached blocks",
    )
    _check(all(state_of[b] is BlockState.FREE for b in free), "a block in the free list is not free")
    _check(all(state_of[b] is BlockState.CACHED for b in cached), "a block in the eviction order is not cached")
    _check(pool.leased == states[BlockState.LEASED], "the count of leased blocks is wrong")
    others = store.blocks.others
    _check(len([page for each in others.values() for page in each]) == states[BlockState.PART], "a page is lost")
    _check(
        all(state_of[page] is BlockState.PART for each in others.values() for page in each),
        "a further page of a block is another one's, or no block's",
    )
    _check(all(state_of[block] in _HELD for block in others), "a block that is free or leased has further pages")
    _check(
        pool.cached_others == sum(len(others.get(block, ())) for block in cached),
        "the further pages of cached blocks are miscounted",
    )
    total = len(free) + pool.cached_pages + pool.leased + pool.in_use
    _check(total == store.config.num_blocks, f"{total} blocks are accounted for, of {store.config.num_blocks}")


def _references(store: BlockStore, sequences: SequenceTable) -> None:
    """Check that references count block tables, and the sources of copies that have not run.

    A block without a reference has no hash, unless it is cached.
    """
    blocks, refs = store.blocks, [0] * len(store.blocks.refs)
    for sequence in sequences.live.values():
        for block_id in sequence.held_blocks():
            refs[block_id] += 1
        if sequence.copy_source is not None:
            refs[sequence.copy_source] += 1
    for block, (of, held, key) in enumerate(zip(blocks.state, blocks.refs, blocks.hash, strict=True)):
        if held != refs[block]:
            raise InvariantBroken(f"block {block} counts {held} references, block tables hold {refs[block]}")
        if (of is BlockState.IN_USE) != (held > 0):
            raise InvariantBroken(f"block {block} is {of.value} with {held} references")
        if of is not BlockState.IN_USE and (key is None) == (of is BlockState.CACHED):
            raise InvariantBroken(f"block {block} is {of.value} and has {'no' if key is None else 'a'} hash")
    _places(store, sequences)


def _places(store: BlockStore, sequences: SequenceTable) -> None:
    """Check that each block of a block table records its place in it."""
    blocks = store.blocks
    for sequence in sequences.live.values():
        for index, block_id in enumerate(sequence.block_table):
            at = index if block_id == TRIMMED else blocks.index[block_id]
            if at != index:
                raise InvariantBroken(f"block {block_id} is at index {index} of {sequence.name} and records index {at}")
        for run in sequence.runs:
            for index, block_id in enumerate(run.table):
                if block_id != TRIMMED and (blocks.index[block_id], blocks.group[block_id]) != (index, run.group):
                    raise InvariantBroken(f"block {block_id} of run {run.group} of {sequence.name} has another place")


def _prefix_map(store: BlockStore) -> None:
    """Check that the map holds exactly the registered blocks and, with each hash, its parent."""
    blocks, cache = store.blocks, store.cache
    linked = not store.config.window
    children = Counter(blocks.parent[first] for first in cache.entries.values() if linked)
    copies = {block: key for key in cache.entries for block in cache.copies_of(key)}
    hashes = {block: key for block, key in enumerate(blocks.hash) if key is not None}
    _check(copies == hashes, "the prefix map and the blocks' hashes disagree")
    _check(set(cache.copies) <= set(cache.entries), "a hash has copies and is not in the map")
    first_copies = set(cache.entries.values())
    _check(
        not any(count for block, count in enumerate(blocks.children) if block not in first_copies),
        "a block that is no first copy counts children",
    )
    _check(set(cache.partials.parts) <= set(cache.entries), "parts of a content are known that is not registered")
    for key, first in cache.entries.items():
        blocks_of = cache.copies_of(key)
        _check(blocks.children[first] == children[key], "the children of a hash are miscounted")
        _check(blocks_of[0] == first, "the first copy of a hash is not the first of its copies")
        alike = {(blocks.index[each], blocks.parent[each]) for each in blocks_of}
        _check(len(alike) == 1, "the copies of a hash differ in depth or parent")
        in_use = [blocks.state[each] is BlockState.IN_USE for each in blocks_of]
        _check(len(in_use) == 1 or all(in_use), "a cached block has the content of another block")
        over = blocks.parent[first]
        if linked and over != ROOT:
            above = cache.entries.get(over) if over is not None else None
            _check(above is not None, "a hash is in the map without its parent")
            depth = blocks.index[above] + (not blocks.group[first]) if above is not None else 0
            _check(depth == blocks.index[first], "a depth is not its parent's plus one")
            _check(
                not blocks.group[first] or key == key_of(over or ROOT, blocks.group[first]), "a key has another parent"
            )
            held = above is not None and blocks.state[above] is BlockState.IN_USE
            _check(held or not any(in_use), "a child is in use whose parent is not")


def _tiers(store: BlockStore) -> None:
    """Check the frames of both tiers, and that what blocks and frames have of one hash is one content."""
    blocks, cache = store.blocks, store.cache
    for tier, above in ((store.tier, cache.entries), (store.disk, dict[BlockHash, BlockId]())):
        if tier is None:
            continue
        check_frames(tier, above)
        for key, frame in tier.entries.items():
            same = cache.entries.get(key)
            if same is not None and key not in cache.ambiguous:
                alike = blocks.index[same], blocks.parent[same]
                there = tier.frames.index[frame], tier.frames.parent[frame]
                _check(alike == there, "a block and a frame of one hash differ in depth or parent")


def check_frames(tier: FrameTier, above: Mapping[BlockHash, BlockId]) -> None:
    """Check frames: each is free, cached or in use, their map and counts are right, and no content lacks its parent.

    The parent of a content is in a frame or in `above`.
    """
    frames, expected = tier.frames, tier.expected
    hashes = {key: frame for frame, key in enumerate(frames.hash) if key and expected.get(key) != frame}
    _check(tier.entries == hashes, "the map of a tier and its frames' hashes disagree")
    cached = sorted(frame for frame, of in enumerate(frames.state) if of is BlockState.CACHED)
    _check(sorted(tier.order) == cached, "the order of frames does not hold those that may go")
    _check(set(cached) <= set(hashes.values()), "a frame that may go holds nothing")
    parts = sorted(frame for frame, of in enumerate(frames.state) if of is BlockState.PART)
    _check(sorted(part for each in frames.others.values() for part in each) == parts, "a part of a content is lost")
    for key, first in tier.entries.items():
        _check(1 + len(frames.others.get(first, ())) == tier.pages_of(key), "a content lacks frames, or has too many")
    _check(tier.to_come == sum(map(tier.pages_of, expected)), "the frames of what is to come are miscounted")
    free = sorted(frame for frame, of in enumerate(frames.state) if of is BlockState.FREE)
    _check(sorted(tier.free) == free, "the list of free frames is wrong")
    _check(not set(free) & {*hashes.values(), *expected.values()}, "a free frame holds something, or is to")
    named = [*hashes.values(), *expected.values()]
    children = Counter(frames.parent[frame] for frame in named)
    counted = {key: frames.children[frame] for key, frame in hashes.items()} | tier.apart
    del children[ROOT]
    _check({key: count for key, count in counted.items() if count} == dict(children), "children are miscounted")
    for frame in hashes.values():
        over = frames.parent[frame]
        _check(not over or over in above or over in hashes, "a frame holds a content without its parent")


def _transfers(state: LedgerState) -> None:
    """Check that open transfers are those that frames expect, and that who waits waits for open ones."""
    transfers, store = state.transfers, state.store
    for tier, saves in ((store.tier, False), (store.disk, True)):
        ordered = {move.key: move.target.index for move in transfers.open.values() if move.saves == saves}
        _check(tier is None or tier.expected == ordered, "a frame expects another transfer than is open")
        _check(tier is None or all(map(partial(_has_pages, tier), transfers.open.values())), "a transfer lacks frames")
    if store.disk is not None and not transfers.closed:
        fetches = [move for move in transfers.open.values() if not move.saves and move.peer is None]
        reads = {move.source.index for move in fetches}
        held = {frame for frame, of in enumerate(store.disk.frames.state) if of is BlockState.IN_USE}
        _check(held == {*reads, *store.disk.expected.values()}, "a frame on disk is in use without a transfer")
    _check(transfers.saves == sum(move.saves for move in transfers.open.values()), "saves are miscounted")
    asked = Counter[str]()
    for move in transfers.open.values():
        if move.peer is not None:
            asked[move.peer.worker_id] += move.num_pages
    _check(transfers.asked == asked, "blocks of peers are miscounted")
    fetching = {move.key: number for number, move in transfers.open.items() if not move.saves}
    _check(transfers.fetching == fetching, "the fetches by hash are other ones than those that are open")
    ahead = state.ahead.part.open if state.ahead.part is not None else set[int]()
    _check(ahead <= set(fetching.values()), "what comes ahead of need is no open fetch")
    there = state.store.tier.entries if state.store.tier is not None else {}
    _check(state.ahead.came.keys() <= there.keys(), "what came ahead of need has left host memory")
    waiting = {(each, number) for number, found in transfers.waiting.items() for each in found}
    wanted = {
        (each, number)
        for each in state.sequences.fetching
        for number in getattr(state.sequences.live[each].fetch, "open", ())
    }
    _check(waiting == wanted and {number for _, number in waiting} <= set(transfers.open), "one waits for no transfer")
    _check({each for each, _ in waiting} == set(state.sequences.fetching), "one waits although its fetch is over")


def _has_pages(tier: FrameTier, transfer: Transfer) -> bool:
    """Return whether a transfer into a tier goes to all frames of its target."""
    if tier.expected.get(transfer.key) != transfer.target.index:
        return True
    return tier.pages_at(transfer.target.index)[1:] == tuple(written for _, written in transfer.others)


def _states_of_layers(store: BlockStore) -> None:
    """Check that the tree of checkpoints has those that are registered, and knows which of them nobody holds."""
    if store.states is None:
        return
    entries, states = store.cache.entries, store.blocks.state
    found = {hash_in(key): entries[key] for key in entries if group_in(key) == store.states.group}
    cached = {state: block for state, block in found.items() if states[block] is BlockState.CACHED}
    _check((store.states.known, store.states.cached) == (set(found), cached), "the tree of checkpoints is another one")


def _pending(store: BlockStore) -> None:
    """Check that a pending block is in a block table, not registered, and named by its own hash."""
    blocks = store.blocks
    said = {key: block for block, key in enumerate(blocks.pending) if key is not None}
    _check(said == store.cache.pending, "the pending map and the blocks disagree")
    for block in store.cache.pending.values():
        of = blocks.state[block]
        _check(of is BlockState.IN_USE and blocks.hash[block] is None, f"pending block {block} is {of.value}")


def _remembered(store: BlockStore, sequences: SequenceTable) -> None:
    """Check that the remembered match is the one that a look-up gives."""
    sequence = sequences.live.get(store.remembered.sequence) if store.remembered is not None else None
    found = store.recall_match(sequence) if sequence is not None else None
    if sequence is None or found is None:
        return
    config, cache, known = store.config, store.cache, sequence.block_hashes
    hits = cache.find_longest_prefix(known, sequence.num_tokens // config.block_size)[: found.match.hit_blocks]
    if config.window:
        limit = min(len(known), config.hits_of(sequence.num_tokens))
        unread, run = cache.find_deepest_run(known, limit, config.unread_blocks)
        _check(found.match.hit_blocks >= unread + len(run), "a remembered match has fewer hits than a look-up")
        hits = run if found.unread or unread else hits
    _check(found.hits == hits, "a remembered match has other blocks than a look-up")
    cached = sum(store.blocks.state[block] is BlockState.CACHED for block in found.hits)
    _check(found.cached_hits == cached, "a remembered match counts other cached blocks than a look-up")


def _sequences(store: BlockStore, sequences: SequenceTable) -> None:
    """Check that running totals, queue and preemptions agree with the sequences."""
    _tenants(sequences)
    phases = Counter(sequence.phase for sequence in sequences.live.values())
    running = [each for each in sequences.live.values() if each.phase is SequencePhase.RUNNING]
    _check(sequences.running == len(running), "the count of running sequences is wrong")
    _check(
        sequences.admitted == sum(phases.values()) - phases[SequencePhase.WAITING],
        "the count of block tables is wrong",
    )
    _check(
        sequences.growth == sum(each.growth for each in running),
        "the blocks that may still be bound are miscounted",
    )
    waiting = {each.id for each in sequences.live.values() if each.phase is SequencePhase.WAITING}
    _check(
        {*sequences.queue, *sequences.planned.awaited, *sequences.fetching} == waiting
        and sequences.waiting == len(waiting),
        "the queue is not the waiting sequences",
    )
    if store.config.grants_parts:
        lacking = {each.id for each in running if each.lacking(store.config.block_size)}
        _check(
            lacking <= {sequences.partial},
            f"{lacking} run and lack blocks of their prompts; {sequences.partial} may",
        )
    draining = {each.id for each in sequences.live.values() if each.phase is SequencePhase.DRAINING_PREEMPT}
    _check(sequences.preempting == draining, "the outstanding preemptions are miscounted")
    for each in sequences.live.values():
        if each.growth < 0:
            raise InvariantBroken(f"{each.name} has more blocks than its longest length needs")
        if any(len(run.table) > len(each.block_table) and not run.checkpoints for run in each.runs):
            raise InvariantBroken(f"{each.name} has more blocks in a run than in its block table")
        if bool(each.block_table) != (each.phase is not SequencePhase.WAITING):
            raise InvariantBroken(f"{each.name} is {each.phase.value} with {len(each.block_table)} blocks")


def _tenants(sequences: SequenceTable) -> None:
    """Check that what each tenant holds is what its sequences hold."""
    every = sequences.live.values()
    running = [each for each in every if each.phase is SequencePhase.RUNNING]
    counted = {name: (use.live, use.running, use.blocks) for name, use in sequences.tenants.items()}
    live, runs = Counter(each.tenant for each in every), Counter(each.tenant for each in running)
    blocks: Counter[str] = Counter()
    for each in running:
        blocks[each.tenant] += each.own_blocks
    held = {name: (count, runs[name], blocks[name]) for name, count in live.items()}
    _check(counted == held, "what the tenants hold is miscounted")


def _retention(store: BlockStore) -> None:
    """Check that marks are those of registered contents, and that every marked cached block stands out of the order."""
    retention, blocks = store.retention, store.blocks
    _check(set(retention.marks) <= set(store.cache.entries), "a content is marked that is not registered")
    contents = {block: blocks.hash[block] or ROOT for block in store.pool.cached}
    marks = {block: retention.pinned.get(each) or retention.marks.get(each) for block, each in contents.items()}
    marked = {block for block, mark in marks.items() if mark is not None and mark.terms}
    _check(set(retention.held) == marked, "the held blocks are not the marked ones of the cached blocks")
    raised: Counter[str] = Counter()
    for block, each in retention.held.items():
        if DEFAULT_RETENTION_PRIORITY < each.priority < PINNED_PRIORITY:
            raised[each.mark.tenant] += blocks.pages_of(block)
    for tenant, count in raised.items():
        _check(retention.count_retained(tenant) == count, f"the retained blocks of {tenant!r} are miscounted")
        _check(count <= store.config.retention_limits.most_blocks, f"{tenant!r} retains {count} blocks")
    _check(retention.count_retained() == raised.total(), "the retained blocks are miscounted")
    pins = sum(store.config.block_pages[group_in(key)] for key in retention.pinned)
    most = max(0, store.config.retention_limits.most_of_all - pins)
    _check(retention.count_retained() <= most, "too many blocks are retained")
    pinned = {block for block, each in contents.items() if each in retention.pinned}
    _check(retention.pinned_cached == len(pinned), "the cached blocks that are pinned are miscounted")
    for block, each in retention.held.items():
        held_as = each.priority == PINNED_PRIORITY
        _check(held_as == (block in pinned), f"block {block} is held with priority {each.priority}")
        _check(blocks.hash[block] == each.hash, f"block {block} is held for another content")
