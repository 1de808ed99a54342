"""Simpler rules of a move at drain that fail: each overrides one rule of the real router or worker.

python -m tests.suites.protocol.drain.mutants
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.contracts.types import FinishReason
from gpuworker.scheduling.lease_agent import LeaseAgent
from router.placement.worker_model import WorkerModel
from router.requests import frontend
from router.requests.dispatcher import Placement
from router.requests.frontend import DrainMover
from router.requests.run import DRAINED, Running
from router.workers.worker_events import Lost
from tests.suites.protocol.drain.search import AllMoves, MoveWalks
from tests.suites.protocol.mutant import Mutant, always
from tests.suites.protocol.mutants import print_table

if TYPE_CHECKING:
    from common.contracts.types import SequenceId


def take_back_first(mover: DrainMover) -> None:
    """The draining worker ends its sequences, and then places are looked for."""
    asked: set[tuple[str, int]] = mover.__dict__.setdefault("asked", set())
    for run, running in mover._waiting():
        assert running.client is not None
        if (run.request_id, running.attempt) not in asked:
            asked.add((run.request_id, running.attempt))
            running.client.take_back(running.handle, DRAINED)


def move_at_once(running: Running, booked: Placement) -> None:
    """The sequence goes on at once, and what the draining worker sends until its end is dropped."""
    client = running.client
    assert client is not None
    running.booked = booked
    left = client._in_flight.pop(running.handle)
    client._tell_to_cancel(running.handle, FinishReason.CANCELLED)
    left.sink(Lost(DRAINED))


def drop_the_last_tokens(agent: LeaseAgent, sequence: SequenceId) -> None:
    agent.cancel_sequence(sequence)


def keep_the_place(running: Running) -> None:
    running.booked = None


MUTANTS = (
    Mutant(
        "56",
        "the draining worker ends a sequence before another place is booked",
        ((DrainMover, "_move", take_back_first), (frontend, "_takes", always)),
        MoveWalks("full"),
        ("D4",),
    ),
    Mutant(
        "57a",
        "a sequence goes on before the draining worker's last tokens are read",
        ((Running, "move_to", move_at_once),),
        AllMoves("alone"),
        ("D2", "D3"),
    ),
    Mutant(
        "57b",
        "the draining worker drops what its steps in flight sample",
        ((LeaseAgent, "hand_over", drop_the_last_tokens),),
        AllMoves("alone"),
        ("D2",),
    ),
    Mutant(
        "58",
        "the booked place is kept when the sequence ends meanwhile",
        ((Running, "_unbook", keep_the_place),),
        AllMoves("stops"),
        ("D6",),
    ),
    Mutant(
        "59",
        "a worker that drains is given sequences",
        ((WorkerModel, "drains", False),),
        MoveWalks("comes"),
        ("D5",),
    ),
)


if __name__ == "__main__":
    print_table(MUTANTS)
