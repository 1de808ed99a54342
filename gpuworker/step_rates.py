"""What the worker learns from its own steps: the time of a decode step and of a prefilled token.

A step is predicted to take decode_step + prefill_token x prefill tokens; both rates are exponential averages over
completed steps (weight 0.1), the second learnt only from steps that prefill enough for it to stand out.
"""

from __future__ import annotations

from gpuworker.core.batch_plan import StepPlan

_WEIGHT = 0.1
_ENOUGH_PREFILL = 16


def prefill_tokens(plan: StepPlan) -> int:
    """Positions of a step beyond one for each row that draws a token."""
    return plan.scheduled_tokens - sum(row.samples for row in plan.rows)


class StepRates:
    """Exponential averages in seconds; 0 until first learnt."""

    def __init__(self) -> None:
        self.decode_step = 0.0
        self.prefill_token = 0.0

    def predict(self, plan: StepPlan) -> float:
        """Return the predicted seconds of a step; 0 while a rate that it needs is not learnt."""
        prefilled = prefill_tokens(plan)
        if prefilled and not self.prefill_token:
            return 0.0
        return self.decode_step + self.prefill_token * prefilled

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take in a completed step."""
        prefilled = prefill_tokens(plan)
        if prefilled == 0:
            self.decode_step = _blend(self.decode_step, seconds)
        elif prefilled >= _ENOUGH_PREFILL:
            self.prefill_token = _blend(self.prefill_token, max(0.0, seconds - self.decode_step) / prefilled)


def _blend(average: float, sample: float) -> float:
    return sample if average == 0.0 else average + _WEIGHT * (sample - average)
