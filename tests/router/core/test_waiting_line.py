"""Who gets a worker next."""

from __future__ import annotations

from router.core.waiting_line import Ticket, WaitingLine


def order(line: WaitingLine[str]) -> list[str]:
    """Empty the line and return who came out, in order."""
    names = []
    while head := line.head():
        names.append(head.item)
        line.leave(head)
    return names


def join(line: WaitingLine[str], *people: tuple[str, int]) -> dict[str, Ticket[str]]:
    tickets = {name: line.ticket(name, priority) for name, priority in people}
    for ticket in tickets.values():
        line.join(ticket)
    return tickets


def test_equal_priorities_go_by_arrival() -> None:
    line: WaitingLine[str] = WaitingLine()
    join(line, ("a", 0), ("b", 0), ("c", 0))
    assert order(line) == ["a", "b", "c"]


def test_higher_priority_goes_first() -> None:
    line: WaitingLine[str] = WaitingLine()
    join(line, ("low", -1), ("normal", 0), ("high", 5))
    assert order(line) == ["high", "normal", "low"]


def test_who_leaves_the_middle_is_not_called() -> None:
    line: WaitingLine[str] = WaitingLine()
    tickets = join(line, ("a", 0), ("b", 0), ("c", 0))
    line.leave(tickets["b"])
    line.leave(tickets["b"])
    assert len(line) == 2
    assert order(line) == ["a", "c"]


def test_who_comes_back_stands_before_later_arrivals() -> None:
    line: WaitingLine[str] = WaitingLine()
    tickets = join(line, ("a", 0), ("b", 0))
    line.leave(tickets["a"])
    line.join(tickets["a"])
    assert order(line) == ["a", "b"]


def test_joining_twice_is_one_place() -> None:
    line: WaitingLine[str] = WaitingLine()
    ticket = join(line, ("a", 0))["a"]
    line.join(ticket)
    assert len(line) == 1
    assert order(line) == ["a"]
    assert len(line) == 0


def test_leaving_and_joining_again_leaves_one_place() -> None:
    line: WaitingLine[str] = WaitingLine()
    ticket = join(line, ("a", 0), ("b", 0))["b"]
    line.leave(ticket)
    line.join(ticket)
    assert order(line) == ["a", "b"]
