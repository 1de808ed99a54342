"""Watches what LRU would find, beside a policy that predicts: where that loses to LRU, age decides for a while.

```
    released -----> shadow: the hashes that LRU would have in as much room ----> hits of LRU
       |                                                                            |  compared once
    the pool, in the order of the policy ------------------------------------> hits of the pool
                                                                                    |  a window
```

What block tables hold takes its room from both, and is a hit of neither: no policy can evict it. Of a large pool some
hashes stand for all (C. Waldspurger et al., SHARDS, FAST '15), of the pool and of LRU the same.
"""

from __future__ import annotations

from typing import Final

from common.contracts.types import BlockHash

_SAMPLED: Final = 1024
_MOST_SPARSE: Final = 64
"""Of so many hashes one is watched at least."""
_LEAST_WINDOW: Final = 2048
_FADE: Final = 0.7
_MARGIN: Final = 0.99
_IN_A_ROW: Final = 2
_FIRST_PENANCE: Final = 4
_LONGEST_PENANCE: Final = 32


class RecencyGuard:
    """Says whether age decides (`by_age`). Time is counted in released blocks, as the policy counts it.

    A window is as long as the pool is large. After two windows in which the pool found less than 0.99 of what LRU would
    have found, age decides for four windows, and for twice as many after each further time, up to 32. Earlier windows
    count less and less.
    """

    __slots__ = ("_due", "_every", "_found", "_lost", "_lru_found", "_penance", "_shadow", "_window", "by_age")

    def __init__(self, num_blocks: int) -> None:
        every = 1
        while num_blocks // every > _SAMPLED and every < _MOST_SPARSE:
            every *= 2
        self._every = every
        # The oldest first; each counts once.
        self._shadow: dict[BlockHash, int] = {}
        self._found = self._lru_found = 0.0
        self._window = max(_LEAST_WINDOW, num_blocks)
        self._due = 2 * self._window
        self._lost, self._penance = 0, _FIRST_PENANCE
        self.by_age = False

    def empty(self) -> None:
        """Forget the contents, because the pool has lost them; what was found out stays."""
        self._shadow.clear()

    def note_released(self, content: BlockHash, cached: int) -> None:
        """Note that no block table has a content any more, as one of so many `cached` ones: LRU has as many then."""
        if content[0] & (self._every - 1):
            return
        shadow, most = self._shadow, max(1, cached // self._every)
        shadow.pop(content, None)
        shadow[content] = 1
        while len(shadow) > most:
            del shadow[next(iter(shadow))]

    def note_found(self, content: BlockHash) -> None:
        """Note that a sequence takes a cached content."""
        if not content[0] & (self._every - 1):
            self._found += 1.0
            self._lru_found += self._shadow.pop(content, 0)

    def note_missed(self, content: BlockHash) -> None:
        """Note that a content that is not cached had to be computed or loaded."""
        if not content[0] & (self._every - 1):
            self._lru_found += self._shadow.pop(content, 0)

    def note_dropped(self, content: BlockHash) -> None:
        """Note that a content is cached no more, although it was not evicted for room: nor would LRU have it."""
        self._shadow.pop(content, None)

    def judge(self, now: int) -> None:
        """Decide at the end of a window who decides in the next ones."""
        if now < self._due:
            return
        self._due = now + self._window
        if self.by_age:
            self.by_age, self._found, self._lru_found = False, 0.0, 0.0
            return
        self._lost = self._lost + 1 if self._found < _MARGIN * self._lru_found else 0
        if self._lost < _IN_A_ROW:
            self._found, self._lru_found = _FADE * self._found, _FADE * self._lru_found
            return
        self.by_age, self._lost = True, 0
        self._due = now + self._penance * self._window
        self._penance = min(_LONGEST_PENANCE, 2 * self._penance)
