"""What a fetch takes by its length, from a peer or from disk: a straight line through those of late."""

from __future__ import annotations

from typing import Final

_DECAY: Final = 0.9
"""The weight of a fetch beside the next one."""
_REMEMBERED: Final = 60.0
"""Seconds after which what no fetch confirms is old."""


class FetchCosts:
    """Learns seconds = setup + blocks x per_block, by least squares over fetches that fade; 0 before the first.

    Fetches of one length say nothing of a setup: then it is 0, and `per_block` has it all. `mean` is that of blocks of
    all lengths of fetches, setups included.
    """

    __slots__ = ("_blocks", "_learnt", "_products", "_seconds", "_squares", "_weight", "mean", "per_block", "setup")

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._weight = self._blocks = self._seconds = self._squares = self._products = self._learnt = 0.0
        self.setup = self.per_block = self.mean = 0.0

    def learn(self, blocks: int, seconds: float, now: float = 0.0) -> None:
        """Take a fetch of so many blocks, at least one, that has ended now."""
        self._learnt = now
        self._weight = _DECAY * self._weight + 1.0
        self._blocks = _DECAY * self._blocks + blocks
        self._seconds = _DECAY * self._seconds + seconds
        self._squares = _DECAY * self._squares + blocks * blocks
        self._products = _DECAY * self._products + blocks * seconds
        spread = self._weight * self._squares - self._blocks * self._blocks
        slope = 0.0
        if spread > 1e-6 * self._blocks * self._blocks:
            slope = (self._weight * self._products - self._blocks * self._seconds) / spread
        mean = self.mean = self._seconds / self._blocks
        # Neither may be below 0: a line through the origin, or one without a slope, is the nearest then.
        self.per_block = min(max(slope, 0.0), mean) if slope else mean
        self.setup = max(0.0, (self._seconds - self.per_block * self._blocks) / self._weight)

    def forget_old(self, now: float, after: float = _REMEMBERED) -> None:
        """Forget everything if the last fetch ended so many seconds ago, a minute unless told."""
        if now > self._learnt + after:
            self._forget()
