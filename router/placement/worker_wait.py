"""What a request waits for at a worker, beside the prompts before it: steps in flight, a place in the batch, blocks."""

from __future__ import annotations

import math
from typing import Final

from router.placement.worker_model import WorkerModel

# The rest of the step that runs, which is half of it in the mean, and the step that is planned while that runs.
_STEPS_AHEAD: Final = 1.5
# With a measured stay of 0 s sequences would leave infinitely fast.
_LEAST_STAY_S: Final = 1e-4


def steps_ahead(worker: WorkerModel) -> float:
    """Return how many steps are before the first one with a new request in it."""
    return _STEPS_AHEAD if worker.sequences else 0.0


def departures(worker: WorkerModel, usual_stay: float, longest_stay: float) -> float:
    """Return how many sequences leave a worker in a second; infinity where none is there.

    By Little's law, n sequences that stay for t seconds leave at the rate n / t. A stay that was measured includes the
    wait at the worker, so all that are there count. One that is assumed is that of a sequence in the batch: the usual
    one, if its greatest output does not make it shorter.
    """
    there, measured = worker.sequences, worker.rates.sequence.value
    if not there:
        return math.inf
    if measured is not None:
        return there / max(measured, _LEAST_STAY_S)
    return min(there, worker.capacity.max_num_seqs) / max(min(usual_stay, longest_stay), _LEAST_STAY_S)


def wait_for_room(worker: WorkerModel, prompt_tokens: int, sequences: int, hit_blocks: int, leave: float) -> float:
    """Return predicted seconds until so many sequences have places, and blocks for their prompt beside the hits.

    `leave` is how many sequences leave the worker in a second.
    """
    capacity, there = worker.capacity, worker.sequences
    places = there + sequences - capacity.max_num_seqs
    blocks = capacity.fresh_blocks(prompt_tokens, hit_blocks) - worker.spare_blocks
    if places <= 0 and blocks <= 0:
        return 0.0  # most often there is room now
    return max(0.0, places / leave, _departures_for(blocks, worker) / leave)


def _departures_for(blocks: float, worker: WorkerModel) -> float:
    """Return how many sequences have to leave until so many more blocks are free.

    While sequences wait, one starts for each that leaves: those that run take the other blocks as they grow. So each of
    the first departures frees what one that waits wants. The later ones free what a sequence holds in the mean. Without
    sequences of this router there the wanted blocks are unknown; `spare_blocks` leaves them out too.
    """
    waiting, wanted = worker.load.waiting, worker.wanted_blocks
    running = max(1, min(worker.sequences - waiting, worker.capacity.max_num_seqs))
    freed = max(1.0, (worker.capacity.num_blocks - worker.unheld_blocks) / running)
    if not waiting or not wanted:
        return blocks / freed
    first = min(freed, wanted)
    return blocks / first if blocks <= waiting * first else waiting + (blocks - waiting * first) / freed
