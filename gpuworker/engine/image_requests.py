"""What peers ask for: the engine takes images out of blocks and frames for them, between its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from common.contracts.clock import Clock
from common.contracts.transfers import ImageName
from gpuworker.engine.image_pace import ImagePace
from gpuworker.scheduling.images import Image, Images
from gpuworker.scheduling.lease_agent import LeaseAgent

_BYTES_A_TURN: Final = 1 << 20
"""Bytes of images that one turn takes while no step runs: a request that comes then waits for no more."""

Deliver = Callable[[Sequence[Image | None]], None]
"""Hands over the next images, None for one that the worker does not have."""


class ImageRequests:
    """Any thread may ask; the engine's thread answers, first come, first served."""

    def __init__(self, images: Images, image_bytes: int, clock: Clock, wake: Callable[[], None]) -> None:
        self._images, self._clock, self._wake = images, clock, wake
        self._pace = ImagePace(image_bytes, _BYTES_A_TURN)
        self._asked: deque[tuple[deque[ImageName], Deliver]] = deque()

    def ask(self, names: Sequence[ImageName], deliver: Deliver) -> None:
        """Ask for images; `deliver` is called until each of them was answered."""
        self._asked.append((deque(names), deliver))
        self._wake()

    @property
    def patience(self) -> float | None:
        """Seconds after which `turn` is to be called although nothing else is to be done; None: it need not be."""
        return self._pace.wait(self._clock.monotonic()) if self._asked else None

    def turn(self, agent: LeaseAgent, steps_run: bool = False) -> bool:
        """Answer a part of what is asked for; return whether anything was. Call it between steps."""
        if not self._asked:
            return False
        began = self._clock.monotonic()
        most = self._pace.allowed(began, steps_run)
        if not most:
            return False
        names, deliver = self._asked[0]
        part = [names.popleft() for _ in range(min(len(names), most))]
        if not names:
            self._asked.popleft()
        images = [None if place is None else self._images.take(place) for place in agent.find_images(part)]
        if taken := len(images) - images.count(None):
            self._pace.note(taken, began, self._clock.monotonic())
        deliver(images)
        return True
