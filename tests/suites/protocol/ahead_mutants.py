"""Simpler rules of copies ahead of need, and the searches that notice them."""

from __future__ import annotations

from unittest import mock

from common.contracts.types import BlockHash
from kvmanager.ledger import ahead, transfers
from kvmanager.ledger.ahead_table import AheadTable, Part, Wish
from kvmanager.ledger.ledger_state import LedgerState
from tests.suites.protocol.mutant import Exhaustive, Mutant, Walks, nothing
from tests.suites.protocol.transfer_mutants import UNAUDITED

_end_part, _order_blocks, _order_fetches = ahead._end_part, ahead._order_blocks, transfers._order_fetches
_find_ahead = transfers.find_ahead


def order_beside_others(state: LedgerState, now: float) -> bool:
    """A part is ordered although sequences wait for transfers."""
    return state.ahead.part is None and now >= state.ahead.due


def order_further_parts(state: LedgerState, now: float) -> bool:
    """A part is ordered although the one before has not ended."""
    return not state.sequences.fetching


def take_all_frames(state: LedgerState, tier: object) -> int:
    return 1000


def go_on_after_a_failure(state: LedgerState, part: Part, now: float) -> None:
    """What has not come is asked for again."""
    part.failed = 0
    _end_part(state, part, now)


def order_whole_wishes(state: LedgerState, wish: Wish, now: float) -> str | None:
    with mock.patch.object(ahead, "PART_SHARE", 1.0):
        return _order_blocks(state, wish, now)


def await_everything(state: LedgerState, run: transfers.FetchRun) -> list[int]:
    """A sequence waits for all that is on its way, whoever wants it."""
    ordered = _order_fetches(state, run)
    return [*ordered, *(number for number in state.transfers.fetching.values() if number not in ordered)]


def order_from_the_beginning(
    state: LedgerState, hashes: list[BlockHash], first: int, end: int
) -> transfers.FetchRun | None:
    """What is there comes once more."""
    found = _find_ahead(state, hashes, first, end)
    everything = transfers._items(hashes, 0, [transfers._AT_PEER] * end)
    return None if found is None else found._replace(first=0, items=everything, behind=[])


def count_at_the_order(state: LedgerState, wish: Wish, now: float) -> str | None:
    """What comes ahead of need counts as there from the order on."""
    found, tier = _order_blocks(state, wish, now), state.store.tier
    for number in state.ahead.part.open if state.ahead.part is not None else ():
        assert tier is not None
        state.store.cache.note_arrived(tier, state.transfers.open[number].hash)
    return found


AHEAD_MUTANTS = (
    Mutant(
        "171",
        "blocks are ordered ahead of need while a sequence waits for others",
        ((ahead, "may_order", order_beside_others),),
        Walks("ahead"),
        ("I27",),
    ),
    Mutant(
        "172",
        "a part is ordered before the one before has ended",
        ((ahead, "may_order", order_further_parts),),
        Walks("ahead", first_seed=53),
        ("I27",),
    ),
    Mutant(
        "173",
        "what comes ahead of need may fill all frames",
        ((ahead, "_room", take_all_frames),),
        Walks("ahead_few"),
        ("I27",),
    ),
    Mutant(
        "174",
        "all blocks of a wish are ordered at once",
        ((ahead, "_order_blocks", order_whole_wishes),),
        Walks("ahead"),
        ("I27",),
    ),
    Mutant(
        "175",
        "what has not come ahead of need is asked for again",
        ((ahead, "_end_part", go_on_after_a_failure),),
        Exhaustive("ahead_stale"),
        ("I10",),
    ),
    Mutant(
        "176",
        "the end of what comes ahead of need is not noted",
        ((AheadTable, "note_end", nothing), UNAUDITED),
        Exhaustive("ahead"),
        ("I27",),
    ),
    Mutant(
        "177",
        "a reset leaves what is to come ahead of need",
        ((AheadTable, "clear", nothing),),
        Exhaustive("ahead_reset"),
        ("I1", "I27"),
    ),
    Mutant(
        "178",
        "a sequence waits for all that is on its way",
        ((transfers, "_order_fetches", await_everything),),
        Walks("ahead"),
        ("I27",),
    ),
    Mutant(
        "179",
        "what is there is ordered once more ahead of need",
        ((transfers, "find_ahead", order_from_the_beginning),),
        Walks("ahead"),
        ("I1", "I2", "I27"),
    ),
    Mutant(
        "180",
        "what comes ahead of need counts as there from the order on",
        ((ahead, "_order_blocks", count_at_the_order), UNAUDITED),
        Exhaustive("ahead"),
        ("I17",),
    ),
)
