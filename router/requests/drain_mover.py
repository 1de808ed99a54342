"""Moves sequences away from workers that drain with `--drain migrate`.

A place at another worker is booked first. Then the draining worker ends the sequence, and what it sampled until then
reaches the client. From there the sequence goes on at the booked place as one that lost its worker does: from its
prompt and its output so far. So no token is computed twice, and a sequence without another place runs on where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Final

from router.core.worker_model import WorkerModel
from router.requests.placing import Placer
from router.requests.run import RequestRun, Running
from router.workers.pool import WorkerPool

# Attempts at once: each hashes the blocks of a sequence, 4 ms for 100,000 tokens. Every heartbeat of any worker, ten a
# second, is the next chance.
_AT_ONCE: Final = 8


class DrainMover:
    """Implements PoolListener over the requests inside."""

    def __init__(self, pool: WorkerPool, placer: Placer, runs: Collection[RequestRun]) -> None:
        self._pool, self._placer, self._runs = pool, placer, runs
        self._tried = 0

    def cache_lost(self, worker_id: str) -> None:
        """Nothing moves for that."""

    def capacity_changed(self, reported: WorkerModel | None = None) -> None:
        """Begin to move what another worker has room for now; no sequence keeps the others from their attempt."""
        waiting = deque(self._waiting())
        waiting.rotate(-self._tried)
        for run, running in islice(waiting, _AT_ONCE):
            place = self._placer.book(run, running)
            if place is not None:
                running.move_to(place)
            else:
                self._tried += 1

    def _waiting(self) -> Iterator[tuple[RequestRun, Running]]:
        """Yield the sequences at draining workers that have no other place yet."""
        leaving = self._pool.migrating()
        for run in tuple(self._runs) if leaving else ():
            for running in run.unfinished():
                if running.client in leaving and running.booked is None:
                    yield run, running
