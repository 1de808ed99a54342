"""What the parts around the manager's core need of each other; `main` alone names the classes behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from common.errors import QuireError
from common.types import BlockHash


class IndexUnavailable(QuireError):
    """The index cannot be reached now, or refused a command; what was sent may or may not have been done."""

    reason = "INDEX_UNAVAILABLE"


class FenceLost(QuireError):
    """The index knows no manager, or only an older one: it was wiped. Take a new epoch, publish everything again."""

    reason = "FENCE_LOST"


@dataclass(frozen=True, slots=True)
class IndexCall:
    """What one call does to the index, in this order."""

    removes: tuple[BlockHash, ...] = ()
    adds: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """How a worker stands in the index. `generation` is u32, drawn at each rebuild or clear."""

    worker_id: str
    incarnation: str
    address: str
    generation: int


class IndexStore(Protocol):
    """The prefix index of one namespace. Every method raises IndexUnavailable when the index cannot be reached.

    Those that take an epoch do nothing and raise FenceLost or StaleEpoch when the fence holds another.
    """

    async def acquire(self, least: int, held: int) -> int:
        """Take and return an epoch of `least` or more, above all before it. Raises StaleEpoch if one above `held` > 0
        rules. The rule is `core.epochs.acquired`.
        """
        ...

    async def register(self, epoch: int, worker: WorkerEntry) -> int | None:
        """Give a worker its slot and generation; entries of earlier generations are dead. None: all slots are taken."""
        ...

    async def update(self, epoch: int, slot: int, generation: int, call: IndexCall) -> None:
        """Remove and add entries of a slot, in one step."""
        ...

    async def renew(self, epoch: int, slots: Mapping[int, str], discovery: Mapping[str, str]) -> None:
        """Prolong liveness (worker id by slot) and discovery (value by worker id)."""
        ...

    async def retire(self, epoch: int, slot: int, generation: int, worker_id: str) -> None:
        """Make a generation's entries dead and forget the worker, if the generation is still the slot's."""
        ...

    async def close(self) -> None:
        """Drop the connection."""
        ...
