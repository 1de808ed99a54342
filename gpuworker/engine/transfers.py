"""The engine's part of transfers beside the steps: it takes images for saves, hands them over, and lands what was read.

The lease agent decides what may be taken and landed now; the mover's threads do the rest. A turn takes and lands few
bytes, so that the next step is not late.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from common.contracts.clock import Clock
from common.contracts.moves import Move, MoveCosts, MoveEnd
from gpuworker.scheduling.image_moves import Image, ImageMover, Images
from gpuworker.scheduling.lease_agent import LeaseAgent

_BYTES_A_TURN: Final = 4 << 20
"""Bytes of images that one turn takes, and that it lands: some hundred microseconds."""
_LEAST_PATIENCE: Final = 0.5
_PATIENCE: Final = 4.0
"""A fetch that is this many times later than forecast counts as lost; so does one that is late by half a second."""
_CHANGE: Final = 0.25
"""The share by which costs change before the manager is told."""

log = logging.getLogger(__name__)


class Transfers:
    """Used by the engine's thread alone."""

    def __init__(self, mover: ImageMover, images: Images, image_bytes: int, reset: int, clock: Clock) -> None:
        """`reset` is the id of the last reset that the disk has carried out."""
        self._mover, self._images, self._clock = mover, images, clock
        self._a_turn = max(1, _BYTES_A_TURN // max(1, image_bytes))
        self._reading: dict[int, Move] = {}
        self._landing: deque[tuple[Move, Image]] = deque()
        self._heard = 0.0  # when a fetch has ended or begun last
        self._costs = MoveCosts(0.0, 0.0)
        self._reset, self._closed = reset, False

    def turn(self, agent: LeaseAgent, compute_seconds: float) -> bool:
        """Do what can be done now; return whether anything was. Computing a block takes `compute_seconds`; 0: unknown.

        Call it between steps, before the next one is planned and before a report is sent.
        """
        if agent.reset != self._reset:
            self._reset = agent.reset
            self._mover.clear(agent.reset)
        worked = self._begin(agent)
        worked = self._gather(agent) or worked
        worked = self._land(agent) or worked
        self._note_costs(agent, compute_seconds)
        if not self._mover.usable and not self._closed:
            self._closed = True
            self._reading.clear()
            agent.close_disk()
        return worked

    @property
    def patience(self) -> float | None:
        """Seconds after which `turn` is to be called although nothing has ended; None: it need not be."""
        if not self._reading:
            return None
        return max(0.0, self._heard + self._most_patience - self._clock.monotonic())

    @property
    def _most_patience(self) -> float:
        return max(_LEAST_PATIENCE, _PATIENCE * self._mover.read_seconds * len(self._reading))

    def close(self) -> None:
        self._mover.close()

    # ------------------------------------------------------------ a turn

    def _begin(self, agent: LeaseAgent) -> bool:
        reads, saves = agent.take_reads(), agent.take_saves(self._a_turn)
        for move in reads:
            if not self._reading:
                self._heard = self._clock.monotonic()
            self._reading[id(move)] = move
            self._mover.start(move)
        for move in saves:
            self._mover.start(move, self._images.take(move.source))
        return bool(reads or saves)

    def _gather(self, agent: LeaseAgent) -> bool:
        ended = self._mover.poll()
        for each in ended:
            if not each.move.saves:
                self._heard = self._clock.monotonic()
                self._reading.pop(id(each.move), None)
            if each.end is MoveEnd.DONE and each.image is not None:
                self._landing.append((each.move, each.image))
            else:
                agent.end_transfer(each.move, each.end)
        if self._reading and self._clock.monotonic() > self._heard + self._most_patience:
            self._give_up(agent)
            return True
        return bool(ended)

    def _give_up(self, agent: LeaseAgent) -> None:
        """End the fetches that are late: who waits for them computes. What still comes of them is dropped."""
        waited = self._clock.monotonic() - self._heard
        log.warning("the disk gave nothing for %.1f s; %d blocks are computed instead", waited, len(self._reading))
        for move in self._reading.values():
            agent.end_transfer(move, MoveEnd.LATE)
        self._reading.clear()

    def _land(self, agent: LeaseAgent) -> bool:
        landed = 0
        while self._landing and landed < self._a_turn:
            move, image = self._landing[0]
            if agent.is_open(move):
                if not agent.may_land(move):
                    break
                self._images.land(move.target.index, image)
                agent.end_transfer(move, MoveEnd.DONE)
                landed += 1
            self._landing.popleft()
        return landed > 0

    def _note_costs(self, agent: LeaseAgent, compute: float) -> None:
        read = self._mover.read_seconds
        if _differs(read, self._costs.read) or _differs(compute, self._costs.compute):
            self._costs = MoveCosts(compute, read)
            agent.note_costs(self._costs)


def _differs(new: float, old: float) -> bool:
    return abs(new - old) > _CHANGE * old
