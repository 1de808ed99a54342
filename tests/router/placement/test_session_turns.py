"""Within a tenant, waiting requests take turns by session, and those without one keep the order that they had."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.contracts.clock import ManualClock
from router.placement.fair_queue import FairQueue, Flow, Ticket, due_at

RED, BLUE = Flow("red"), Flow("blue")
# Sequences of the largest request.
MOST = 4


def joined(queue: FairQueue[str], name: str, session: str = "", sequences: int = 1, flow: Flow = RED) -> Ticket:
    ticket = queue.ticket(0, flow, sequences, session=session)
    queue.join_queue(ticket, name)
    return ticket


def served(queue: FairQueue[str], count: int = 1_000) -> list[str]:
    """Serve so many requests, and return their names in order."""
    names = list[str]()
    while queue and len(names) < count:
        ticket, name = queue.head()
        queue.serve_ticket(ticket)
        names.append(name)
    return names


def waiting_sessions(queue: FairQueue[Any]) -> int:
    """Return of how many sessions the queue knows anything."""
    return sum(len(line._sessions) for lines in queue._rounds.values() for line in lines.values())


def test_sessions_of_a_tenant_take_turns() -> None:
    queue = FairQueue[str](ManualClock())
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        joined(queue, name, session=name[0])
    assert served(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_one_of_a_thousand_requests_goes_before_a_session_that_has_just_come() -> None:
    queue = FairQueue[str](ManualClock())
    for number in range(1_000):
        joined(queue, f"a{number}", "a")
    assert served(queue, 3) == ["a0", "a1", "a2"]
    joined(queue, "b0", "b")
    joined(queue, "c0", "c")
    assert served(queue, 4) == ["a3", "b0", "c0", "a4"]


def test_turns_count_sequences() -> None:
    """A session of requests of three sequences gets one while another one gets three."""
    queue = FairQueue[str](ManualClock())
    for number in range(3):
        joined(queue, f"a{number}", "a", sequences=3)
    for number in range(8):
        joined(queue, f"b{number}", "b")
    assert served(queue) == ["b0", "b1", "a0", "b2", "b3", "b4", "a1", "b5", "b6", "b7", "a2"]


def test_of_equal_turns_the_session_that_has_waited_longest_is_first() -> None:
    queue = FairQueue[str](ManualClock())
    for number in range(3):
        joined(queue, f"b{number}", "b")
    joined(queue, "a0", "a", sequences=2)
    assert served(queue) == ["b0", "a0", "b1", "b2"]


def test_who_sends_a_new_id_each_time_does_not_starve_a_session_and_leaves_nothing() -> None:
    queue, turns = FairQueue[str](ManualClock()), list[int]()
    joined(queue, "a", "a")
    for number in range(100):
        joined(queue, f"new{number}", f"new{number}")
        (name,) = served(queue, 1)
        if name == "a":
            turns.append(number)
            joined(queue, "a", "a")
    # Those that waited when it joined, and nobody who came later: one more each time, because it is one more itself.
    assert turns == [0, 2, 5, 9, 14, 20, 27, 35, 44, 54, 65, 77, 90]
    assert waiting_sessions(queue) == len(queue) == len(turns) + 1
    served(queue)
    assert (len(queue), waiting_sessions(queue), queue.flows()) == (0, 0, set())


def test_a_session_starts_anew_once_none_of_its_requests_waits() -> None:
    """What it got before neither helps nor harms it."""
    queue = FairQueue[str](ManualClock())
    for number in range(5):
        joined(queue, f"b{number}", "b")
    joined(queue, "a0", "a")
    assert served(queue, 3) == ["b0", "a0", "b1"]
    joined(queue, "a1", "a")
    joined(queue, "a2", "a")
    assert served(queue) == ["b2", "a1", "b3", "a2", "b4"]


def test_requests_without_a_session_have_as_many_turns_as_there_are_of_them() -> None:
    """So nobody waits longer for not naming a session, and a session does not wait for all of them."""
    queue = FairQueue[str](ManualClock())
    for number in range(3):
        joined(queue, f"a{number}", "a")
    for number in range(4):
        joined(queue, f"-{number}")
    assert served(queue) == ["-0", "-1", "a0", "-2", "a1", "-3", "a2"]


def test_sessions_of_two_tenants_with_one_name_share_nothing() -> None:
    queue = FairQueue[str](ManualClock())
    for number in range(3):
        joined(queue, f"red{number}", "talk")
    for session in ("talk", "other"):
        joined(queue, f"blue {session}", session, flow=BLUE)
    assert served(queue) == ["red0", "blue talk", "red1", "blue other", "red2"]


def test_a_deadline_counts_within_its_session_alone() -> None:
    queue = FairQueue[str](ManualClock())
    for name, deadline in (("a slow", None), ("b slow", None), ("a quick", 5.0)):
        queue.join_queue(queue.ticket(0, RED, 1, due_at(0.0, deadline), name[0]), name)
    assert served(queue) == ["a quick", "b slow", "a slow"]


def test_a_request_that_lost_its_worker_goes_first_and_pays_nothing() -> None:
    queue = FairQueue[str](ManualClock())
    lost = joined(queue, "a lost", "a")
    served(queue)
    for name in ("b1", "a1", "b2"):
        joined(queue, name, name[0])
    queue.join_queue(lost, "a lost")
    assert served(queue) == ["a lost", "b1", "a1", "b2"]


def test_a_request_by_age_pays_and_the_others_keep_their_turns() -> None:
    clock = ManualClock()
    queue = FairQueue[str](clock, max_wait=30.0)
    for number in range(12):
        joined(queue, f"a{number}", "a")
    clock.advance(31.0)
    for number in range(8):
        joined(queue, f"b{number}", "b")
    names = served(queue, 12)
    assert names[:8] == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4"], "the eighth goes by age"
    assert names[8:] == ["b3", "b4", "a5", "b5"], "which was a turn of its session"


def test_a_turn_by_age_moves_nobody_behind_it() -> None:
    """Who comes after it begins where the last turn in order was."""
    clock = ManualClock()
    queue = FairQueue[str](clock, max_wait=30.0)
    for number in range(4):
        joined(queue, f"a{number}", "a")
    clock.advance(31.0)
    for session in "bcdefgh":
        joined(queue, f"{session}0", session)
    assert served(queue, 8) == ["a0", "b0", "c0", "d0", "e0", "f0", "g0", "a1"]
    joined(queue, "x0", "x")
    assert served(queue) == ["h0", "x0", "a2", "a3"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0.0, 90.0)), max_size=24))
def test_what_leads_is_what_would_be_the_head(arrivals: list[tuple[int, str, float]]) -> None:
    """Of every state: a ticket leads if and only if it is the head once it has joined."""
    queue = FairQueue[str](ManualClock())
    for place, (sequences, session, due) in enumerate(arrivals):
        if not sequences and queue:
            queue.serve_ticket(queue.head()[0])
            continue
        asked = queue.ticket(0, RED, max(1, sequences), due, "" if session == "c" else session)
        leads = queue.leads(asked)
        queue.join_queue(asked, str(place))
        assert leads == (queue.head()[0] is asked)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, MOST), st.floats(0.0, 60.0)), max_size=40))
def test_without_sessions_the_order_is_that_of_what_is_due(steps: list[tuple[bool, int, float]]) -> None:
    queue, waiting = FairQueue[str](ManualClock()), list[tuple[float, int]]()
    for place, (serves, sequences, due) in enumerate(steps):
        if serves and queue:
            _, name = queue.head()
            assert int(name) == min(waiting)[1]
            waiting.remove(min(waiting))
            queue.serve_ticket(queue.head()[0])
            continue
        queue.join_queue(queue.ticket(0, RED, sequences, due), str(place))
        waiting.append((due, place))


class Turns(RuleBasedStateMachine):
    """Sessions come, wait, leave and are served in any order; a plain account of all of it stands beside the queue."""

    @initialize()
    def begin(self) -> None:
        self.queue = FairQueue[int](ManualClock())
        self.waiting: dict[Ticket, int] = {}
        self.number = 0
        # Of each session: sequences that it got since it waits, and of each pair what the other got meanwhile.
        self.since: dict[str, Counter[str]] = {}

    @rule(session=st.sampled_from(["", "a", "b", "c", "d"]), sequences=st.integers(1, MOST))
    def join(self, session: str, sequences: int) -> None:
        ticket = self.queue.ticket(0, RED, sequences, session=session)
        self.queue.join_queue(ticket, self.number)
        self.waiting[ticket] = self.number
        self.number += 1
        if session not in self.since:
            self.since[session] = Counter()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting, key=lambda each: each.arrival)))
        assert self.queue.leave_queue(ticket) == self.waiting.pop(ticket)
        self._forget()

    @precondition(lambda self: self.waiting)
    @rule()
    def serve(self) -> None:
        ticket, item = self.queue.head()
        assert item == self.waiting[ticket]
        own = [each for each in self.waiting if each.session == ticket.session]
        assert ticket is min(own, key=lambda each: each.place), "within a session by what is due"
        cost = ticket.cost
        self.queue.serve_ticket(ticket)
        del self.waiting[ticket]
        for counts in self.since.values():
            counts[ticket.session] += cost
        self._forget()

    def _forget(self) -> None:
        left = {each.session for each in self.waiting}
        for session in [each for each in self.since if each not in left]:
            del self.since[session]
            for counts in self.since.values():
                del counts[session]

    @invariant()
    def nobody_is_ahead_by_more_than_two_requests(self) -> None:
        """Of two sessions that have waited at the same time, since the one that came last."""
        for name, counts in self.since.items():
            for other in self.since:
                if name and other:
                    assert counts[other] <= counts[name] + 2 * MOST

    @invariant()
    def the_queue_knows_the_sessions_that_wait_and_no_other(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert waiting_sessions(self.queue) == len({each.session for each in self.waiting})


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
