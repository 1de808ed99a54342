"""A thread that does what it is given, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpuworker.serial_thread import SerialThread


def test_work_is_done_in_order_on_one_thread_before_it_closes() -> None:
    done: list[tuple[int, str]] = []
    thread = SerialThread("worker")
    for n in range(20):
        thread.put(lambda n=n: done.append((n, threading.current_thread().name)))  # type: ignore[misc]
    thread.close()
    thread.close()
    assert done == [(n, "worker") for n in range(20)]


def test_all_work_is_done_within_the_context() -> None:
    seen: list[str] = []

    @contextmanager
    def within() -> Iterator[None]:
        seen.append("enter")
        yield
        seen.append("leave")

    thread = SerialThread("worker", within)
    thread.put(lambda: seen.append("work"))
    thread.close()
    assert seen == ["enter", "work", "leave"]


def test_an_idle_thread_leaves_work_to_the_calling_one() -> None:
    done: list[str] = []
    thread = SerialThread("worker")
    thread.run(lambda: done.append(threading.current_thread().name))
    thread.put(lambda: done.append("put"))
    thread.close()
    assert done == [threading.current_thread().name, "put"]


def test_a_busy_thread_does_the_work_itself_and_in_order() -> None:
    done: list[tuple[str, str]] = []
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(60)
        done.append(("held", threading.current_thread().name))

    thread = SerialThread("worker")
    thread.put(hold)
    assert begun.wait(60)
    thread.run(lambda: done.append(("run", threading.current_thread().name)))
    assert done == []
    go_on.set()
    thread.close()
    assert done == [("held", "worker"), ("run", "worker")]


def test_what_is_put_while_another_thread_works_waits_for_it() -> None:
    done: list[str] = []
    thread = SerialThread("worker")
    put = threading.Event()

    def work() -> None:
        thread.put(lambda: done.append("put"))
        put.set()
        thread.do_there(lambda: done.append("there"))
        done.append("run")

    thread.run(work)
    assert put.is_set()
    thread.close()
    assert done == ["run", "put", "there"]


def test_work_for_this_thread_is_done_at_once_there() -> None:
    done: list[str] = []
    thread = SerialThread("worker")

    def work() -> None:
        thread.do_there(lambda: done.append("there"))
        done.append("work")

    thread.put(work)
    thread.close()
    assert done == ["there", "work"]


def test_work_that_fails_on_the_calling_thread_ends_neither(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    thread = SerialThread("worker")
    thread.run(lambda: [1].remove(2))
    thread.run(lambda: done.append("after"))
    thread.put(lambda: done.append("put"))
    thread.close()
    assert done == ["after", "put"]
    assert "a callable of the thread worker failed" in caplog.text
