"""The rates that the worker learns from its own steps: the time of a decode step and of a prefilled token.

A step is predicted to take decode_step + prefill_token x prefill tokens. Both rates are exponential averages over
completed steps (weight 0.1). The second is learnt only from steps whose prefill is large enough to stand out.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from gpuworker.core.batch_plan import StepPlan

_WEIGHT = 0.1
_ENOUGH_PREFILL = 16
# Upper bounds of the buckets of step times, in seconds; the last bucket has none.
STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A histogram of step times: the count in each bucket of STEP_BOUNDS and above, and the sum of seconds."""

    counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS) + 1)
    seconds: float = 0.0


NO_STEPS = StepTimes()


class _Tally:
    """A histogram of step times that still grows."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_BOUNDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(STEP_BOUNDS, seconds)] += 1
        self._seconds += seconds

    def times(self) -> StepTimes:
        return StepTimes(tuple(self._counts), self._seconds)


def prefill_tokens(plan: StepPlan) -> int:
    """Positions of a step beyond one for each row that samples a token."""
    return plan.scheduled_tokens - sum(row.samples for row in plan.rows)


class StepRates:
    """Exponential averages in seconds; 0 until first learnt."""

    def __init__(self) -> None:
        self.decode_step = 0.0
        self.prefill_token = 0.0
        self._decodes, self._mixed = _Tally(), _Tally()

    @property
    def decode_times(self) -> StepTimes:
        """The times of steps without prefill."""
        return self._decodes.times()

    @property
    def mixed_times(self) -> StepTimes:
        """The times of steps with prefill."""
        return self._mixed.times()

    def predict(self, plan: StepPlan) -> float:
        """Return the predicted seconds of a step; 0 while a rate that it needs is not learnt."""
        prefilled = prefill_tokens(plan)
        if prefilled and not self.prefill_token:
            return 0.0
        return self.decode_step + self.prefill_token * prefilled

    def learn(self, plan: StepPlan, seconds: float) -> None:
        prefilled = prefill_tokens(plan)
        (self._mixed if prefilled else self._decodes).add(seconds)
        if prefilled == 0 or seconds < self.decode_step:
            # A step with prefill that is quicker than the learnt decode step shows that disturbed steps were learnt.
            # Where every request asks for one token, no step of decodes alone corrects the average.
            self.decode_step = _blend(self.decode_step, seconds)
        elif prefilled >= _ENOUGH_PREFILL:
            self.prefill_token = _blend(self.prefill_token, max(0.0, seconds - self.decode_step) / prefilled)


def _blend(average: float, sample: float) -> float:
    return sample if average == 0.0 else average + _WEIGHT * (sample - average)
