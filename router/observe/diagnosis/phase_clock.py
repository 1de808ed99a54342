"""Adds up the seconds of a request by phase, while the request runs."""

from __future__ import annotations

from collections.abc import Callable

from router.observe.diagnosis.outcome import Phase, Seconds


def _never(begin: float, end: float) -> float:
    return 0.0


class PhaseClock:
    """Every moment from `arrived` on belongs to one phase. Times are readings of Clock.monotonic.

    What a worker did ends when the worker says so (`done`), and not when its message is read. What passed between the
    two, the message was on the way. If the router stood still meanwhile (`stood_still`), that is the reason, for as
    long as the worker had nothing more to do.
    """

    __slots__ = (
        "_after",
        "_before",
        "_done",
        "_overlap",
        "_phase",
        "_since",
        "_stood_still",
        "client_longest",
        "has_first_token",
    )

    def __init__(self, arrived: float, stood_still: Callable[[float, float], float] = _never) -> None:
        self._before: dict[Phase, float] = {}
        self._after: dict[Phase, float] = {}
        self._phase, self._since = Phase.READING, arrived
        # Until when the worker has said what it did, and the seconds since then that may turn out to be its work: a
        # message that was on the way for long says nothing of what the worker did after it.
        self._done = arrived
        self._overlap: dict[Phase, float] = {}
        self._stood_still = stood_still
        self.has_first_token, self.client_longest = False, 0.0

    @property
    def phase(self) -> Phase:
        return self._phase

    def enter(self, phase: Phase, now: float, done: float | None = None) -> None:
        """End the present phase, and begin another one.

        `done`: what ended the phase is a worker's message, and by the worker's clock this would be the time if no
        message took any.
        """
        passed = max(0.0, now - self._since)
        still = min(passed, self._stood_still(self._since, now))
        if done is None:
            self._add(self._phase, passed - still)
            self._add(Phase.ROUTER_STILL, still)
            self._done = max(self._since, now)
            self._overlap.clear()
        else:
            self._add_work(passed, still, done)
        self._phase, self._since = phase, now

    def _add_work(self, passed: float, still: float, done: float) -> None:
        """Divide seconds that passed into work until `done`, and what its message was on the way."""
        worked = max(0.0, done - self._done)
        self._done = max(self._done, done)
        own = min(passed, worked)
        still = min(still, passed - own)
        self._add(self._phase, own)
        for phase, seconds in ((Phase.ROUTER_STILL, still), (Phase.ON_THE_WAY, passed - own - still)):
            self._add(phase, seconds)
            self._overlap[phase] = self._overlap.get(phase, 0.0) + seconds
        for phase in self._overlap:
            worked_meanwhile = min(worked - own, self._overlap[phase])
            self.shift(phase, self._phase, worked_meanwhile)
            self._overlap[phase] -= worked_meanwhile
            own += worked_meanwhile

    def spent(self, phase: Phase, seconds: float) -> None:
        """Give so many seconds of the present phase, which have passed, to another one."""
        self._add(phase, seconds)
        self._since += seconds

    def become(self, phase: Phase) -> None:
        """Let another phase begin when the last `enter` was."""
        self._phase = phase

    def first_token(self) -> None:
        """Begin the second part then: all phases from here on come after the first token."""
        self._phase, self.has_first_token = Phase.DECODE, True
        self._overlap.clear()

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
