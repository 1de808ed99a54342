"""The inbox of a stream and the turns in which streams are woken."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from common.contracts.errors import Overloaded
from common.contracts.limits import SMALL_OUTPUT_BYTES
from common.contracts.types import FinishReason, TokenLogprobs, Usage
from router.requests.inbox import WORK_A_TURN, Arrival, Inbox, Turns, work_of
from router.workers.worker_events import Preempted, PromptScored, SequenceFinished, TokensSampled
from tests.support.turns import take_turn, until_blocked, until_idle
from tests.support.waiting import until

END = SequenceFinished(FinishReason.LENGTH, Usage())


def _turns(wakes: int = 16) -> Turns:
    return Turns(wakes)


async def _told(inbox: Inbox) -> list[tuple[int, int, object]]:
    return [(each.index, each.attempt, part) for each in await inbox.take_arrivals() for part in each.parts()]


async def test_one_event_is_taken_as_it_came() -> None:
    inbox = Inbox(_turns())
    inbox.put_event(0, 1, TokensSampled((7,)))
    assert await _told(inbox) == [(0, 1, TokensSampled((7,)))]


async def test_tokens_that_gathered_come_as_one_event() -> None:
    inbox = Inbox(_turns())
    entries = [TokenLogprobs(token, -1.0) for token in (7, 8, 9)]
    inbox.put_event(0, 1, TokensSampled((7,), (entries[0],)))
    inbox.put_event(0, 1, TokensSampled((8, 9), (entries[1], entries[2])))
    inbox.put_event(0, 1, END)
    assert await _told(inbox) == [(0, 1, TokensSampled((7, 8, 9), tuple(entries))), (0, 1, END)]


async def test_tokens_of_several_sequences_gather_apart() -> None:
    inbox = Inbox(_turns())
    for token in (1, 2):
        inbox.put_event(0, 1, TokensSampled((token,)))
        inbox.put_event(1, 1, TokensSampled((10 * token,)))
    assert await _told(inbox) == [(0, 1, TokensSampled((1, 2))), (1, 1, TokensSampled((10, 20)))]


async def test_nothing_overtakes_another_event_of_its_sequence() -> None:
    inbox = Inbox(_turns())
    for event in (TokensSampled((1,)), Preempted(), TokensSampled((2,))):
        inbox.put_event(0, 1, event)
    assert await _told(inbox) == [(0, 1, TokensSampled((1,))), (0, 1, Preempted()), (0, 1, TokensSampled((2,)))]


async def test_tokens_of_two_runs_are_kept_apart() -> None:
    inbox = Inbox(_turns())
    inbox.put_event(0, 1, TokensSampled((1,)))
    inbox.put_event(0, 2, TokensSampled((2,)))
    assert await _told(inbox) == [(0, 1, TokensSampled((1,))), (0, 2, TokensSampled((2,)))]


async def test_what_was_taken_is_joined_by_nothing() -> None:
    inbox = Inbox(_turns())
    inbox.put_event(0, 1, TokensSampled((1,)))
    (first,) = await inbox.take_arrivals()
    inbox.put_event(0, 1, TokensSampled((2,)))
    assert first == Arrival(0, 1, None, [1])
    assert await _told(inbox) == [(0, 1, TokensSampled((2,)))]


async def test_a_waiting_stream_gets_all_that_comes_before_it_runs() -> None:
    inbox = Inbox(_turns())
    taking = asyncio.create_task(inbox.take_arrivals())
    await until_blocked(taking)
    for token in (1, 2, 3):
        inbox.put_event(0, 1, TokensSampled((token,)))
    assert [part for arrival in await taking for part in arrival.parts()] == [TokensSampled((1, 2, 3))]


async def test_what_comes_for_a_stream_that_was_just_cancelled_disturbs_nobody() -> None:
    inbox = Inbox(_turns())
    taking = asyncio.create_task(inbox.take_arrivals())
    await until_blocked(taking)
    taking.cancel()
    inbox.put_event(0, 1, TokensSampled((1,)))  # the task has not run since, and still waits
    with pytest.raises(asyncio.CancelledError):
        await taking


async def test_a_patient_stream_is_woken_for_the_first_token_of_each_sequence_and_for_what_is_no_token() -> None:
    inbox, taken = Inbox(_turns(), patient=True), list[list[object]]()

    async def stream() -> None:
        while not taken or END not in taken[-1]:
            taken.append([part for arrival in await inbox.take_arrivals() for part in arrival.parts()])

    running = asyncio.create_task(stream())
    for index, event in (
        (0, TokensSampled((1,))),
        (0, TokensSampled((2,))),
        (1, TokensSampled((3,))),
        (0, TokensSampled((4,))),
        (0, END),
    ):
        inbox.put_event(index, 1, event)
        await until_idle()
    await running
    assert taken == [[TokensSampled((1,))], [TokensSampled((2,)), TokensSampled((3,))], [TokensSampled((4,)), END]]


async def test_a_turn_of_the_loop_wakes_so_many_streams_and_no_more() -> None:
    turns, woken = _turns(2), list[int]()
    inboxes = [Inbox(turns) for _ in range(5)]

    async def stream(number: int) -> None:
        await inboxes[number].take_arrivals()
        woken.append(number)

    tasks = [asyncio.create_task(stream(number)) for number in range(5)]
    await until_blocked(*tasks)
    for inbox in inboxes:
        inbox.put_event(0, 1, TokensSampled((1,)))
    await take_turn()
    assert woken == [0, 1]
    await asyncio.gather(*tasks)
    assert woken == [0, 1, 2, 3, 4]


async def test_a_stream_without_tokens_so_far_overtakes_also_after_its_admission() -> None:
    turns, woken = _turns(1), list[str]()
    old, new, other = Inbox(turns), Inbox(turns), Inbox(turns)
    for inbox, event in ((old, TokensSampled((0,))), (other, TokensSampled((0,))), (new, Preempted())):
        inbox.put_event(0, 1, event)
        await inbox.take_arrivals()

    async def stream(name: str, inbox: Inbox) -> None:
        await inbox.take_arrivals()
        woken.append(name)

    tasks = [asyncio.create_task(stream(*each)) for each in (("other", other), ("old", old), ("new", new))]
    await until_blocked(*tasks)
    for inbox in (other, old, new):
        inbox.put_event(0, 1, TokensSampled((1,)))
    await asyncio.gather(*tasks)
    assert woken == ["other", "new", "old"]


async def test_a_stream_that_is_always_behind_waits_for_its_turn_too() -> None:
    turns, woken = _turns(1), list[str]()
    busy, quiet = Inbox(turns), Inbox(turns)

    async def stream(name: str, inbox: Inbox) -> None:
        await inbox.take_arrivals()
        woken.append(name)

    waiting = asyncio.create_task(stream("quiet", quiet))
    await until_blocked(waiting)
    busy.put_event(0, 1, TokensSampled((1,)))
    await stream("busy", busy)
    quiet.put_event(0, 1, TokensSampled((5,)))
    busy.put_event(0, 1, TokensSampled((2,)))
    await asyncio.gather(stream("busy again", busy), waiting)
    assert woken == ["busy", "quiet", "busy again"]


async def test_a_cancelled_stream_uses_up_nobodys_turn() -> None:
    turns = _turns(1)
    inboxes = [Inbox(turns) for _ in range(3)]
    tasks = [asyncio.create_task(inbox.take_arrivals()) for inbox in inboxes]
    await until_blocked(*tasks)
    for inbox in inboxes:
        inbox.put_event(0, 1, END)
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert [part for arrival in await tasks[2] for part in arrival.parts()] == [END]
    assert [part for arrival in await tasks[0] for part in arrival.parts()] == [END]


# ------------------------------------------------------------ slow readers

LIKELY = tuple((token, -1.0) for token in range(20))


def much(tokens: int) -> TokensSampled:
    """Return an event of so many tokens with 20 likely ones beside each: about 2.8 kB a token."""
    return TokensSampled((7,) * tokens, tuple(TokenLogprobs(7, -1.0, LIKELY) for _ in range(tokens)))


async def test_output_that_a_client_leaves_unread_ends_its_sequences_once() -> None:
    turns, ended = _turns(), list[str]()
    inbox = Inbox(turns, too_slow=lambda: ended.append("ended"))
    inbox.put_event(0, 1, much(1))
    await inbox.take_arrivals()
    for _ in range(40):
        inbox.put_event(0, 1, much(100))
    inbox.put_event(0, 1, END)
    assert (ended, turns.output_bytes) == (["ended"], 0)
    assert inbox.interrupted.is_set()
    with pytest.raises(Overloaded, match="the client reads too slowly"):
        await inbox.take_arrivals()
    inbox.close()


async def test_a_stream_that_waits_for_its_turn_is_not_slow() -> None:
    turns, ended = _turns(), list[str]()
    inbox = Inbox(turns, too_slow=lambda: ended.append("ended"))
    for _ in range(40):
        inbox.put_event(0, 1, much(100))
    (arrival,) = await inbox.take_arrivals()
    assert (len(arrival.token_ids), ended) == (4000, [])
    inbox.sent()
    assert turns.output_bytes == 0


async def test_what_a_stream_took_counts_until_it_was_sent() -> None:
    turns = _turns()
    inbox = Inbox(turns)
    inbox.put_event(0, 1, much(10))
    waiting = turns.output_bytes
    await inbox.take_arrivals()
    assert waiting == turns.output_bytes > 20_000
    inbox.close()
    assert turns.output_bytes == 0


async def test_a_cancelled_stream_leaves_nothing_to_the_collector() -> None:
    """Its task has the error, whose frames have the inbox."""

    async def stream(inbox: Inbox) -> None:
        try:
            while True:
                await inbox.take_arrivals()
        finally:
            inbox.close()

    async def cancelled() -> weakref.ref[Inbox]:
        inbox = Inbox(_turns())
        streaming = asyncio.create_task(stream(inbox))
        inbox.put_event(0, 1, TokensSampled((7,)))
        await until_blocked(streaming)
        streaming.cancel()
        await asyncio.wait({streaming})
        return weakref.ref(inbox)

    gc.collect()
    gc.disable()
    try:
        left = await cancelled()
        await until(lambda: left() is None)
    finally:
        gc.enable()


async def test_when_all_requests_have_too_much_those_with_little_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.requests.inbox.MAX_ALL_OUTPUT_BYTES", 2 * SMALL_OUTPUT_BYTES)
    turns, ended = _turns(), list[str]()
    large = [Inbox(turns, too_slow=lambda: ended.append("large")) for _ in range(2)]
    small = Inbox(turns, too_slow=lambda: ended.append("small"))
    for inbox in (*large, small):
        inbox.put_event(0, 1, much(1))
        await inbox.take_arrivals()
    for inbox in large:
        inbox.put_event(0, 1, much(30))
    small.put_event(0, 1, much(1))
    assert ended == ["large"]
    assert [len(each.token_ids) for each in await small.take_arrivals()] == [1]


async def test_a_patient_stream_wakes_before_its_output_is_too_much() -> None:
    inbox = Inbox(_turns(), patient=True)
    inbox.put_event(0, 1, much(1))
    await inbox.take_arrivals()
    taking = asyncio.create_task(inbox.take_arrivals())
    await until_blocked(taking)
    for _ in range(8):
        inbox.put_event(0, 1, much(100))
    (arrival,) = await taking
    assert 700 <= len(arrival.token_ids) <= 800


@pytest.mark.parametrize(("likely", "parts"), [(None, [256, 256, 88]), (20, [32] * 18 + [24])])
async def test_what_is_too_much_for_a_turn_comes_in_parts(likely: int | None, parts: list[int]) -> None:
    inbox = Inbox(_turns())
    ids = tuple(range(600))
    entries = () if likely is None else tuple(TokenLogprobs(each, -1.0, ((each, -1.0),) * likely) for each in ids)
    inbox.put_event(0, 1, TokensSampled(ids, entries))
    (arrival,) = await inbox.take_arrivals()
    found = [part for part in arrival.parts() if isinstance(part, TokensSampled)]
    assert [len(each.token_ids) for each in found] == parts
    assert tuple(token for each in found for token in each.token_ids) == ids
    assert tuple(entry for each in found for entry in each.logprobs) == entries
    assert max(map(work_of, found)) <= WORK_A_TURN


async def test_streams_with_much_work_share_the_turns() -> None:
    """Only so much is done between two turns of the loop; nobody is left out."""
    turns, done, in_turn = _turns(), [0, 0, 0], [0]
    most = 0

    def turn() -> None:
        nonlocal most
        most, in_turn[0] = max(most, in_turn[0]), 0
        asyncio.get_running_loop().call_soon(turn)

    async def stream(number: int) -> None:
        for _ in range(20):
            done[number] += 1
            in_turn[0] += WORK_A_TURN // 2
            await turns.pace(WORK_A_TURN // 2)

    turn()
    await asyncio.gather(*map(stream, range(3)))
    assert done == [20, 20, 20]
    assert most <= 2 * WORK_A_TURN


async def test_a_stream_that_is_cancelled_while_it_is_paced_holds_up_nobody() -> None:
    turns = _turns()
    first, second = (asyncio.create_task(turns.pace(WORK_A_TURN)) for _ in range(2))
    await until_blocked(first)
    first.cancel()
    await asyncio.wait_for(second, 60.0)


async def test_log_probabilities_of_a_prompt_come_in_parts_before_the_tokens_and_wake_no_patient_stream() -> None:
    inbox = Inbox(Turns(), patient=True, whole=True)
    entries = tuple(TokenLogprobs(token, -1.0, LIKELY) for token in range(70))
    taking = asyncio.create_task(inbox.take_arrivals())
    await until_blocked(taking)
    inbox.put_event(0, 1, PromptScored(entries[:40]))
    await until_idle()
    assert not taking.done()
    inbox.put_event(0, 1, PromptScored(entries[40:]))
    inbox.put_event(0, 1, TokensSampled((1,)))
    (arrival,) = await taking
    *prompt, tokens = arrival.parts()
    assert tokens == TokensSampled((1,))
    assert [len(part.logprobs) for part in prompt if isinstance(part, PromptScored)] == [32, 32, 6]
    assert tuple(entry for part in prompt if isinstance(part, PromptScored) for entry in part.logprobs) == entries
    assert [work_of(part) for part in prompt] == [32 * (1 + len(LIKELY))] * 2 + [6 * (1 + len(LIKELY))]


async def test_log_probabilities_of_a_prompt_count_against_the_bound_of_a_slow_reader() -> None:
    ended = []
    inbox = Inbox(Turns(), too_slow=lambda: ended.append(True))
    inbox.put_event(0, 1, Preempted())
    await inbox.take_arrivals()
    entries = tuple(TokenLogprobs(token, -1.0, LIKELY) for token in range(1_000))
    while not ended:
        inbox.put_event(0, 1, PromptScored(entries))
    with pytest.raises(Overloaded, match="reads too slowly"):
        await inbox.take_arrivals()
