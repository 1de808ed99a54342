"""Transfers beside the steps: what is saved to disk, what is fetched from there or from a peer, and who waits for it.

    released block table --queue_saves--> to_save --order_saves--> a frame on disk is expected --done--> it holds it

    next sequence --await_fetch--> frames of host memory are expected, the sequence has left the queue
                                       --all have ended--> it is queued again, and its hits are what has landed

A sequence waits for a fetch once a stay in the queue. What did not come is a miss, and is computed. Landed frames are
kept for nobody. Nothing that a transfer touches is in a block table before the transfer has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import mode
from typing import Final, NamedTuple

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
from common.contracts.types import BlockHash, FrameId, ShortfallReason
from kvmanager.cache.frame_tier import NO_FRAME, FrameTier, Taken
from kvmanager.contracts.block import ROOT
from kvmanager.contracts.ports import Peer
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


def fetch_seconds(costs: TransferCosts | None, blocks: int, from_peer: bool = False) -> float:
    """Return what fetching so many blocks is expected to take; 0: not known."""
    if costs is None:
        return 0.0
    return costs.peer_setup + costs.peer * blocks if from_peer else costs.read * blocks


def fetch_pays(costs: TransferCosts | None, blocks: int, from_peer: bool = False, ahead: int = 0) -> bool:
    """Return whether fetching so many blocks is expected to beat computing them; yes while costs are unknown.

    The peer has `ahead` blocks to serve before them.
    """
    return costs is None or pays_to_fetch(fetch_seconds(costs, ahead + blocks, from_peer), costs.compute * blocks)


# ------------------------------------------------------------ fetches


def await_fetch(state: LedgerState, sequence: Sequence) -> bool:
    """Let a sequence leave the queue for blocks of its prompt that can be fetched; return whether it does."""
    run = find_fetch(state, sequence)
    sequence.asked_peers = True
    if run is None or state.store.tier is None:
        return False
    awaited = order_run(state, sequence.block_hashes, run)
    if not awaited:
        return False
    source = mode(_source_of(state, number) for number in awaited)
    ahead = run.peer.ahead if run.peer is not None else 0
    forecast = fetch_seconds(state.worker.costs, ahead + len(awaited), run.peer is not None)
    sequence.fetch = Fetch(set(awaited), len(awaited), state.clock.monotonic(), source, run.first, forecast)
    for number in awaited:
        state.transfers.waiting.setdefault(number, []).append(sequence.id)
    state.sequences.fetching[sequence.id] = None
    state.sequences.queue.remove_sequence(sequence)
    state.totals.fetches += 1
    grant_records.record_wait(state, sequence, (ShortfallReason.FETCH.value, source), (len(awaited), len(awaited)))
    return True


def order_run(state: LedgerState, hashes: list[BlockHash], run: FetchRun) -> list[int]:
    """Order what is to be fetched of a run, as far as frames can be had; return the ids of all its transfers."""
    tier = state.store.tier
    assert tier is not None, "only a worker with host memory has runs"
    if run.behind:
        tier.hold(run.behind)
    ordered = _order_fetches(state, hashes, run)
    if run.behind:
        tier.release(run.behind)
    return ordered


def _source_of(state: LedgerState, number: int) -> str:
    peer = state.transfers.open[number].peer
    return FROM_DISK if peer is None else peer.worker_id


class FetchRun(NamedTuple):
    """Blocks of a prompt from place `first` on: frames on disk, FETCHING for those that are being fetched already.

    They are `_AT_PEER` where the worker `peer` has them. `behind` is the frame of host memory before them, if the block
    there is in no block of the pool.
    """

    first: int
    frames: list[FrameId]
    behind: list[FrameId]
    peer: Peer | None = None


_FETCHING: Final = FrameId(-1)
_AT_PEER: Final = FrameId(-2)


def find_fetch(state: LedgerState, sequence: Sequence, from_peers: bool = True) -> FetchRun | None:
    """Return what a sequence would wait for; None: it has waited in this stay, there is nothing, or it does not pay.

    Peers are looked at once a stay: there may be hundreds of them.
    """
    store, from_peers = state.store, from_peers and state.peers is not None and not sequence.asked_peers
    if store.tier is None or sequence.fetch is not None or not sequence.takes_hits:
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
    coming = _find_coming(state, store.tier, hashes, first, end)
    own, peer, frames = _find_on_disk(state, hashes, first + coming, end), None, list[FrameId]()
    if from_peers and fetch_pays(costs, end - first - coming, from_peer=True):
        peer, frames = _find_at_peer(state, hashes, first + coming, end)
    if peer is not None and not fetch_pays(costs, len(frames), from_peer=True, ahead=peer.ahead):
        peer, frames = None, []
    if len(own) >= len(frames) and fetch_pays(costs, len(own)):
        peer, frames = None, own
    frames = [_FETCHING] * coming + frames
    return FetchRun(first, frames, behind, peer) if frames else None


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
    return FetchRun(first, frames, behind, peer) if frames else None


def _find_coming(state: LedgerState, tier: FrameTier, hashes: list[BlockHash], first: int, end: int) -> int:
    """Return how many blocks of hashes[first:end] are being fetched, from the first one on."""
    for place in range(first, end):
        expected = tier.expected.get(hashes[place])
        parent = hashes[place - 1] if place else ROOT
        if (
            expected is None
            or hashes[place] in state.store.cache.ambiguous
            or not _is_at(tier, expected, parent, place)
        ):
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
    found = state.peers(hashes, first, end) if first < end else None
    if found is None:
        return None, []
    peer, count = found
    return peer, [_AT_PEER] * _count_unknown(store.tier, hashes[first : first + count])


def _count_unknown(tier: FrameTier, hashes: list[BlockHash]) -> int:
    """Return how many leading hashes have no frame of host memory, and are not being fetched into one."""
    known = (place for place, each in enumerate(hashes) if each in tier.entries or each in tier.expected)
    return next(known, len(hashes))


def _order_fetches(state: LedgerState, hashes: list[BlockHash], run: FetchRun) -> list[int]:
    """Order what is to be fetched of a run, as far as frames can be had; return the ids of all its transfers."""
    store, transfers = state.store, state.transfers
    assert store.tier is not None
    awaited, orders = list[int](), list[Transfer]()
    for place, frame in enumerate(run.frames, run.first):
        if frame == _FETCHING:
            awaited.append(transfers.fetching[hashes[place]])
            continue
        parent = hashes[place - 1] if place else ROOT
        taken = _expect(state, store.tier, hashes[place], parent, place)
        if taken is None:
            break
        if frame != _AT_PEER and store.disk is not None:
            store.disk.hold([frame])
        ends = FROM_PEER if frame == _AT_PEER else Place(Medium.DISK, frame), Place(Medium.HOST, taken.frame)
        orders.append(Transfer(transfers.next_id(), hashes[place], parent, place, *ends))
    if run.peer is not None and orders:
        peer = run.peer.serve([each.hash for each in orders])
        orders = [replace(each, peer=peer) for each in orders]
    return awaited + [transfers.order(each) for each in orders]


def _is_at(tier: FrameTier, frame: FrameId, parent: BlockHash, depth: int) -> bool:
    return tier.frames.parent[frame] == parent and tier.frames.index[frame] == depth


def _expect(state: LedgerState, tier: FrameTier, block_hash: BlockHash, parent: BlockHash, depth: int) -> Taken | None:
    """Take a frame for what a transfer brings; what it held leaves the index, unless something else has it."""
    taken = tier.expect(block_hash, parent, depth)
    state.store.cache.note_dropped(taken)
    if tier is state.store.tier:
        state.count_drop(taken)
    return taken if taken.frame != NO_FRAME else None


def fetched_for(sequence: Sequence, plan: grant_plan.GrantPlan) -> Fetched:
    """Return what a sequence that is admitted, and has waited for a fetch, has got by it."""
    fetch = sequence.fetch
    assert fetch is not None, "only of one that has waited"
    shared = max(0, min(fetch.landed, plan.shared - fetch.first))
    return Fetched(shared, fetch.blocks, fetch.seconds, fetch.source)


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
    hashes = sequence.block_hashes[: len(sequence.block_table)]
    for block_hash in reversed(hashes):
        disk.touch(block_hash)
    for block_hash in hashes:
        if block_hash not in disk.entries and block_hash not in disk.expected:
            transfers.to_save[block_hash] = None


def order_saves(state: LedgerState) -> None:
    """Order the next saves. A content is left out that has left the cache, or whose parent is not on disk."""
    transfers, disk = state.transfers, state.store.disk
    while transfers.to_save and disk is not None and transfers.saves < MOST_SAVES:
        block_hash = next(iter(transfers.to_save))
        del transfers.to_save[block_hash]
        if block_hash not in disk.entries and block_hash not in disk.expected:
            _save(state, disk, block_hash)


def _save(state: LedgerState, disk: FrameTier, block_hash: BlockHash) -> None:
    store, transfers = state.store, state.transfers
    found = _find_source(state, block_hash)
    if found is None or block_hash in store.cache.ambiguous:
        return
    source, parent, depth = found
    if parent and parent not in disk.entries and parent not in disk.expected:
        state.totals.unsaved += 1
        return
    taken = _expect(state, disk, block_hash, parent, depth)
    if taken is None:
        state.totals.unsaved += 1
        return
    transfers.order(Transfer(transfers.next_id(), block_hash, parent, depth, source, Place(Medium.DISK, taken.frame)))


def _find_source(state: LedgerState, block_hash: BlockHash) -> tuple[Place, BlockHash, int] | None:
    """Return where a content is in the pool or in host memory, its parent and its depth."""
    store = state.store
    if (block := store.cache.entries.get(block_hash)) is not None:
        parent = store.blocks.parent[block]
        return (Place(Medium.BLOCK, block), parent or ROOT, store.blocks.index[block]) if parent is not None else None
    if store.tier is not None and (frame := store.tier.entries.get(block_hash)) is not None:
        frames = store.tier.frames
        return Place(Medium.HOST, frame), frames.parent[frame] or ROOT, frames.index[frame]
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
        state.ahead.note_end(number, end)
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
    del state.transfers.fetching[transfer.hash]
    if transfer.peer is None and store.disk is not None:
        _end_read(state, store.disk, transfer, end)
    if end is TransferEnd.DONE and _may_enter(state, store.tier, transfer):
        cache.note_arrived(store.tier, transfer.hash)
        state.totals.disk_loads += transfer.peer is None
        state.totals.peer_loads += transfer.peer is not None
    else:
        store.tier.abandon(transfer.hash)


def _end_read(state: LedgerState, disk: FrameTier, transfer: Transfer, end: TransferEnd) -> None:
    """Let a frame on disk go that was read. One that could not be read holds nothing, so nothing behind it counts."""
    if disk.end_read(transfer.source.index, transfer.hash) and end in (TransferEnd.CORRUPT, TransferEnd.FAILED):
        state.totals.disk_lost += state.store.cache.drop_tree(disk, transfer.hash)


def _end_save(state: LedgerState, transfer: Transfer, end: TransferEnd) -> None:
    disk = state.store.disk
    assert disk is not None
    state.transfers.saves -= 1
    if end is TransferEnd.DONE and _may_enter(state, disk, transfer):
        state.store.cache.note_arrived(disk, transfer.hash)
        state.totals.disk_stores += 1
    else:
        disk.abandon(transfer.hash)


def _may_enter(state: LedgerState, tier: FrameTier, transfer: Transfer) -> bool:
    """Return whether what a transfer has brought has its parent before it, and no other content its hash."""
    cache = state.store.cache
    if transfer.hash in tier.entries or cache.is_ambiguous(transfer.hash, transfer.parent, transfer.depth):
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
