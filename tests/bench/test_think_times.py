"""Think times of sessions: what is learned, what is forgotten, and which requests retain their blocks for them."""

from __future__ import annotations

import pytest

from bench.cache_replay.think_times import ThinkTimes, retained
from bench.cache_replay.workloads import CacheRequest, agents_and_chats
from common.contracts.types import BlockHash

A = BlockHash(bytes(16))


def taught(learned: ThinkTimes, session: str, *gaps: float, tenant: str = "", now: float = 0.0) -> None:
    """Let a session come back after these times, and end once more."""
    learned.note_end(tenant, session, now)
    for gap in gaps:
        now += gap
        learned.note_request(tenant, session, now)
        learned.note_end(tenant, session, now)


def test_a_session_that_has_come_back_gets_what_its_tenant_has_shown() -> None:
    learned = ThinkTimes()
    taught(learned, "a", 4.0)
    assert learned.predict("", "a") is None, "one think time is not enough to learn from"
    for number in range(9):
        taught(learned, f"b{number}", 4.0)
    assert learned.predict("", "a") == pytest.approx(4.0)
    taught(learned, "new")
    assert learned.predict("", "new") is None, "it may never come back"
    taught(learned, "other", 4.0, tenant="blue")
    assert learned.predict("blue", "other") is None, "tenants learn from their own sessions alone"


def test_a_session_with_think_times_of_its_own_gets_those() -> None:
    learned = ThinkTimes()
    for number in range(20):
        taught(learned, f"b{number}", 1.0)
    taught(learned, "slow", 90.0, 100.0, 80.0, 70.0)
    assert learned.predict("", "slow") == 100.0
    taught(learned, "slow", *[5.0] * 8, now=340.0)
    assert learned.predict("", "slow") == 5.0, "the last eight count"


def test_a_request_beside_another_one_of_its_session_tells_nothing() -> None:
    learned = ThinkTimes()
    learned.note_end("", "a", 10.0)
    for _ in range(20):
        learned.note_request("", "a", 5.0)
    assert learned.predict("", "a") is None


def test_longer_times_than_an_hour_are_as_the_longest() -> None:
    learned = ThinkTimes()
    for number in range(9):
        taught(learned, f"b{number}", 1e9)
    assert learned.predict("", "b0") == pytest.approx(0.25 * 2**13.5)


def test_tables_are_bounded_and_later_times_weigh_more() -> None:
    learned = ThinkTimes(most_sessions=10, most_tenants=3)
    for number in range(1000):
        taught(learned, f"s{number}", 1.0, tenant=str(number % 7))
    assert len(learned) == 13
    learned = ThinkTimes()
    for number in range(2000):
        taught(learned, f"s{number}", 1.0 if number < 1000 else 64.0)
    assert learned.predict("", "s1999") == pytest.approx(64.0)


def of_session(name: str, at: float, blocks: int = 4) -> CacheRequest:
    return CacheRequest((A,) * blocks, (), at, session=name)


def test_nothing_is_retained_while_all_sessions_together_want_too_much() -> None:
    """Ten sessions of four blocks come back after 4 s. The eighth is the first of which something is known."""
    requests = [of_session(f"s{number}", at) for at in (0.0, 4.0) for number in range(10)]
    later = [of_session("s0", 7.0), of_session("s1", 100.0)]
    terms = [bool(each.retention) for each in retained([*requests, *later], 100, 0.3)]
    assert terms == [False] * 17 + [True] * 3 + [True, True]
    # Of ten blocks, two sessions have eight. Those of the third count too, and all of them until their time is over.
    terms = [bool(each.retention) for each in retained([*requests, *later], 100, 0.1)]
    assert terms == [False] * 17 + [True] * 2 + [False] * 2 + [True]


def test_requests_without_a_session_retain_nothing() -> None:
    asked = [CacheRequest((A,), (), float(number)) for number in range(50)]
    assert [*retained(asked, 100)] == asked


def test_the_workload_of_sessions_is_the_same_for_a_seed_and_its_sessions_grow() -> None:
    requests = agents_and_chats(3, 200)
    assert requests == agents_and_chats(3, 200) != agents_and_chats(4, 200)
    last: dict[str, CacheRequest] = {}
    for each in requests:
        if each.session and (before := last.get(each.session)) is not None:
            assert each.prompt[: len(before.prompt)] == before.prompt
            assert each.at > before.at
        last[each.session] = each
    assert len(last) > 20
