"""What the router predicted of first tokens against when they came, and what a new prediction is worth by that.

A prediction that may refuse a request for its deadline is looked up among those of about its size (`about`). Where
these were too high, it counts as much less as they were in the median, by `MOST_LOWERED` at most. It is never raised:
a refusal cannot be taken back, so an error lets a request in. Who is let in is measured, and ends the error.

Whom a prediction refuses measures nothing. So while nothing of its size has been measured for `TRIED_EVERY_S`, one
request that would be refused is tried (`may_try`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final

KEPT: Final = 16
"""Outcomes that count of each size, the last ones."""
MOST_LOWERED: Final = 16.0
TRIED_EVERY_S: Final = 30.0
# Predictions below it do not justify refusing a request, and too short to be measured.
_LEAST_S: Final = 0.001
# The part of the time until a deadline that counts as all of it: a worker or a client may end the request a bit sooner.
_ALL_OF_IT: Final = 0.95


@dataclass(frozen=True, slots=True)
class Happened:
    """A prediction, and the seconds to the first token; where none `came`, the seconds that were waited in vain."""

    predicted_s: float
    actual_s: float
    came: bool = True

    @property
    def ratio(self) -> float:
        return self.actual_s / self.predicted_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds to a first token as they were predicted, and as they count by what happened after such predictions."""

    predicted_s: float
    seconds: float
    measured: tuple[Happened, ...] = ()

    @property
    def how_sure(self) -> str:
        """Return in words what the prediction rests on."""
        errors = [each.predicted_s / max(each.actual_s, _LEAST_S) for each in self.measured if each.came]
        in_vain = len(self.measured) - len(errors)
        words = "no such prediction was measured"
        if errors:
            low, high = _times(min(errors)), _times(max(errors))
            span = low if low == high else f"between {low} and {high}"
            which = f"last {len(errors)} such predictions were" if len(errors) > 1 else "last such prediction was"
            words = f"the {which} {span} times what happened"
        if in_vain:
            words += f"; {in_vain} had no first token by the deadline"
        lowered = self.seconds < self.predicted_s
        return f"{words}; it was {self.predicted_s:.3f} s before it was lowered for that" if lowered else words


class FirstTokens:
    """The last outcomes of predictions, by size: a size goes to twice its seconds."""

    def __init__(self) -> None:
        self._happened: dict[int, deque[Happened]] = {}
        # When something of a size was last measured or tried, or first refused without either.
        self._latest: dict[int, float] = {}

    def note_first_token(self, happened: Happened, now: float) -> None:
        """Add what happened after a prediction."""
        if happened.predicted_s < _LEAST_S:
            return
        size = _size(happened.predicted_s)
        self._happened.setdefault(size, deque(maxlen=KEPT)).append(happened)
        self._latest[size] = now

    def about(self, seconds: float) -> Prediction:
        """Return what a prediction is worth by those of its size and of the sizes beside it."""
        if seconds < _LEAST_S:
            return Prediction(seconds, seconds)
        found = [each for size in _near(seconds) for each in self._happened.get(size, ())]
        factor = median(each.ratio for each in found) if found else 1.0
        return Prediction(seconds, seconds * min(1.0, max(factor, 1.0 / MOST_LOWERED)), tuple(found))

    def may_try(self, seconds: float, now: float) -> bool:
        """Return whether a request that such a prediction refuses is tried all the same, and count it as tried."""
        latest = max((self._latest[size] for size in _near(seconds) if size in self._latest), default=None)
        if latest is not None and now - latest < TRIED_EVERY_S:
            return False
        self._latest[_size(seconds)] = now
        return latest is not None


class Foretold:
    """A prediction for one request, until its first token comes or it ends without one."""

    __slots__ = ("_began", "_deadline", "_log", "_predicted_s")

    def __init__(self, log: FirstTokens, predicted_s: float, began: float, deadline: float | None) -> None:
        self._log, self._predicted_s, self._began, self._deadline = log, predicted_s, began, deadline

    def came(self, now: float) -> None:
        """Note that the first token came."""
        self._log.note_first_token(Happened(self._predicted_s, now - self._began), now)

    def ended(self, now: float) -> None:
        """Note the end without a first token. One long before the deadline says nothing."""
        allowed = 0.0 if self._deadline is None else self._deadline - self._began
        if allowed > 0.0 and now - self._began >= _ALL_OF_IT * allowed:
            self._log.note_first_token(Happened(self._predicted_s, now - self._began, came=False), now)


def _times(error: float) -> str:
    return f"{error:.2g}" if error < 100.0 else f"{error:.0f}"


def _size(seconds: float) -> int:
    return math.floor(math.log2(max(seconds, _LEAST_S)))


def _near(seconds: float) -> Iterator[int]:
    size = _size(seconds)
    return iter((size - 1, size, size + 1))
