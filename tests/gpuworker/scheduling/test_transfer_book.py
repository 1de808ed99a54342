"""The worker's side of transfers: what it refuses, when images may be taken and landed, what it claims and reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, CachedBlock, Copy, GrantBatch, Report, TierCopy
from common.contracts.transfers import Medium, Place, Transfer, TransferCosts, TransferEnd
from common.contracts.types import BlockHash, BlockId, FinishReason, FrameId, SequenceId
from gpuworker.scheduling.block_states import Content
from gpuworker.scheduling.frame_claims import Claims, FrameClaims
from gpuworker.scheduling.transfer_book import TransferBook
from tests.support.gpuworker.agent_harness import Driver, blocks, keys

SIZE = 4
TOKENS = list(range(10))
A, B = keys(TOKENS, SIZE)
"""The hashes of two full blocks; a part of a third follows."""
ROOT = BlockHash(b"")
DONE, STALE, CORRUPT, FAILED, LATE = TransferEnd


def block(index: int) -> Place:
    return Place(Medium.BLOCK, BlockId(index))


def host(index: int) -> Place:
    return Place(Medium.HOST, FrameId(index))


def disk(index: int) -> Place:
    return Place(Medium.DISK, FrameId(index))


def save(number: int, source: Place, frame: int, depth: int = 0) -> Transfer:
    return Transfer(number, (A, B)[depth], A if depth else ROOT, depth, source, disk(frame))


def fetch(number: int, saved: int, frame: int, depth: int = 0) -> Transfer:
    return Transfer(number, (A, B)[depth], A if depth else ROOT, depth, disk(saved), host(frame))


def store(source: int, frame: int) -> TierCopy:
    return TierCopy(BlockId(source), FrameId(frame))


def load(target: int, frame: int) -> TierCopy:
    return TierCopy(BlockId(target), FrameId(frame), load=True)


def give(made: Driver, *transfers: Transfer, tier: tuple[TierCopy, ...] = (), reset: int = 0) -> None:
    made.agent.apply_grant(GrantBatch(made.lease_target, tier=tier, reset=reset, transfers=transfers))


def taken(made: Driver) -> Report:
    report = made.agent.take_report()
    assert report is not None
    return report


def worker(outputs: int = 1) -> Driver:
    """Return a worker that has computed a prompt, whose full blocks are 0 and 1. With one output it has ended."""
    made = Driver(8, SIZE, host_frames=4, disk_frames=4)
    made.submit(0, TOKENS, max_tokens=outputs)
    made.admit(0, [0, 1, 2])
    made.step()
    taken(made)
    return made


def claims(made: Driver) -> dict[int, tuple[BlockHash, int]]:
    return {each.block: (each.hash, each.depth) for each in made.agent.inventory().saved}


# ---------------------------------------------------------------- orders that contradict themselves


@pytest.mark.parametrize(
    ("transfers", "words"),
    [
        ((save(1, block(8), 0),), "transfer 1 names block 8; there are 8"),
        ((save(1, host(4), 0),), "transfer 1 names host 4; there are 4"),
        ((save(1, block(0), 4),), "transfer 1 names disk 4; there are 4"),
        ((fetch(1, 4, 0),), "transfer 1 names disk 4; there are 4"),
        ((fetch(1, 0, 4),), "transfer 1 names host 4; there are 4"),
        (
            (save(1, block(0), 3), save(2, block(1), 3, depth=1)),
            "transfer 2 goes where another one goes that has not ended",
        ),
        ((fetch(5, 0, 3), fetch(6, 1, 3, depth=1)), "transfer 6 goes where another one goes that has not ended"),
    ],
    ids=str,
)
def test_an_impossible_transfer_is_refused_and_nothing_is_applied(transfers: tuple[Transfer, ...], words: str) -> None:
    made = worker()
    with pytest.raises(ProtocolViolation, match=words):
        give(made, *transfers, tier=(store(0, 1),))
    assert made.agent.inventory().frames == ()
    assert (made.agent.take_reads(), made.agent.take_saves(9)) == ([], [])


def test_a_place_that_an_open_transfer_fills_is_refused_until_a_reset_voids_that_one() -> None:
    made = worker(outputs=2)
    give(made, save(1, block(0), 3))
    with pytest.raises(ProtocolViolation, match="transfer 2 goes where"):
        give(made, save(2, block(1), 3, depth=1))
    give(made, save(3, block(1), 3, depth=1), reset=1)
    assert [each.id for each in made.agent.take_saves(9)] == [3]


# ---------------------------------------------------------------- saves


def test_a_save_is_taken_and_claimed_once_it_is_done() -> None:
    made = worker()
    first, second = save(1, block(0), 3), save(2, block(1), 0, depth=1)
    give(made, first, second)
    assert made.agent.take_saves(1) == [first]
    assert made.agent.take_saves(9) == [second]
    assert made.agent.take_saves(9) == []
    made.agent.end_transfer(second, DONE)
    assert taken(made).ended == ((2, DONE),)
    made.agent.end_transfer(first, DONE)
    assert taken(made).ended == ((1, DONE),)
    assert claims(made) == {0: (B, 1), 3: (A, 0)}


def test_the_end_of_a_save_does_not_hurry_a_report_and_that_of_a_fetch_does() -> None:
    made = worker()
    one, two = save(1, block(0), 3), fetch(2, 2, 0)
    give(made, one, two)
    made.agent.end_transfer(one, DONE)
    assert not made.agent.report_is_urgent
    made.agent.end_transfer(two, LATE)
    assert made.agent.report_is_urgent
    assert taken(made).ended == ((1, DONE), (2, LATE))


def test_a_source_that_holds_something_else_is_stale() -> None:
    made = worker()
    give(made, save(1, block(2), 0), save(2, host(1), 1), save(3, block(1), 2), save(4, block(1), 3, depth=1))
    assert [each.id for each in made.agent.take_saves(9)] == [4], "a part of a block, an empty frame, another hash"
    assert taken(made).ended == ((1, STALE), (2, STALE), (3, STALE))


def test_a_save_from_a_frame_waits_for_the_copy_that_fills_it_and_runs_it_alone_if_need_be() -> None:
    made = worker()
    give(made, save(1, host(1), 0), save(2, block(1), 1, depth=1), tier=(store(0, 1),))
    assert made.agent.take_saves(9) == [], "those behind it wait too: parents are saved first"
    plan = made.plan()
    assert (plan.rows, plan.copies) == ((), (store(0, 1),)), "a step of copies alone"
    assert made.agent.take_saves(9) == [], "the step runs"
    assert made.agent.plan() is None, "nothing is left to run"
    made.complete(plan)
    assert [each.id for each in made.agent.take_saves(9)] == [1, 2]
    assert made.agent.plan() is None


def test_a_save_does_not_wait_for_a_copy_that_reads_its_source() -> None:
    made = worker()
    give(made, save(1, block(0), 0), tier=(store(0, 1),))
    assert [each.id for each in made.agent.take_saves(9)] == [1]
    assert made.agent.plan() is None, "copies wait for a step that has rows"


def test_what_a_frame_on_disk_held_is_claimed_no_more_from_the_order_on() -> None:
    made = worker()
    made.agent.restore_saved(Claims((CachedBlock(FrameId(3), B, -1, 7, A, 1),)), reset=0)
    assert claims(made) == {3: (B, 1)}
    made.agent.attached(0)
    give(made, save(1, block(0), 3))
    assert claims(made) == {}


# ---------------------------------------------------------------- fetches


def saved_worker() -> Driver:
    """Return a worker with nothing in its pool, whose disk has the prompt's two blocks in frames 2 and 0."""
    made = Driver(8, SIZE, host_frames=4, disk_frames=4)
    rows = (CachedBlock(FrameId(2), A, -1, 7, A, 0), CachedBlock(FrameId(0), B, -1, 7, A, 1))
    made.agent.restore_saved(Claims(rows), reset=5)
    made.agent.inventory()
    made.agent.attached(0)
    return made


def test_a_fetch_is_read_once_and_its_frame_holds_it_once_it_is_done() -> None:
    made = saved_worker()
    one, two = fetch(1, 2, 3), fetch(2, 0, 1, depth=1)
    give(made, one, two)
    assert made.agent.take_reads() == [one, two]
    assert made.agent.take_reads() == []
    assert made.agent.may_land(one)
    made.agent.end_transfer(one, DONE)
    found = made.agent.inventory()
    assert [(each.block, each.hash, each.depth) for each in found.frames] == [(3, A, 0)]
    assert [(each.block, each.hash) for each in found.saved] == [(0, B), (2, A)], "the disk has it all the same"


def test_a_frame_is_void_from_the_order_on_and_cannot_be_loaded_before_the_fetch_is_done() -> None:
    made = worker()
    give(made, tier=(store(0, 3),))
    give(made, fetch(1, 2, 3))
    made.submit(1, TOKENS)
    admit = Admit(SequenceId(1), blocks([5, 6, 7]), 1, SIZE)
    with pytest.raises(ProtocolViolation, match="loaded from frame 3, which is empty"):
        made.agent.apply_grant(GrantBatch(0, admit=(admit,), tier=(load(5, 3),)))


@pytest.mark.parametrize("touches", [store(1, 3), load(5, 3)], ids=["filled", "read"])
def test_a_landing_waits_for_copies_that_were_granted_before_it_and_have_not_run(touches: TierCopy) -> None:
    made = worker()
    give(made, tier=(store(0, 3),))
    if touches.load:
        made.submit(1, TOKENS)
        admit = Admit(SequenceId(1), blocks([5, 6, 7]), 1, SIZE)
        made.agent.apply_grant(GrantBatch(0, admit=(admit,), tier=(touches,)))
        made.agent.cancel_sequence(SequenceId(1))
    else:
        give(made, tier=(touches,))
    transfer, other = fetch(1, 2, 3), fetch(2, 0, 1)
    give(made, transfer, other)
    assert made.agent.may_land(other), "no copy touches its frame"
    assert not made.agent.may_land(transfer), "copies wait"
    plan = made.plan()
    assert (plan.rows, plan.copies) == ((), (store(0, 3), touches)), "no row is to run, so they run alone"
    assert not made.agent.may_land(transfer), "they run"
    made.complete(plan)
    assert made.agent.may_land(transfer)


def test_without_a_transfer_that_waits_copies_wait_for_rows() -> None:
    made = worker()
    give(made, fetch(1, 2, 0), tier=(store(0, 3),))
    assert made.agent.take_saves(9) == []
    assert made.agent.plan() is None


@pytest.mark.parametrize(("end", "kept"), [(CORRUPT, False), (FAILED, False), (LATE, True), (STALE, True)])
def test_what_cannot_be_read_is_claimed_no_more(end: TransferEnd, kept: bool) -> None:
    made = saved_worker()
    transfer = fetch(1, 2, 3)
    give(made, transfer)
    made.agent.end_transfer(transfer, end)
    report = taken(made)
    assert report.ended == ((1, end),)
    assert (2 in claims(made)) is kept
    assert made.agent.inventory().frames == ()


# ---------------------------------------------------------------- sessions, resets, the end of the disk


def test_a_break_voids_transfers_and_what_comes_of_them_is_dropped() -> None:
    made = worker()
    one, two, bad = save(1, block(0), 3), fetch(2, 2, 0), fetch(3, 1, 1, depth=1)
    made.agent.restore_saved(Claims((CachedBlock(FrameId(1), B, -1, 7, A, 1),)), reset=0)
    give(made, one, two, bad)
    made.agent.take_reads()
    made.agent.take_saves(9)
    made.agent.inventory()
    made.agent.attached(0)
    assert not any(map(made.agent.is_open, (one, two, bad)))
    made.agent.end_transfer(one, DONE)
    made.agent.end_transfer(two, DONE)
    assert claims(made) == {1: (B, 1)}
    made.agent.attached(0)
    made.agent.end_transfer(bad, CORRUPT)
    assert claims(made) == {}, "what is lost is lost, whoever asked for it"
    made.agent.attached(0)
    report = made.agent.take_report()
    assert report is None or report.ended == ()


def test_a_void_transfer_is_not_taken_for_a_new_one_with_its_id() -> None:
    made = worker()
    old, new = fetch(1, 2, 0), fetch(1, 2, 0)
    give(made, old)
    made.agent.inventory()
    made.agent.attached(0)
    give(made, new)
    assert (made.agent.is_open(old), made.agent.is_open(new)) == (False, True)
    made.agent.end_transfer(old, DONE)
    assert made.agent.is_open(new)
    assert made.agent.take_reads() == [new]


def test_a_reset_voids_transfers_and_empties_claims_before_it_is_confirmed() -> None:
    made = saved_worker()
    assert made.agent.reset == 5, "that of the disk"
    transfer = fetch(1, 2, 3)
    give(made, transfer)
    give(made, reset=6)
    assert made.agent.reset == 6
    assert not made.agent.is_open(transfer)
    made.agent.end_transfer(transfer, DONE)
    report = taken(made)
    assert (report.reset, report.ended) == (6, ())
    found = made.agent.inventory()
    assert (found.saved, found.frames) == ((), ())


def test_an_order_behind_a_reset_in_one_batch_counts() -> None:
    made = worker(outputs=2)
    give(made, save(1, block(0), 3), reset=4)
    assert [each.id for each in made.agent.take_saves(9)] == [1], "a sequence holds the block, so that it outlives it"


def test_a_disk_that_is_given_up_fails_what_is_open_and_is_attached_as_none() -> None:
    made = saved_worker()
    one, two = fetch(1, 2, 3), fetch(2, 0, 1, depth=1)
    give(made, one, two)
    made.agent.close_disk()
    report = taken(made)
    assert (report.ended, report.disk_closed) == (((1, FAILED), (2, FAILED)), True)
    assert (made.agent.disk_frames, claims(made)) == (0, {})
    made.agent.attached(0)
    give(made, fetch(3, 1, 3), save(4, block(0), 2))  # the manager had not heard of it
    assert (made.agent.take_reads(), made.agent.take_saves(9)) == ([], [])
    again = taken(made)
    assert (again.ended, again.disk_closed) == (((3, FAILED), (4, FAILED)), False)


def test_costs_are_reported_when_they_change() -> None:
    made = worker()
    made.agent.note_costs(TransferCosts(0.5, 0.25))
    made.submit(1, TOKENS)
    assert taken(made).transfer_costs == TransferCosts(0.5, 0.25)
    made.agent.cancel_sequence(SequenceId(1), FinishReason.CANCELLED)
    assert taken(made).transfer_costs is None


# ---------------------------------------------------------------- the book alone


def test_a_copy_of_a_part_touches_its_source_and_its_target() -> None:
    book, part = TransferBook(4), Copy(BlockId(0), BlockId(5), 2)
    assert book.may_land(fetch(1, 0, 0), (part,)), "a block is no frame"
    claimed = {BlockId(0): Content(A, None, 0, 1), BlockId(5): Content(A, None, 0, 1)}
    made = worker().agent._blocks
    made.content.update(claimed)
    frames = FrameClaims(4)
    book.apply([save(1, block(0), 0), save(2, block(5), 1)], frames)
    assert book.take_saves(made, frames, (part,), 9) == ([save(1, block(0), 0)], []), "5 is to be filled"
    assert book.waits_to_take
    assert book.take_saves(made, frames, (), 9) == ([save(2, block(5), 1)], [])


# ---------------------------------------------------------------- contents of several pages


def of_two_pages(number: int = 1, target: tuple[int, int] = (2, 0)) -> Transfer:
    """Return a fetch from disk of a content of group 1, from frames 3 and 1."""
    others = ((FrameId(1), FrameId(target[1])),)
    return Transfer(number, B, B, 1, disk(3), host(target[0]), group=1, others=others)


def book_of_pages() -> tuple[TransferBook, FrameClaims]:
    """Return a book that has the content on disk, and host memory where frames 2 and 3 have another one."""
    book, frames = TransferBook(6, block_pages=(1, 2)), FrameClaims(4, (1, 2))
    book.restore(Claims((CachedBlock(FrameId(3), B, -1, 7, B, 1),), (1,), (FrameId(3), FrameId(1))))
    frames.claim((FrameId(3), FrameId(2)), Content(A, None, 0, 1, 1))
    return book, frames


def test_a_content_is_there_once_all_its_pages_have_come() -> None:
    book, frames = book_of_pages()
    fetch_ = of_two_pages()
    book.check([fetch_], 8, 4)
    book.apply([fetch_], frames)
    assert frames.held == {}, "a frame of what was there is to be filled"
    first, second = book.take_reads()
    assert [(each.source, each.target, each.page) for each in (first, second)] == [
        (disk(3), host(2), 0), (disk(1), host(0), 1),
    ]  # fmt: skip
    assert book.end(second, TransferEnd.DONE, frames, 9) is None
    assert (frames.held, book.is_open(first)) == ({}, True)
    assert book.end(first, TransferEnd.DONE, frames, 9) is TransferEnd.DONE
    assert frames.claims() == Claims((CachedBlock(FrameId(2), B, -1, 9, B, 1),), (1,), (FrameId(2), FrameId(0)))
    assert book.end(second, TransferEnd.DONE, frames, 9) is None, "it is over"


@pytest.mark.parametrize("bad", [0, 1])
def test_a_content_of_which_a_page_fails_is_none_and_the_disk_has_it_no_more(bad: int) -> None:
    book, frames = book_of_pages()
    book.apply([of_two_pages()], frames)
    pages = book.take_reads()
    ends = [TransferEnd.CORRUPT if page == bad else TransferEnd.DONE for page in range(2)]
    assert [book.end(*each, frames, 9) for each in zip(pages, ends, strict=True)] == [None, TransferEnd.CORRUPT]
    assert (frames.held, book.saved.held, book.open) == ({}, {}, {})


@pytest.mark.parametrize("lost", [TransferEnd.CORRUPT, TransferEnd.FAILED])
@pytest.mark.parametrize("other", [TransferEnd.STALE, TransferEnd.LATE])
@pytest.mark.parametrize("first", [True, False])
def test_the_manager_hears_that_the_disk_has_lost_a_content_whatever_the_order_of_its_pages(
    lost: TransferEnd, other: TransferEnd, first: bool
) -> None:
    """A page is corrupt, and the disk hangs behind it or before: the manager must forget what the worker forgets."""
    book, frames = book_of_pages()
    book.apply([of_two_pages()], frames)
    ends = (lost, other) if first else (other, lost)
    assert [book.end(*each, frames, 9) for each in zip(book.take_reads(), ends, strict=True)] == [None, lost]
    assert book.saved.held == {}


def test_a_page_of_a_void_transfer_is_not_one_of_the_next_with_its_number() -> None:
    book, frames = book_of_pages()
    book.apply([of_two_pages()], frames)
    old = book.take_reads()
    book.void()
    book.apply([of_two_pages()], frames)
    assert [book.is_open(each) for each in old] == [False, False]
    assert book.end(old[0], TransferEnd.DONE, frames, 9) is None
    pages = book.take_reads()
    assert book.end(pages[0], TransferEnd.DONE, frames, 9) is None
    assert book.end(pages[1], TransferEnd.DONE, frames, 9) is TransferEnd.DONE


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"group": 2}, "has 2 pages in group 2"),
        ({"group": 0}, "has 2 pages in group 0"),
        ({"others": ()}, "has 1 pages in group 1"),
        ({"others": ((FrameId(1), FrameId(2)),)}, "goes where another one goes"),
        ({"others": ((FrameId(1), FrameId(4)),)}, "names host 4; there are 4"),
        ({"others": ((FrameId(6), FrameId(0)),)}, "names disk 6; there are 6"),
    ],
)
def test_a_transfer_whose_pages_are_not_those_of_its_group_is_refused(changed: dict[str, Any], words: str) -> None:
    book, _ = book_of_pages()
    with pytest.raises(ProtocolViolation, match=words):
        book.check([replace(of_two_pages(), **changed)], 8, 4)
