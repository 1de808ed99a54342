"""The rates that the worker measures on its own steps: the time of a decode step and of a prefilled token.

A step is predicted to take decode_step + prefill_token x prefill tokens + draft x drafts. The rates are exponential
averages over completed steps (weight 0.1). That of prefill is learnt only from steps whose prefill is large enough to
stand out, and that of drafts from steps without prefill.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from gpuworker.scheduling.batch_plan import StepPlan
from gpuworker.scheduling.drafting import NO_PRICES, DraftPrices

_WEIGHT = 0.1
_ENOUGH_PREFILL = 16
# A step that takes so many times its usual, and so many seconds more, has lost the time above that.
_MANY_TIMES, _LEAST_LOST_S = 8.0, 0.02
# Each such step makes the next one count a little less: what lasts becomes the usual, after 40 steps of 12 times it.
_DOUBT = 1.01
_FORGETTING = 0.99  # of what drafts cost, a step: a cost that was measured too high would never be measured again
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


class StepRates:
    """Exponential averages in seconds; 0 until first learnt."""

    def __init__(self) -> None:
        self.decode_step = 0.0
        self.prefill_token = 0.0
        self.draft = 0.0
        self.gap = 0.0
        self.pace = 0.0
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
        prefilled = plan.prefilled
        if prefilled and not self.prefill_token:
            return 0.0
        return self.decode_step + self.prefill_token * prefilled + self.draft * plan.drafts

    @property
    def prices(self) -> DraftPrices:
        """What a draft costs, as far as it is learnt; a position of a prompt stands in for a draft.

        Small steps that are planned ahead come at the pace of the engine, which is slower than that of the device. So
        a step alone may cost less than its gap.
        """
        if not self.decode_step:
            return NO_PRICES
        pace = max(self.pace, self.decode_step)
        return DraftPrices(pace, self.draft or self.prefill_token, max(0.0, self.gap + self.decode_step - pace))

    def learn_pace(self, plan: StepPlan, seconds: float) -> None:
        """Learn how long after the step before it a step ended that was planned ahead."""
        if not plan.drafts and not plan.prefilled:
            self.pace = _blend(self.pace, seconds)

    def learn_gap(self, seconds: float) -> None:
        """Learn how long the device waits for a step that is planned when the one before is over."""
        self.gap = _blend(self.gap, max(0.0, seconds))

    def learn(self, plan: StepPlan, seconds: float) -> None:
        prefilled = plan.prefilled
        self.draft, self.gap = _FORGETTING * self.draft, _FORGETTING * self.gap
        (self._mixed if prefilled else self._decodes).add(seconds)
        if plan.drafts and seconds >= self.decode_step:
            if not prefilled:
                self.draft = _blend(self.draft, (seconds - self.decode_step) / plan.drafts)
        elif prefilled == 0 or seconds < self.decode_step:
            # A step with prefill that is quicker than the learnt decode step shows that disturbed steps were learnt.
            # Where every request asks for one token, no step of decodes alone corrects the average.
            self.decode_step = _blend(self.decode_step, seconds)
        elif prefilled >= _ENOUGH_PREFILL:
            self.prefill_token = _blend(self.prefill_token, max(0.0, seconds - self.decode_step) / prefilled)


class UsualSteps:
    """What steps usually take. Unlike the rates that predict the next step, it learns nothing from those that lost."""

    def __init__(self) -> None:
        self._rates, self._doubt = StepRates(), 1.0

    def lost(self, plan: StepPlan, seconds: float) -> float:
        """Return what a step lost to something other than its own work; 0 where it took about its usual."""
        usual = self._doubt * self._rates.predict(plan)
        lost = seconds - usual
        if usual and lost >= _LEAST_LOST_S and seconds > _MANY_TIMES * usual:
            self._doubt *= _DOUBT
            return lost
        self._rates.learn(plan, seconds)
        self._doubt = 1.0
        return 0.0


def _blend(average: float, sample: float) -> float:
    return sample if average == 0.0 else average + _WEIGHT * (sample - average)
