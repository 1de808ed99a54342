"""Sets how the C library allocates memory in a service. Standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_M_ARENA_MAX: Final = -8
# An operator's own choice counts.
_VARIABLES: Final = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def one_arena() -> None:
    """Call before any thread begins: glibc then keeps one heap, and not one for each thread up to eight a core.

    Memory that one heap has free serves no thread of another. gRPC's threads come and go, and take whatever heap is
    there: with many heaps a router of 27 MiB of native memory had up to 11 MiB of free pieces, with one 1.5. The
    interpreter's lock leaves little to allocate at once, so one heap costs a router no throughput.
    """
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in _VARIABLES):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
