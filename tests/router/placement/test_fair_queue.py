"""Which request gets a worker next."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from common.contracts.clock import ManualClock
from router.placement.fair_queue import PASSED_SECONDS, FairQueue, Flow, Ticket, due_at
from router.placement.slot_shares import SlotShares

RED, BLUE = Flow("red"), Flow("blue")
FLOWS = {"red": RED, "blue": BLUE, "green": Flow("green")}
# Sequences of the largest request.
MOST = 8


class Over:
    """Holdings by which one tenant is over its share, and the others hold nothing."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def load(self, flow: Flow) -> float:
        return 2.0 if flow is self.flow else 0.0

    def is_over(self, flow: Flow, largest: int) -> bool:
        return flow is self.flow

    def is_within(self, ticket: Ticket) -> bool:
        return ticket.flow is not self.flow


class Holds(Over):
    """Holdings by which one tenant holds so much more than its share that others pass it, and is not over it."""

    def is_over(self, flow: Flow, largest: int) -> bool:
        return False


def order(queue: FairQueue[str]) -> list[str]:
    """Serve the queue until it is empty and return its items in order."""
    names = []
    while queue:
        ticket, name = queue.head()
        names.append(name)
        queue.serve_ticket(ticket)
    return names


def join(queue: FairQueue[str], *items: tuple[str, int], flow: Flow = RED, sequences: int = 1) -> dict[str, Ticket]:
    tickets = {name: queue.ticket(priority, flow, sequences) for name, priority in items}
    for name, ticket in tickets.items():
        queue.join_queue(ticket, name)
    return tickets


def test_equal_priorities_go_by_arrival() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, ("a", 0), ("b", 0), ("c", 0))
    assert order(queue) == ["a", "b", "c"]


def wait(queue: FairQueue[str], name: str, now: float, deadline: float | None = None, priority: int = 0) -> None:
    queue.join_queue(queue.ticket(priority, RED, due=due_at(now, deadline)), name)


def test_the_earliest_deadline_goes_first_within_a_priority() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    wait(queue, "none", 0.0)
    wait(queue, "late", 1.0, 20.0)
    wait(queue, "soon", 2.0, 5.0)
    wait(queue, "high", 3.0, 25.0, priority=1)
    wait(queue, "also late", 4.0, 20.0)
    assert order(queue) == ["high", "soon", "late", "also late", "none"]


def test_a_far_deadline_is_no_worse_than_none() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    wait(queue, "far", 0.0, 3600.0)
    wait(queue, "none", 1.0)
    assert order(queue) == ["far", "none"]


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.none() | st.floats(0.0, 100.0)), max_size=20))
def test_nobody_passes_a_request_that_has_waited_for_so_long(arrivals: list[tuple[float, float | None]]) -> None:
    """With one tenant and one priority. Those without a deadline are served in the order of their arrival."""
    queue: FairQueue[str] = FairQueue(ManualClock())
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
    queue: FairQueue[str] = FairQueue(ManualClock())
    for name in ("a", "b"):
        queue.join_queue(queue.ticket(0, RED, due=due_at(0.0, None)), name)
    for name in ("x", "y"):
        queue.join_queue(queue.ticket(0, BLUE, due=due_at(0.0, 1.0)), name)
    assert order(queue) == ["a", "x", "b", "y"]


def test_higher_priority_goes_first() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, ("low", -1), ("normal", 0), ("high", 5))
    assert order(queue) == ["high", "normal", "low"]


def test_an_item_that_left_the_middle_is_skipped() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    tickets = join(queue, ("a", 0), ("b", 0), ("c", 0))
    assert queue.leave_queue(tickets["b"]) == "b"
    assert queue.leave_queue(tickets["b"]) is None
    assert len(queue) == 2
    assert order(queue) == ["a", "c"]


def test_a_ticket_that_rejoins_goes_before_later_arrivals_and_costs_nothing() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    ticket = join(queue, ("a", 0), ("b", 0), sequences=9)["a"]
    join(queue, ("other", 0), flow=BLUE)
    queue.leave_queue(join(queue, ("gone", 0), flow=BLUE)["gone"])
    assert queue.head()[1] == "other"
    queue.serve_ticket(queue.head()[0])
    queue.serve_ticket(ticket)
    join(queue, ("another", 0), flow=BLUE)
    queue.join_queue(ticket, "a again")
    assert order(queue) == ["a again", "another", "b"]


def test_joining_twice_is_one_place() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    ticket = join(queue, ("a", 0))["a"]
    queue.join_queue(ticket, "a again")
    assert len(queue) == 1
    assert order(queue) == ["a"]
    assert len(queue) == 0


def test_tenants_take_turns_however_many_requests_each_has() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, *((f"red {number}", 0) for number in range(5)))
    join(queue, ("blue 0", 0), ("blue 1", 0), flow=BLUE)
    assert order(queue) == ["red 0", "blue 0", "red 1", "blue 1", "red 2", "red 3", "red 4"]


def test_weights_divide_the_turns() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, *((f"red {number}", 0) for number in range(40)), flow=Flow("red", 3.0))
    join(queue, *((f"blue {number}", 0) for number in range(40)), flow=Flow("blue", 1.0))
    first = order(queue)[:40]
    assert sum(name.startswith("red") for name in first) == 30


def test_a_request_costs_its_sequences_and_its_head_start_is_lost_to_a_small_one() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, ("64 sequences", 0), sequences=64)
    assert queue.head()[1] == "64 sequences"
    join(queue, ("one", 0), ("two", 0), flow=BLUE)
    assert order(queue) == ["one", "two", "64 sequences"]


def test_a_large_request_gets_its_turn_while_small_ones_keep_coming() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, ("large", 0), sequences=8)
    join(queue, *((f"small {number}", 0) for number in range(40)), flow=BLUE)
    assert order(queue).index("large") == 7


def test_a_tenant_over_its_share_goes_after_the_others_and_saves_up_one_request_at_most() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, *((f"red {number}", 0) for number in range(9)))
    join(queue, *((f"blue {number}", 0) for number in range(9)), flow=BLUE)
    served = []
    for _ in range(6):
        ticket, name = queue.head(Over(RED))
        served.append(name)
        queue.serve_ticket(ticket)
    assert served == [f"blue {number}" for number in range(6)]
    assert order(queue)[:4] == ["red 0", "blue 6", "red 1", "blue 7"]


def test_weights_that_are_no_whole_multiples_divide_the_turns_exactly() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, *((f"red {number}", 0) for number in range(290)), flow=Flow("red", 1.0))
    join(queue, *((f"blue {number}", 0) for number in range(290)), flow=Flow("blue", 1.9))
    first = order(queue)[:290]
    assert sum(name.startswith("red") for name in first) == 100


def test_weights_divide_sequences_and_not_requests() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, *((f"red {number}", 0) for number in range(20)), flow=Flow("red", 1.0), sequences=2)
    join(queue, *((f"blue {number}", 0) for number in range(20)), flow=Flow("blue", 3.0), sequences=2)
    assert sum(name.startswith("red") for name in order(queue)[:20]) == 5


def test_a_tenant_that_is_passed_by_a_large_request_saves_up_as_much() -> None:
    """Eight sequences pass it while it is over its share; then it has eight of its own."""
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, *((f"red {number}", 0) for number in range(20)))
    join(queue, ("blue 0", 0), ("blue 1", 0), flow=BLUE, sequences=8)
    queue.serve_ticket(queue.head(Over(RED))[0])
    assert order(queue).index("blue 1") == 8 + 7, "what it saved up, and its turns until then"


@given(
    sizes=st.lists(st.lists(st.integers(1, MOST), min_size=1, max_size=20), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4),
)
@example(sizes=[[1] * 20, [1] * 20], weights=[1.0, 1.9, 1.0, 1.0])
@example(sizes=[[2] * 20, [2] * 20], weights=[1.0, 3.0, 1.0, 1.0])
def test_tenants_that_wait_get_sequences_by_weight(sizes: list[list[int]], weights: list[float]) -> None:
    """Nobody is ahead of another one by more than the largest request of either."""
    queue: FairQueue[tuple[int, int]] = FairQueue(ManualClock())
    for tenant, requests in enumerate(sizes):
        for size in requests:
            queue.join_queue(queue.ticket(0, Flow(str(tenant), weights[tenant]), size), (tenant, size))
    served, left = [0.0] * len(sizes), list(map(len, sizes))
    while all(left):
        ticket, (tenant, size) = queue.head()
        queue.serve_ticket(ticket)
        served[tenant] += size / weights[tenant]
        left[tenant] -= 1
        most = [max(requests) / weight for requests, weight in zip(sizes, weights, strict=False)]
        assert max(served) - min(served) <= max(most) + 1e-6


def test_a_request_within_its_share_passes_a_head_that_lacks_places_of_a_tenant_beyond_its_own() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, ("large", 0), sequences=2)
    join(queue, ("small", 0), flow=Flow("blue", 0.1))
    held = Holds(RED)
    assert queue.head(held)[1] == "large"
    passing = queue.passing(queue.head(held)[0], held)
    assert passing is not None
    assert passing[1] == "small"
    head = queue.head(held)[0]
    assert queue.passing(head, Holds(BLUE)) is None, "the tenant of the head is not beyond its share"
    assert queue.passing(head, Over(FLOWS["green"])) is None
    queue.serve_ticket(passing[0])
    assert order(queue) == ["large"]


# ------------------------------------------------------------ by age


def rise(queue: FairQueue[str], count: int) -> list[str]:
    """Serve so many, while another one of a high priority comes before each; return who was served."""
    served = []
    for _ in range(count):
        queue.join_queue(queue.ticket(5), "high")
        ticket, name = queue.head()
        queue.serve_ticket(ticket)
        served.append(name)
    return served


def test_who_has_waited_for_long_gets_every_eighth_place_whatever_its_priority() -> None:
    clock = ManualClock()
    queue: FairQueue[str] = FairQueue(clock, max_wait=30.0)
    join(queue, ("a", -10), ("b", 0), ("c", -10))
    clock.advance(29.9)
    assert set(rise(queue, 20)) == {"high"}
    clock.advance(0.1)
    assert rise(queue, 24) == ["a", *["high"] * 7, "b", *["high"] * 7, "c", *["high"] * 7]
    assert order(queue) == ["high"] * 3, "those that they went before"


def test_a_wait_of_zero_turns_the_places_by_age_off() -> None:
    clock = ManualClock()
    queue: FairQueue[str] = FairQueue(clock, max_wait=0.0)
    join(queue, ("low", -10))
    clock.advance(1e6)
    assert set(rise(queue, 50)) == {"high"}


def test_seven_go_in_order_before_the_first_one_by_age() -> None:
    clock = ManualClock()
    queue: FairQueue[str] = FairQueue(clock, max_wait=30.0)
    join(queue, ("low", -10))
    clock.advance(30.0)
    assert rise(queue, 8) == [*["high"] * 7, "low"]


def test_a_head_by_age_that_has_to_wait_stays_the_head_and_nobody_goes_before_it() -> None:
    """Its 64 sequences have no slots yet; each look at the queue finds it again. It has its turn after 7 for each."""
    clock = ManualClock()
    queue: FairQueue[str] = FairQueue(clock, max_wait=30.0)
    join(queue, ("large", -10), sequences=64)
    clock.advance(30.0)
    assert set(rise(queue, 7 * 64)) == {"high"}
    join(queue, ("high", 5))
    for _ in range(3):
        ticket, name = queue.head()
        assert (name, ticket.by_age) == ("large", True)
        assert not queue.leads(queue.ticket(99))
        clock.advance(10.0)
    queue.serve_ticket(ticket)
    assert order(queue) == ["high"]


def test_a_tenant_at_its_share_has_no_place_by_age_while_others_wait() -> None:
    clock = ManualClock()
    queue: FairQueue[str] = FairQueue(clock, max_wait=30.0)
    join(queue, ("red", -10))
    join(queue, ("blue", -10), flow=BLUE)
    rise(queue, 7)
    clock.advance(30.0)
    queue.join_queue(queue.ticket(5), "high")
    assert (queue.head()[1], queue.head(Over(RED))[1], queue.head(Over(BLUE))[1]) == ("red", "blue", "red")
    queue.leave_queue(queue.head(Over(RED))[0])
    queue.leave_queue(queue.head()[0])
    join(queue, ("red again", -10))
    clock.advance(30.0)
    assert queue.head(Over(RED))[1] == "high", "the tenant of the high priority waits too"


def test_the_least_load_goes_first_by_age_then_the_first_arrival() -> None:
    clock = ManualClock()
    queue: FairQueue[str] = FairQueue(clock, max_wait=30.0)
    join(queue, ("red", -10))
    join(queue, ("blue", -10), flow=BLUE)
    rise(queue, 7)
    clock.advance(30.0)
    counts = SlotShares()
    assert queue.head(counts.among(8, queue.flows()))[1] == "red"
    counts.take_slot(RED)
    assert queue.head(counts.among(8, queue.flows()))[1] == "blue"


def test_the_time_at_a_worker_is_no_wait_and_the_wait_before_it_counts() -> None:
    clock = ManualClock()
    queue: FairQueue[str] = FairQueue(clock, max_wait=30.0)
    ticket = join(queue, ("low", -10))["low"]
    clock.advance(20.0)
    queue.serve_ticket(ticket)
    clock.advance(1000.0)
    rise(queue, 7)
    queue.join_queue(ticket, "low again")
    clock.advance(9.0)
    assert rise(queue, 1) == ["high"]
    clock.advance(1.0)
    assert rise(queue, 1) == ["low again"]


@given(
    st.lists(
        st.tuples(st.floats(0.0, 9.0), st.sampled_from(["red", "blue"]), st.integers(-2, 2), st.integers(0, 3)),
        min_size=1,
        max_size=120,
    )
)
def test_nobody_who_is_old_waits_for_more_than_its_turns(steps: list[tuple[float, str, int, int]]) -> None:
    """Eight admissions for each one that waits and arrived before it, and eight for itself."""
    clock = ManualClock()
    queue: FairQueue[int] = FairQueue(clock, max_wait=30.0)
    joined, allowed = dict[int, float](), dict[int, int]()
    for number, (seconds, tenant, priority, serves) in enumerate(steps):
        clock.advance(seconds)
        queue.join_queue(queue.ticket(priority, Flow(tenant)), number)
        joined[number] = clock.now
        for _ in range(min(serves, len(queue))):
            for place, each in enumerate(joined):
                if clock.now - joined[each] >= 30.0:
                    allowed.setdefault(each, 8 * (place + 1))
            ticket, served = queue.head()
            queue.serve_ticket(ticket)
            del joined[served]
            allowed.pop(served, None)
            for each in allowed:
                allowed[each] -= 1
                assert allowed[each] > 0, "it is served before its turns are over"


dues = st.sampled_from([1.0, 2.0, 3.0])


@given(
    st.lists(st.tuples(st.sampled_from(["red", "blue"]), st.integers(0, 1), st.integers(1, MOST), dues), max_size=8),
    st.integers(0, 9),
    st.sampled_from(["red", "blue", "green"]),
    st.integers(0, 1),
    st.integers(1, MOST),
    dues,
    st.sampled_from([Over(RED), Over(BLUE), Holds(RED), Holds(BLUE), Over(Flow("nobody"))]),
)
@example([("blue", 1, 1, 1.0), ("blue", 1, 1, 1.0), ("red", 1, 1, 2.0)], 1, "red", 1, 2, 1.0, Over(BLUE))
@example([("blue", 1, 1, 1.0)] * 7 + [("blue", 0, 1, 1.0)], 7, "red", 1, 1, 1.0, Over(BLUE))
@example([("blue", 1, 1, 1.0)] * 7 + [("blue", 0, 1, 1.0)], 7, "blue", 1, 1, 1.0, Over(BLUE))
def test_a_ticket_leads_exactly_when_it_would_be_the_head_or_pass_it(
    waiting: list[tuple[str, int, int, float]],
    served: int,
    tenant: str,
    priority: int,
    sequences: int,
    due: float,
    held: Over,
) -> None:
    clock = ManualClock()
    queue: FairQueue[str] = FairQueue(clock)
    for place, (name, level, size, its_due) in enumerate(waiting):
        queue.join_queue(queue.ticket(level, FLOWS[name], size, its_due), str(place))
    for _ in range(min(served, len(waiting))):
        queue.serve_ticket(queue.head()[0])
    clock.advance(30.0)
    asked, length = Ticket(priority, 0, FLOWS[tenant], sequences, due), len(queue)
    leads = queue.leads(asked, held)
    assert len(queue) == length
    ticket = queue.ticket(priority, FLOWS[tenant], sequences, due)
    queue.join_queue(ticket, "new")
    passing = queue.passing(queue.head(held)[0], held)
    assert leads == (queue.head(held)[0] is ticket or (passing is not None and passing[0] is ticket))


def test_those_before_a_priority_are_counted() -> None:
    queue: FairQueue[str] = FairQueue(ManualClock())
    join(queue, ("low", -1), ("a", 0), ("b", 0), ("high", 5))
    assert [queue.before(priority) for priority in (6, 5, 0, -1)] == [0, 1, 3, 4]


def test_an_old_one_of_a_lower_priority_whose_turn_it_is_counts_among_those_before() -> None:
    clock = ManualClock()
    queue: FairQueue[str] = FairQueue(clock, max_wait=30.0)
    join(queue, ("low", -1), ("also low", -1))
    rise(queue, 6)
    join(queue, ("high", 5))
    clock.advance(30.0)
    assert [queue.before(priority) for priority in (6, 5)] == [0, 2], "six were served; after the next one it is age's"
    rise(queue, 1)
    assert [queue.before(priority) for priority in (6, 5)] == [1, 2]
