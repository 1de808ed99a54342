"""Sets when the garbage collector of a service runs. Standard library only."""

from __future__ import annotations

import gc
from typing import Final

YOUNG: Final = 20_000
_GROWTH: Final = 20_000_000


def collect_rarely(young: int = YOUNG) -> None:
    """Call once everything is built: the collector then skips all present objects and walks new ones rarely.

    Services keep a hundred thousand records in rings. A walk over them takes 65 ms, and at the interpreter's own
    thresholds walks were a tenth of a busy router's CPU. The records form no cycles. The few cycles that exist (errors
    of broken streams) are found in the younger generations. An error of a large request holds megabytes, so the middle
    generation stays small: under 1,000 hostile requests a router peaked at 469 MiB, and at 632 with walks a tenth as
    often; its longest turn took 58 ms, and 197.

    `young` is the number of new objects that lead to a walk over them. A walk takes time for each object, so a small
    number makes short pauses and costs no more in all. Everything is walked after the same growth whatever it is.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, 5, _GROWTH // young)
