"""Which spans a full store gives up: the oldest, but first those of a sender that holds more than its share.

Sizes are bytes. A sender that floods the store pushes out its own spans, so the newest traces of the others stay.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.contracts.limits import MAX_SENDER_SHARE

Key = tuple[str, str]  # trace id, span id


@dataclass(slots=True)
class _Sender:
    keys: deque[Key] = field(default_factory=deque)  # oldest first
    bytes: int = 0


class SpanRing:
    """The order and the sizes of kept spans: at most `capacity`, and at most `max_bytes`."""

    def __init__(self, capacity: int, max_bytes: int) -> None:
        if capacity < 1 or max_bytes < 1:
            raise ValueError(f"capacity is {capacity} and max_bytes is {max_bytes}; expected 1 or more")
        self.capacity, self.max_bytes = capacity, max_bytes
        # What one sender may hold while the ring is full.
        self._most_spans, self._most_bytes = MAX_SENDER_SHARE * capacity, MAX_SENDER_SHARE * max_bytes
        self.bytes = 0
        self._spans: OrderedDict[Key, tuple[str, int]] = OrderedDict()  # -> sender, size; oldest first
        self._senders: dict[str, _Sender] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, key: Key, sender: str, size: int) -> Iterator[Key]:
        """Yield the spans that make room, each removed already; then note a span that is not here yet."""
        while self._spans and (len(self._spans) == self.capacity or self.bytes + size > self.max_bytes):
            yield self._remove_oldest(self._crowder(sender, size))
        held = self._senders.get(sender)
        if held is None:
            held = self._senders[sender] = _Sender()
        held.keys.append(key)
        held.bytes += size
        self._spans[key] = sender, size
        self.bytes += size

    def resize(self, key: Key, size: int) -> None:
        """Note the new size of a span that its sender sent again."""
        sender, before = self._spans[key]
        self._spans[key] = sender, size
        self._senders[sender].bytes += size - before
        self.bytes += size - before

    def _crowder(self, sender: str, size: int) -> str | None:
        """Return the sender of the next span where it holds more than its share of the ring."""
        held = self._senders.get(sender)
        if held is None or not held.keys:
            return None
        crowds = held.bytes + size > self._most_bytes or len(held.keys) + 1 > self._most_spans
        return sender if crowds else None

    def _remove_oldest(self, sender: str | None) -> Key:
        """Remove the oldest span of a sender, or of all."""
        if sender is None:
            key = next(iter(self._spans))
            sender = self._spans[key][0]
        held = self._senders[sender]
        key = held.keys.popleft()  # the oldest of all is the oldest of its sender
        _, size = self._spans.pop(key)
        held.bytes -= size
        self.bytes -= size
        if not held.keys:
            del self._senders[sender]
        return key
