"""Which request broke a worker, and which ones were only there.

Every request that the worker had begun when it broke is suspected. Two facts clear or blame it: its presence at another
break, and its progress between two breaks.

* A request is cleared once it gets further: by more tokens in one run than in its run that broke.
* A request without a token in that run goes first, one at a time; the others of the break wait for it for a moment.
* At its second break a request is blamed if it is the only one there that was at an earlier break, and got just as far
  as before. This is the pattern of a request that breaks its worker at once, or after its n-th token.
* If several were at two breaks, or one got elsewhere, they are tried one at a time. A break in its turn blames one.

A request that was at one break is never blamed. Of several that were at two breaks, each is tried alone first.

A connection also breaks while its worker lives. The next handshake with the worker tells. If the same process answers,
the break is excused: it counts for no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from common.contracts.limits import MAX_STRIKES

# Tokens by which two runs that break at the same place may differ: those of the last steps are lost with the stream.
_SAME_PLACE_TOKENS: Final = 2


class Breakdown:
    """One break of a worker. All requests that were there join it before any of them is tried again.

    An `unsettled` one may have ended a connection alone.
    """

    __slots__ = ("_first", "_listeners", "_members", "_settled", "excused", "repeaters", "settled")

    def __init__(self, unsettled: bool = False) -> None:
        # Requests that were at an earlier break too, and are not cleared of that.
        self.repeaters = 0
        self.settled, self.excused = not unsettled, False
        # Requests without a token in their run, which go first and are neither cleared nor gone.
        self._first = 0
        self._listeners: list[Callable[[], None]] = []
        self._members: list[Suspicion] = []
        self._settled: list[Callable[[], None]] = []

    @property
    def has_first(self) -> bool:
        return self._first > 0

    def join(self, member: Suspicion, first: bool, repeater: bool) -> None:
        self._first += first
        self.repeaters += repeater
        if not self.settled:
            self._members.append(member)

    def leave_first(self) -> None:
        """Note that one of those that go first is cleared or gone."""
        self._first -= 1
        if not self._first:
            _call_all(self._listeners)

    def when_no_first(self, listener: Callable[[], None]) -> None:
        """Call `listener` once none of those that go first is left."""
        self._listeners.append(listener)

    def settle(self, lives: bool) -> None:
        """Note whether the worker's process lives, which excuses the break. The first word counts."""
        if self.settled:
            return
        self.settled, self.excused = True, lives
        members, self._members = self._members, []
        for member in members if lives else ():
            member.excuse(self)
        _call_all(self._settled)

    def when_settled(self, listener: Callable[[], None]) -> None:
        """Call `listener` once it is known whether the worker's process lives."""
        self._settled.append(listener)


def _call_all(listeners: list[Callable[[], None]]) -> None:
    for listener in listeners:
        listener()
    listeners.clear()


@dataclass(slots=True)
class _Break:
    """A break at which a request was: the tokens of the run that it ended, and whether that was the request's turn."""

    breakdown: Breakdown
    reached: int
    in_turn: bool
    repeater: bool = False


class Suspicion:
    """What is known of one request: the breaks at which it was, since it was last cleared."""

    __slots__ = ("_at_worker", "_breaks", "_first", "_progress")

    def __init__(self) -> None:
        self._breaks: list[_Break] = []
        # Tokens since the last break.
        self._progress = 0
        self._first = self._at_worker = False

    @property
    def breaks(self) -> int:
        return len(self._breaks)

    def placed(self) -> None:
        """Note that a worker has the request, or a sequence of it, again."""
        self._at_worker = True

    def sampled(self, tokens: int) -> bool:
        """Count tokens; return whether they clear the request."""
        self._progress += tokens
        if not self._breaks or self._progress <= self._breaks[-1].reached:
            return False
        self.leave()
        self._breaks.clear()
        return True

    def add_break(self, breakdown: Breakdown, in_turn: bool) -> None:
        """Join a break, in the request's turn or not; of several sequences that one break ends, the first counts."""
        if not self._at_worker or breakdown.excused:
            return
        self.leave()
        latest = _Break(breakdown, self._progress, in_turn)
        self._breaks.append(latest)
        latest.repeater = self.breaks >= MAX_STRIKES
        self._first = not self._progress
        self._progress, self._at_worker = 0, False
        breakdown.join(self, self._first, latest.repeater)

    def excuse(self, breakdown: Breakdown) -> None:
        """Forget a break: its worker lives. Others that were at a later break may be alone with theirs now."""
        if not any(each.breakdown is breakdown for each in self._breaks):
            return
        if self._breaks[-1].breakdown is breakdown:
            self.leave()
        self._breaks = [each for each in self._breaks if each.breakdown is not breakdown]
        if self._breaks and self._breaks[-1].repeater and self.breaks < MAX_STRIKES:
            self._breaks[-1].repeater = False
            self._breaks[-1].breakdown.repeaters -= 1

    def leave(self) -> None:
        """Let the others of the break go on: the request is cleared or gone. Idempotent."""
        if self._first and self._breaks:
            self._breaks[-1].breakdown.leave_first()
        self._first = False

    @property
    def is_blamed(self) -> bool:
        """Whether the request broke its workers, as far as that can be told; once all have joined its last break."""
        if self.breaks < MAX_STRIKES:
            return False
        before, latest = self._breaks[-2:]
        # In a turn after two breaks all others with two breaks wait; in an earlier one they may run.
        alone = latest.in_turn and self.breaks > MAX_STRIKES
        same_place = abs(latest.reached - before.reached) <= _SAME_PLACE_TOKENS
        return alone or (same_place and latest.breakdown.repeaters == 1)

    @property
    def unsettled(self) -> list[Breakdown]:
        """The breaks of which it is not known whether their worker lives."""
        return [each.breakdown for each in self._breaks if not each.breakdown.settled]

    @property
    def apart(self) -> bool:
        """Whether the request is to be tried while no other suspected request runs."""
        return self.breaks > 0 and (self._first or self.breaks >= MAX_STRIKES)

    @property
    def waits_for(self) -> Breakdown | None:
        """The break whose requests without tokens go before this request."""
        if self._first or not self._breaks:
            return None
        breakdown = self._breaks[-1].breakdown
        return breakdown if breakdown.has_first else None
