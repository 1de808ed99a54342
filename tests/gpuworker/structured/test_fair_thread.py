"""A thread on which tenants take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from gpuworker.structured.grammars import FairThread, Turns

PATIENCE = 120.0


def drained(turns: Turns[str]) -> list[str]:
    return list(iter(turns.take, None))


def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    turns: Turns[str] = Turns()
    for tenant, item in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]:
        turns.put(tenant, item)
    assert len(turns) == 6
    assert drained(turns) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_tenant_that_comes_back_joins_the_end_of_the_round() -> None:
    turns: Turns[str] = Turns()
    for tenant, item in [("a", "a1"), ("b", "b1"), ("b", "b2")]:
        turns.put(tenant, item)
    assert turns.take() == "a1"
    turns.put("a", "a2")
    assert drained(turns) == ["b1", "a2", "b2"]


def test_what_is_discarded_costs_its_tenant_no_turn() -> None:
    turns: Turns[str] = Turns()
    for tenant, item in [("a", "a1"), ("b", "b1"), ("a", "a2")]:
        turns.put(tenant, item)
    turns.discard("a", "a1")
    turns.discard("b", "b1")
    turns.discard("c", "a2")
    assert drained(turns) == ["a2"]
    assert turns.take() is None


class Held:
    """A thread that is busy until `release`, and the names of what it has run since."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.thread: FairThread[str] = FairThread(executor)
        self.ran: list[str] = []
        self._busy, self._go_on = threading.Event(), threading.Event()
        self.first = self.thread.submit("first", self._hold)
        assert self._busy.wait(PATIENCE)

    def _hold(self) -> str:
        self._busy.set()
        assert self._go_on.wait(PATIENCE)
        return "first"

    def submit(self, tenant: str, name: str) -> Future[str]:
        def work() -> str:
            self.ran.append(name)
            if name == "bad":
                raise ZeroDivisionError("a bug")
            return name

        return self.thread.submit(tenant, work)

    def release(self) -> None:
        self._go_on.set()


@pytest.fixture
def held() -> Iterator[Held]:
    with ThreadPoolExecutor(1) as executor:
        made = Held(executor)
        yield made
        made.release()


def test_work_of_one_tenant_waits_for_one_piece_of_another(held: Held) -> None:
    futures = [held.submit("many", f"many {number}") for number in range(50)]
    futures.append(held.submit("few", "few"))
    held.release()
    wait(futures, PATIENCE)
    assert held.ran[:3] == ["many 0", "few", "many 1"]
    assert futures[-1].result() == "few"


def test_work_that_is_cancelled_leaves_at_once(held: Held) -> None:
    futures = [held.submit("a", "a"), held.submit("b", "b")]
    assert futures[0].cancel()
    assert not held.first.cancel()
    assert len(held.thread._work) == 1
    held.release()
    assert futures[1].result(PATIENCE) == "b"
    assert held.ran == ["b"]


def test_an_error_ends_its_own_work_alone(held: Held) -> None:
    bad, good = held.submit("a", "bad"), held.submit("a", "good")
    held.release()
    assert isinstance(bad.exception(PATIENCE), ZeroDivisionError)
    assert good.result(PATIENCE) == "good"


def test_a_thread_that_was_idle_begins_again(held: Held) -> None:
    held.release()
    assert held.first.result(PATIENCE) == "first"
    for name in ("one", "two"):
        assert held.submit("a", name).result(PATIENCE) == name
