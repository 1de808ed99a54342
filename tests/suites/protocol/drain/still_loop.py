"""An event loop that runs until nothing is ready, and whose time stands still unless a world moves it."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class StillLoop(asyncio.SelectorEventLoop):
    """Time is in seconds from 0."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def settle(self) -> None:
        """Run all tasks until each of them waits."""
        while True:
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready:  # type: ignore[attr-defined]  # no public method tells
                return

    def pass_time(self, seconds: float) -> None:
        """Let timers fire, those that were set earlier first."""
        self._now += seconds
        self.settle()

    def end(self) -> None:
        """Cancel all tasks and close the loop."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()
