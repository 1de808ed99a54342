"""Which request broke a worker, and which ones were only there.

A break makes a suspect of every request that the worker had begun. Two facts clear or convict a suspect: its presence
at another break, and its progress between two breaks.

* A request is cleared once it gets further: by more tokens in one run than in its run that broke.
* A request without a token in that run goes first, one at a time; the others of the break wait for it for a moment.
* At its second break a request is guilty if it is the only one there that was at an earlier break, and got just as far
  as before. So it is with a request that breaks its worker at once, or after its n-th token.
* If several were at two breaks, or one got elsewhere, they are tried one at a time. A break in its turn convicts.

A request that was at one break is never convicted. Of several that were at two breaks, each is tried alone first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.limits import MAX_STRIKES

# Tokens by which two runs that break at the same place may differ: those of the last steps are lost with the stream.
_SAME_PLACE_TOKENS: Final = 2


class Breakdown:
    """One break of a worker. All requests that were there join it before any of them is tried again."""

    __slots__ = ("_first", "_listeners", "repeaters")

    def __init__(self) -> None:
        # Requests that were at an earlier break too, and are not cleared of that.
        self.repeaters = 0
        # Requests without a token in their run, which go first and are neither cleared nor gone.
        self._first = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def has_first(self) -> bool:
        return self._first > 0

    def join(self, first: bool, repeater: bool) -> None:
        self._first += first
        self.repeaters += repeater

    def leave_first(self) -> None:
        """Note that one of those that go first is cleared or gone."""
        self._first -= 1
        if not self._first:
            for listener in self._listeners:
                listener()
            self._listeners.clear()

    def when_no_first(self, listener: Callable[[], None]) -> None:
        """Call `listener` once none of those that go first is left."""
        self._listeners.append(listener)


class Suspicion:
    """What is known of one request: the breaks at which it was, since it was last cleared."""

    __slots__ = ("_alone", "_at_worker", "_breakdown", "_first", "_progress", "_reached", "_same_place", "breaks")

    def __init__(self) -> None:
        self.breaks = 0
        self._breakdown: Breakdown | None = None
        # Tokens since the last break, and those of the run that it ended.
        self._progress = self._reached = 0
        self._first = self._same_place = self._alone = self._at_worker = False

    def placed(self) -> None:
        """Note that a worker has the request, or a sequence of it, again."""
        self._at_worker = True

    def sampled(self, tokens: int) -> bool:
        """Count tokens; return whether they clear the request."""
        self._progress += tokens
        if not self.breaks or self._progress <= self._reached:
            return False
        self.leave()
        self.breaks = 0
        return True

    def accuse(self, breakdown: Breakdown, in_turn: bool) -> None:
        """Join a break, in the request's turn or not; of several sequences that one break ends, the first counts."""
        if not self._at_worker:
            return
        self.leave()
        self.breaks += 1
        self._same_place = abs(self._progress - self._reached) <= _SAME_PLACE_TOKENS
        # In a turn after two breaks all others with two breaks wait; in an earlier one they may run.
        self._alone = in_turn and self.breaks > MAX_STRIKES
        self._first = not self._progress
        self._reached, self._progress, self._at_worker = self._progress, 0, False
        self._breakdown = breakdown
        breakdown.join(self._first, self.breaks >= MAX_STRIKES)

    def leave(self) -> None:
        """Let the others of the break go on: the request is cleared or gone. Idempotent."""
        if self._first and self._breakdown is not None:
            self._breakdown.leave_first()
        self._first = False

    @property
    def guilty(self) -> bool:
        """Whether the request broke its workers, as far as that can be told; once all have joined its last break."""
        if self._breakdown is None or self.breaks < MAX_STRIKES:
            return False
        return self._alone or (self._same_place and self._breakdown.repeaters == 1)

    @property
    def apart(self) -> bool:
        """Whether the request is to be tried while no other suspect runs."""
        return self.breaks > 0 and (self._first or self.breaks >= MAX_STRIKES)

    @property
    def waits_for(self) -> Breakdown | None:
        """The break whose first suspects go before this request."""
        breakdown = self._breakdown
        waits = self.breaks > 0 and not self._first and breakdown is not None and breakdown.has_first
        return breakdown if waits else None
