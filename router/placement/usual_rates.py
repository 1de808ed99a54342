"""The rates that are assumed for a worker: its own, those of all workers where they are newer, or priors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from router.placement.worker_model import WorkerModel

# Assumed until the first worker has been measured.
PRIOR_PREFILL_TOKEN_S = 1e-4
PRIOR_STEP_S = 0.02
PRIOR_OUTPUT_TOKENS = 64.0
# A worker's own rates weigh half when other workers were measured so many seconds later; see `trust_in`.
TRUST_HALF_LIFE_S = 10.0


@dataclass(frozen=True, slots=True)
class UsualRates:
    """Mean rates of all workers, assumed for a worker that has no measurements, or only old ones."""

    prefill_token: float
    step: float
    output_tokens: float
    latest: float

    @staticmethod
    def of(workers: Sequence[WorkerModel]) -> UsualRates:
        latest = max([worker.shown_at for worker in workers], default=float("-inf"))
        prefill, step, output = _Mean(), _Mean(), _Mean()
        for worker in workers:
            rates, trust = worker.rates, trust_in(worker, latest)
            prefill.add(rates.prefill_token.value, trust)
            step.add(rates.step.predict(1), trust)
            output.add(rates.output_tokens.value, trust)
        return UsualRates(
            prefill.value(PRIOR_PREFILL_TOKEN_S), step.value(PRIOR_STEP_S), output.value(PRIOR_OUTPUT_TOKENS), latest
        )


def trust_in(worker: WorkerModel, latest: float) -> float:
    """Return the weight of a worker's own rates against the mean of all workers.

    A worker that was disturbed while it was measured looks slow, gets no requests, and so is never measured again. Its
    own rates therefore lose half their weight with every TRUST_HALF_LIFE_S by which the latest measurement of any
    worker is newer. The worker then looks like the others and gets requests again. An idle pool forgets nothing.
    """
    if worker.shown_at == latest:
        return 1.0
    return math.pow(0.5, (latest - worker.shown_at) / TRUST_HALF_LIFE_S)


class _Mean:
    """A weighted mean of what is known."""

    __slots__ = ("_sum", "_weight")

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float | None, weight: float) -> None:
        if value is not None:
            self._sum += value * weight
            self._weight += weight

    def value(self, prior: float) -> float:
        return self._sum / self._weight if self._weight else prior


def believed(shown: float | None, usual: float, trust: float) -> float:
    """Return a rate between the one that a worker showed, if any, and the usual one."""
    return usual if shown is None else usual + trust * (shown - usual)
