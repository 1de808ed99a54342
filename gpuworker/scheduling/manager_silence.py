"""When a worker had no KV manager that answered: it had none, or the one that it had said nothing.

A manager answers each pulse of the worker. It counts as away from its last message on once it has left two pulses
unanswered. While the worker itself stands still, it hears nothing either: that time is not the manager's.
"""

from __future__ import annotations

from typing import Final


# For how long a worker without a KV manager still counts as ready for new requests.
class ManagerAbsence:
    """Routers send a worker new requests for `patience` seconds without a KV manager: its leases last for a while.

    A worker that has had no manager yet is not ready. It reads no clock itself.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._attached_at: float | None = None

    def why_not_ready(self, attached: bool, now: float) -> str:
        """Return why the worker is not ready at a time; "" if it is. Call it with times that only rise."""
        if attached:
            self._attached_at = now
        if self._attached_at is None:
            return "the worker has no KV manager yet"
        if now - self._attached_at < self._patience:
            return ""
        return f"the worker has had no KV manager for {self._patience:g} s (--manager-patience)"


_BEARABLE_PULSES: Final = 2
# Absences that are remembered; those before them are older than any sequence of interest.
_LATEST: Final = 64


class ManagerSilence:
    """Times are readings of one monotonic clock. One thread notes what happens, any thread asks for seconds."""

    def __init__(self, now: float) -> None:
        self._absences: tuple[tuple[float, float], ...] = ()
        self._pulse: float | None = None
        # Since when there is no session; None while there is one. When the manager was heard, when the worker ran last.
        self._none_since: float | None = now
        self._heard = self._ran = now

    def attached(self, now: float, pulse: float | None) -> None:
        """Note a session with a manager; it answers pulses that are so many seconds apart, or none."""
        if self._none_since is not None:
            self._absent(self._none_since, now)
        self._none_since, self._pulse, self._heard, self._ran = None, pulse, now, now

    def lost(self, now: float) -> None:
        """Note that the session is over; a silence before that counts."""
        if self._none_since is None:
            self._none_since = self._heard if self._is_silent(now) else now

    def ran(self, now: float) -> None:
        """Note that the worker runs: it sends a pulse."""
        self._skip_own_stop(now)

    def heard(self, now: float) -> None:
        """Note a message of the manager."""
        self._skip_own_stop(now)
        if self._none_since is None and self._is_silent(now):
            self._absent(self._heard, now)
        self._heard = now

    def seconds(self, begin: float, end: float) -> float:
        """Return the seconds between two times in which there was no manager that answered."""
        absences, since = self._absences, self._none_since
        if since is None and self._is_silent(end):
            since = self._heard
        if since is not None:
            absences = (*absences, (since, end))
        return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in absences)

    def _skip_own_stop(self, now: float) -> None:
        """Let the time in which the worker should have sent a pulse, and did not run, not count."""
        if self._pulse is not None:
            self._heard = min(now, self._heard + max(0.0, now - self._ran - self._pulse))
        self._ran = now

    def _is_silent(self, now: float) -> bool:
        return self._pulse is not None and now - self._heard > _BEARABLE_PULSES * self._pulse

    def _absent(self, begin: float, end: float) -> None:
        self._absences = (*self._absences[1 - _LATEST :], (begin, end))
