"""Totals of ledgers that are gone: a counter must not fall when its worker attaches again or never returns."""

from __future__ import annotations

from kvmanager.contracts.counts import Totals

# The id of the sum over all workers that have no account of their own.
DEPARTED = "departed"


def added(first: Totals, second: Totals) -> Totals:
    total = first.clone()
    for name in Totals.__slots__:
        value = getattr(second, name)
        if isinstance(value, dict):
            counts = getattr(total, name)
            for reason, count in value.items():
                counts[reason] = counts.get(reason, 0) + count
        else:
            setattr(total, name, getattr(total, name) + value)
    return total


class PastTotals:
    """Accounts by worker id, of the `most` workers that left last; those of the others are one sum, `DEPARTED`.

    Where an orchestrator gives workers new names at each start, the number of ids would grow without bound.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._by_worker: dict[str, Totals] = {}
        self._departed: Totals | None = None

    def add(self, worker_id: str, totals: Totals) -> None:
        self._by_worker[worker_id] = added(self._by_worker.pop(worker_id, Totals()), totals)
        if len(self._by_worker) > self._most:
            oldest = self._by_worker.pop(next(iter(self._by_worker)))
            self._departed = added(self._departed or Totals(), oldest)

    def accounts(self) -> dict[str, Totals]:
        return self._by_worker | ({DEPARTED: self._departed} if self._departed is not None else {})
