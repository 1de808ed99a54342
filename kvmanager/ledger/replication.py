"""Which prefixes are to be copied to one more worker: those of prompts at several workers, or of prompts that wait.

A prompt is noted by the hashes at some places, four for each doubling of its length. So what two prompts have in common
is known within a fifth, whatever else they hold.

    two workers are asked for a prefix within ten seconds   -> one of the others gets it
    a worker has it, its queue stands, it is asked again     -> a worker that has nothing to wait for gets it

Each prompt makes one copy at most, and a worker gets a prefix once a minute at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import Final, NamedTuple

from common.contracts.types import BlockHash

WINDOW: Final = 10.0
"""Seconds within which two prompts make a prefix hot."""
AGAIN: Final = 60.0
"""Seconds after which a worker may get a prefix once more that it has lost since."""
MOST_PLACES: Final = 1 << 14
"""Places of prompts that are remembered, those asked for last."""
MOST_WORKERS: Final = 4
"""Workers that are remembered for each place."""


class Standing(NamedTuple):
    """A worker as it stands: whether it has all of a prefix, and the sequences that wait and that run there."""

    worker_id: str
    has: bool
    waiting: int
    running: int


class Hot(NamedTuple):
    """A prefix of so many blocks that is in demand: `askers` were asked for it within the window."""

    blocks: int
    askers: frozenset[str]


class Choice(NamedTuple):
    """A worker that is to get a prefix, and why in words."""

    worker_id: str
    why: str


def places_of(blocks: int) -> Iterator[int]:
    """Yield the numbers of leading blocks by which a prompt of so many is noted, ascending."""
    place = 1
    while place <= blocks:
        yield place
        place += max(1, 1 << max(0, place.bit_length() - 3))


class HotPrefixes:
    """Remembers which workers were asked for which prefixes of late."""

    def __init__(self) -> None:
        # When each worker was asked last for what ends with a hash; the hash that was asked for last comes last.
        self._asked: dict[BlockHash, dict[str, float]] = {}
        self._copied: dict[tuple[BlockHash, str], float] = {}

    def note_prompt(self, now: float, worker_id: str, hashes: Items[BlockHash]) -> list[Hot]:
        """Note a prompt; return what of it is hot, the longest first: at several workers, then at one."""
        shared: Hot | None = None
        again: Hot | None = None
        for place in places_of(len(hashes)):
            asked = self._asked.pop(hashes[place - 1], {})
            late = {worker: at for worker, at in asked.items() if at > now - WINDOW}
            askers = frozenset((*late, worker_id))
            if len(askers) > 1:
                shared = Hot(place, askers)
            if worker_id in late:
                again = Hot(place, askers)
            late.pop(worker_id, None)
            kept = list(late.items())[1 - MOST_WORKERS :]
            self._asked[hashes[place - 1]] = {**dict(kept), worker_id: now}
        while len(self._asked) > MOST_PLACES:
            del self._asked[next(iter(self._asked))]
        return sorted({each for each in (shared, again) if each is not None}, key=lambda each: -each.blocks)

    def may_copy(self, now: float, last: BlockHash, worker_id: str) -> bool:
        """Return whether a worker may get what ends with a hash, and count that it does."""
        if self._copied.get((last, worker_id), -AGAIN) > now - AGAIN:
            return False
        self._copied.pop((last, worker_id), None)
        self._copied[last, worker_id] = now
        while len(self._copied) > MOST_PLACES:
            del self._copied[next(iter(self._copied))]
        return True


def choose_worker(hot: Hot, asked: str, workers: Iterable[Standing]) -> Choice | None:
    """Return which worker is to get a hot prefix for which the worker `asked` has a prompt; None: none is.

    Those that were asked for it have it, or get it with their prompts. Of the others the one with the least to do is
    chosen.
    """
    known = {each.worker_id: each for each in workers}
    others = [each for each in known.values() if not each.has and each.worker_id not in hot.askers]
    at = known.get(asked)
    stuck = at is not None and at.has and at.waiting > 0
    if len(hot.askers) < 2:
        others = [each for each in others if stuck and not each.waiting]
    if not others:
        return None
    least = min(others, key=lambda each: (each.waiting, each.running, each.worker_id))
    if len(hot.askers) > 1:
        return Choice(least.worker_id, f"prompts at {' and '.join(sorted(hot.askers))} begin with it")
    return Choice(least.worker_id, f"{asked} has it, and prompts wait there that begin with it")
