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

from common.contracts.clock import Clock
from router.placement.worker_model import WorkerModel
from router.requests.placing import Placer
from router.requests.run import RequestRun, Running
from router.workers.pool import WorkerPool

# Attempts of one pass: each hashes the blocks of a sequence, 4 ms for 100,000 tokens.
_AT_ONCE: Final = 8
# Seconds between two passes: 1000 workers send 10,000 heartbeats a second. Those of the draining worker itself come
# until its last sequence has left, so a chance that is passed over comes again.
_PERIOD_S: Final = 0.1


class DrainMover:
    """Implements PoolListener over the requests inside."""

    def __init__(self, pool: WorkerPool, placer: Placer, runs: Collection[RequestRun], clock: Clock) -> None:
        self._pool, self._placer, self._runs, self._clock = pool, placer, runs, clock
        self._tried, self._next = 0, float("-inf")

    def cache_lost(self, worker_id: str) -> None:
        """Nothing moves for that."""

    def capacity_changed(self, reported: WorkerModel | None = None) -> None:
        """Begin to move what another worker has room for now; no sequence keeps the others from their attempt.

        A heartbeat of a full worker gives no room. The others count once in `_PERIOD_S` all together.
        """
        if not self._pool.migrating() or not _matters(reported) or self._clock.monotonic() < self._next:
            return
        self._next = self._clock.monotonic() + _PERIOD_S
        if any(_takes(each) for each in self._pool.models()):
            self._move()

    def _move(self) -> None:
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
        for run in tuple(self._runs):
            for running in run.unfinished():
                if running.client in leaving and running.booked is None and not running.ended:
                    yield run, running


def _takes(worker: WorkerModel) -> bool:
    return worker.has_batch_place() and not worker.drains


def _matters(reported: WorkerModel | None) -> bool:
    """Return whether news may let a sequence move: of the pool, of a worker that drains, or of one with room."""
    return reported is None or reported.drains or reported.has_batch_place()
