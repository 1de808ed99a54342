"""Moves images to and from frames on disk, with a thread for each direction: a load never waits behind saves."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from common.contracts.transfers import Transfer, TransferEnd
from common.process.priority import stand_back
from gpuworker.memory.disk_frames import DiskFrames
from gpuworker.scheduling.images import EndedTransfer, Image, TransferFailed
from gpuworker.serial_thread import SerialThread

# How far each thread stands back behind those of the steps, where the system has priorities of threads.
_READ_NICE, _WRITE_NICE = 5, 15
log = logging.getLogger(__name__)


class DiskMover:
    """Implements `ImageMover` for the frames of a worker, which it closes at its end.

    `wake` is called by a thread of the mover, whenever a transfer has ended.
    """

    def __init__(self, disk: DiskFrames, wake: Callable[[], None]) -> None:
        self._disk, self._wake = disk, wake
        self._ended: deque[EndedTransfer] = deque()
        self._closed = False
        self._reads = SerialThread("quire-disk-read", partial(_at_priority, _READ_NICE))
        self._writes = SerialThread("quire-disk-write", partial(_at_priority, _WRITE_NICE))

    @property
    def usable(self) -> bool:
        return self._disk.usable

    def start(self, transfer: Transfer, image: Image | None = None) -> None:
        if image is None:
            self._reads.put(partial(self._carry_out, transfer, partial(self._disk.read, transfer)))
        else:
            write = partial(self._disk.write, transfer, image, self._disk.generation)
            self._writes.put(partial(self._carry_out, transfer, write))

    def poll(self) -> list[EndedTransfer]:
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    def clear(self, reset: int) -> None:
        self._disk.clear(reset)

    def close(self) -> None:
        self._closed = True
        self._reads.close()
        self._writes.close()
        self._disk.close()

    # ------------------------------------------------------------ the mover's threads

    def _carry_out(self, transfer: Transfer, work: Callable[[], bytes | None]) -> None:
        if self._closed:
            return
        image, end = None, TransferEnd.DONE
        try:
            image = work()
        except TransferFailed as failure:
            end = failure.end
        except BaseException:  # each transfer ends, whatever the error is
            log.critical("transfer %d failed", transfer.id, exc_info=True)
            end = TransferEnd.FAILED
        self._ended.append(EndedTransfer(transfer, image, end))
        self._wake()


@contextmanager
def _at_priority(nice: int) -> Iterator[None]:
    stand_back(nice)
    yield
