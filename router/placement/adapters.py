"""The LoRA adapters of a pool: which content a name stands for, and which workers know it or have it in memory.

Workers say what they know. Where they differ, the content that came last counts: it was loaded under the name, and the
other workers still have the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from common.contracts.adapters import AdapterRef, AdapterShare

PRIOR_LOAD_S: Final = 0.2
"""Assumed for a load until a worker has made one."""


@dataclass(frozen=True, slots=True)
class WorkerAdapter:
    """An adapter that a worker knows; one that is not in memory is read when a request needs it."""

    fingerprint: str
    rank: int = 0
    num_bytes: int = 0
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class WorkerAdapters:
    """All that a worker knows, by name, and the seconds of its last load; 0: it has made none."""

    by_name: Mapping[str, WorkerAdapter]
    load_seconds: float = 0.0
    max_in_memory: int = 0

    def knows(self, wanted: AdapterRef) -> bool:
        """Return whether the worker can serve an adapter, at once or behind a load."""
        found = self.by_name.get(wanted.name)
        return found is not None and found.fingerprint == wanted.fingerprint

    def seconds_until(self, wanted: AdapterRef) -> float:
        """Return predicted seconds until an adapter that is known is in memory."""
        found = self.by_name.get(wanted.name)
        return 0.0 if found is not None and found.in_memory else self.load_seconds or PRIOR_LOAD_S


NO_ADAPTERS: Final = WorkerAdapters({})


ShareOf = Callable[[str, str], AdapterShare]


def share_of_tenant(name: str, tenant: str) -> AdapterShare:
    """Let a load be for the tenant whose request waits for it: no adapter is anybody's own."""
    return AdapterShare(tenant)


class AdapterNames:
    """What names stand for. `reserved` are those of the base, which no adapter may have.

    `share_of` returns for whom a load of an adapter is, by its name and the tenant whose request waits for it.
    """

    def __init__(self, reserved: Collection[str] = (), share_of: ShareOf = share_of_tenant) -> None:
        self.reserved, self.share_of = frozenset(reserved), share_of
        self._latest: dict[str, str] = {}

    def note(self, before: WorkerAdapters, now: WorkerAdapters) -> list[str]:
        """Take in what a worker knows now, and before. Return names that clash with those of the base."""
        for name, adapter in now.by_name.items():
            known = before.by_name.get(name)
            if known is None or known.fingerprint != adapter.fingerprint:
                self._latest[name] = adapter.fingerprint
        return sorted(self.reserved & now.by_name.keys() - before.by_name.keys())

    def find(self, name: str, workers: Iterable[WorkerAdapters]) -> AdapterRef | None:
        """Return the content that a name stands for; None where no worker knows the name, or it is of the base."""
        if name in self.reserved:
            return None
        contents = [each.by_name[name].fingerprint for each in workers if name in each.by_name]
        if not contents:
            self._latest.pop(name, None)
            return None
        latest = self._latest.get(name, "")
        return AdapterRef(name, latest if latest in contents else contents[-1])

    def names(self, workers: Iterable[WorkerAdapters]) -> list[str]:
        """Return all names that requests may give, in order."""
        return sorted({name for each in workers for name in each.by_name} - self.reserved)
