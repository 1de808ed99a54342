"""Fits the times of a replay to a log: the costs of a step by regression, the time of a message by replays."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from cli.replay.figures import figures_of, recorded_figures
from cli.replay.simulation import Replay, ReplayOptions
from cli.replay.trace import Trace
from cli.replay.worker import Timing
from gpuworker.scheduling.step_costs import StepCosts

_LEAST: Final = 1e-8
_REFITS: Final = 12
# Below this share of a column's size, what the other columns leave of it counts as nothing.
_NOTHING: Final = 1e-9


# The cost of a step, from the times of streams: each further token of a stream is one step of its worker.
#     last token - first token = base * steps + decode * rows + prefill * positions
# `steps` are the stream's further tokens. `rows` are the further tokens of all streams of its worker in that time,
# and `positions` the uncached tokens of prompts that ended in it. A regression over all streams gives the three
# costs.
@dataclass(frozen=True, slots=True)
class Stream:
    """One request at a worker, recorded or replayed. Times in seconds of one clock."""

    worker: str
    uncached_tokens: int
    output_tokens: int
    first_token_at: float
    last_token_at: float

    @property
    def steps(self) -> int:
        return max(0, self.output_tokens - 1)

    @property
    def token_s(self) -> float:
        return (self.last_token_at - self.first_token_at) / max(1, self.steps)


def step_costs(streams: Iterable[Stream]) -> StepCosts | None:
    """Return the costs that explain the streams best; None where no stream has a second token.

    A cost that nothing determines, or that would be below 0, is next to none.
    """
    known = list(streams)
    rows, positions = _Rows(known), _Positions(known)
    streams = [each for each in known if each.steps]
    if not streams:
        return None
    lines = [(1.0, rows.between(each) / each.steps, positions.between(each) / each.steps) for each in streams]
    found = nonnegative_median(lines, [each.token_s for each in streams], [float(each.steps) for each in streams])
    return StepCosts(*(max(_LEAST, each) for each in found))


class _Rows:
    """How many further tokens a worker's streams had at a time; each stream has them at an even pace."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        changes: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for each in streams:
            if each.steps and each.last_token_at > each.first_token_at:
                rate = 1 / each.token_s
                changes[each.worker] += [(each.first_token_at, rate), (each.last_token_at, -rate)]
        self._lines = {worker: _integrated(sorted(pairs)) for worker, pairs in changes.items()}

    def between(self, stream: Stream) -> float:
        if stream.worker not in self._lines:
            return float(stream.steps)
        times, tokens, rates = self._lines[stream.worker]

        def at(time: float) -> float:
            place = bisect_right(times, time) - 1
            return tokens[place] + rates[place] * (time - times[place])

        return at(stream.last_token_at) - at(stream.first_token_at)


def _integrated(changes: Sequence[tuple[float, float]]) -> tuple[list[float], list[float], list[float]]:
    """Return times, the tokens until each, and the rate after it."""
    times = [time for time, _ in changes]
    rates = list(accumulate(change for _, change in changes))
    gaps = [rate * (after - before) for rate, before, after in zip(rates, times, times[1:], strict=False)]
    return times, list(accumulate(gaps, initial=0.0)), rates


class _Positions:
    """How many positions of prompts a worker has computed at a time, beyond those that sample."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        prompts: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for each in sorted(streams, key=lambda each: each.first_token_at):
            prompts[each.worker].append((each.first_token_at, max(0, each.uncached_tokens - 1)))
        self._times = {worker: [time for time, _ in found] for worker, found in prompts.items()}
        self._sums = {
            worker: list(accumulate((count for _, count in found), initial=0)) for worker, found in prompts.items()
        }

    def between(self, stream: Stream) -> float:
        times, sums = self._times[stream.worker], self._sums[stream.worker]
        first, last = (bisect_right(times, time) for time in (stream.first_token_at, stream.last_token_at))
        return float(sums[last] - sums[first])


def nonnegative_median(
    lines: Sequence[Sequence[float]], wanted: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return the solution with the least sum of absolute errors, nearly: a few streams that stalled move it little.

    By least squares whose weights are divided by the errors of the round before.
    """
    least = max(1e-3 * sorted(wanted)[len(wanted) // 2], _LEAST)
    found, scaled = [0.0] * len(lines[0]), list(weights)
    for _ in range(_REFITS):
        roots = [weight**0.5 for weight in scaled]
        table = [[root * value for value in line] for root, line in zip(roots, lines, strict=True)]
        found = nonnegative(table, [root * value for root, value in zip(roots, wanted, strict=True)])
        errors = [
            value - sum(cost * count for cost, count in zip(found, line, strict=True))
            for value, line in zip(wanted, lines, strict=True)
        ]
        scaled = [weight / max(least, abs(error)) for weight, error in zip(weights, errors, strict=True)]
    return found


def nonnegative(lines: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return the least-squares solution; a column whose part would be below 0 is left out, the worst one first."""
    used = list(range(len(lines[0])))
    while used:
        found = least_squares([[line[column] for column in used] for line in lines], wanted)
        worst = min(range(len(used)), key=lambda place: found[place])
        if found[worst] >= 0:
            return [found[used.index(column)] if column in used else 0.0 for column in range(len(lines[0]))]
        del used[worst]
    return [0.0] * len(lines[0])


def least_squares(lines: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return the solution of the normal equations; 0 for a column that earlier ones determine."""
    size = len(lines[0])
    table = [
        [sum(line[row] * line[column] for line in lines) for column in range(size)]
        + [sum(line[row] * value for line, value in zip(lines, wanted, strict=True))]
        for row in range(size)
    ]
    sizes = [table[row][row] for row in range(size)]
    for pivot in range(size):
        if table[pivot][pivot] <= _NOTHING * sizes[pivot]:
            table[pivot] = [0.0] * (size + 1)
            continue
        for row in range(size):
            factor = table[row][pivot] / table[pivot][pivot]
            if row != pivot and factor:
                table[row] = [a - factor * b for a, b in zip(table[row], table[pivot], strict=True)]
    return [table[row][size] / table[row][row] if table[row][row] else 0.0 for row in range(size)]


# Requests that a fit takes at most: the first ones.
FIT_REQUESTS: Final = 2000
_ROUNDS: Final = 4
# Messages one after another from a router's submission to the first token at the router.
_MESSAGES: Final = 4


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted times, and the relative errors of a replay with them against the log."""

    timing: Timing
    errors: Mapping[str, float]


def fit(trace: Trace, options: ReplayOptions, run: Callable[[Trace, ReplayOptions], Replay]) -> Fit:
    """Return the best of a few replays. Raises ValueError for a trace without measurements."""
    part = replace(trace, arrivals=trace.arrivals[:FIT_REQUESTS])
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
