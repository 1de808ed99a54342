"""Awaits a call that may block for long, such as a lookup of a name, in a thread of its own.

The pools of an event loop have few threads: calls that hang keep all others waiting, and the loop from being closed.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `function` returns, or raise what it raises. Raises OSError where no thread can be started.

    The thread is a daemon: it keeps no process from ending. A cancelled wait leaves the call running to its end.
    """
    call = Future[T]()
    call.set_running_or_notify_cancel()

    def work() -> None:
        try:
            call.set_result(function(*args, **kwargs))
        # Broad: the error is for the one who awaits the call.
        except BaseException as error:  # noqa: BLE001
            call.set_exception(error)

    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return await asyncio.wrap_future(call)
