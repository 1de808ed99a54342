"""The interfaces between the manager's parts. Only `main` names the classes that implement them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.contracts.errors import QuireError, Unavailable
from common.contracts.transfers import PeerSource
from common.contracts.types import BlockHash
from kvmanager.contracts.slots import Loss, NoSlot


class Peer(Protocol):
    """A worker that may be asked for blocks."""

    @property
    def worker_id(self) -> str: ...

    @property
    def ahead(self) -> int:
        """Images of blocks, or of pages, that it is to serve before, to whichever workers."""
        ...

    def serve(self, keys: Sequence[BlockHash]) -> PeerSource:
        """Return what lets the worker that asks have what has these keys, in this order."""
        ...


class HasContents(Protocol):
    """What a worker has in its pool or in host memory, as another one may ask for it."""

    def find_run(self, block_hashes: Sequence[BlockHash], first: int, end: int) -> int:
        """Return how many leading blocks of block_hashes[first:end] are there, of the first group of layers."""
        ...

    def has_content(self, key: BlockHash, parent: BlockHash, depth: int) -> bool: ...

    def has_any(self, keys: frozenset[BlockHash]) -> bool:
        """Return whether something with one of these keys is there."""
        ...


Reach = Callable[[HasContents], int]
"""Returns how many blocks of a prompt a worker could do without that got what another one has."""
FindPeer = Callable[[Reach], tuple[Peer, int] | None]
"""Returns the worker by which one gets furthest, and how far; None: none helps."""


class IndexUnavailable(QuireError):
    """The index cannot be reached or refused a command. A command that was sent may or may not have taken effect."""

    reason = "INDEX_UNAVAILABLE"


class PinsUnreadable(Unavailable):
    """The value at the key of the pins is none that a manager has written. It stays as it is."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(
            f"the pins in Redis cannot be read, and stay as they are: {key} {what}. Delete that key, and pin again"
        )


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
    """A worker's entry in the index. `generation` is u32, drawn at each rebuild or clear.

    `session` is the worker's count of attaches: a later one tells that another group publishes the worker now.
    """

    worker_id: str
    incarnation: str
    address: str
    generation: int
    session: int = 0


@dataclass(frozen=True, slots=True)
class KeptPins:
    """A stored value of pins, and its key. `own`: it is that of the group; otherwise that of no group."""

    key: str
    value: bytes
    own: bool = True


class IndexStore(Protocol):
    """The prefix index of one namespace, for one group. Every method raises IndexUnavailable when it cannot be reached.

    Those that take an epoch do nothing and raise FenceLost or StaleEpoch when the fence of the group holds another.
    """

    async def acquire(self, least: int, held: int) -> int:
        """Take and return an epoch of at least `least`, above all earlier ones, as `contracts.epochs.acquired` says.

        Raises StaleEpoch when the fence is above `held` and `held` is not 0.
        """
        ...

    async def register(self, epoch: int, worker: WorkerEntry) -> int | NoSlot:
        """Give a worker its slot and generation; entries of earlier generations are dead."""
        ...

    async def update(self, epoch: int, slot: int, generation: int, call: IndexCall) -> bool:
        """Remove and add entries of a slot, in one step. Do nothing and return False when it has another generation."""
        ...

    async def renew(self, epoch: int, slots: Mapping[int, int], discovery: Mapping[str, str]) -> Mapping[int, Loss]:
        """Prolong liveness (generation by slot) and discovery (value by worker id).

        Return the slots that have not this generation, and why.
        """
        ...

    async def retire(self, epoch: int, slot: int, generation: int, worker_id: str) -> None:
        """Make a generation's entries dead and forget the worker, if the generation is still the slot's."""
        ...

    async def read_pins(self, most_bytes: int) -> KeptPins | None:
        """Return what `write_pins` wrote last, or what no group has written where that is missing; None: nothing.

        Raises PinsUnreadable for a longer value, and for one of another type.
        """
        ...

    async def has_pins(self) -> bool:
        """Return whether the key of the group's own pins is there."""
        ...

    async def write_pins(self, epoch: int, value: bytes) -> None:
        """Keep the pins of operators."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LeaderState:
    """Who leads, as one manager knows it. `owner` names that manager's process; `leader` is HOST:PORT ("": unknown).

    `term` is that of the leader; 0 where it is unknown, or where there is no `group` (""). `since` is when this manager
    began to lead, or to stand by, in seconds of its monotonic clock.
    """

    owner: str
    leads: bool = False
    term: int = 0
    leader: str = ""
    since: float = 0.0
    group: str = ""

    @property
    def settled(self) -> bool:
        """Whether this manager leads, or stands by a leader that it knows."""
        return self.leads or bool(self.leader)


class Leading(Protocol):
    """Whether this manager leads its `group` ("": it is in none). `address` is where others reach it."""

    address: str
    group: str

    @property
    def term(self) -> int: ...

    @property
    def takeovers(self) -> int: ...

    def leads(self) -> bool:
        """Return whether this manager may grant blocks now."""
        ...

    async def confirmed(self) -> None:
        """Return once it is known that this manager leads. Raises Unavailable if it does not."""
        ...

    async def writes(self, namespace: str) -> None:
        """Note that the index of this namespace is about to be written. Raises Unavailable if another manager leads."""
        ...

    def states(self) -> AsyncGenerator[LeaderState, None]:
        """Yield who leads, and again after each change."""
        ...
