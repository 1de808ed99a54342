"""The inbox of a stream and the turns in which streams are woken."""

from __future__ import annotations

import asyncio

import pytest

from common.types import FinishReason, TokenLogprobs, Usage
from router.core.worker_events import Preempted, SequenceFinished, TokensSampled
from router.requests.inbox import Arrival, Inbox, Turns

END = SequenceFinished(FinishReason.LENGTH, Usage())


def _turns(wakes: int = 16) -> Turns:
    return Turns(wakes)


async def _told(inbox: Inbox) -> list[tuple[int, int, object]]:
    return [(each.index, each.attempt, each.event) for each in await inbox.take()]


async def test_one_event_is_taken_as_it_came() -> None:
    inbox = Inbox(_turns())
    inbox.put(0, 1, TokensSampled((7,)))
    assert await _told(inbox) == [(0, 1, TokensSampled((7,)))]


async def test_tokens_that_gathered_come_as_one_event() -> None:
    inbox = Inbox(_turns())
    entries = [TokenLogprobs(token, -1.0) for token in (7, 8, 9)]
    inbox.put(0, 1, TokensSampled((7,), (entries[0],)))
    inbox.put(0, 1, TokensSampled((8, 9), (entries[1], entries[2])))
    inbox.put(0, 1, END)
    assert await _told(inbox) == [(0, 1, TokensSampled((7, 8, 9), tuple(entries))), (0, 1, END)]


async def test_tokens_of_several_sequences_gather_apart() -> None:
    inbox = Inbox(_turns())
    for token in (1, 2):
        inbox.put(0, 1, TokensSampled((token,)))
        inbox.put(1, 1, TokensSampled((10 * token,)))
    assert await _told(inbox) == [(0, 1, TokensSampled((1, 2))), (1, 1, TokensSampled((10, 20)))]


async def test_nothing_overtakes_another_event_of_its_sequence() -> None:
    inbox = Inbox(_turns())
    for event in (TokensSampled((1,)), Preempted(), TokensSampled((2,))):
        inbox.put(0, 1, event)
    assert await _told(inbox) == [(0, 1, TokensSampled((1,))), (0, 1, Preempted()), (0, 1, TokensSampled((2,)))]


async def test_tokens_of_two_runs_are_kept_apart() -> None:
    inbox = Inbox(_turns())
    inbox.put(0, 1, TokensSampled((1,)))
    inbox.put(0, 2, TokensSampled((2,)))
    assert await _told(inbox) == [(0, 1, TokensSampled((1,))), (0, 2, TokensSampled((2,)))]


async def test_what_was_taken_is_joined_by_nothing() -> None:
    inbox = Inbox(_turns())
    inbox.put(0, 1, TokensSampled((1,)))
    (first,) = await inbox.take()
    inbox.put(0, 1, TokensSampled((2,)))
    assert first == Arrival(0, 1, None, [1])
    assert await _told(inbox) == [(0, 1, TokensSampled((2,)))]


async def test_a_waiting_stream_gets_all_that_comes_before_it_runs() -> None:
    inbox = Inbox(_turns())
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    for token in (1, 2, 3):
        inbox.put(0, 1, TokensSampled((token,)))
    assert [arrival.event for arrival in await taking] == [TokensSampled((1, 2, 3))]


async def test_what_comes_for_a_stream_that_was_just_cancelled_disturbs_nobody() -> None:
    inbox = Inbox(_turns())
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    taking.cancel()
    inbox.put(0, 1, TokensSampled((1,)))  # the task has not run since, and still waits
    with pytest.raises(asyncio.CancelledError):
        await taking


async def test_a_patient_stream_is_woken_for_the_first_token_of_each_sequence_and_for_what_is_no_token() -> None:
    inbox, taken = Inbox(_turns(), patient=True), list[list[object]]()

    async def stream() -> None:
        while not taken or END not in taken[-1]:
            taken.append([arrival.event for arrival in await inbox.take()])

    running = asyncio.create_task(stream())
    for index, event in (
        (0, TokensSampled((1,))),
        (0, TokensSampled((2,))),
        (1, TokensSampled((3,))),
        (0, TokensSampled((4,))),
        (0, END),
    ):
        inbox.put(index, 1, event)
        for _ in range(4):
            await asyncio.sleep(0)
    await running
    assert taken == [[TokensSampled((1,))], [TokensSampled((2,)), TokensSampled((3,))], [TokensSampled((4,)), END]]


async def test_a_turn_of_the_loop_wakes_so_many_streams_and_no_more() -> None:
    turns, woken = _turns(2), list[int]()
    inboxes = [Inbox(turns) for _ in range(5)]

    async def stream(number: int) -> None:
        await inboxes[number].take()
        woken.append(number)

    tasks = [asyncio.create_task(stream(number)) for number in range(5)]
    await asyncio.sleep(0)
    for inbox in inboxes:
        inbox.put(0, 1, TokensSampled((1,)))
    await asyncio.sleep(0)
    assert woken == [0, 1]
    await asyncio.gather(*tasks)
    assert woken == [0, 1, 2, 3, 4]


async def test_a_stream_without_tokens_so_far_overtakes_also_after_its_admission() -> None:
    turns, woken = _turns(1), list[str]()
    old, new, other = Inbox(turns), Inbox(turns), Inbox(turns)
    for inbox, event in ((old, TokensSampled((0,))), (other, TokensSampled((0,))), (new, Preempted())):
        inbox.put(0, 1, event)
        await inbox.take()

    async def stream(name: str, inbox: Inbox) -> None:
        await inbox.take()
        woken.append(name)

    tasks = [asyncio.create_task(stream(*each)) for each in (("other", other), ("old", old), ("new", new))]
    await asyncio.sleep(0)
    for inbox in (other, old, new):
        inbox.put(0, 1, TokensSampled((1,)))
    await asyncio.gather(*tasks)
    assert woken == ["other", "new", "old"]


async def test_a_stream_that_is_always_behind_waits_for_its_turn_too() -> None:
    turns, woken = _turns(1), list[str]()
    busy, quiet = Inbox(turns), Inbox(turns)

    async def stream(name: str, inbox: Inbox) -> None:
        await inbox.take()
        woken.append(name)

    waiting = asyncio.create_task(stream("quiet", quiet))
    await asyncio.sleep(0)
    busy.put(0, 1, TokensSampled((1,)))
    await stream("busy", busy)
    quiet.put(0, 1, TokensSampled((5,)))
    busy.put(0, 1, TokensSampled((2,)))
    await asyncio.gather(stream("busy again", busy), waiting)
    assert woken == ["busy", "quiet", "busy again"]


async def test_a_cancelled_stream_uses_up_nobodys_turn() -> None:
    turns = _turns(1)
    inboxes = [Inbox(turns) for _ in range(3)]
    tasks = [asyncio.create_task(inbox.take()) for inbox in inboxes]
    await asyncio.sleep(0)
    for inbox in inboxes:
        inbox.put(0, 1, END)
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert [arrival.event for arrival in await tasks[2]] == [END]
    assert [arrival.event for arrival in await tasks[0]] == [END]
