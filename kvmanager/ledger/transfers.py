"""Transfers beside the steps: what is saved to disk, what is fetched from there or from a peer, and who waits for it.

    released block table --queue_saves--> to_save --order_saves--> a frame on disk is expected --done--> it holds it

    next sequence --await_fetch--> frames of host memory are expected, the sequence has left the queue
                                       --all have ended--> it is queued again, and its hits are what has landed

A sequence waits for a fetch once a stay in the queue. What did not come is a miss, and is computed. Landed frames are
kept for nobody. Nothing that a transfer touches is in a block table before the transfer has ended.

Where the pool has groups, what moves is a content of one of them, all its pages together. For a prompt those come that
are read behind the deepest boundary from which it could go on, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from statistics import mode
from typing import Final, NamedTuple

from common.contracts.hashing import group_in, hash_in, key_of
from common.contracts.lease import unread_blocks
from common.contracts.limits import MAX_PEER_IMAGES
from common.contracts.transfers import (
    FROM_DISK,
    FROM_PEER,
    Fetched,
    Medium,
    Place,
    Transfer,
    TransferCosts,
    TransferEnd,
    pays_to_fetch,
)
from common.contracts.types import BlockHash, FrameId, KvGroupKind, ShortfallReason
from kvmanager.cache.frame_tier import NO_FRAME, FrameTier, Taken
from kvmanager.cache.group_match import GroupMatcher, Lack
from kvmanager.contracts.block import ROOT
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.ports import HasContents, Peer
from kvmanager.contracts.sequence import Fetch, Sequence
from kvmanager.ledger import grant_plan, grant_records
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.transfer_table import TransferTable

MOST_SAVES: Final = 32
"""Saves that are ordered and not ended at once: the others wait here, where a reset and an eviction find them."""
MOST_FETCHES: Final = 512
"""Blocks that are being fetched at once."""
LANDING_SHARE: Final = 0.5
"""The most of the host's frames that fetches may fill at once."""


def fetch_seconds(costs: TransferCosts | None, images: int, from_peer: bool = False) -> float:
    """Return what fetching so many blocks, or pages where the pool has groups, is expected to take; 0: not known."""
    if costs is None:
        return 0.0
    return costs.peer_setup + costs.peer * images if from_peer else costs.read * images


def fetch_pays(
    costs: TransferCosts | None, blocks: int, from_peer: bool = False, ahead: int = 0, images: int | None = None
) -> bool:
    """Return whether fetching so many blocks is expected to beat computing them; yes while costs are unknown.

    The peer has `ahead` images to serve before theirs. They have `images`; None: one each. Steps load them then.
    """
    if costs is None:
        return True
    own = blocks if images is None else images
    fetched = fetch_seconds(costs, ahead + own, from_peer)
    return not fetched or pays_to_fetch(fetched + costs.copy * own, costs.compute * blocks)


def loads_pay(costs: TransferCosts, config: LedgerConfig) -> bool:
    """Return whether loading a block from host memory is expected to beat computing it."""
    pages = sum(each.pages for each in config.groups if each.kind is not KvGroupKind.STATE) or 1
    return pays_to_fetch(costs.copy * pages, costs.compute)


def note_costs(state: LedgerState, costs: TransferCosts) -> None:
    """Take what a block costs the worker. What it does not pay to load from host memory is no hit from now on."""
    state.worker.costs, pay = costs, loads_pay(costs, state.config)
    if pay is not state.store.loads:
        state.store.loads, state.store.remembered = pay, None


# ------------------------------------------------------------ fetches


def await_fetch(state: LedgerState, sequence: Sequence) -> bool:
    """Let a sequence leave the queue for what can be fetched of its prompt; return whether it does."""
    run = find_fetch(state, sequence)
    sequence.asked_peers = True
    if run is None or state.store.tier is None:
        return False
    awaited = order_run(state, run)
    if not awaited:
        return False
    source, images = mode(_source_of(state, number) for number in awaited), len(awaited)
    if state.config.groups:
        images = sum([state.transfers.open[number].num_pages for number in awaited])
    ahead = run.peer.ahead if run.peer is not None else 0
    forecast = fetch_seconds(state.worker.costs, ahead + images, run.peer is not None)
    sequence.fetch = Fetch(set(awaited), len(awaited), state.clock.monotonic(), source, run.first, forecast)
    for number in awaited:
        state.transfers.waiting.setdefault(number, []).append(sequence.id)
    state.sequences.fetching[sequence.id] = None
    state.sequences.queue.remove_sequence(sequence)
    state.totals.fetches += 1
    grant_records.record_wait(state, sequence, (ShortfallReason.FETCH.value, source), (len(awaited), len(awaited)))
    return True


def order_run(state: LedgerState, run: FetchRun) -> list[int]:
    """Order what is to be fetched of a run, as far as frames can be had; return the ids of all its transfers."""
    tier = state.store.tier
    assert tier is not None, "only a worker with host memory has runs"
    if run.behind:
        tier.hold(run.behind)
    ordered = _order_fetches(state, run)
    if run.behind:
        tier.release(run.behind)
    return ordered


def _source_of(state: LedgerState, number: int) -> str:
    peer = state.transfers.open[number].peer
    return FROM_DISK if peer is None else peer.worker_id


class FetchItem(NamedTuple):
    """A content that is to come, and its frame on disk: FETCHING if it is being fetched already, AT_PEER if a peer
    has it.
    """

    key: BlockHash
    parent: BlockHash
    depth: int
    frame: FrameId


class FetchRun(NamedTuple):
    """What is to come of a prompt, so that it goes on behind `end` blocks, and not behind the `first` that are there.

    `behind` are frames of host memory that it needs beside that, and that are in no block of the pool. What a peer has
    is at `peer`.
    """

    first: int
    items: list[FetchItem]
    behind: list[FrameId]
    end: int
    peer: Peer | None = None


_FETCHING: Final = FrameId(-1)
_AT_PEER: Final = FrameId(-2)


def is_coming(item: FetchItem) -> bool:
    """Return whether a content is being fetched already."""
    return item.frame == _FETCHING


def find_fetch(state: LedgerState, sequence: Sequence, from_peers: bool = True) -> FetchRun | None:
    """Return what a sequence would wait for; None: it has waited in this stay, there is nothing, or it does not pay.

    Peers are looked at once a stay: there may be hundreds of them.
    """
    store, from_peers = state.store, from_peers and state.peers is not None and not sequence.asked_peers
    if store.tier is None or sequence.fetch is not None or not sequence.takes_hits or not store.loads:
        return None
    if not (store.cache.saved or store.tier.expected or from_peers):
        return None
    if grant_plan.find_fork_parent(state.sequences, sequence) is not None:
        return None
    found = grant_plan.find_match(store, sequence)
    first, hashes = found.unread + len(found.hits) + len(found.frames), sequence.block_hashes
    end = min(state.config.hits_of(sequence.num_tokens), len(hashes))
    if first >= end:
        return None
    behind, costs = list(found.frames[-1:]), state.worker.costs
    if state.config.groups:
        matcher = GroupMatcher(store.cache, store.blocks, state.config, hashes, sequence.num_tokens)
        return _find_in_groups(state, matcher, first, _rooms_in_groups(state), costs, from_peers)
    coming = _find_coming(state, store.tier, hashes, first, end)
    own, peer, frames = _find_on_disk(state, hashes, first + coming, end), None, list[FrameId]()
    if from_peers and fetch_pays(costs, end - first - coming, from_peer=True):
        peer, frames = _find_at_peer(state, hashes, first + coming, end)
    if peer is not None and not fetch_pays(costs, len(frames), from_peer=True, ahead=peer.ahead):
        peer, frames = None, []
    if len(own) >= len(frames) and fetch_pays(costs, len(own)):
        peer, frames = None, own
    items = _items(hashes, first, [_FETCHING] * coming + frames)
    return FetchRun(first, items, behind, first + len(items), peer) if items else None


def find_ahead(state: LedgerState, hashes: list[BlockHash], first: int, end: int) -> FetchRun | None:
    """Return the longest run of hashes[first:end] that the disk has or a peer, whatever it costs; None: there is none.

    The worker has the blocks before it.
    """
    store = state.store
    assert store.tier is not None
    own, (peer, frames) = _find_on_disk(state, hashes, first, end), _find_at_peer(state, hashes, first, end)
    if len(own) >= len(frames):
        peer, frames = None, own
    parent = hashes[first - 1] if first else ROOT
    behind = [] if parent in store.cache.entries or not parent else [store.tier.entries[parent]]
    return FetchRun(first, _items(hashes, first, frames), behind, first + len(frames), peer) if frames else None


def _items(hashes: list[BlockHash], first: int, frames: list[FrameId]) -> list[FetchItem]:
    """Return the blocks from a place on; they are in these frames on disk, or where these say."""
    return [
        FetchItem(hashes[place], hashes[place - 1] if place else ROOT, place, frame)
        for place, frame in enumerate(frames, first)
    ]


# ------------------------------------------------------------ fetches where the pool has groups


def find_ahead_in_groups(state: LedgerState, hashes: Items[BlockHash], rooms: tuple[int, int]) -> FetchRun | None:
    """Return what is to come of a prefix, so that a prompt goes on from the deepest place up to its end.

    It is bounded by `rooms`, contents and pages, whatever it costs; None: nothing helps.
    """
    matcher = _matcher_of(state, hashes)
    return _find_in_groups(state, matcher, count_resumable(state, hashes), rooms, None, from_peers=True)


def count_resumable(state: LedgerState, hashes: Items[BlockHash]) -> int:
    """Return how many leading blocks of a prefix a prompt could go on from, with what the worker has by now."""
    if not state.config.groups:
        return count_run(state, hashes, 0, len(hashes))
    return _matcher_of(state, hashes).find_boundary(_nothing, 0, 0, 0)


def has_prefix(state: LedgerState, hashes: Items[BlockHash]) -> bool:
    """Return whether a prompt could go on from the end of a prefix, with what the worker has by now."""
    if not state.config.groups:
        return count_run(state, hashes, len(hashes) - 1, len(hashes)) > 0
    return count_resumable(state, hashes) == len(hashes)


def _matcher_of(state: LedgerState, hashes: Items[BlockHash]) -> GroupMatcher:
    """Return what looks up a prefix whose last block is no prompt's last one."""
    tokens = len(hashes) * state.config.block_size + 1
    return GroupMatcher(state.store.cache, state.store.blocks, state.config, hashes, tokens)


def _nothing(key: BlockHash, parent: BlockHash, depth: int) -> bool:
    return False


def _find_in_groups(
    state: LedgerState,
    matcher: GroupMatcher,
    hits: int,
    rooms: tuple[int, int],
    costs: TransferCosts | None,
    from_peers: bool,
) -> FetchRun | None:
    """Return what is to come so that a prompt goes on behind more than its hits; None: there is nothing, or no gain.

    It comes from the disk or from one peer, whichever lets the prompt go on from the deeper boundary.
    """
    boundary = matcher.find_boundary(partial(_is_on_disk, state), hits, *rooms)
    best = _fetch_to(state, matcher, boundary, hits, costs, None)
    if not from_peers or state.peers is None:
        return best

    wanted = matcher.absent_keys()

    def reach(peer: HasContents) -> int:
        if not peer.has_any(wanted):
            return 0
        return matcher.find_boundary(partial(_is_at_peer, state, peer), hits, *rooms) - hits

    found = state.peers(reach)
    theirs = _fetch_to(state, matcher, hits + found[1], hits, costs, found[0]) if found is not None else None
    return theirs if theirs is not None and (best is None or theirs.end > best.end) else best


def _fetch_to(
    state: LedgerState, matcher: GroupMatcher, boundary: int, hits: int, costs: TransferCosts | None, peer: Peer | None
) -> FetchRun | None:
    """Return what is to come for a boundary, from a peer or else from the disk; None: it is none, or does not pay."""
    tier, disk = state.store.tier, state.store.disk
    if boundary <= hits or tier is None:
        return None
    items, images, sizes = list[FetchItem](), 0, state.config.block_pages
    for lack in matcher.lacking(boundary):
        frame = _FETCHING
        if not _is_coming(tier, *lack):
            frame = _AT_PEER if peer is not None or disk is None else disk.entries[lack.key]
            images += sizes[group_in(lack.key)]
        items.append(FetchItem(*lack, frame))
    ahead = peer.ahead if peer is not None else 0
    if not items or not fetch_pays(costs, boundary - hits, peer is not None, ahead, images):
        return None
    return FetchRun(hits, items, matcher.frames_behind(boundary), boundary, peer)


def _is_coming(tier: FrameTier, key: BlockHash, parent: BlockHash, depth: int) -> bool:
    """Return whether a content is being fetched."""
    frame = tier.expected.get(key)
    return frame is not None and _is_at(tier, frame, parent, depth)


def _is_on_disk(state: LedgerState, key: BlockHash, parent: BlockHash, depth: int) -> bool:
    """Return whether a content is being fetched, or can be from the disk."""
    store = state.store
    if store.tier is None or key in store.cache.ambiguous:
        return False
    if _is_coming(store.tier, key, parent, depth):
        return True
    on_disk = store.disk is not None and not state.transfers.closed and store.disk.find(key, parent, depth) is not None
    return on_disk and _is_unknown(store.tier, key)


def _is_at_peer(state: LedgerState, peer: HasContents, key: BlockHash, parent: BlockHash, depth: int) -> bool:
    """Return whether a content is being fetched, or can be from a peer."""
    store = state.store
    if store.tier is None or key in store.cache.ambiguous:
        return False
    if _is_coming(store.tier, key, parent, depth):
        return True
    return _is_unknown(store.tier, key) and peer.has_content(key, parent, depth)


def _is_unknown(tier: FrameTier, key: BlockHash) -> bool:
    """Return whether host memory neither has a content with this key nor expects one."""
    return key not in tier.entries and key not in tier.expected


def _rooms_in_groups(state: LedgerState) -> tuple[int, int]:
    """Return how many contents may be fetched now, and how many pages of them."""
    tier = state.store.tier
    assert tier is not None
    part = state.ahead.part.open if state.ahead.part is not None else ()
    ahead = sum([state.transfers.open[number].num_pages for number in part])
    pages = int(LANDING_SHARE * len(tier.frames)) - tier.to_come + ahead
    return MOST_FETCHES - len(state.transfers.fetching) + len(part), min(pages, MAX_PEER_IMAGES)


# ------------------------------------------------------------ what there is, and orders


def count_run(state: LedgerState, hashes: Items[BlockHash], first: int, end: int) -> int:
    """Return how many leading blocks of hashes[first:end] the worker has in the pool or in host memory.

    Where the pool has groups, they are those of the first one.
    """
    cache, place = state.store.cache, first
    while place < end:
        block_hash, parent = hashes[place], hashes[place - 1] if place else ROOT
        below = cache.tier is not None and cache.tier.find_run(hashes, place, place + 1, cache.ambiguous)
        if not below and cache.find_registered_block(block_hash, parent, place) is None:
            break
        place += 1
    return place - first


def has_content(state: LedgerState, key: BlockHash, parent: BlockHash, depth: int) -> bool:
    """Return whether the worker has a content in the pool or in host memory."""
    cache = state.store.cache
    if key in cache.ambiguous:
        return False
    if cache.find_registered_block(key, parent, depth) is not None:
        return True
    return cache.tier is not None and cache.tier.find(key, parent, depth) is not None


def has_any(state: LedgerState, keys: frozenset[BlockHash]) -> bool:
    """Return whether the worker has something of this in the pool or in host memory; takes O(keys).

    A set that is compared with a dict itself would walk over all that the worker has.
    """
    cache = state.store.cache
    return not (cache.entries.keys().isdisjoint(keys) and cache.below.keys().isdisjoint(keys))


def _find_coming(state: LedgerState, tier: FrameTier, hashes: list[BlockHash], first: int, end: int) -> int:
    """Return how many blocks of hashes[first:end] are being fetched, from the first one on."""
    for place in range(first, end):
        parent = hashes[place - 1] if place else ROOT
        if hashes[place] in state.store.cache.ambiguous or not _is_coming(tier, hashes[place], parent, place):
            return place - first
    return end - first


def _room(state: LedgerState, tier: FrameTier) -> int:
    """Return how many blocks may be fetched now."""
    ahead = state.ahead.open  # what nobody waits for takes nothing from those who wait
    most = int(LANDING_SHARE * len(tier.frames)) - len(tier.expected) + ahead
    return min(most, MOST_FETCHES - len(state.transfers.fetching) + ahead)


def _find_on_disk(state: LedgerState, hashes: list[BlockHash], first: int, end: int) -> list[FrameId]:
    """Return the frames on disk of the longest run of hashes[first:end] that may be fetched now."""
    store = state.store
    if store.disk is None or store.tier is None or state.transfers.closed:
        return []
    run = store.disk.find_run(hashes, first, min(end, first + _room(state, store.tier)), store.cache.ambiguous)
    return run[: _count_unknown(store.tier, hashes[first : first + len(run)])]


def _find_at_peer(
    state: LedgerState, hashes: list[BlockHash], first: int, end: int
) -> tuple[Peer | None, list[FrameId]]:
    """Return the worker that has the longest run of hashes[first:end], as far as it may be fetched now."""
    store = state.store
    if state.peers is None or store.tier is None:
        return None, []
    end = min(end, first + _room(state, store.tier))
    found = state.peers(lambda peer: peer.find_run(hashes, first, end)) if first < end else None
    if found is None:
        return None, []
    peer, count = found
    return peer, [_AT_PEER] * _count_unknown(store.tier, hashes[first : first + count])


def _count_unknown(tier: FrameTier, hashes: list[BlockHash]) -> int:
    """Return how many leading hashes have no frame of host memory, and are not being fetched into one."""
    known = (place for place, each in enumerate(hashes) if not _is_unknown(tier, each))
    return next(known, len(hashes))


def _order_fetches(state: LedgerState, run: FetchRun) -> list[int]:
    """Order what is to be fetched of a run, as far as frames can be had; return the ids of all its transfers."""
    store, transfers = state.store, state.transfers
    assert store.tier is not None
    awaited, orders = list[int](), list[Transfer]()
    for key, parent, depth, frame in run.items:
        if frame == _FETCHING:
            awaited.append(transfers.fetching[key])
            continue
        taken = _expect(state, store.tier, key, parent, depth)
        if taken is None:
            break
        source, read = FROM_PEER, (FROM_PEER.index,) * store.tier.pages_of(key)
        if frame != _AT_PEER and store.disk is not None:
            store.disk.hold([frame])
            source, read = Place(Medium.DISK, frame), store.disk.pages_at(frame)
        orders.append(_transfer(state, Lack(key, parent, depth), source, read, store.tier, taken.frame))
    if run.peer is not None and orders:
        peer = run.peer.serve([each.key for each in orders])
        orders = [replace(each, peer=peer) for each in orders]
    return awaited + [transfers.order(each) for each in orders]


def _transfer(
    state: LedgerState, lack: Lack, source: Place, read: tuple[FrameId, ...], tier: FrameTier, frame: FrameId
) -> Transfer:
    """Return the transfer of a content from the pages `read`, of which `source` is the first, into frames of a tier."""
    key, parent, depth = lack
    medium = Medium.HOST if tier is state.store.tier else Medium.DISK
    number, target = state.transfers.next_id(), Place(medium, frame)
    if not state.config.groups:
        return Transfer(number, key, parent, depth, source, target)
    others = tuple(zip(read[1:], tier.pages_at(frame)[1:], strict=True))
    group = group_in(key)
    return Transfer(number, hash_in(key), parent, depth, source, target, group=group, others=others)


def _is_at(tier: FrameTier, frame: FrameId, parent: BlockHash, depth: int) -> bool:
    return tier.frames.parent[frame] == parent and tier.frames.index[frame] == depth


def _expect(state: LedgerState, tier: FrameTier, block_hash: BlockHash, parent: BlockHash, depth: int) -> Taken | None:
    """Take frames for what a transfer brings; what they held leaves the index, unless something else has it."""
    taken = tier.expect(block_hash, parent, depth)
    state.store.cache.note_dropped(tier, taken)
    if tier is state.store.tier:
        state.count_drop(taken)
    return taken if taken.frame != NO_FRAME else None


def fetched_for(state: LedgerState, sequence: Sequence, plan: grant_plan.GrantPlan) -> Fetched:
    """Return what a sequence that is admitted, and has waited for a fetch, has got by it."""
    fetch = sequence.fetch
    assert fetch is not None, "only of one that has waited"
    shared = max(0, min(fetch.landed, plan.shared - fetch.first))
    if state.config.groups and fetch.landed:  # a checkpoint alone may save many blocks
        shared = max(0, plan.shared - fetch.first)
    return Fetched(shared, max(shared, fetch.blocks), fetch.seconds, fetch.source)


def stop_awaiting(state: LedgerState, sequence: Sequence) -> bool:
    """Forget a sequence that waits for transfers; return whether it did. The transfers go on."""
    if sequence.id not in state.sequences.fetching:
        return False
    del state.sequences.fetching[sequence.id]
    for number in sequence.fetch.open if sequence.fetch else ():
        state.transfers.waiting[number].remove(sequence.id)
    return True


# ------------------------------------------------------------ saves


def queue_saves(state: LedgerState, sequence: Sequence) -> None:
    """Let the blocks of a table that is about to be released be saved, parents first; count them as used on disk."""
    disk, transfers = state.store.disk, state.transfers
    if disk is None or transfers.closed:
        return
    keys = sequence.block_hashes[: len(sequence.block_table)]
    if state.config.groups:
        keys = _keys_in_groups(state, sequence, keys)
    for key in reversed(keys):
        disk.touch(key)
    for key in keys:
        if key not in disk.entries and key not in disk.expected:
            transfers.to_save[key] = None


def _keys_in_groups(state: LedgerState, sequence: Sequence, hashes: list[BlockHash]) -> list[BlockHash]:
    """Return the contents of a table, full blocks with these hashes, from which prompts are expected to go on.

    The first group's come first, up to the deepest place at which that may be, then those of each other group that are
    read there, the deepest first. Such places are the end of the table, that of the prompt, where the sequence went on
    from others, where ranges of its retention end; and where layers keep states, the checkpoints alone.
    """
    config, store = state.config, state.store
    points = {len(hashes), config.hits_of(sequence.num_tokens), sequence.n_shared}
    points |= {each.end for each in sequence.retention}
    kept = range(1, len(hashes) + 1) if store.states is not None else sorted(points)
    if (states := store.states) is not None:
        kept = [place for place in kept if states.is_worth_keeping(hashes[place - 1])]
    ends = [place for place in kept if 0 < place <= len(hashes)]
    found = dict.fromkeys(hashes[: max(ends, default=0)])
    for end in reversed(ends):
        for run, group in enumerate(config.groups[1:], 1):
            first = min(unread_blocks(group, end * config.block_size, config.block_size), end)
            found.update(dict.fromkeys([key_of(each, run) for each in hashes[first:end]]))
    return list(found)


def order_saves(state: LedgerState) -> None:
    """Order the next saves. A content is left out that has left the cache, or whose parent is not on disk."""
    transfers, disk = state.transfers, state.store.disk
    while transfers.to_save and disk is not None and transfers.saves < MOST_SAVES:
        key = next(iter(transfers.to_save))
        del transfers.to_save[key]
        if key not in disk.entries and key not in disk.expected:
            _save(state, disk, key)


def _save(state: LedgerState, disk: FrameTier, key: BlockHash) -> None:
    store, transfers = state.store, state.transfers
    found = _find_source(state, key)
    if found is None or key in store.cache.ambiguous:
        return
    source, pages, parent, depth = found
    if parent and parent not in disk.entries and parent not in disk.expected:
        state.totals.unsaved += 1
        return
    taken = _expect(state, disk, key, parent, depth)
    if taken is None:
        state.totals.unsaved += 1
        return
    transfers.order(_transfer(state, Lack(key, parent, depth), source, pages, disk, taken.frame))


def _find_source(state: LedgerState, key: BlockHash) -> tuple[Place, tuple[FrameId, ...], BlockHash, int] | None:
    """Return where a content is in the pool or in host memory, all its pages there, its parent and its depth."""
    store = state.store
    if (block := store.cache.entries.get(key)) is not None:
        parent, pages = store.blocks.parent[block], (block, *store.blocks.others.get(block, ()))
        return (
            None if parent is None else (Place(Medium.BLOCK, block), pages, parent or ROOT, store.blocks.index[block])
        )
    if store.tier is not None and (frame := store.tier.entries.get(key)) is not None:
        frames = store.tier.frames
        return Place(Medium.HOST, frame), store.tier.pages_at(frame), frames.parent[frame] or ROOT, frames.index[frame]
    return None


# ------------------------------------------------------------ ends


def end_transfers(state: LedgerState, ended: Iterable[tuple[int, TransferEnd]]) -> None:
    """Account for transfers that have ended; those of which nothing is known were void."""
    transfers = state.transfers
    for number, end in ended:
        transfer = transfers.take_ended(number)
        if transfer is None:
            continue
        state.totals.transfer_ends[end.name] = state.totals.transfer_ends.get(end.name, 0) + 1
        if transfer.saves:
            _end_save(state, transfer, end)
        else:
            _end_fetch(state, transfer, end)
        state.ahead.note_end(transfer, end)
        for waiting in transfers.waiting.pop(number, ()):
            _note_end(state, state.sequences.live[waiting], number, end)


def _note_end(state: LedgerState, sequence: Sequence, number: int, end: TransferEnd) -> None:
    """Queue a sequence again once the last transfer that it waits for has ended."""
    fetch = sequence.fetch
    assert fetch is not None, "a sequence that waits for transfers has a fetch"
    fetch.note_end(number, end)
    if not fetch.open:
        del state.sequences.fetching[sequence.id]
        fetch.seconds = state.clock.monotonic() - fetch.began
        state.sequences.queue.add_sequence(sequence)


def _end_fetch(state: LedgerState, transfer: Transfer, end: TransferEnd) -> None:
    store, cache = state.store, state.store.cache
    assert store.tier is not None
    del state.transfers.fetching[transfer.key]
    if transfer.peer is None and store.disk is not None:
        _end_read(state, store.disk, transfer, end)
    if end is TransferEnd.DONE and _may_enter(state, store.tier, transfer):
        cache.note_arrived(store.tier, transfer.key)
        state.totals.disk_loads += transfer.peer is None
        state.totals.peer_loads += transfer.peer is not None
    else:
        store.tier.abandon(transfer.key)


def _end_read(state: LedgerState, disk: FrameTier, transfer: Transfer, end: TransferEnd) -> None:
    """Let a frame on disk go that was read. One that could not be read holds nothing, so nothing behind it counts."""
    if disk.end_read(transfer.source.index, transfer.key) and end in (TransferEnd.CORRUPT, TransferEnd.FAILED):
        state.totals.disk_lost += state.store.cache.drop_tree(disk, transfer.key)


def _end_save(state: LedgerState, transfer: Transfer, end: TransferEnd) -> None:
    disk = state.store.disk
    assert disk is not None
    state.transfers.saves -= 1
    if end is TransferEnd.DONE and _may_enter(state, disk, transfer):
        state.store.cache.note_arrived(disk, transfer.key)
        state.totals.disk_stores += 1
    else:
        disk.abandon(transfer.key)


def _may_enter(state: LedgerState, tier: FrameTier, transfer: Transfer) -> bool:
    """Return whether what a transfer has brought has its parent before it, and no other content its hash."""
    cache = state.store.cache
    if transfer.key in tier.entries or cache.is_ambiguous(transfer.key, transfer.parent, transfer.depth):
        return False
    above = tier is state.store.tier and transfer.parent in cache.entries
    return not transfer.parent or above or transfer.parent in tier.entries


def void_all(state: LedgerState) -> None:
    """Forget all transfers, because the cache is reset; who waits for one is queued again."""
    state.transfers = TransferTable(state.transfers)
    state.ahead.clear()
    for each in state.sequences.fetching:
        sequence = state.sequences.live[each]
        if sequence.fetch is not None:
            sequence.fetch.open.clear()
        state.sequences.queue.add_sequence(sequence)
    state.sequences.fetching.clear()


def close_disk(state: LedgerState) -> None:
    """Forget what is on disk: the worker has given it up. Fetches under way end on their own."""
    state.transfers.closed = True
    state.transfers.forget_saves()
    state.store.cache.clear_disk()
