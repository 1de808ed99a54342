"""Rates that the router measures of a worker: exponential averages, and step time as a line over batch size."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_MIN_WEIGHT = 0.1
_HALF_LIFE_S = 10.0
# Of a CountRate: what it covers, and the least time between two readings that it keeps.
_WINDOW_S = 5.0
_READING_EVERY_S = 0.25


@dataclass(slots=True)
class Average:
    """An exponential average. Weights halve in `half_life` seconds; a new sample weighs 0.1 or more."""

    half_life: float = _HALF_LIFE_S
    value: float | None = None
    updated: float = 0.0

    def add(self, sample: float, now: float) -> None:
        """Add a sample taken at `now` (seconds)."""
        if self.value is None:
            self.value = sample
        else:
            weight = max(_MIN_WEIGHT, 1.0 - 0.5 ** ((now - self.updated) / self.half_life))
            self.value += weight * (sample - self.value)
        self.updated = now

    def age(self, now: float) -> float:
        """Return seconds since the last sample; infinity before the first sample."""
        return now - self.updated if self.value is not None else float("inf")


@dataclass(slots=True)
class CountRate:
    """How fast a count rises, over the last seconds. A count that falls belongs to another life of the worker."""

    window: float = _WINDOW_S
    _readings: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, count: int, now: float) -> None:
        """Add a reading of the count; of readings in quick succession the last one stays."""
        readings = self._readings
        if readings and count < readings[-1][1]:
            readings.clear()
        if len(readings) > 1 and readings[-1][0] - readings[-2][0] < _READING_EVERY_S:
            readings.pop()
        readings.append((now, count))
        while len(readings) > 2 and now - readings[1][0] >= self.window:
            readings.popleft()

    def per_second(self) -> float:
        """Return the rate between the oldest and the newest reading; 0 before there are two."""
        if len(self._readings) < 2:
            return 0.0
        (began, first), (ended, last) = self._readings[0], self._readings[-1]
        return (last - first) / (ended - began) if ended > began else 0.0


@dataclass(slots=True)
class StepLine:
    """Seconds of a decode step = base + slope x running sequences, by exponentially weighted least squares.

    A sample's weight halves in ten seconds, so that the line soon fits a worker that works again. Until batch sizes
    have varied, a full batch is assumed to take twice the time of an empty one: K/V and weights then cost the same to
    read. The slope never falls below half of that: every sequence costs something, and a line that noise made flat
    would send all requests to one worker.
    """

    full_batch: int
    _weight: float = 0.0
    _updated: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, running: int, seconds: float, now: float) -> None:
        """Add a step of `running` sequences that ended at `now` (seconds)."""
        keep = 0.5 ** ((now - self._updated) / _HALF_LIFE_S)
        self._updated = now
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + running
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + running * running
        self._xy = keep * self._xy + running * seconds

    def predict(self, running: float) -> float | None:
        """Return seconds of a step with `running` sequences; None before the first sample."""
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        slope = mean_y / (self.full_batch + mean_x)
        if variance >= 1.0:
            slope = max(slope / 2, (self._xy / self._weight - mean_x * mean_y) / variance)
        return max(mean_y + slope * (running - mean_x), 0.1 * mean_y)


@dataclass(slots=True)
class Rates:
    """Rates of one worker: seconds a prompt token, a decode step, a whole sequence; output tokens a sequence."""

    step: StepLine
    prefill_token: Average = field(default_factory=Average)
    sequence: Average = field(default_factory=Average)
    output_tokens: Average = field(default_factory=Average)

    def finished(self, seconds: float, output_tokens: int, now: float) -> None:
        """Add a sequence that ran to its end."""
        self.sequence.add(seconds, now)
        self.output_tokens.add(output_tokens, now)
