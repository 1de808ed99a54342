"""Which request gets a worker next."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from router.core.fair_queue import PASSED_SECONDS, FairQueue, Flow, Ticket, due_at

RED, BLUE = Flow("red"), Flow("blue")
# Sequences of the largest request.
MOST = 8


def order(queue: FairQueue[str]) -> list[str]:
    """Serve the queue until it is empty and return its items in order."""
    names = []
    while queue:
        ticket, name = queue.head()
        names.append(name)
        queue.serve(ticket)
    return names


def join(queue: FairQueue[str], *items: tuple[str, int], flow: Flow = RED, sequences: int = 1) -> dict[str, Ticket]:
    tickets = {name: queue.ticket(priority, flow, sequences) for name, priority in items}
    for name, ticket in tickets.items():
        queue.join(ticket, name)
    return tickets


def test_equal_priorities_go_by_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    join(queue, ("a", 0), ("b", 0), ("c", 0))
    assert order(queue) == ["a", "b", "c"]


def wait(queue: FairQueue[str], name: str, now: float, deadline: float | None = None, priority: int = 0) -> None:
    queue.join(queue.ticket(priority, RED, due=due_at(now, deadline)), name)


def test_the_earliest_deadline_goes_first_within_a_priority() -> None:
    queue: FairQueue[str] = FairQueue()
    wait(queue, "none", 0.0)
    wait(queue, "late", 1.0, 20.0)
    wait(queue, "soon", 2.0, 5.0)
    wait(queue, "high", 3.0, 25.0, priority=1)
    wait(queue, "also late", 4.0, 20.0)
    assert order(queue) == ["high", "soon", "late", "also late", "none"]


def test_a_far_deadline_is_no_worse_than_none() -> None:
    queue: FairQueue[str] = FairQueue()
    wait(queue, "far", 0.0, 3600.0)
    wait(queue, "none", 1.0)
    assert order(queue) == ["far", "none"]


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.none() | st.floats(0.0, 100.0)), max_size=20))
def test_nobody_passes_a_request_that_has_waited_for_so_long(arrivals: list[tuple[float, float | None]]) -> None:
    """With one tenant and one priority. Those without a deadline are served in the order of their arrival."""
    queue: FairQueue[str] = FairQueue()
    arrivals = sorted(arrivals, key=lambda each: each[0])
    for place, (now, allowed) in enumerate(arrivals):
        wait(queue, str(place), now, None if allowed is None else now + allowed)
    served = [int(name) for name in order(queue)]
    free = [place for place in served if arrivals[place][1] is None]
    assert free == sorted(free)
    for at, place in enumerate(served):
        passed_by = [other for other in served[:at] if other > place]
        assert all(arrivals[other][0] <= arrivals[place][0] + PASSED_SECONDS for other in passed_by)


def test_a_tenants_deadlines_do_not_put_it_before_others() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a", "b"):
        queue.join(queue.ticket(0, RED, due=due_at(0.0, None)), name)
    for name in ("x", "y"):
        queue.join(queue.ticket(0, BLUE, due=due_at(0.0, 1.0)), name)
    assert order(queue) == ["a", "x", "b", "y"]


def test_higher_priority_goes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    join(queue, ("low", -1), ("normal", 0), ("high", 5))
    assert order(queue) == ["high", "normal", "low"]


def test_an_item_that_left_the_middle_is_skipped() -> None:
    queue: FairQueue[str] = FairQueue()
    tickets = join(queue, ("a", 0), ("b", 0), ("c", 0))
    assert queue.leave(tickets["b"]) == "b"
    assert queue.leave(tickets["b"]) is None
    assert len(queue) == 2
    assert order(queue) == ["a", "c"]


def test_a_ticket_that_rejoins_goes_before_later_arrivals_and_costs_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    ticket = join(queue, ("a", 0), ("b", 0), sequences=9)["a"]
    join(queue, ("other", 0), flow=BLUE)
    queue.leave(join(queue, ("gone", 0), flow=BLUE)["gone"])
    assert queue.head()[1] == "other"
    queue.serve(queue.head()[0])
    queue.serve(ticket)
    join(queue, ("another", 0), flow=BLUE)
    queue.join(ticket, "a again")
    assert order(queue) == ["a again", "another", "b"]


def test_joining_twice_is_one_place() -> None:
    queue: FairQueue[str] = FairQueue()
    ticket = join(queue, ("a", 0))["a"]
    queue.join(ticket, "a again")
    assert len(queue) == 1
    assert order(queue) == ["a"]
    assert len(queue) == 0


def test_tenants_take_turns_however_many_requests_each_has() -> None:
    queue: FairQueue[str] = FairQueue()
    join(queue, *((f"red {number}", 0) for number in range(5)))
    join(queue, ("blue 0", 0), ("blue 1", 0), flow=BLUE)
    assert order(queue) == ["red 0", "blue 0", "red 1", "blue 1", "red 2", "red 3", "red 4"]


def test_weights_divide_the_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    join(queue, *((f"red {number}", 0) for number in range(40)), flow=Flow("red", 3.0))
    join(queue, *((f"blue {number}", 0) for number in range(40)), flow=Flow("blue", 1.0))
    first = order(queue)[:40]
    assert sum(name.startswith("red") for name in first) == 30


def test_a_request_costs_its_sequences_and_its_head_start_is_lost_to_a_small_one() -> None:
    queue: FairQueue[str] = FairQueue()
    join(queue, ("64 sequences", 0), sequences=64)
    assert queue.head()[1] == "64 sequences"
    join(queue, ("one", 0), ("two", 0), flow=BLUE)
    assert order(queue) == ["one", "two", "64 sequences"]


def test_a_large_request_gets_its_turn_while_small_ones_keep_coming() -> None:
    queue: FairQueue[str] = FairQueue()
    join(queue, ("large", 0), sequences=8)
    join(queue, *((f"small {number}", 0) for number in range(40)), flow=BLUE)
    assert order(queue).index("large") == 7


def test_a_tenant_over_its_share_goes_after_the_others_and_saves_up_one_request_at_most() -> None:
    queue: FairQueue[str] = FairQueue()
    join(queue, *((f"red {number}", 0) for number in range(9)))
    join(queue, *((f"blue {number}", 0) for number in range(9)), flow=BLUE)
    served = []
    for _ in range(6):
        ticket, name = queue.head(lambda ticket: ticket.flow is RED)
        served.append(name)
        queue.serve(ticket)
    assert served == [f"blue {number}" for number in range(6)]
    assert order(queue)[:4] == ["red 0", "blue 6", "red 1", "blue 7"]


@given(
    sizes=st.lists(st.lists(st.integers(1, MOST), min_size=1, max_size=20), min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=4, max_size=4),
)
def test_tenants_that_wait_get_sequences_by_weight(sizes: list[list[int]], weights: list[float]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for tenant, requests in enumerate(sizes):
        for size in requests:
            queue.join(queue.ticket(0, Flow(str(tenant), weights[tenant]), size), (tenant, size))
    served, left = [0.0] * len(sizes), list(map(len, sizes))
    while all(left):
        ticket, (tenant, size) = queue.head()
        queue.serve(ticket)
        served[tenant] += size / weights[tenant]
        left[tenant] -= 1
        # A turn, and the largest request, which its tenant saves up for.
        assert max(served) - min(served) <= 2 * MOST / min(weights) + 2


dues = st.sampled_from([1.0, 2.0, 3.0])


@given(
    st.lists(st.tuples(st.sampled_from(["red", "blue"]), st.integers(0, 1), st.integers(1, MOST), dues), max_size=8),
    st.integers(0, 6),
    st.sampled_from(["red", "blue", "green"]),
    st.integers(0, 1),
    st.integers(1, MOST),
    dues,
)
@example([("blue", 1, 1, 1.0), ("blue", 1, 1, 1.0), ("red", 1, 1, 2.0)], 1, "red", 1, 2, 1.0)
def test_a_ticket_leads_exactly_when_it_would_be_the_head(
    waiting: list[tuple[str, int, int, float]], served: int, tenant: str, priority: int, sequences: int, due: float
) -> None:
    queue: FairQueue[str] = FairQueue()
    for place, (name, level, size, its_due) in enumerate(waiting):
        queue.join(queue.ticket(level, Flow(name), size, its_due), str(place))
    for _ in range(min(served, len(waiting))):
        queue.serve(queue.head()[0])
    asked, length = Ticket(priority, 0, Flow(tenant), sequences, due), len(queue)
    leads = queue.leads(asked)
    assert len(queue) == length
    ticket = queue.ticket(priority, Flow(tenant), sequences, due)
    queue.join(ticket, "new")
    assert leads == (queue.head()[0] is ticket)


def test_those_before_a_priority_are_counted() -> None:
    queue: FairQueue[str] = FairQueue()
    join(queue, ("low", -1), ("a", 0), ("b", 0), ("high", 5))
    assert [queue.before(priority) for priority in (6, 5, 0, -1)] == [0, 1, 3, 4]
