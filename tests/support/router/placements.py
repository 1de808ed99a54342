"""Requests to place, workers of known speed, and what the record of a choice says."""

from __future__ import annotations

import itertools

from common.contracts.clock import ManualClock
from router.placement.placement_request import PlacementRequest
from router.placement.routing import Choice, Router
from router.placement.worker_model import Capacity, Load, WorkerModel

CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_model_len=512)
STEP, TOKEN = 0.01, 0.001


def worker(name: str, load: Load | None = None, capacity: Capacity = CAPACITY) -> WorkerModel:
    """Return a worker that has shown a step of 10 ms for one sequence and 1 ms a prompt token."""
    model = WorkerModel(name, capacity, Load(unheld_blocks=capacity.num_blocks), heartbeat_at=0.0)
    model.heartbeat(Load(running=1, decode_step_seconds=STEP, prefill_seconds_per_token=TOKEN), now=0.0)
    model.heartbeat(load or Load(unheld_blocks=capacity.num_blocks), now=0.0)
    return model


def router(seed: int = 1) -> Router:
    numbers = itertools.count(1)
    return Router(ManualClock(), lambda: f"d{next(numbers)}", seed)


def placement(prompt: int = 100, output: int = 20, sequences: int = 1) -> PlacementRequest:
    return PlacementRequest("r", prompt, prompt + output, output, sequences)


def terms(choice: Choice, name: str) -> dict[str, float]:
    return dict(next(candidate.terms for candidate in choice.decision.candidates if candidate.name == name))


def rejected(choice: Choice) -> dict[str, str]:
    return {candidate.name: candidate.rejected for candidate in choice.decision.candidates if candidate.rejected}


def chosen(choice: Choice) -> str:
    assert choice.worker is not None
    return choice.worker.worker_id


def step_of(running: int) -> float:
    """Return the seconds of a step of so many sequences: a full batch of 4 is taken to be twice as slow as none."""
    return STEP * (1 + (running - 1) / 5)
