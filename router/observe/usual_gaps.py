"""The usual seconds from one output token to the next at each worker, of the requests that it served before."""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median
from typing import Final

# Requests of a worker that count, and how few say nothing yet.
_LATEST: Final = 64
_FEW: Final = 8
_MAX_WORKERS: Final = 4_096


class UsualGaps:
    """Medians, so that one slow request changes nothing. The workers that served last are remembered."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[str, deque[float]] = OrderedDict()

    def usual(self, worker_id: str) -> float:
        """Return the usual seconds a token at a worker; 0 while too few requests say so."""
        gaps = self._gaps.get(worker_id, ())
        return median(gaps) if len(gaps) >= _FEW else 0.0

    def add(self, worker_id: str, gap: float) -> None:
        """Count a request with so many seconds a token."""
        gaps = self._gaps.setdefault(worker_id, deque(maxlen=_LATEST))
        gaps.append(gap)
        self._gaps.move_to_end(worker_id)
        if len(self._gaps) > _MAX_WORKERS:
            self._gaps.popitem(last=False)
