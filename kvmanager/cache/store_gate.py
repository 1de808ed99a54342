"""Watches what host memory gives back: where that is less than its copies cost, blocks leave the pool without a copy.

```
    stores  x copy  ------------------------------> paid   |  compared once a window;
    loads   x (compute - copy) -------------------> saved  |  a window has a quarter of as many stores as frames
```

Time is that of the worker's steps: copies are a part of them.
"""

from __future__ import annotations

from typing import Final

from common.contracts.transfers import TransferCosts

_LEAST_WINDOW: Final = 1024
_WINDOWS: Final = 4
"""In so many of them all frames are filled. What comes back later than after two may be missed at first."""
_IN_A_ROW: Final = 2
_FIRST_PENANCE: Final = 4
_LONGEST_PENANCE: Final = 32


class StoreGate:
    """Says whether what is evicted goes to host memory (`open`). Blocks count by their pages where the pool has groups.

    After two windows in a row whose loads saved less time than the copies took, nothing is stored for four windows of
    evictions, and for twice as many after each further time, up to 32 (the penance). A window that pays begins that
    anew. While costs are unknown everything is stored.
    """

    __slots__ = ("_loaded", "_lost", "_passed", "_penance", "_spared", "_stored", "_window", "open")

    def __init__(self, num_frames: int) -> None:
        self._window = max(_LEAST_WINDOW, num_frames // _WINDOWS)
        self._stored = self._spared = self._loaded = self._passed = 0
        self._lost, self._penance = 0, _FIRST_PENANCE
        self.open = True

    def note_loaded(self, pages: int) -> None:
        """Note that so many pages are copied back."""
        self._loaded += pages

    def note_spared(self, blocks: int) -> None:
        """Note that so many blocks of a prompt need not be computed, because they are loaded."""
        self._spared += blocks

    def note_stored(self, pages: int, costs: TransferCosts | None) -> None:
        """Note that so many pages were stored; at the end of a window decide whether further ones are.

        While the gate is closed, what is stored all the same decides nothing: it stands before what frames hold.
        """
        if not self.open:
            return
        self._stored += pages
        if self._stored < self._window:
            return
        if costs is not None and costs.copy and costs.compute:
            paid = costs.copy * (self._stored + self._loaded)
            self._judge(costs.compute * self._spared < paid)
        self._stored = self._spared = self._loaded = 0

    def _judge(self, lost: bool) -> None:
        self._lost = self._lost + 1 if lost else 0
        if not lost:
            self._penance = _FIRST_PENANCE
        elif self._lost == _IN_A_ROW:
            self.open, self._lost, self._passed = False, 0, 0

    def note_declined(self, pages: int) -> None:
        """Note that so many pages were not stored; after the last one of the penance further ones are again.

        Those that were not stored for another reason, while the gate is open, count nothing.
        """
        if self.open:
            return
        self._passed += pages
        if self._passed >= self._penance * self._window:
            self.open, self._penance = True, min(_LONGEST_PENANCE, 2 * self._penance)
            self._stored = self._spared = self._loaded = 0
