"""Threads for work on texts, which tenants use by turns.

Two of them: a text that takes long does not hold up short ones. An encoding cannot be parted: a token may depend on all
that precedes it, and some tokenizers merge across spaces. What can be parted comes here in short pieces: counting the
tokens of a text that is too long, and making text of many tokens.

A thread takes its next piece by itself: it waits for no turn of the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from common.contracts.errors import QuotaViolation, RateLimited
from common.contracts.limits import MAX_WAITING_TEXT_BYTES_A_TENANT, SHORT_TEXT_BYTES
from router.answers.text.byte_turns import ByteTurns
from router.placement.fair_queue import ONE_FLOW, Flow
from router.tenants.tenancy import Tenant

_RETRY_S: Final = 1.0
# Whose turn the work of a call takes: set where the caller is recognised, and inherited by the tasks of its call.
_FLOW: Final[ContextVar[Flow]] = ContextVar("quire_text_work_of", default=ONE_FLOW)
ResultT = TypeVar("ResultT")


def works_for(tenant: Tenant) -> None:
    """Let the texts of the current call, in this task and those that it starts, take the turns of a tenant."""
    _FLOW.set(Flow(tenant.name, tenant.weight))


class Encoder:
    """The two threads; for one event loop. `most` bounds the bytes that one tenant has waiting for each of them."""

    def __init__(self, most: int = MAX_WAITING_TEXT_BYTES_A_TENANT) -> None:
        self._short, self._long = _Thread("tokenizer", most), _Thread("long-texts", most)

    async def run(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of work on so many bytes, which is not begun where the caller goes away before.

        Raises RateLimited when too much of the tenant's waits already.
        """
        thread = self._short if size <= SHORT_TEXT_BYTES else self._long
        return await thread.run(_FLOW.get(), size, work)

    def close(self) -> None:
        """End the threads; work that is not begun is cancelled."""
        self._short.close()
        self._long.close()


class _Piece:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self.done = work, Future[Any]()

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - the waiter gets it, also a Rust panic, which is not an Exception
            self.done.set_exception(error)


class _Thread:
    """One thread. Event loop and thread change the turns under one lock."""

    def __init__(self, name: str, most: int) -> None:
        self._turns: ByteTurns[_Piece] = ByteTurns()
        self._most, self._lock = most, threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, flow: Flow, size: int, work: Callable[[], ResultT]) -> ResultT:
        piece = _Piece(work)
        with self._lock:
            self._check(flow.tenant, size)
            self._turns.put(flow, size, piece)
        self._pool.submit(self._run_next)
        try:
            result: ResultT = await asyncio.wrap_future(piece.done)
            return result
        finally:
            with self._lock:
                self._turns.withdraw(flow.tenant, piece)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while (piece := self._turns.take()) is not None:
                piece.done.cancel()

    def _check(self, tenant: str, size: int) -> None:
        """Raise RateLimited where a tenant has work here and no room for more."""
        waiting = self._turns.waiting(tenant)
        if waiting and waiting + size > self._most:
            what = f"texts of {waiting} bytes wait to be read, and {size} more are sent; at most {self._most} may wait"
            raise RateLimited(QuotaViolation(f"tenant {tenant}.waiting_texts", what), _RETRY_S)

    def _run_next(self) -> None:
        """Run the piece whose turn it is. This is called once for each piece; for withdrawn ones nothing is left."""
        with self._lock:
            piece = self._turns.take()
        if piece is not None:
            piece.run()
        with self._lock:
            self._turns.rest()
