"""Sequences that want a worker: what they ask for, how they wait, and the place that they get."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.contracts.types import BlockHash, Decision
from router.contracts.index_answer import NOTHING_ASKED, IndexAnswer
from router.placement.first_tokens import Foretold
from router.placement.placement import PlacementRequest
from router.placement.routing import Choice
from router.requests.reservation import LoadReservation
from router.workers.client import WorkerClient


@dataclass(frozen=True, slots=True)
class Job:
    """Sequences with the same tokens, to be placed at one worker.

    `moved_because` says why they left their previous worker; it is empty for a new request. `owner` is that of the
    caller.
    """

    request: PlacementRequest
    block_hashes: Sequence[BlockHash]
    priority: int
    deadline: float | None
    moved_because: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker for a job, with the load of each sequence reserved there; the caller submits them at once.

    Every reservation must be released. `foretold` is to learn when the first token comes. `looked_up_ns` is when the
    prefix lookup ended, and `index` what it said.
    """

    worker_id: str
    client: WorkerClient
    reservations: tuple[LoadReservation, ...]
    decision: Decision
    looked_up_ns: int
    index: IndexAnswer = NOTHING_ASKED
    foretold: Foretold | None = None


@dataclass(frozen=True, slots=True)
class Foresight:
    """What would happen to a job that came now. It `leads` if it is served before the `before` jobs that wait.

    `soonest_s` are predicted seconds to its first token that may refuse it for its deadline where it has to wait.
    """

    choice: Choice
    leads: bool
    before: int
    index_answered: bool
    soonest_s: float = 0.0


@dataclass(slots=True, eq=False)
class WaitingJob:
    """A job in the queue, what the prefix index said of it, and the future of its placement.

    `foretold` is the prediction at its arrival, if it had one. It is `tried` although it is predicted to be late.
    """

    job: Job
    index: IndexAnswer
    looked_up_ns: int
    foretold: Foretold | None = None
    tried: bool = False
    placed: asyncio.Future[Placement] = field(init=False)

    def __post_init__(self) -> None:
        self.placed = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.placed.done():
            self.placed.set_exception(error)

    def discard(self) -> None:
        """Release the placement; the caller is gone."""
        if self.placed.done() and not self.placed.cancelled() and self.placed.exception() is None:
            for reservation in self.placed.result().reservations:
                reservation.release()
