"""How long a report that nothing waits for gathers the content of short steps.

A message costs both ends more than its content. Such a report is looked for after 50 ms, or once the sequences have
used a quarter of their runway: a lease want that rises must reach the manager long before a sequence needs the block.
"""

from __future__ import annotations

import math
from typing import Final

from gpuworker.scheduling.batch_plan import StepPlan

GATHER_SECONDS: Final = 0.05


class ReportPace:
    """The time and the slots since the engine last looked for a report."""

    __slots__ = ("_looked", "_most_slots", "_slots")

    def __init__(self, runway_slots: int) -> None:
        self._most_slots = max(1, runway_slots // 4)
        self._looked, self._slots = -math.inf, 0

    def completed(self, plan: StepPlan) -> None:
        """Count the slots by which a sequence may have come further in a step."""
        self._slots += 1 + (max(len(row.drafts) for row in plan.rows) if plan.drafts else 0)

    def due(self, now: float) -> bool:
        """Whether the content has gathered for long enough."""
        return self._slots >= self._most_slots or now - self._looked >= GATHER_SECONDS

    def looked(self, now: float) -> None:
        self._looked, self._slots = now, 0
