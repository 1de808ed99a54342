"""The latest changes of one worker's prefix cache, so that a subscriber can go on where its last stream ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from kvmanager.contracts.index_events import IndexEvent

KEPT_EVENTS = 4096


class EventLog:
    """The last `most` events of one session, whose numbers are dense."""

    __slots__ = ("_events", "number")

    def __init__(self, number: int = 0, most: int = KEPT_EVENTS) -> None:
        """`number` is that of the last event before the first one to come."""
        self.number = number
        self._events: deque[IndexEvent] = deque(maxlen=most)

    def add(self, events: Sequence[IndexEvent]) -> None:
        """Add events in their order; those that are older than the log's beginning are passed over."""
        if events and events[0].number <= self.number:
            events = [event for event in events if event.number > self.number]
        if events:
            self.number = events[-1].number
            self._events.extend(events)

    def pass_over(self, number: int) -> None:
        """Keep none of the events up to this number."""
        self.number = max(self.number, number)
        self._events.clear()

    def since(self, number: int) -> tuple[IndexEvent, ...] | None:
        """Return the events after a number; None when some of them are gone, or the number was never given."""
        missing = self.number - number
        if not 0 <= missing <= len(self._events):
            return None
        return tuple(islice(self._events, len(self._events) - missing, None))
