"""Memory that a process asks for gets its pages when they are first written: here beside the steps, not within them."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from common.process.priority import stand_back

log = logging.getLogger(__name__)

_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of Linux 5.14: pages are there, as after a write, and hold what they held."""
_PIECE: Final = 2 << 20
"""Bytes: a huge page, which one fault brings whole."""
_NICE: Final = 19
Populate = Callable[[int, int], int]
"""Brings the pages from an address on, so many bytes; returns 0, or a number of `errno`."""


def warm_memory(memory: torch.Tensor) -> threading.Thread | None:
    """Bring the pages of a tensor of this machine's memory, in a thread that stands back; None where that cannot be.

    It begins at the front and takes half of the time of one core at most. What is written meanwhile stays.
    """
    populate = _populate()
    if populate is None or memory.device.type != "cpu" or not memory.numel():
        return None
    # The thread keeps the memory: it must not be unmapped under the call.
    thread = threading.Thread(target=_bring, args=(memory, populate), name="quire-warm-memory", daemon=True)
    thread.start()
    return thread


def _populate() -> Populate | None:
    if sys.platform != "linux":
        return None
    # Unlike that of `mmap`, a call by `ctypes` lets other threads of Python run.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate(address: int, size: int) -> int:
        return 0 if madvise(address, size, _POPULATE_WRITE) == 0 else ctypes.get_errno()

    return populate


def _bring(memory: torch.Tensor, populate: Populate, sleep: Callable[[float], None] = time.sleep) -> None:
    stand_back(_NICE)
    for address, size in pieces(memory.data_ptr(), memory.nbytes):
        began = time.monotonic()
        while (failed := populate(address, size)) in (errno.EINTR, errno.EAGAIN):
            sleep(time.monotonic() - began)
        if failed:
            if failed != errno.EINVAL:  # of older kernels
                log.warning("the pages of host memory come with its first use: %s", os.strerror(failed))
            return
        sleep(time.monotonic() - began)


def pieces(address: int, size: int) -> list[tuple[int, int]]:
    """Return the whole pages within so many bytes from an address on, in pieces that end where huge pages do."""
    page = os.sysconf("SC_PAGE_SIZE")
    at, end, found = -(-address // page) * page, (address + size) // page * page, list[tuple[int, int]]()
    while at < end:
        after = min(end, (at // _PIECE + 1) * _PIECE)
        found.append((at, after - at))
        at = after
    return found
