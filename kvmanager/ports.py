"""The interfaces between the manager's parts. Only `main` names the classes that implement them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from common.errors import QuireError
from common.types import BlockHash


class IndexUnavailable(QuireError):
    """The index cannot be reached or refused a command. A command that was sent may or may not have taken effect."""

    reason = "INDEX_UNAVAILABLE"


class FenceLost(QuireError):
    """The index was wiped: its fence is missing or older. Take a new epoch and publish everything again."""

    reason = "FENCE_LOST"


@dataclass(frozen=True, slots=True)
class IndexCall:
    """The changes of one call to the index, in this order."""

    removes: tuple[BlockHash, ...] = ()
    adds: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker's entry in the index. `generation` is u32, drawn at each rebuild or clear."""

    worker_id: str
    incarnation: str
    address: str
    generation: int


class IndexStore(Protocol):
    """The prefix index of one namespace. Every method raises IndexUnavailable when the index cannot be reached.

    Those that take an epoch do nothing and raise FenceLost or StaleEpoch when the fence holds another.
    """

    async def acquire(self, least: int, held: int) -> int:
        """Take and return an epoch of at least `least`, above all earlier ones, as `core.epochs.acquired` says.

        Raises StaleEpoch when the fence is above `held` and `held` is not 0.
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

    async def close(self) -> None: ...
