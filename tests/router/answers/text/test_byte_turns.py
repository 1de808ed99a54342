"""Whose piece of work is next, with exact sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.answers.text.byte_turns import ByteTurns
from router.placement.fair_queue import Flow

RED, BLUE, GREEN = Flow("red"), Flow("blue"), Flow("green")


def turns_of(*pieces: tuple[Flow, int, str]) -> ByteTurns[str]:
    turns = ByteTurns[str]()
    for flow, size, piece in pieces:
        turns.put(flow, size, piece)
    return turns


def taken(turns: ByteTurns[str]) -> list[str]:
    found = list[str]()
    while (piece := turns.take()) is not None:
        found.append(piece)
    return found


def test_pieces_of_one_tenant_go_in_the_order_of_their_arrival() -> None:
    turns = turns_of((RED, 900, "a"), (RED, 1, "b"), (RED, 30, "c"))
    assert (len(turns), turns.waiting("red"), turns.waiting("blue")) == (3, 931, 0)
    assert taken(turns) == ["a", "b", "c"]
    assert (len(turns), turns.waiting("red")) == (0, 0)
    assert turns.take() is None


def test_tenants_that_wait_get_bytes_by_turns() -> None:
    turns = turns_of(*((RED, 100, f"red {n}") for n in range(3)), *((BLUE, 50, f"blue {n}") for n in range(5)))
    # red ends at 100, 200, 300; blue at 50, 100, ...: of two that start at 100, blue was served last.
    assert taken(turns) == ["red 0", "blue 0", "blue 1", "red 1", "blue 2", "blue 3", "red 2", "blue 4"]


def test_bytes_go_by_weight() -> None:
    heavy = Flow("red", 3.0)
    turns = turns_of(*((heavy, 30, f"red {n}") for n in range(6)), *((BLUE, 30, f"blue {n}") for n in range(2)))
    assert taken(turns) == ["red 0", "blue 0", "red 1", "red 2", "blue 1", "red 3", "red 4", "red 5"]


def test_who_comes_after_a_pause_waits_for_the_piece_in_progress_alone_however_large_its_own_is() -> None:
    turns = turns_of(*((RED, 10, f"red {n}") for n in range(100)))
    assert [turns.take() for _ in range(5)] == [f"red {n}" for n in range(5)]
    turns.put(BLUE, 5_000, "blue 0")
    turns.put(GREEN, 10, "green 0")
    assert [turns.take() for _ in range(3)] == ["blue 0", "green 0", "red 5"]
    turns.put(BLUE, 10, "blue 1")  # red catches up with the 5,000 bytes before
    assert taken(turns) == [*(f"red {n}" for n in range(6, 100)), "blue 1"]


def test_who_comes_after_a_pause_waits_for_one_piece_of_each_other_tenant_at_most() -> None:
    turns = turns_of(*((flow, 10, f"{flow.tenant} {n}") for n in range(9) for flow in (RED, BLUE)))
    assert turns.take() == "red 0"
    turns.put(GREEN, 10, "green 0")
    assert [turns.take() for _ in range(3)] == ["blue 0", "green 0", "red 1"]


def test_tenants_that_come_one_after_the_other_do_not_pass_one_that_waits() -> None:
    turns = turns_of(*((RED, 100, f"red {n}") for n in range(3)))
    order = list[str | None]()
    for number in range(8):
        turns.put(Flow(f"t{number}"), 50, f"t{number}")
        order.append(turns.take())
    assert order == ["red 0", "t0", "t1", "t2", "red 1", "t3", "t4", "t5"]


def test_a_tenant_with_one_piece_at_a_time_gains_nothing_by_its_pauses() -> None:
    turns = turns_of(*((RED, 100, f"red {n}") for n in range(4)))
    order = list[str | None]()
    for number in range(4):
        turns.put(BLUE, 100, f"blue {number}")
        order += [turns.take(), turns.take()]
    assert order == ["red 0", "blue 0", "blue 1", "red 1", "blue 2", "red 2", "blue 3", "red 3"]


def test_a_piece_that_is_withdrawn_costs_its_tenant_nothing() -> None:
    turns = turns_of((RED, 100, "gone"), (RED, 10, "red"), (BLUE, 50, "blue 0"), (BLUE, 50, "blue 1"))
    turns.withdraw("red", "gone")
    turns.withdraw("red", "gone")
    turns.withdraw("green", "unknown")
    assert (len(turns), turns.waiting("red")) == (3, 10)
    assert taken(turns) == ["red", "blue 0", "blue 1"]


def test_the_last_piece_of_a_tenant_may_be_withdrawn() -> None:
    turns = turns_of((RED, 100, "gone"))
    turns.withdraw("red", "gone")
    assert (len(turns), turns.take()) == (0, None)
    turns.put(RED, 1, "red")
    assert taken(turns) == ["red"]


def test_what_was_done_is_forgotten_when_nothing_is_left_to_do_and_not_before() -> None:
    turns = turns_of((RED, 100, "red"), (BLUE, 10, "blue"))
    assert turns.take() == "red"
    turns.rest()
    turns.put(RED, 1, "later")
    assert taken(turns) == ["blue", "later"]
    assert turns.remembered == 2
    turns.rest()
    assert turns.remembered == 0
    turns.put(BLUE, 1, "b")
    turns.put(RED, 1, "r")
    assert taken(turns) == ["b", "r"]


def test_tenants_that_come_no_more_are_forgotten_in_a_thread_that_never_rests() -> None:
    turns, most = turns_of(*((RED, 1, f"red {n}") for n in range(6_000))), 0
    for number in range(5_000):
        turns.put(Flow(f"t{number}"), 1, f"{number}")
        turns.take()
        most = max(most, turns.remembered)
    assert most <= 512


sizes = st.integers(1, 1000)
pieces = st.lists(st.tuples(st.sampled_from([RED, BLUE, Flow("green", 2.0)]), sizes), min_size=1, max_size=60)


@given(pieces)
def test_tenants_that_have_waited_since_the_beginning_got_the_same_by_weight_up_to_a_piece_each(
    sent: list[tuple[Flow, int]],
) -> None:
    turns, largest = ByteTurns[tuple[int, Flow, int]](), max(size for _, size in sent)
    for number, (flow, size) in enumerate(sent):
        turns.put(flow, size, (number, flow, size))
    got = {flow.tenant: 0.0 for flow, _ in sent}
    while (piece := turns.take()) is not None:
        got[piece[1].tenant] += piece[2] / piece[1].weight
        waits = [name for name in got if turns.waiting(name)]
        if len(waits) > 1:
            assert max(got[name] for name in waits) - min(got[name] for name in waits) <= 2 * largest
    assert turns.remembered == len(got)
