"""Sequences that have ended, and whose router may still be sending what they put out: it may die before it has."""

from __future__ import annotations

from collections.abc import Iterator

from common.contracts.limits import MAX_ENDED_BYTES, MAX_ENDED_SEQUENCES
from gpuworker.server.live_sequence import LiveSequence


class EndedSequences:
    """Those of one stream by handle, bounded: the oldest leave first."""

    def __init__(self) -> None:
        self._by_handle: dict[int, LiveSequence] = {}
        self._bytes = 0

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._by_handle.values())

    def put(self, ended: LiveSequence) -> None:
        """Keep a sequence, if any router may go on with it."""
        if not ended.ended:
            return
        self.pop(ended.handle)
        self._by_handle[ended.handle] = ended
        self._bytes += ended.bytes
        while len(self._by_handle) > MAX_ENDED_SEQUENCES or self._bytes > MAX_ENDED_BYTES:
            self.pop(next(iter(self._by_handle)))

    def pop(self, handle: int) -> None:
        ended = self._by_handle.pop(handle, None)
        if ended is not None:
            self._bytes -= ended.bytes

    def clear(self) -> None:
        self._by_handle.clear()
        self._bytes = 0
