"""Adoptions that a worker has not answered yet."""

from __future__ import annotations

import asyncio

from common.contracts.errors import QuireError


class Confirmations:
    """Futures by the handle of the sequence that is to be adopted."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[None]] = {}

    def expect(self, handle: int) -> asyncio.Future[None]:
        answer = self._open[handle] = asyncio.get_running_loop().create_future()
        return answer

    def settle(self, handle: int, error: QuireError | None = None) -> None:
        """Answer, with success or an error. A handle that none expects is ignored."""
        answer = self._open.pop(handle, None)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)
            answer.exception()  # whoever waited may have left
