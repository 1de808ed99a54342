"""Adds up the seconds of a request by phase, while the request runs."""

from __future__ import annotations

from router.core.diagnosis.outcome import Phase, Seconds


class PhaseClock:
    """Every moment from `arrived` on belongs to one phase. Times are readings of Clock.monotonic."""

    __slots__ = ("_after", "_before", "_phase", "_since", "client_longest", "has_first_token")

    def __init__(self, arrived: float) -> None:
        self._before: dict[Phase, float] = {}
        self._after: dict[Phase, float] = {}
        self._phase, self._since = Phase.QUEUE, arrived
        self.has_first_token, self.client_longest = False, 0.0

    @property
    def phase(self) -> Phase:
        return self._phase

    def enter(self, phase: Phase, now: float) -> None:
        """End the present phase, and begin another one."""
        self._add(self._phase, now - self._since)
        self._phase, self._since = phase, now

    def spent(self, phase: Phase, seconds: float) -> None:
        """Give so many seconds of the present phase, which have passed, to another one."""
        self._add(phase, seconds)
        self._since += seconds

    def first_token(self, now: float) -> None:
        """Begin the second part: all phases from here on come after the first token."""
        self.enter(Phase.DECODE, now)
        self.has_first_token = True

    def left_unread(self, seconds: float) -> None:
        """Note for how long the client left an event unread."""
        self.client_longest = max(self.client_longest, seconds)

    def shift(self, source: Phase, to: Phase, seconds: float) -> None:
        """Move seconds of the present part, before or after the first token, from one phase to another that has them.

        The present phase has those up to the last `enter`.
        """
        part = self._part
        moved = min(max(0.0, seconds), part.get(source, 0.0))
        if moved:
            part[source] -= moved
            part[to] = part.get(to, 0.0) + moved

    @property
    def _part(self) -> dict[Phase, float]:
        return self._after if self.has_first_token else self._before

    def parts(self, now: float) -> tuple[Seconds, Seconds]:
        """Return the seconds before the first token and after it, until now."""
        self.enter(self._phase, now)
        return _seconds(self._before), _seconds(self._after)

    def _add(self, phase: Phase, seconds: float) -> None:
        self._part[phase] = self._part.get(phase, 0.0) + max(0.0, seconds)


def _seconds(part: dict[Phase, float]) -> Seconds:
    return tuple([(phase.value, part[phase]) for phase in Phase if part.get(phase, 0.0) > 0.0])
