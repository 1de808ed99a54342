"""When the garbage collector of a service runs. Standard library only."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Call once everything is built: what there is is walked no more, and what comes is walked rarely.

    Services keep a hundred thousand records in rings; a walk over them takes 65 ms, and at the interpreter's own
    thresholds walks were a tenth of a busy router's CPU. They form no cycles; the little that does (errors of broken
    streams) is found in the younger generations.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 1_000)
