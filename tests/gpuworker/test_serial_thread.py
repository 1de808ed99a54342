"""A thread that does what it is given, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
