"""Fits the times of a replay to a log: the costs of a step by regression, the time of a message by replays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cli.replay.figures import figures_of, recorded_figures
from cli.replay.regression import Stream, step_costs
from cli.replay.simulation import Replay, ReplayOptions
from cli.replay.trace import Trace
from cli.replay.worker import Timing
from gpuworker.scheduling.step_costs import StepCosts

# Requests that a fit takes at most: the first ones.
MOST_REQUESTS: Final = 2000
_ROUNDS: Final = 4
# Messages one after another from a router's submission to the first token at the router.
_MESSAGES: Final = 4
_LEAST: Final = 1e-8


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted times, and the relative errors of a replay with them against the log."""

    timing: Timing
    errors: Mapping[str, float]


def fit(trace: Trace, options: ReplayOptions, run: Callable[[Trace, ReplayOptions], Replay]) -> Fit:
    """Return the best of a few replays. Raises ValueError for a trace without measurements."""
    part = replace(trace, arrivals=trace.arrivals[:MOST_REQUESTS])
    recorded = recorded_figures(part)
    if not recorded:
        raise ValueError("the trace has no measurements")
    timing, best = replace(options.timing, costs=costs_of(part)), None
    for _ in range(_ROUNDS):
        found = figures_of(run(part, replace(options, timing=timing)))
        tried = Fit(timing, errors(recorded, found))
        if best is None or abs(tried.errors.get("ttft_p50_s", 0.0)) < abs(best.errors.get("ttft_p50_s", 0.0)):
            best = tried
        missing = (recorded["ttft_p50_s"] - found["ttft_p50_s"]) / _MESSAGES
        timing = replace(timing, message=max(0.0, timing.message + missing))
    assert best is not None
    return best


def costs_of(trace: Trace) -> StepCosts:
    """Return the costs of a step. Where streams do not show what a token of a prompt costs, first tokens do."""
    found = step_costs(_streams(trace))
    known = [(each, each.measured) for each in trace.arrivals if each.measured is not None]
    uncached = [arrival.prompt_tokens - measured.cached_tokens for arrival, measured in known]
    token = slope(uncached, [measured.first_token_s for _, measured in known])
    if found is None:
        quickest = min(measured.first_token_s for _, measured in known)
        found = StepCosts(max(_LEAST, quickest / 2), _LEAST, _LEAST)
    if found.prefill <= _LEAST and token > 0:
        found = replace(found, prefill=token)
    return found


def _streams(trace: Trace) -> Iterator[Stream]:
    for each in trace.arrivals:
        if (found := each.measured) is not None:
            uncached = each.prompt_tokens - found.cached_tokens
            first, last = each.at + found.first_token_s, each.at + found.finished_s
            yield Stream(found.worker, uncached, each.output_tokens, first, last)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line; nan of fewer than three points, or of one x."""
    if len(xs) < 3:
        return math.nan
    middle_x, middle_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    spread = math.fsum((x - middle_x) ** 2 for x in xs)
    if not spread:
        return math.nan
    return math.fsum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread


def errors(recorded: Mapping[str, float], replayed: Mapping[str, float]) -> dict[str, float]:
    """Return the relative error of each recorded time."""
    known = {name: value for name, value in recorded.items() if name.endswith("_s") and value > 0}
    return {name: replayed[name] / value - 1 for name, value in known.items()}
