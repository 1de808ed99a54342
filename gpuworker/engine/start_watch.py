"""Watches admitted sequences until their first step: how long they wait, and for whom the worker computes then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.contracts.types import SequenceId
from gpuworker.engine.ports import Started
from gpuworker.scheduling.batch_plan import StepPlan


@dataclass(slots=True)
class _Waiting:
    """When a sequence was admitted, and the positions computed since: in all, and of the longest row of each step."""

    since: float
    computed: int = 0
    longest: Counter[SequenceId] = field(default_factory=Counter)


class StartWatch:
    """A step costs nothing here while every admitted sequence has begun. Times are readings of Clock.monotonic."""

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def admitted(self, sequence: SequenceId, now: float) -> None:
        self._waiting[sequence] = _Waiting(now)

    def left(self, sequence: SequenceId) -> None:
        """Forget a sequence that ended or lost its blocks."""
        self._waiting.pop(sequence, None)

    def clear(self) -> None:
        self._waiting.clear()

    def stepped(self, plan: StepPlan, began: float, name: Callable[[SequenceId], str]) -> Iterable[Started]:
        """Return the sequences whose first step this was; count its positions for those that still wait.

        `name` returns the request of a sequence, or "" where it has gone.
        """
        rows = {row.sequence: row.length for row in plan.rows}
        started = [self._started(each, began, name) for each in rows if each in self._waiting]
        longest, computed = max(rows, key=lambda each: rows[each]), sum(rows.values())
        for waiting in self._waiting.values():
            waiting.computed += computed
            if rows[longest] > 1:  # a prompt; a decode takes one position, and delays no other row
                waiting.longest[longest] += rows[longest]
        return started

    def _started(self, sequence: SequenceId, began: float, name: Callable[[SequenceId], str]) -> Started:
        waiting = self._waiting.pop(sequence)
        most = waiting.longest.most_common(1)
        ahead_of = name(most[0][0]) if most else ""
        return Started(sequence, max(0.0, began - waiting.since), waiting.computed, ahead_of)
