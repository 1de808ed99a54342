"""Copies ahead of need: a prefix comes into a worker's host memory from its disk or a peer, and nobody waits for it.

    wish_prefix --> wishes --order_part--> transfers of a few blocks, parents first
                                             --all have ended--> a pause, and the next part
                                             --one has failed--> the wish is over

They are the lowest class. A part is ordered while no sequence waits for a transfer, and a pause follows each of them.
So the link is theirs for a share of the time at most. What comes counts as anything else in host memory: a sequence
that needs a block which is on its way waits for that transfer, and eviction makes no difference. What does not come is
a miss, and is not asked for again.

Where the pool has groups, a prefix is there once a prompt could go on from its end. So what comes are the contents that
are read there, and a wish may end before the prefix does.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Final

from common.contracts.hashing import group_in
from common.contracts.types import BlockHash, DecisionKind
from kvmanager.cache.frame_tier import FrameTier
from kvmanager.ledger import transfers
from kvmanager.ledger.ahead_table import AheadKind, Answer, Outcome, Part, Wish
from kvmanager.ledger.ledger_state import LedgerState

MOST_WISHES: Final = 8
"""Prefixes that are to come to one worker at once."""
FRAMES_SHARE: Final = 0.25
"""The most of the host's frames that all wishes together may fill."""
PART_BLOCKS: Final = 16
"""Blocks that are ordered at once: a sequence that waits for a block of its own waits for so many others at most."""
PART_SHARE: Final = 0.125
"""The most of the host's frames that one part may fill."""
LINK_SHARE: Final = 0.1
"""The most of the time that parts may take."""

DRAINS: Final = "the worker drains"
NO_GAIN: Final = "to load a block from its host memory takes longer than to compute it"
_NOTHING_THERE: Final = "neither its disk nor another worker has the next block"
_NO_DEEPER: Final = "with what its disk or another worker has, no prompt could go on from a deeper block"
_EVERYTHING: Final = 1 << 30, 1 << 30
"""Room for whatever there is."""


# ------------------------------------------------------------ wishes


def wish_prefix(state: LedgerState, kind: AheadKind, hashes: Items[BlockHash], why: str) -> Answer:
    """Let the blocks of a prefix come that are not there, as far as the budget allows, and record that.

    `why` is who asks, in words. Call `schedule` next.
    """
    answer, ahead = _answer_of(state, hashes), state.ahead
    if answer.blocks:
        end = answer.there + answer.blocks
        wish = Wish(kind, tuple(hashes[:end]), answer.there, why, state.clock.monotonic())
        if state.config.groups:
            _bound_wish(state, wish)
        ahead.wishes.append(wish)
    figures = {"asked": float(len(hashes)), "there": float(answer.there), "blocks": float(answer.blocks)}
    reasons = (why, *([answer.why] if answer.why else ()))
    state.decisions.record(DecisionKind.PREFETCH, f"{kind}: {answer.outcome}", None, reasons, figures)
    return answer


def _bound_wish(state: LedgerState, wish: Wish) -> None:
    """Note what a wish takes where the pool has groups."""
    run = transfers.find_ahead_in_groups(state, wish.hashes, _EVERYTHING)
    items = run.items if run is not None else []
    wish.left, wish.pages = len(items), sum(state.config.block_pages[group_in(each.key)] for each in items)


def _answer_of(state: LedgerState, hashes: Items[BlockHash]) -> Answer:
    tier, wanted = state.store.tier, len(hashes)
    if tier is None or (unfit := _why_unfit(state)):
        what = "the worker keeps nothing in host memory; expected one that has --host-memory"
        return Answer(Outcome.REFUSED, 0, 0, what if tier is None else unfit)
    there = transfers.count_resumable(state, hashes)
    if there == wanted or state.ahead.find_wish(hashes) is not None:
        why = "all of it is there" if there == wanted else "it is on its way already"
        return Answer(Outcome.ACCEPTED, there, 0, why)
    room = _room(state, tier)
    if isinstance(room, str):
        return Answer(Outcome.REFUSED, there, 0, room)
    if state.config.groups:
        return _answer_in_groups(state, hashes, there, room)
    return _answer_by_run(state, hashes, there, room)


def _why_unfit(state: LedgerState) -> str:
    """Return why nothing is to come to a worker that has host memory; "" where something may."""
    if state.worker.draining:
        return f"{DRAINS}; expected one that takes new requests"
    return "" if state.store.loads else f"{NO_GAIN}; expected one where that pays"


def _answer_by_run(state: LedgerState, hashes: Items[BlockHash], there: int, room: int) -> Answer:
    """Return how far a prefix is to come behind what is there: as far as somebody has it, and as there is room."""
    found, wanted = _count_elsewhere(state, hashes, there), len(hashes)
    if not found:
        return Answer(Outcome.REFUSED, there, 0, f"{_NOTHING_THERE}, block {there} of it")
    if min(found, room) == wanted - there:
        return Answer(Outcome.ACCEPTED, there, wanted - there)
    why = f"nobody has block {there + found} of it" if found <= room else f"it has room for {room} blocks ahead of need"
    return Answer(Outcome.CLIPPED, there, min(found, room), why)


def _answer_in_groups(state: LedgerState, hashes: Items[BlockHash], there: int, room: int) -> Answer:
    """Return how far a prefix is to come: to the deepest place from which a prompt could go on, as there is room."""
    run = transfers.find_ahead_in_groups(state, hashes, (room, room))
    most = transfers.find_ahead_in_groups(state, hashes, _EVERYTHING)
    if run is None or most is None:
        why = _NO_DEEPER if most is None else f"it has room for {room} pages ahead of need"
        return Answer(Outcome.REFUSED, there, 0, why)
    if run.end == len(hashes):
        return Answer(Outcome.ACCEPTED, there, run.end - there)
    why = f"{_NO_DEEPER} than {run.end}" if run.end == most.end else f"it has room for {room} pages ahead of need"
    return Answer(Outcome.CLIPPED, there, run.end - there, why)


def _room(state: LedgerState, tier: FrameTier) -> int | str:
    """Return how many blocks more may be on their way, at least one, or why none; where the pool has groups, pages."""
    ahead = state.ahead
    if len(ahead.wishes) >= MOST_WISHES:
        return f"{MOST_WISHES} prefixes are on their way to it; ask again later"
    room = int(FRAMES_SHARE * len(tier.frames)) - ahead.frames
    share = f"{FRAMES_SHARE:g} of {len(tier.frames)} frames"
    unit = "pages" if state.config.groups else "blocks"
    return room if room > 0 else f"{ahead.frames} {unit} are on their way to it, of at most {share}; ask again later"


def _count_elsewhere(state: LedgerState, hashes: Items[BlockHash], first: int) -> int:
    """Return the length of the longest run of hashes[first:] that the disk has, or a peer."""
    store, end = state.store, len(hashes)
    disk = store.disk is not None and not state.transfers.closed
    own = len(store.disk.find_run(hashes, first, end, store.cache.ambiguous)) if disk and store.disk is not None else 0
    found = state.peers(lambda peer: peer.find_run(hashes, first, end)) if state.peers is not None else None
    return max(own, found[1] if found is not None else 0)


# ------------------------------------------------------------ parts


def order_part(state: LedgerState) -> None:
    """Order the next blocks of the first wish, if it is their turn; wishes for which nothing is to come are over."""
    ahead, now = state.ahead, state.clock.monotonic()
    if ahead.part is not None and not ahead.part.open:
        _end_part(state, ahead.part, now)
    while ahead.wishes and may_order(state, now):
        why = _order_blocks(state, ahead.wishes[0], now)
        if why is None:
            return
        _end_wish(state, ahead.wishes.popleft(), why, now)


def may_order(state: LedgerState, now: float) -> bool:
    """Return whether a part may be ordered: none is under way, nobody waits for a transfer, the last pause is over."""
    return state.ahead.part is None and not state.sequences.fetching and now >= state.ahead.due


def _end_part(state: LedgerState, part: Part, now: float) -> None:
    ahead, wish = state.ahead, state.ahead.wishes[0]
    ahead.part, ahead.due = None, now + (now - part.began) * (1.0 / LINK_SHARE - 1.0)
    _count_came(state, wish, part)
    if part.failed or wish.there + wish.came == len(wish.hashes):
        why = f"{part.failed} blocks did not come" if part.failed else "all of it is there"
        _end_wish(state, ahead.wishes.popleft(), why, now)


def _count_came(state: LedgerState, wish: Wish, part: Part) -> None:
    """Count and remember what a part has brought."""
    came, counts = max(0, _reach(state, wish) - wish.there - wish.came), state.totals.ahead_loads
    wish.came += came
    counts[wish.kind.value] = counts.get(wish.kind.value, 0) + came
    state.ahead.note_came(part, wish.kind, state.store.cache.below)


def _order_blocks(state: LedgerState, wish: Wish, now: float) -> str | None:
    """Order the next blocks of a wish, or let them wait; return why nothing more is to come of it."""
    tier, hashes = state.store.tier, list(wish.hashes)
    assert tier is not None, "only a worker with host memory has wishes"
    first = _reach(state, wish)
    if first == len(hashes):
        return "all of it is there"
    if state.config.groups:
        return _order_contents(state, wish, tier, now)
    if hashes[first] in tier.expected:
        return None  # for a sequence that has left
    end = min(len(hashes), first + min(PART_BLOCKS, max(1, int(PART_SHARE * len(tier.frames)))))
    run = transfers.find_ahead(state, hashes, first, end)
    if run is None:
        return f"{_NOTHING_THERE}, block {first} of it"
    numbers = transfers.order_run(state, run)
    if not numbers:
        return "no frame of host memory could be had"
    state.ahead.part = Part(set(numbers), now)
    return None


def _order_contents(state: LedgerState, wish: Wish, tier: FrameTier, now: float) -> str | None:
    """Do what `_order_blocks` does where the pool has groups."""
    run = transfers.find_ahead_in_groups(state, wish.hashes, _EVERYTHING)
    if run is None or not wish.left:
        return _NO_DEEPER
    part, room = list[transfers.FetchItem](), int(PART_SHARE * len(tier.frames))
    for item in run.items:
        room -= tier.pages_of(item.key)
        if len(part) == min(PART_BLOCKS, wish.left) or (part and room < 0):
            break
        if not transfers.is_coming(item):  # for a sequence that has left
            part.append(item)
    if not part:
        return None
    numbers = transfers.order_run(state, run._replace(items=part))
    if not numbers:
        return "no frame of host memory could be had"
    wish.left -= len(numbers)
    state.ahead.part = Part(set(numbers), now)
    return None


def _reach(state: LedgerState, wish: Wish) -> int:
    """Return how many leading blocks of a wish are there. Where the last known one is, so are those before it."""
    if state.config.groups:
        return transfers.count_resumable(state, wish.hashes)
    known, end = wish.there + wish.came, len(wish.hashes)
    if known and not transfers.count_run(state, wish.hashes, known - 1, known):
        known = 0
    return known + transfers.count_run(state, wish.hashes, known, end)


def end_wishes(state: LedgerState, why: str) -> None:
    """End all wishes. What is on its way comes, and counts as anything else there."""
    now, part = state.clock.monotonic(), state.ahead.part
    if part is not None:
        _count_came(state, state.ahead.wishes[0], part)
    for wish in state.ahead.wishes:
        wish.came = max(wish.came, _reach(state, wish) - wish.there)
        _end_wish(state, wish, why, now)
    state.ahead.clear_wishes()


def _end_wish(state: LedgerState, wish: Wish, why: str, now: float) -> None:
    figures = {"blocks": float(len(wish.hashes) - wish.there), "came": float(wish.came), "seconds": now - wish.asked}
    chosen = f"{wish.kind}: {wish.came} of {len(wish.hashes) - wish.there} blocks came"
    state.decisions.record(DecisionKind.PREFETCH, chosen, None, (wish.why, why), figures)
