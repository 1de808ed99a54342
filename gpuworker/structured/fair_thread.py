"""A thread on which tenants take turns: who queues much work delays others by one piece of it at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Turns(Generic[ItemT]):
    """Plain round robin over tenants; within a tenant by arrival. Items are unique. Not for several threads."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[ItemT, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def put(self, tenant: str, item: ItemT) -> None:
        """Add an item; a tenant that had none joins the end of the round."""
        self._lines.setdefault(tenant, OrderedDict())[item] = None

    def take(self) -> ItemT | None:
        """Remove and return the next item; its tenant goes to the end of the round. None when nothing waits."""
        if not self._lines:
            return None
        tenant, line = self._lines.popitem(last=False)
        item, _ = line.popitem(last=False)
        if line:
            self._lines[tenant] = line
        return item

    def discard(self, tenant: str, item: ItemT) -> None:
        """Remove an item, if it still waits."""
        line = self._lines.get(tenant)
        if line is not None and item in line:
            del line[item]
            if not line:
                del self._lines[tenant]


class FairThread(Generic[ResultT]):
    """Runs work on one thread of an executor. Any thread may call `submit`."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._lock = executor, threading.Lock()
        self._turns: Turns[Future[ResultT]] = Turns()
        self._work: dict[Future[ResultT], Callable[[], ResultT]] = {}
        self._running = False

    def submit(self, tenant: str, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `work` when it is the tenant's turn. Work whose future is cancelled before that leaves at once."""
        future: Future[ResultT] = Future()
        with self._lock:
            self._turns.put(tenant, future)
            self._work[future] = work
            idle, self._running = not self._running, True
        future.add_done_callback(lambda done: self._withdraw(tenant, done))
        if idle:
            self._executor.submit(self._run)
        return future

    def _withdraw(self, tenant: str, future: Future[ResultT]) -> None:
        with self._lock:
            self._turns.discard(tenant, future)
            self._work.pop(future, None)

    def _run(self) -> None:
        while (due := self._next()) is not None:
            future, work = due
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - the future ends, whatever the error is
                    future.set_exception(error)

    def _next(self) -> tuple[Future[ResultT], Callable[[], ResultT]] | None:
        with self._lock:
            future = self._turns.take()
            self._running = future is not None
            return None if future is None else (future, self._work.pop(future))
