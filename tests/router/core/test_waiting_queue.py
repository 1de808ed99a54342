"""Which request gets a worker next."""

from __future__ import annotations

from router.core.waiting_queue import Ticket, WaitingQueue


def order(queue: WaitingQueue[str]) -> list[str]:
    """Empty the queue and return its items in order."""
    names = []
    while head := queue.head():
        ticket, name = head
        names.append(name)
        queue.leave(ticket)
    return names


def join(queue: WaitingQueue[str], *items: tuple[str, int]) -> dict[str, Ticket]:
    tickets = {name: queue.ticket(priority) for name, priority in items}
    for name, ticket in tickets.items():
        queue.join(ticket, name)
    return tickets


def test_equal_priorities_go_by_arrival() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    join(queue, ("a", 0), ("b", 0), ("c", 0))
    assert order(queue) == ["a", "b", "c"]


def test_higher_priority_goes_first() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    join(queue, ("low", -1), ("normal", 0), ("high", 5))
    assert order(queue) == ["high", "normal", "low"]


def test_an_item_that_left_the_middle_is_skipped() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    tickets = join(queue, ("a", 0), ("b", 0), ("c", 0))
    queue.leave(tickets["b"])
    queue.leave(tickets["b"])
    assert len(queue) == 2
    assert order(queue) == ["a", "c"]


def test_a_ticket_that_rejoins_goes_before_later_arrivals() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    tickets = join(queue, ("a", 0), ("b", 0))
    queue.leave(tickets["a"])
    queue.join(tickets["a"], "a again")
    assert order(queue) == ["a again", "b"]


def test_joining_twice_is_one_place() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    ticket = join(queue, ("a", 0))["a"]
    queue.join(ticket, "a again")
    assert len(queue) == 1
    assert order(queue) == ["a"]
    assert len(queue) == 0


def test_leaving_and_joining_again_leaves_one_place() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    ticket = join(queue, ("a", 0), ("b", 0))["b"]
    queue.leave(ticket)
    queue.join(ticket, "b")
    assert order(queue) == ["a", "b"]
