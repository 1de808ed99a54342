"""What peers ask for: the engine takes images out of blocks and frames for them, between its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from common.contracts.types import BlockHash
from gpuworker.scheduling.images import Image, Images
from gpuworker.scheduling.lease_agent import LeaseAgent

_BYTES_A_TURN: Final = 1 << 20
"""Bytes of images that one turn takes: the next step is late by no more than some hundred microseconds."""

Deliver = Callable[[Sequence[Image | None]], None]
"""Hands over the images of the next hashes, None for one that the worker does not have."""


class ImageRequests:
    """Any thread may ask; the engine's thread answers, first come, first served."""

    def __init__(self, images: Images, image_bytes: int, wake: Callable[[], None]) -> None:
        self._images, self._wake = images, wake
        self._a_turn = max(1, _BYTES_A_TURN // max(1, image_bytes))
        self._asked: deque[tuple[deque[BlockHash], Deliver]] = deque()

    def ask(self, hashes: Sequence[BlockHash], deliver: Deliver) -> None:
        """Ask for images; `deliver` is called until each of the hashes was answered."""
        self._asked.append((deque(hashes), deliver))
        self._wake()

    def turn(self, agent: LeaseAgent) -> bool:
        """Answer a part of what is asked for; return whether there was anything. Call it between steps."""
        if not self._asked:
            return False
        hashes, deliver = self._asked[0]
        part = [hashes.popleft() for _ in range(min(len(hashes), self._a_turn))]
        if not hashes:
            self._asked.popleft()
        places = agent.find_images(part)
        deliver([None if place is None else self._images.take(place) for place in places])
        return True
