"""Simpler rules of transfers where the pool has groups, and the searches that notice them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

from common.contracts.hashing import group_in
from common.contracts.lease import Inventory
from common.contracts.transfers import Medium, Place, Transfer, TransferEnd
from common.contracts.types import BlockHash, BlockId
from gpuworker.scheduling import lease_agent, transfer_book
from gpuworker.scheduling.block_states import BlockStates, Content, PageBlocks
from gpuworker.scheduling.claims_by_hash import ClaimsByHash
from gpuworker.scheduling.frame_claims import FrameClaims
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.transfer_book import TransferBook
from kvmanager.cache.frame_tier import FrameTier
from kvmanager.cache.group_match import Lack
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.contracts.index_events import Stored
from kvmanager.ledger import transfers
from kvmanager.ledger.ledger_state import LedgerState
from tests.suites.protocol.mutant import Mutant, Walks, always
from tests.suites.protocol.scenarios import ALL_FAULTS, RESETS
from tests.suites.protocol.search import Pace

_pages, _end, _inventory = Transfer.pages, TransferBook.end, LeaseAgent.inventory
_take_saves = TransferBook.take_saves
_FAULTS = (*ALL_FAULTS, *RESETS)


def page_of_the_first(transfer: Transfer) -> tuple[Transfer, ...]:
    """Each page is copied from the first one."""
    return tuple([replace(each, source=transfer.source, whole=each.whole) for each in _pages(transfer)])


def end_with_the_first(
    book: TransferBook, transfer: Transfer, end: TransferEnd, frames: FrameClaims, step: int
) -> TransferEnd | None:
    """A transfer is over once one of its pages is."""
    return _end(book, transfer.whole or transfer, end, frames, step)


def end_as_the_last(
    book: TransferBook, transfer: Transfer, end: TransferEnd, frames: FrameClaims, step: int
) -> TransferEnd | None:
    """A transfer ends as its last page does."""
    if transfer.whole is not None and book.is_open(transfer):
        left, _ = book._left[transfer.id]
        book._left[transfer.id] = left, TransferEnd.DONE
        if left > 1 and end is not TransferEnd.DONE:
            book._left[transfer.id] = left - 1, TransferEnd.DONE
            return None
    return _end(book, transfer, end, frames, step)


def is_there_by_number(page: Transfer, blocks: BlockStates, frames: FrameClaims) -> bool:
    """A page is saved whatever its block is by then."""
    return True


def tell_each_group(cache: PrefixCache, tier: FrameTier, key: BlockHash) -> None:
    """The index is told of the first group's content when it arrives, whatever the others have."""
    depth = tier.frames.index[tier.expected[key]]
    if not group_in(key) and cache._place_of(key) is None:
        cache.number += 1
        cache.events.append(Stored(cache.number, key, depth))
    tier.admit(key)


def save_without_parents(state: LedgerState, disk: FrameTier, key: BlockHash) -> None:
    found = transfers._find_source(state, key)
    if found is None or key in state.store.cache.ambiguous:
        return
    source, pages, parent, depth = found
    taken = transfers._expect(state, disk, key, parent, depth)
    if taken is not None:
        lack = Lack(key, parent, depth)
        state.transfers.order(transfers._transfer(state, lack, source, pages, disk, taken.frame))


def name_first_frames(agent: LeaseAgent) -> Inventory:
    """An inventory names the first frame of each content on disk."""
    found = _inventory(agent)
    return replace(found, saved_pages=tuple([each.block for each in found.saved]))


def first_page(medium: Medium, first: BlockId | None, page: int, made: PageBlocks | None) -> Place | None:
    """A peer gets the first page of a content for any of them."""
    return None if first is None else Place(medium, first)


def claim_by_hash(claims: ClaimsByHash, place: BlockId, content: Content | None) -> None:
    dict.__setitem__(claims, place, content)
    if content is not None:
        claims._places[content.hash] = place


def find_by_hash(claims: ClaimsByHash, key: BlockHash) -> BlockId | None:
    """A content of any group answers for a hash."""
    place = claims._places.get(BlockHash(key[:16]))
    content = claims.get(place) if place is not None else None
    return place if content is not None and content.hash == key[:16] else None


def take_all_at_once(
    book: TransferBook, blocks: BlockStates, frames: FrameClaims, copies: Items[Any], most: int
) -> tuple[list[Transfer], list[Transfer]]:
    """Copies that wait or run hinder no save behind its first page."""
    late = bool(book._to_take) and book._to_take[0].page > 0
    return _take_saves(book, blocks, frames, () if late else copies, most)


def is_open_by_id(book: TransferBook, transfer: Transfer) -> bool:
    return transfer.id in book.open


MOVED_GROUP_MUTANTS = (
    Mutant(
        "200",
        "of a content of several pages, each page is copied from the first one, and the worker does not compare",
        ((Transfer, "pages", page_of_the_first), (transfer_book, "_is_there", is_there_by_number)),
        Walks("disk_compound"),
        ("I3", "I4", "I17"),
    ),
    Mutant(
        "201",
        "a transfer of several pages is over once one of them is",
        ((TransferBook, "end", end_with_the_first),),
        Walks("peers_compound"),
        ("I2", "I3", "I4", "I17", "I24"),
    ),
    Mutant(
        "202",
        "a transfer of several pages ends as the last one of them does",
        ((TransferBook, "end", end_as_the_last),),
        Walks("peers_compound"),
        ("I3", "I4", "I17", "I24"),
    ),
    Mutant(
        "203",
        "a page is saved whatever its block is by then",
        ((transfer_book, "_is_there", is_there_by_number),),
        Walks("disk_three", faults=_FAULTS),
        ("I17",),
    ),
    Mutant(
        "204",
        "a window's content counts as come although that of its place in the first group has left, or did not come",
        ((transfers, "_may_enter", always),),
        Walks("peers_window"),
        ("I1", "I5", "I18"),
    ),
    Mutant(
        "205",
        "the index is told of what has come of the first group, whatever the others have",
        ((PrefixCache, "note_arrived", tell_each_group),),
        Walks("peers_window"),
        ("I6", "I29"),
    ),
    Mutant(
        "206",
        "a content of a window goes to disk although that of its place in the first group did not",
        ((transfers, "_save", save_without_parents), (transfers, "_may_enter", always)),
        Walks("disk_window_few"),
        ("I1", "I5", "I18"),
    ),
    Mutant(
        "207",
        "an inventory names the first frames of what is on disk alone",
        ((LeaseAgent, "inventory", name_first_frames),),
        Walks("disk_compound"),
        ("I2",),
    ),
    Mutant(
        "208",
        "a peer gets the first page of a content for any of them",
        ((lease_agent, "_page_at", first_page),),
        Walks("peers_compound"),
        ("I24",),
    ),
    Mutant(
        "209",
        "a content of any group answers for a hash",
        ((ClaimsByHash, "__setitem__", claim_by_hash), (ClaimsByHash, "find", find_by_hash)),
        Walks("peers_state"),
        ("I24",),
    ),
    Mutant(
        "210",
        "a page is saved while a copy that has not run writes it, if it is not the first one of its content",
        ((TransferBook, "take_saves", take_all_at_once),),
        Walks("disk_state_window", first_seed=21, faults=_FAULTS),
        ("I17", "I25"),
    ),
    Mutant(
        "211",
        "a page that comes for a transfer which is void counts for the one that has its number now",
        ((TransferBook, "is_open", is_open_by_id),),
        Walks("peers_compound", faults=_FAULTS, pace=Pace(350, 0.1)),
        ("I2", "I3", "I4", "I11", "I17", "I24"),
    ),
)
