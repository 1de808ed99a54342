"""Finds the rank of a worker that died or stands still, and what differs between ranks at the start.

All of it is pure but `watch_first`, the body of a thread.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from typing import Final

from gpuworker.native.ranks import RankBoard

_log = logging.getLogger(__name__)

LOOK_S: Final = 0.2
"""Seconds between two looks at the beats of the others; each rank beats as often."""
STILL_LOOKS: Final = 6
_LATE_S: Final = 0.5


class BeatWatch:
    """Counts, for each other rank, the looks at which its beats stood still.

    A look that came late says nothing: this process may have stood still itself, or the whole machine.
    """

    def __init__(self, beats: Mapping[int, int], now: float) -> None:
        """`beats` are those of the other ranks now; `now` is in seconds of a monotonic clock."""
        self._beats, self._looked = dict(beats), now
        self._still = dict.fromkeys(beats, 0)

    def still(self, beats: Mapping[int, int], now: float) -> int | None:
        """Return a rank that has stood still for `STILL_LOOKS` looks in time; None while all run."""
        late, self._looked = now - self._looked > LOOK_S + _LATE_S, now
        for rank, beat in beats.items():
            if beat != self._beats[rank]:
                self._beats[rank], self._still[rank] = beat, 0
            elif not late:
                self._still[rank] += 1
        return next((rank for rank, looks in self._still.items() if looks >= STILL_LOOKS), None)


def stood_still_words(rank: int, *, elsewhere: bool = False) -> str:
    """Return what to say of a rank without beats; those of one on another host come over a network."""
    beyond = ", or its host cannot be reached" if elsewhere else ""
    return f"rank {rank} stood still for {LOOK_S * STILL_LOOKS:.1f} s{beyond}"


def how_it_ended(status: int) -> str:
    """Return what to say of a process that ended; a negative status is that of a signal."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"


def watch_first(board: RankBoard, parent: int) -> None:
    """Follow rank 0: end with it, and kill it when it stands still while it serves; the body of a thread.

    `parent` is rank 0, or on another host what follows it there, and what a lost rank 0 ends all the same.
    """
    watch: BeatWatch | None = None
    while os.getppid() == parent:
        time.sleep(LOOK_S)
        beats, now = {0: board.beats(0)}, time.monotonic()
        if not board.serving:
            continue
        if watch is None:
            watch = BeatWatch(beats, now)
        elif watch.still(beats, now) is not None:
            _log.critical("the worker ends: %s", stood_still_words(0))
            os.kill(parent, signal.SIGKILL)
            break
    os._exit(0)


def differences(own: Mapping[str, str], others: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return each fact in which a rank differs from rank 0, which is `own`, in words."""
    return [
        f"rank {rank} has {name} {facts.get(name, 'none'):.200}, and rank 0 has {value}"
        for rank, facts in sorted(others.items())
        for name, value in own.items()
        if facts.get(name) != value
    ]
