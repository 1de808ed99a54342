"""Simpler rules of transfers between host memory and disk, and the searches that notice them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

from common.contracts.lease import Copy, TierCopy
from common.contracts.transfers import Transfer, TransferEnd
from common.contracts.types import BlockHash, BlockId, FrameId
from gpuworker.scheduling.block_states import BlockStates, Content
from gpuworker.scheduling.frame_claims import FrameClaims
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.report_builder import SessionState
from gpuworker.scheduling.transfer_book import TransferBook
from kvmanager.cache.frame_tier import FrameTier, Taken
from kvmanager.contracts.block import IN_USE, ROOT
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import audit, evicting, transfers
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.transfer_table import TransferTable
from tests.suites.protocol.manager_side import ManagerSide
from tests.suites.protocol.mutant import HASTY, Exhaustive, Mutant, Walks, always, nothing
from tests.suites.protocol.scenarios import ALL_FAULTS, RESETS
from tests.suites.protocol.transfer_side import TransferSide

EVERY_FAULT = (*ALL_FAULTS, *RESETS)
_order_fetches, _find_fetch = transfers._order_fetches, transfers.find_fetch
_save, _end_fetch = transfers._save, transfers._end_fetch
_expect, _drop_cached = FrameTier.expect, evicting.drop_cached_blocks
_take_saves, _book_saves, _book_end = LeaseAgent.take_saves, TransferBook.take_saves, TransferBook.end
_start_manager = ManagerSide.start_manager

UNAUDITED = (audit, "_transfers", nothing)
UNAUDITED_FRAMES = (audit, "check_frames", nothing)
"""The ledger's own books would notice these mutants at once: the search is to see what harm they do."""

# ------------------------------------------------------------ what counts, and when


def register_at_the_order(state: LedgerState, run: transfers.FetchRun) -> list[int]:
    ordered = _order_fetches(state, run)
    assert state.store.tier is not None
    for block_hash in [*state.store.tier.expected]:
        state.store.cache.note_arrived(state.store.tier, block_hash)
    return ordered


def end_a_registered_fetch(state: LedgerState, transfer: Transfer, end: TransferEnd) -> None:
    del state.transfers.fetching[transfer.hash]
    assert state.store.disk is not None
    transfers._end_read(state, state.store.disk, transfer, end)


def take_every_fetch_for_done(state: LedgerState, transfer: Transfer, _: TransferEnd) -> None:
    _end_fetch(state, transfer, TransferEnd.DONE)


def count_a_save_at_the_order(state: LedgerState, disk: FrameTier, block_hash: BlockHash) -> None:
    _save(state, disk, block_hash)
    if block_hash in disk.expected:
        state.store.cache.note_arrived(disk, block_hash)


def end_a_counted_save(state: LedgerState, _: Transfer, __: TransferEnd) -> None:
    state.transfers.saves -= 1


def expect_without_holding(tier: FrameTier, block_hash: BlockHash, parent: BlockHash, depth: int) -> Taken | None:
    """The frame counts as free although a transfer is to fill it."""
    taken = _expect(tier, block_hash, parent, depth)
    if taken is not None:
        tier.free.appendleft(taken.frame)
    return taken


def drop_one(tier: FrameTier, root: BlockHash) -> list[tuple[int, BlockHash]]:
    """What is behind a lost content stays on disk."""
    frame = tier.entries.get(root)
    if frame is None or tier.frames.state[frame] is IN_USE:
        return []
    depth = tier.frames.index[frame]
    tier.order.discard_block(frame)
    tier._forget(frame)
    tier._set_free(frame)
    return [(depth, root)]


def fetch_again(state: LedgerState, sequence: Sequence) -> transfers.FetchRun | None:
    """A sequence may wait as often as the disk has something for it."""
    waited, sequence.fetch = sequence.fetch, None
    found = _find_fetch(state, sequence)
    if found is None:
        sequence.fetch = waited
    return found


def read_nothing_in_time(world: TransferSide, _: int) -> bool:
    """The disk answers no fetch in time: the engine gives up each of them."""
    transfer, *rest = world.reading
    world.reading = tuple(rest)
    world.agent.end_transfer(transfer, TransferEnd.LATE)
    return True


# ------------------------------------------------------------ when images are taken and landed


def land_behind_steps(agent: LeaseAgent, transfer: Transfer) -> bool:
    may = agent._transfers.may_land(transfer, [copy for plan in agent._in_flight for copy in plan.copies])
    agent._transfer_waits |= not may
    return may


def land_behind_what_waits(agent: LeaseAgent, transfer: Transfer) -> bool:
    may = agent._transfers.may_land(transfer, agent._copies)
    agent._transfer_waits |= not may
    return may


def land_without_a_step(agent: LeaseAgent, transfer: Transfer) -> bool:
    return agent._transfers.may_land(transfer, agent._copies_under_way())


def take_without_a_step(agent: LeaseAgent, most: int) -> list[Transfer]:
    ready = _take_saves(agent, most)
    agent._transfer_waits = False
    return ready


def take_at_once(
    book: TransferBook, blocks: BlockStates, frames: FrameClaims, _: Iterable[Copy | TierCopy], most: int
) -> tuple[list[Transfer], list[Transfer]]:
    return _book_saves(book, blocks, frames, (), most)


def take_without_looking(book: TransferBook, *given: Any) -> tuple[list[Transfer], list[Transfer]]:
    ready, stale = _book_saves(book, *given)
    return [*ready, *stale], []


# ------------------------------------------------------------ breaks, resets and losses


def detach_without_voiding(agent: LeaseAgent) -> None:
    agent._report.state = SessionState.DETACHED
    agent._report.discard()


def reset_without_voiding(agent: LeaseAgent, number: int) -> None:
    agent._blocks.forget_unheld()
    agent._frames.forget_all()
    agent._transfers.forget_saved()
    agent.reset = number
    agent._report.reset(number)


def drop_without_voiding(state: LedgerState) -> int:
    """What transfers bring that were open at the reset counts."""
    tiers = [tier for tier in (state.store.tier, state.store.disk) if tier is not None]
    expected = [
        (tier, key, frame, tier.frames.parent[frame] or ROOT, tier.frames.index[frame])
        for tier in tiers
        for key, frame in tier.expected.items()
    ]
    with mock.patch.object(transfers, "void_all", nothing):
        dropped = _drop_cached(state)
    for tier, key, frame, parent, depth in expected:
        tier.free.remove(BlockId(frame))
        tier._describe(frame, key, parent, depth)
        tier.frames.state[frame] = IN_USE
        tier.expected[key] = frame
    return dropped


def begin_ids_again(state: LedgerState) -> None:
    state.transfers = TransferTable()
    _requeue_all(state)


def leave_who_waits(state: LedgerState) -> None:
    state.transfers = TransferTable(state.transfers)


def _requeue_all(state: LedgerState) -> None:
    for each in state.sequences.fetching:
        sequence = state.sequences.live[each]
        if sequence.fetch is not None:
            sequence.fetch.open.clear()
        state.sequences.queue.add_sequence(sequence)
    state.sequences.fetching.clear()


def forget_who_waits(state: LedgerState, sequence: Sequence) -> bool:
    return state.sequences.fetching.pop(sequence.id, sequence) is None


def name_the_last_reset(world: TransferSide) -> None:
    """A process that starts names the latest reset, whether or not its disk has carried it out."""
    world.reading, world.coming, world.writing, world.landing = (), (), (), ()
    world.agent.restore_saved(world.disk.claims(()), world.resets)


def start_without_the_last_reset(world: ManagerSide) -> None:
    _start_manager(world)
    world.managers[-1].core.last_reset = 0


def end_with_the_claim(
    book: TransferBook, transfer: Transfer, end: TransferEnd, frames: FrameClaims, step: int
) -> TransferEnd | None:
    kept: dict[FrameId, Content | None] = book.saved.held.copy()
    ended = _book_end(book, transfer, end, frames, step)
    if end is TransferEnd.CORRUPT:
        book.saved.held = kept
    return ended


TRANSFER_MUTANTS = (
    Mutant(
        "131",
        "a block that is fetched counts as there from the order on",
        (
            (transfers, "_order_fetches", register_at_the_order),
            (transfers, "_end_fetch", end_a_registered_fetch),
            UNAUDITED,
        ),
        Exhaustive("disk_warm"),
        ("I17",),
    ),
    Mutant(
        "132",
        "a fetch that failed is taken for one that is done",
        ((transfers, "_end_fetch", take_every_fetch_for_done),),
        Exhaustive("disk_warm_break"),
        ("I17",),
    ),
    Mutant(
        "133",
        "a block that is saved counts as there from the order on",
        ((transfers, "_save", count_a_save_at_the_order), (transfers, "_end_save", end_a_counted_save), UNAUDITED),
        Exhaustive("disk_warm"),
        ("I17",),
    ),
    Mutant(
        "134",
        "a frame that a transfer is to fill may be taken for something else",
        ((FrameTier, "expect", expect_without_holding), UNAUDITED, UNAUDITED_FRAMES),
        Exhaustive("disk_warm"),
        ("I2",),
    ),
    Mutant(
        "135",
        "what a transfer brings counts, whether or not its parent is there",
        ((transfers, "_may_enter", always),),
        Exhaustive("disk_warm_break"),
        ("I5", "I18"),
    ),
    Mutant(
        "137",
        "what is behind a lost content stays",
        ((FrameTier, "drop_tree", drop_one),),
        Exhaustive("disk_warm_break"),
        ("I5", "I18"),
    ),
    Mutant(
        "138",
        "a landing waits for no copy",
        ((TransferBook, "may_land", always),),
        Walks("disk_few", faults=EVERY_FAULT),
        ("I25",),
    ),
    Mutant(
        "139",
        "a landing waits for copies of steps in flight alone",
        ((LeaseAgent, "may_land", land_behind_steps),),
        Walks("disk_few", faults=EVERY_FAULT),
        ("I25",),
    ),
    Mutant(
        "140",
        "a landing waits for copies alone that no step has yet",
        ((LeaseAgent, "may_land", land_behind_what_waits),),
        Walks("disk_tight", first_seed=124, faults=EVERY_FAULT, pace=HASTY),
        ("I25",),
    ),
    Mutant(
        "141",
        "no step has copies alone",
        ((LeaseAgent, "may_land", land_without_a_step), (LeaseAgent, "take_saves", take_without_a_step)),
        Walks("disk_brisk", first_seed=117, faults=("cancel", "wipe")),
        ("I8", "I10"),
    ),
    Mutant(
        "142",
        "an image is taken although a copy is to fill its block",
        ((TransferBook, "take_saves", take_at_once),),
        Walks("disk", faults=EVERY_FAULT),
        ("I25",),
    ),
    Mutant(
        "143",
        "an image is taken whatever its block holds by now",
        ((TransferBook, "take_saves", take_without_looking),),
        Walks("disk", faults=EVERY_FAULT),
        ("I17",),
    ),
    Mutant(
        "144",
        "transfers go on when the stream breaks",
        ((LeaseAgent, "detach", detach_without_voiding),),
        Exhaustive("disk_warm_break"),
        ("I2",),
    ),
    Mutant(
        "145",
        "the worker lets transfers go on that were open at a reset",
        ((LeaseAgent, "_reset_cache", reset_without_voiding),),
        Walks("disk_few", first_seed=4, faults=EVERY_FAULT, pace=HASTY),
        ("I2", "I11", "I17"),
    ),
    Mutant(
        "146",
        "the manager counts transfers that were open at a reset",
        ((evicting, "drop_cached_blocks", drop_without_voiding), UNAUDITED, UNAUDITED_FRAMES),
        Exhaustive("disk_warm_reset"),
        ("I10", "I11"),
    ),
    Mutant(
        "147",
        "a process that starts names the last reset, which its disk has missed",
        ((TransferSide, "restart_transfers", name_the_last_reset),),
        Exhaustive("disk_warm_reset"),
        ("I11",),
    ),
    Mutant(
        "148",
        "a manager that starts forgets the last reset",
        ((ManagerSide, "start_manager", start_without_the_last_reset),),
        Walks("disk_few", first_seed=2, faults=EVERY_FAULT),
        ("I11",),
    ),
    Mutant(
        "149",
        "a reset leaves what the worker claims of its disk",
        ((TransferBook, "forget_saved", nothing),),
        Exhaustive("disk_warm_reset"),
        ("I11", "I17"),
    ),
    Mutant(
        "150",
        "what could not be read is claimed all the same",
        ((TransferBook, "end", end_with_the_claim),),
        Exhaustive("disk_warm_break"),
        ("I17",),
    ),
    Mutant(
        "151",
        "a sequence waits for the disk again and again",
        ((transfers, "find_fetch", fetch_again), (TransferSide, "read", read_nothing_in_time)),
        Exhaustive("disk_warm"),
        ("I10",),
    ),
    Mutant(
        "152",
        "who waits for a transfer stays away when a reset voids it",
        ((transfers, "void_all", leave_who_waits), UNAUDITED),
        Exhaustive("disk_warm_reset"),
        ("I10",),
    ),
    Mutant(
        "153",
        "a transfer remembers a sequence that was cancelled",
        ((transfers, "stop_awaiting", forget_who_waits),),
        Exhaustive("disk_warm"),
        ("I1",),
    ),
    Mutant(
        "154",
        "ids of transfers begin again at a reset",
        ((transfers, "void_all", begin_ids_again),),
        Walks("disk_few", first_seed=4, faults=EVERY_FAULT, pace=HASTY),
        ("I17",),
    ),
)
