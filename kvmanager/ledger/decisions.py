"""Decision records: the manager's choices, their candidates and reasons. The caller provides ids and time."""

from __future__ import annotations

from collections.abc import Callable

from common.contracts.clock import Clock
from common.contracts.types import Candidate, Decision, DecisionKind
from kvmanager.contracts.sequence import Sequence

Figures = dict[str, float]


class DecisionLog:
    """Makes records about one worker and keeps them until they are drained."""

    __slots__ = ("_clock", "_ids", "_records", "_worker")

    def __init__(self, clock: Clock, ids: Callable[[], str], worker: str = "") -> None:
        self._clock = clock
        self._ids = ids
        self._worker = worker
        self._records: list[Decision] = []

    def record(
        self,
        kind: DecisionKind,
        chosen: str,
        subject: Sequence | None,
        reasons: tuple[str, ...],
        figures: Figures,
        candidates: tuple[Candidate, ...] = (),
        beneficiary: str = "",
    ) -> str:
        """Add a record about `subject` (None: the worker as a whole) and return its id.

        The beneficiary of an eviction is its subject.
        """
        return self._add(
            Decision(
                self._ids(), kind, self._clock.time_ns(), chosen, subject.request_id if subject else "", candidates,
                reasons, figures=tuple(figures.items()), traceparent=subject.traceparent if subject else "",
                beneficiary=subject.name if subject and kind is DecisionKind.EVICTION else beneficiary,
                worker=self._worker,
            )
        )  # fmt: skip

    def preempted(
        self,
        victim: Sequence,
        beneficiary: Sequence | None,
        reasons: tuple[str, ...],
        figures: Figures,
        candidates: tuple[Candidate, ...],
    ) -> str:
        return self._add(
            Decision(
                self._ids(), DecisionKind.PREEMPTION, self._clock.time_ns(), victim.name, victim.request_id, candidates,
                reasons, victim=victim.name, beneficiary=beneficiary.name if beneficiary else "",
                figures=tuple(figures.items()), traceparent=victim.traceparent, worker=self._worker,
            )
        )  # fmt: skip

    def _add(self, decision: Decision) -> str:
        self._records.append(decision)
        return decision.decision_id

    def drain(self) -> tuple[Decision, ...]:
        """Return the records since the last call."""
        records, self._records = tuple(self._records), []
        return records
