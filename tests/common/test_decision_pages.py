"""Pages of a ring, and what a watch sees of it: exact numbers, whatever the ring has lost meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from common.contracts.errors import InvalidRequest, Overloaded
from common.contracts.limits import MAX_WATCHED_DECISIONS
from common.contracts.types import Decision, DecisionKind
from common.decisions.pages import bounds_of, page_of, query_of
from common.decisions.query import DecisionQuery
from common.decisions.ring import DecisionRing
from common.decisions.watch import WatcherLimit, watched
from common.process.loop_turns import A_STEP
from quire.decision.v1 import decision_pb2 as pb
from tests.support.turns import take_turn, until_blocked

ALL = DecisionQuery()


def record(number: int, kind: DecisionKind = DecisionKind.ROUTING, **fields: str) -> Decision:
    return Decision(f"d{number}", kind, number * 10, "worker-0", fields.pop("request_id", f"r{number}"), **fields)  # type: ignore[arg-type]


def ring_of(count: int, capacity: int = 100) -> DecisionRing:
    ring = DecisionRing(capacity, source="router-a", began_ns=5)
    for number in range(1, count + 1):
        ring.record(record(number))
    return ring


def page(ring: DecisionRing, asked: pb.ListDecisionsRequest) -> pb.ListDecisionsResponse:
    return asyncio.run(page_of(ring, asked))


def ids(answer: pb.ListDecisionsResponse) -> list[str]:
    return [each.decision_id for each in answer.decisions]


def test_pages_have_each_record_once_the_newest_first() -> None:
    ring, asked, pages = ring_of(7), pb.ListDecisionsRequest(limit=3), []
    for _ in range(3):
        answer = page(ring, asked)
        pages.append(ids(answer))
        asked.page_token = answer.next_page_token
        ring.record(record(100))  # what comes meanwhile is on none of the later pages
    assert pages == [["d5", "d6", "d7"], ["d2", "d3", "d4"], ["d1"]]
    assert asked.page_token == ""


def test_a_page_of_all_that_matches_has_no_token() -> None:
    assert page(ring_of(3), pb.ListDecisionsRequest(limit=3)).next_page_token == ""
    assert page(ring_of(3), pb.ListDecisionsRequest(limit=3)).source == "router-a"


async def test_other_tasks_have_turns_while_a_page_is_made() -> None:
    """Records that come and go meanwhile change nothing of the page."""
    ring, turns = ring_of(80, capacity=80), 0
    making = asyncio.create_task(page_of(ring, pb.ListDecisionsRequest()))
    while not making.done():
        await take_turn()
        turns += 1
        ring.record(record(80 + turns))
    answer = await making
    assert turns >= 80 // A_STEP
    assert ids(answer) == [f"d{number}" for number in range(1, 81)]
    assert answer.complete_since_unix_nano == 5


def test_records_keep_their_numbers_when_older_ones_go() -> None:
    ring = ring_of(10, capacity=4)
    answer = page(ring, pb.ListDecisionsRequest())
    assert [(each.decision_id, each.sequence) for each in answer.decisions] == [(f"d{n}", n) for n in (7, 8, 9, 10)]
    # The sixth, of the time 60, was the last to go.
    assert answer.complete_since_unix_nano == 61
    assert page(ring_of(3), pb.ListDecisionsRequest()).complete_since_unix_nano == 5
    assert ids(page(ring, pb.ListDecisionsRequest(page_token="router-a:7"))) == []
    assert ids(page(ring, pb.ListDecisionsRequest(page_token="router-a:9"))) == ["d7", "d8"]
    assert ids(page(ring, pb.ListDecisionsRequest(page_token="router-b:9"))) == []


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (pb.ListDecisionsRequest(worker="worker-1"), ["d2"]),
        (pb.ListDecisionsRequest(tenant="red"), ["d3"]),
        (pb.ListDecisionsRequest(kind="outcome"), ["d4"]),
        (pb.ListDecisionsRequest(request_id="r9"), ["d5"]),
        (pb.ListDecisionsRequest(since_unix_nano=20, until_unix_nano=40), ["d2", "d3"]),
        (pb.ListDecisionsRequest(since_unix_nano=50), ["d5"]),
        (pb.ListDecisionsRequest(request_id="r9", kind="grant"), []),
    ],
)
def test_filters(asked: pb.ListDecisionsRequest, found: list[str]) -> None:
    ring = ring_of(1)
    ring.record(record(2, worker="worker-1"))
    ring.record(record(3, tenant="red"))
    ring.record(record(4, DecisionKind.OUTCOME))
    ring.record(record(5, beneficiary="r9"))
    assert ids(page(ring, asked)) == found


def test_pages_of_one_request() -> None:
    ring = DecisionRing(100, source="a")
    for number in range(6):
        ring.record(record(number, request_id="even" if number % 2 == 0 else "odd"))
    first = page(ring, pb.ListDecisionsRequest(request_id="even", limit=2))
    token = first.next_page_token
    assert ids(first) == ["d2", "d4"]
    assert ids(page(ring, pb.ListDecisionsRequest(request_id="even", limit=2, page_token=token))) == ["d0"]


@pytest.mark.parametrize("token", ["7", "a:", "a:x", ":7", "a:7,", "a:-1", "a:" + "9" * 30])
def test_a_token_of_another_make_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest, match="expected next_page_token of an earlier answer"):
        bounds_of(token)


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequest, match="'grants'; expected one of admission, eviction, grant"):
        query_of(pb.ListDecisionsRequest(kind="grants"))


def test_a_watch_goes_on_after_a_number_and_counts_what_is_gone() -> None:
    ring = ring_of(10, capacity=4)
    passed = ring.after(8, ALL)
    assert ([number for number, _ in passed.records], passed.number, passed.lost) == ([9, 10], 10, 0)
    passed = ring.after(2, ALL)
    assert ([number for number, _ in passed.records], passed.number, passed.lost) == ([7, 8, 9, 10], 10, 4)
    passed = ring.after(10, ALL)
    assert (passed.records, passed.number, passed.lost) == ((), 10, 0)
    # Records that do not match are passed too: none of them is lost later.
    passed = ring.after(6, DecisionQuery(kind="grant"))
    assert (passed.records, passed.number, passed.lost) == ((), 10, 0)


def test_one_turn_of_a_watch_is_bounded() -> None:
    ring = ring_of(MAX_WATCHED_DECISIONS + 5, capacity=1000)
    passed = ring.after(0, ALL)
    assert (len(passed.records), passed.number) == (MAX_WATCHED_DECISIONS, MAX_WATCHED_DECISIONS)
    rest = ring.after(passed.number, ALL)
    assert (len(rest.records), rest.number, rest.lost) == (5, MAX_WATCHED_DECISIONS + 5, 0)


async def test_a_watcher_that_does_not_read_is_told_how_many_it_missed() -> None:
    ring = ring_of(2, capacity=3)
    stream = watched(ring, ALL, after=None)
    async with asyncio.timeout(60):
        first = await anext(stream)
        assert (first.records, first.number, first.lost) == ((), 2, 0)
        ring.record(record(3))
        assert [number for number, _ in (await anext(stream)).records] == [3]
        for number in range(4, 11):  # seven records come while nothing is read; three are kept
            ring.record(record(number))
        late = await anext(stream)
        assert ([number for number, _ in late.records], late.lost) == ([8, 9, 10], 4)
        await stream.aclose()
    assert ring._listeners == []


async def test_a_watch_waits_for_the_next_record() -> None:
    ring = ring_of(1)
    stream = watched(ring, DecisionQuery(kind="outcome"), after=None)
    async with asyncio.timeout(60):
        await anext(stream)
        news = asyncio.ensure_future(anext(stream))
        await until_blocked(news)
        ring.record(record(2))
        ring.record(record(3, DecisionKind.OUTCOME))
        assert [number for number, _ in (await news).records] == [3]
        await stream.aclose()


def test_watchers_are_bounded() -> None:
    limit = WatcherLimit(most=1)
    with limit:
        with pytest.raises(Overloaded, match="at most 1"), limit:
            pass
        assert limit.watching == 1
    assert limit.watching == 0
