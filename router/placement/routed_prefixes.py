"""The router's own memory of the worker to which it sent each prefix.

For a few seconds a routed prefix counts as a hit at its worker, although its blocks are not computed or published yet.
A burst of similar prompts then goes to one worker. For some minutes the memory replaces an index that does not answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from common.contracts.types import BlockHash

BURST_SECONDS = 5.0
MEMORY_SECONDS = 600.0
MAX_BLOCKS = 200_000
# A prefix that was remembered this recently is not written again.
_FRESH_SECONDS = 0.5


class RoutedPrefixes:
    """When each block was sent to each worker; blocks that were not routed for MEMORY_SECONDS are dropped.

    Above `max_blocks` blocks the least recently routed ones are dropped too.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._sent: OrderedDict[BlockHash, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def remember(self, worker_id: str, block_hashes: Sequence[BlockHash], now: float) -> None:
        """Record that a prompt went to a worker. Its last blocks enter first, and so are dropped first."""
        block_hashes = block_hashes[: self._max_blocks]
        if block_hashes and now - self._sent.get(block_hashes[-1], {}).get(worker_id, float("-inf")) < _FRESH_SECONDS:
            return
        for block in reversed(block_hashes):
            self._sent.setdefault(block, {})[worker_id] = now
            self._sent.move_to_end(block)
        self._drop(2 * len(block_hashes), now - MEMORY_SECONDS)

    def _drop(self, most: int, oldest: float) -> None:
        """Drop what is too much, and at most so many blocks that are too old: an idle hour is not paid for at once."""
        excess = len(self._sent) - self._max_blocks
        while excess > 0 or (most > 0 and self._is_old(oldest)):
            self._sent.popitem(last=False)
            excess, most = excess - 1, most - 1

    def _is_old(self, oldest: float) -> bool:
        """Return whether the least recently routed block was sent to no worker since."""
        return max(next(iter(self._sent.values()), _NOWHERE).values(), default=oldest) < oldest

    def forget(self, worker_id: str) -> None:
        """Drop everything about a worker that lost its cache."""
        for block, times in list(self._sent.items()):
            times.pop(worker_id, None)
            if not times:
                del self._sent[block]

    def lookup(self, block_hashes: Sequence[BlockHash], now: float, max_age: float = BURST_SECONDS) -> dict[str, int]:
        """Return blocks of `block_hashes` sent to each worker within `max_age` seconds; some may have left since.

        A remembered block implies that its parent is remembered, so bisection finds the number of leading blocks.
        """
        oldest = now - max_age
        hits = {}
        first = self._sent.get(block_hashes[0], _NOWHERE) if block_hashes else _NOWHERE
        for worker_id in first:
            low, high = 0, len(block_hashes)
            while low < high:
                middle = (low + high) // 2
                if self._sent.get(block_hashes[middle], _NOWHERE).get(worker_id, float("-inf")) >= oldest:
                    low = middle + 1
                else:
                    high = middle
            if low:
                hits[worker_id] = low
        return hits


_NOWHERE: dict[str, float] = {}
