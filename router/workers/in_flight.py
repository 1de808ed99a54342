"""Sequences that are at a worker, and whether one of them may have broken it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from router.workers.worker_events import SequenceAdmitted, SequenceEvent, TokensSampled

Sink = Callable[[SequenceEvent], None]

# Heartbeats of a worker after a submission that show that it survived reading it. The first may have been on its way.
_BEATS: Final = 2


@dataclass(slots=True)
class InFlight:
    """A sequence at the worker; `beats` counts the heartbeats before its submission."""

    sink: Sink
    beats: int
    heard_at: float = field(default_factory=time.monotonic)
    admitted: bool = False
    sampled: bool = False

    def saw(self, event: SequenceEvent) -> None:
        self.admitted = self.admitted or isinstance(event, SequenceAdmitted)
        self.sampled = isinstance(event, TokensSampled)

    def begun(self, beats: int) -> bool:
        """Return whether the sequence may have broken the worker: by its submission, or by a step."""
        return self.sampled or self.admitted or beats - self.beats < _BEATS
