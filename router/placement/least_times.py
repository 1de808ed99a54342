"""Lower bounds of the seconds to a first token, of all of many workers, from one look at them.

A deadline that none of the priced workers keeps asks for all the others, and a client may send many such deadlines. To
price a worker costs ten microseconds; to compare a bound costs less than one. The look is at no request in particular:
what one client asks changes nothing for the others. So the bound has what is before any request, and the request's own
work at the worker's rates. A request that needs more places or blocks may have to wait for longer than its bound says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.placement.shortlist import LOOK_EVERY_S, MOST_PRICED
from router.placement.worker_model import Capacity, WorkerModel


@dataclass(frozen=True, slots=True)
class LeastTime:
    """Of the smallest request at one worker: seconds before it, of each prompt token, and of the step that samples."""

    worker: WorkerModel
    before_s: float
    token_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Pairs of least seconds to the first token and worker ids: with what is before a request there, and without."""

    full: Sequence[tuple[float, str]]
    work: Sequence[tuple[float, str]]
    recovers: bool
    """Whether a worker in trouble may soon be well, and serve the request."""

    def soonest(self) -> frozenset[str]:
        """Return the ids of those with the lowest bounds of both kinds."""
        half = MOST_PRICED // 2
        return frozenset(name for pairs in (self.full, self.work) for _, name in heapq.nsmallest(half, pairs))

    def least_s(self, but: Collection[str], passes: bool) -> float:
        """Return the least bound of the other workers; infinity where there is none."""
        pairs = self.work if passes else self.full
        return min((seconds for seconds, name in pairs if name not in but), default=math.inf)


class LeastTimes:
    """What the last look at all workers showed. It counts for `LOOK_EVERY_S`."""

    def __init__(self) -> None:
        self._looked_at, self._workers = float("-inf"), 0
        self._capacities: list[Capacity] = []
        # By worker id: seconds before a request, of a prompt token, of a step, and the place of its capacity.
        self._times: dict[str, tuple[float, float, float, int]] = {}
        # Those in trouble, and which of them may soon be well.
        self._away: dict[str, bool] = {}

    def is_old(self, workers: int, now: float) -> bool:
        """Return whether the last look is too old, or was at fewer workers."""
        return now - self._looked_at >= LOOK_EVERY_S or workers > self._workers

    def keep(self, times: Iterable[LeastTime], away: Iterable[WorkerModel], workers: int, now: float) -> None:
        """Keep a look at so many workers. Those that are `away` can serve nothing now."""
        places = dict[Capacity, int]()
        self._times = {
            each.worker.worker_id: (
                each.before_s,
                each.token_s,
                each.step_s,
                places.setdefault(each.worker.capacity, len(places)),
            )
            for each in times
        }
        self._away = {each.worker_id: not each.drains for each in away}
        self._capacities, self._looked_at, self._workers = list(places), now, workers

    def bounds(
        self,
        workers: Sequence[WorkerModel],
        hits: Mapping[str, int],
        prompt_tokens: int,
        avoids: Collection[str],
        fits: Callable[[Capacity], bool],
    ) -> Bounds:
        """Return the bounds of a request at those of the workers that it `fits`; 0 for workers that are new."""
        fitting = [fits(each) for each in self._capacities]
        sizes = [*(each.block_size for each in self._capacities), 1]  # the last one is of workers that are new
        full, work = list[tuple[float, str]](), list[tuple[float, str]]()
        for worker in workers:
            name = worker.worker_id
            if name in self._away or name in avoids:
                continue
            before_s, token_s, step_s, place = self._times.get(name, _NEW)
            if place >= 0 and not fitting[place]:
                continue
            cached = min(hits.get(name, 0), (prompt_tokens - 1) // sizes[place]) * sizes[place] if hits else 0
            own = (prompt_tokens - cached) * token_s + step_s
            work.append((own, name))
            full.append((before_s + own, name))
        return Bounds(full, work, self._recovers(workers, avoids, fits))

    def _recovers(
        self, workers: Sequence[WorkerModel], avoids: Collection[str], fits: Callable[[Capacity], bool]
    ) -> bool:
        if not any(self._away.values()):
            return False
        return any(
            self._away.get(each.worker_id) and each.worker_id not in avoids and fits(each.capacity) for each in workers
        )


_NEW = (0.0, 0.0, 0.0, -1)
