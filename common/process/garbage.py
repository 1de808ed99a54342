"""Sets when the garbage collector of a service runs. Standard library only."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_M_ARENA_MAX: Final = -8
# An operator's own choice counts.
_VARIABLES: Final = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


# Sets how the C library allocates memory in a service. Standard library only.
def one_arena() -> None:
    """Call before any thread begins: glibc then keeps one heap, and not one for each thread up to eight a core.

    Memory that one heap has free serves no thread of another. gRPC's threads come and go, and take whatever heap is
    there: with many heaps a router of 27 MiB of native memory had up to 11 MiB of free pieces, with one 1.5. The
    interpreter's lock leaves little to allocate at once, so one heap costs a router no throughput.
    """
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in _VARIABLES):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


# New objects that lead to a walk over them.
YOUNG: Final = 1_000
# Such walks that lead to one over all that came since the last of those.
WALKS: Final = 100
# Objects that lead to a walk over everything, once these are more than a quarter of it.
_GROWTH: Final = 100_000_000


@contextmanager
def lasting() -> Iterator[None]:
    """Walk what is made in this block neither while it is made nor later: modules, which live to the end.

    Imports make 100,000 objects in a router and a million with torch. Walks over them were a fifth of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def collect_rarely(walks: int = WALKS) -> None:
    """Call once everything is built: the collector then skips all present objects and walks new ones rarely.

    Services keep a hundred thousand records in rings. A walk over them takes 65 ms, and at the interpreter's own
    thresholds walks were a tenth of a busy router's CPU. The records form no cycles. The few cycles that exist (gRPC
    makes one for each call) are found in the younger generations. An error of a large request holds megabytes, so the
    middle generation stays small: under 1,000 hostile requests a router peaked at 469 MiB, and at 632 with walks a
    tenth as often; its longest turn took 58 ms, and 197.

    A walk takes time for each object, so a small number makes short pauses and costs no more in all. It also bounds the
    memory of cycles: with 20,000 young objects, those of 4,000 calls waited for their walk.

    After `walks` of them, what survived them is walked over again. A request that is open then, and is in a cycle when
    it ends, stays for hours. So that should be rare where cycles are made, and soon where a long pause is felt.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, walks, _GROWTH // (YOUNG * walks))
