"""The prefix index of one worker as Redis keeps it, and what a manager writes behind: the model's edge to the outside.

Every method of Index is one atomic script; the order of a publisher's calls is that of the real `NetChanges`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.contracts.types import BlockHash
from kvmanager.contracts import epochs
from kvmanager.contracts.index_events import Cleared, IndexEvent, IndexSnapshot, Removed, Stored
from kvmanager.contracts.ports import IndexCall
from kvmanager.index.worker_feed import NetChanges

ABSENT = -1
CALL_LIMIT = 2
"""Hashes a call: small, so that every prefix of a longer batch is a state of its own."""


class Replaced(Exception):
    """The fence holds a higher epoch: this manager was replaced."""


class Wiped(Exception):
    """The fence is gone: Redis lost its data."""


@dataclass(slots=True)
class Index:
    """Epoch counter, fence, live generation and entries (hash, generation) of one worker's slot."""

    counter: int | None = None
    fence: int | None = None
    generation: int = ABSENT
    entries: frozenset[tuple[BlockHash, int]] = frozenset()

    def acquire(self, least: int, held: int, jump: int) -> int:
        """Let a manager that holds an epoch (0: none) take another; taking it writes the fence. Raises Replaced."""
        if epochs.is_replaced(held, self.fence):
            raise Replaced
        self.counter = self.fence = epochs.acquired(least, self.counter, self.fence, jump)
        return self.fence

    def check(self, epoch: int) -> None:
        """Refuse a manager that does not hold the fence."""
        if epochs.is_replaced(epoch, self.fence):
            raise Replaced
        if self.fence != epoch:
            raise Wiped

    def register(self, epoch: int, generation: int) -> None:
        """Make a generation the live one."""
        self.check(epoch)
        self.generation = generation

    def update(self, epoch: int, generation: int, call: IndexCall) -> None:
        """Remove and add entries; those of dead generations on the keys it touches go with it."""
        self.check(epoch)
        touched = {*call.removes, *call.adds}
        kept = {entry for entry in self.entries if entry[0] not in touched}
        self.entries = frozenset(kept | {(key, generation) for key in call.adds})

    def live(self) -> set[BlockHash]:
        """Return the entries that a reader sees: those of the live generation."""
        return {key for key, generation in self.entries if generation == self.generation}

    def wipe(self) -> None:
        self.counter, self.fence, self.generation, self.entries = None, None, ABSENT, frozenset()

    def clone(self) -> Index:
        return Index(self.counter, self.fence, self.generation, self.entries)


@dataclass(slots=True)
class Publisher:
    """A manager's changes that are not in the index yet, and the generation under which it writes."""

    generation: int = ABSENT
    registered: bool = False
    net: NetChanges = field(default_factory=NetChanges)

    def follow(self, events: tuple[IndexEvent, ...]) -> None:
        """Record changes of membership."""
        for event in events:
            match event:
                case Stored():
                    self.net.store(event.hash, event.depth)
                case Removed():
                    self.net.remove(event.hash, event.depth)
                case Cleared():
                    raise AssertionError("a clear is published under a new generation")

    def restart(self, generation: int, snapshot: IndexSnapshot) -> None:
        """Publish the whole membership under a new generation."""
        self.generation, self.registered, self.net = generation, False, NetChanges()
        self.net.refresh(snapshot.entries)

    def flush(self, index: Index, epoch: int) -> bool:
        """Make one call; False when there is nothing to write."""
        if not self.registered and self.generation != ABSENT:
            index.register(epoch, self.generation)
            self.registered = True
            return True
        for call in self.net.calls(CALL_LIMIT):
            index.update(epoch, self.generation, call)
            self.net.sent(call)
            return True
        return False

    @property
    def settled(self) -> bool:
        """Whether the index has every change of this publisher."""
        return self.registered and not len(self.net)

    def clone(self) -> Publisher:
        return Publisher(self.generation, self.registered, NetChanges(dict(self.net._pending)))

    def state_key(self) -> tuple[object, ...]:
        """Return everything that decides the future, hashable."""
        return self.generation, self.registered, frozenset(self.net._pending.items())
