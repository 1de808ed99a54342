"""The manager's epoch: 1 + max(counter in Redis, state file, highest epoch that any worker has seen).

Taking an epoch in Redis also writes the fence of the index, in the same step. Without Redis the epoch comes from the
other two sources, and the fence is taken when Redis is back.
"""

from __future__ import annotations

import asyncio
import logging

from common.contracts.errors import InvalidConfig, ProtocolViolation
from common.contracts.lease import highest_plausible_epoch
from kvmanager.contracts import epochs
from kvmanager.contracts.ports import IndexStore, IndexUnavailable
from kvmanager.index.state_file import EpochFile

log = logging.getLogger(__name__)


class EpochKeeper:
    """Holds one epoch at a time; it only rises, from above `floor`.

    Raises StaleEpoch once another manager has taken over in Redis.
    """

    def __init__(self, file: EpochFile, store: IndexStore | None, floor: int = 0) -> None:
        self._file, self._store, self._floor = file, store, floor
        self._lock = asyncio.Lock()
        self._answered = False  # whether this process has answered a worker with this epoch
        self._fence = 0  # the last epoch that this process wrote as the fence
        self.epoch = 0

    async def for_attach(self, seen: int) -> int:
        """Return the epoch for the answer to a worker that has accepted `seen`; takes a higher one if need be.

        Raises ProtocolViolation when no manager can have given `seen`.
        """
        async with self._lock:
            self._refuse_implausible(seen)
            if epochs.must_rise(self.epoch, seen, self._answered):
                await self._take(seen)
            self._answered = True
            return self.epoch

    def _refuse_implausible(self, seen: int) -> None:
        own = max(self.epoch, self._floor)
        if seen <= highest_plausible_epoch(own):
            return
        highest = highest_plausible_epoch(max(own, self._stored()))
        if seen > highest:
            raise ProtocolViolation(
                f"the worker has accepted epoch {seen}; no manager of this pool can have one above {highest}. "
                "Start the worker anew: it then accepts any epoch"
            )

    async def fenced(self) -> int:
        """Return the epoch under which the index may be written, after taking one there if that was not done yet.

        Raises IndexUnavailable.
        """
        async with self._lock:
            if self._fence != self.epoch or not self.epoch:
                await self._take(0, need_index=True)
            return self.epoch

    async def renew_fence(self) -> int:
        """Take a higher epoch, because the index has lost the fence. Raises IndexUnavailable."""
        async with self._lock:
            await self._take(0, need_index=True)
            return self.epoch

    async def _take(self, seen: int, need_index: bool = False) -> None:
        epoch = epochs.next_epoch(own=max(self.epoch, self._floor), seen=seen, stored=self._stored())
        if self._store is not None:
            try:
                epoch = await self._store.acquire(epoch, self._fence)
                self._fence = epoch
            except IndexUnavailable as error:
                if need_index:
                    raise
                log.warning("no fence in the index yet; Redis cannot be reached: %s", error)
        self._remember(epoch)
        self.epoch, self._answered = epoch, False
        log.info("took epoch %d", epoch)

    def _stored(self) -> int:
        try:
            return self._file.read()
        except InvalidConfig as error:  # the start has read the file; the own epoch is at least what it held then
            log.error("the stored epoch is lost: %s", error)
            return 0

    def _remember(self, epoch: int) -> None:
        try:
            self._file.write(epoch)
        except (
            InvalidConfig
        ) as error:  # a full disk must not keep workers out; Redis and the workers hold the epoch too
            log.error("the epoch is not stored: %s", error)
