"""Simpler rules of fetches from other workers, and the searches that notice them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.contracts.transfers import Transfer, TransferEnd
from common.contracts.types import BlockHash, BlockId
from gpuworker.scheduling import lease_agent
from gpuworker.scheduling.block_states import Content
from gpuworker.scheduling.claims_by_hash import ClaimsByHash
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.transfer_book import TransferBook
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import transfers
from kvmanager.ledger.ledger_state import LedgerState
from tests.suites.protocol.mutant import Exhaustive, Mutant, Walks, always, nothing
from tests.suites.protocol.scenarios import ALL_FAULTS, RESETS
from tests.suites.protocol.search import Pace

_apply = TransferBook.apply
_note_end, _end_fetch = transfers._note_end, transfers._end_fetch


def fill_none(copies: Iterable[Any]) -> frozenset[Any]:
    """What waits or runs is not looked at."""
    return frozenset()


def find_by_number(claims: ClaimsByHash, block_hash: BlockHash) -> BlockId | None:
    """A block answers for the last content that it had, or has."""
    return claims._places.get(block_hash)


def ask_again(state: LedgerState, sequence: Sequence, number: int, end: TransferEnd) -> None:
    """What did not come is asked for once more in the same stay."""
    _note_end(state, sequence, number, end)
    if sequence.fetch is not None and not sequence.fetch.open:
        sequence.fetch, sequence.asked_peers = None, False


def count_as_landed(state: LedgerState, transfer: Transfer, end: TransferEnd) -> None:
    _end_fetch(state, transfer, TransferEnd.DONE)


def claim_at_the_order(book: TransferBook, transfers: Any, frames: Any) -> None:
    """The worker claims what is to come from the order on."""
    _apply(book, transfers, frames)
    for each in transfers:
        if each.peer is not None:
            frames.held[each.target.index] = Content(each.hash, each.parent or None, each.depth, 0)


PEER_MUTANTS = (
    Mutant(
        "161",
        "a place is served that a copy writes which has not run",
        ((lease_agent, "filled_by", fill_none),),
        Walks("peers_few"),
        ("I24",),
    ),
    Mutant(
        "162",
        "a block number answers for a content after its claim is gone",
        ((ClaimsByHash, "find", find_by_number),),
        Walks("peers_few"),
        ("I24",),
    ),
    Mutant(
        "163",
        "a hash that did not come is asked for again in the same stay",
        ((transfers, "_note_end", ask_again),),
        Exhaustive("peers_stale"),
        ("I10",),
    ),
    Mutant(
        "164",
        "a fetch that failed counts as landed",
        ((transfers, "_end_fetch", count_as_landed),),
        Exhaustive("peers"),
        ("I2", "I17"),
    ),
    Mutant(
        "165",
        "what comes for a transfer that is void lands all the same",
        ((LeaseAgent, "is_open", always),),
        Walks("peers_few", first_seed=80, faults=(*ALL_FAULTS, *RESETS), pace=Pace(350, 0.1)),
        ("I2", "I17", "I11"),
    ),
    Mutant(
        "166",
        "an image lands while a copy touches its frame that has not run",
        ((TransferBook, "may_land", always),),
        Walks("peers_few"),
        ("I25",),
    ),
    Mutant(
        "167",
        "a reset leaves the fetches that the manager has ordered",
        ((transfers, "void_all", nothing),),
        Walks("peers", faults=(*ALL_FAULTS, *RESETS)),
        ("I1", "I8", "I10", "I11"),
    ),
    Mutant(
        "168",
        "a reset leaves the fetches that are open at the worker",
        ((TransferBook, "void", nothing),),
        Walks("peers", faults=(*ALL_FAULTS, *RESETS)),
        ("I2", "I10", "I11", "I17"),
    ),
    Mutant(
        "169",
        "what has come counts although its parent has left",
        ((transfers, "_may_enter", always),),
        Walks("peers_few"),
        ("I1", "I5", "I18"),
    ),
    Mutant(
        "170",
        "a block counts as come from the order on",
        ((TransferBook, "apply", claim_at_the_order),),
        Walks("peers"),
        ("I17", "I24"),
    ),
)
