"""The adapters that a worker knows: by name, which of them are in memory, who uses them, and who leaves for another.

    known --fill--> held --evict, or another content under the name--> known, or forgotten
                     ^ |
                use  | | release
                     +-+

What is held is bounded. A held adapter that no sequence uses is the first to leave, the least recently used one. One
whose name has got another content, or was removed, counts until its last sequence has ended: its memory is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.contracts.errors import NotFound, Overloaded, QuotaViolation, Unavailable
from common.contracts.limits import MAX_ADAPTERS

_RETRY_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Adapter:
    """One content under one name. `weights` is what the model made of it; None: it is not in memory."""

    name: str
    fingerprint: str
    rank: int
    num_bytes: int
    source: str
    weights: object | None = None
    users: int = 0
    used_at: int = field(default=0, repr=False)
    """When it was last used: a count that rises with each use of any adapter."""


class AdapterTable:
    """Not safe to use from several threads."""

    def __init__(self, max_held: int) -> None:
        self.max_held = max_held
        self._by_name: dict[str, Adapter] = {}
        self._leaving: set[Adapter] = set()  # without a name, in memory until their last sequences end
        self._uses = 0

    @property
    def known(self) -> Sequence[Adapter]:
        """The adapters that requests can name, in the order in which they came."""
        return tuple(self._by_name.values())

    @property
    def num_held(self) -> int:
        """Adapters in memory, those among them that are about to leave."""
        return sum(each.weights is not None for each in self._by_name.values()) + len(self._leaving)

    def get(self, name: str) -> Adapter:
        """Return an adapter by its name. Raises NotFound."""
        found = self._by_name.get(name)
        if found is None:
            raise NotFound(f"adapter {name!r} is not known at this worker; load it")
        return found

    def add(self, adapter: Adapter) -> Adapter:
        """Make an adapter known under its name, in place of another content; return it, or the same one that is there.

        Raises Overloaded where too many names are known.
        """
        there = self._by_name.get(adapter.name)
        if there is not None and there.fingerprint == adapter.fingerprint:
            there.source = adapter.source
            return there
        if there is None and len(self._by_name) >= MAX_ADAPTERS:
            what = f"{MAX_ADAPTERS} adapters are known at this worker; unload some"
            raise Overloaded(QuotaViolation("worker.adapters", what), _RETRY_SECONDS)
        if there is not None:
            self.remove(adapter.name)
        self._by_name[adapter.name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Forget a name; sequences that use the adapter go on. Raises NotFound."""
        left = self.get(name)
        del self._by_name[name]
        if left.users:
            self._leaving.add(left)
        else:
            left.weights = None

    def fill(self, adapter: Adapter, weights: object) -> Adapter | None:
        """Put a known adapter into memory; return the one that left for it, if any.

        Raises Overloaded where all that are held are in use.
        """
        left = None
        if adapter.weights is None:
            left = self._make_room()
        adapter.weights = weights
        self._touch(adapter)
        return left

    def _make_room(self) -> Adapter | None:
        if self.num_held < self.max_held:
            return None
        left = self._first_to_leave()
        left.weights = None
        return left

    def _first_to_leave(self) -> Adapter:
        unused = [each for each in self._by_name.values() if each.weights is not None and not each.users]
        if not unused:
            what = f"all {self.num_held} adapters in memory are in use, and --max-loras is {self.max_held}"
            raise Overloaded(QuotaViolation("worker.loras", what), _RETRY_SECONDS)
        return min(unused, key=lambda each: each.used_at)

    def check_room(self, adapter: Adapter) -> None:
        """Raise Overloaded where `fill` would, so that nothing is read in vain."""
        if adapter.weights is None and self.num_held >= self.max_held:
            self._first_to_leave()

    def find_held(self, name: str, fingerprint: str) -> Adapter:
        """Return an adapter in memory.

        Raises NotFound for an unknown name, Unavailable where its content is another one or not in memory: it is to be
        loaded first.
        """
        found = self.get(name)
        if found.fingerprint != fingerprint:
            what = "has another content at this worker than the router knows; it is to be loaded again"
            raise Unavailable(f"adapter {name!r} {what}")
        if found.weights is None:
            raise Unavailable(f"adapter {name!r} is not in memory at this worker any more; it is to be loaded again")
        return found

    def use(self, adapter: Adapter) -> None:
        """Count a sequence that begins with an adapter in memory."""
        assert adapter.weights is not None, f"{adapter.name} is not in memory"
        adapter.users += 1
        self._touch(adapter)

    def release(self, adapter: Adapter) -> None:
        """Count the end of a sequence that used an adapter."""
        adapter.users -= 1
        assert adapter.users >= 0, f"{adapter.name} was released more often than used"
        if not adapter.users and adapter in self._leaving:
            self._leaving.remove(adapter)
            adapter.weights = None

    def _touch(self, adapter: Adapter) -> None:
        self._uses += 1
        adapter.used_at = self._uses

    def check_invariants(self) -> None:
        """Raise AssertionError where the books contradict themselves."""
        assert self.num_held <= self.max_held or self._leaving, "more adapters are held than may be"
        assert all(each.users and each.weights is not None for each in self._leaving), "one left that nobody uses"
        assert all(name == each.name for name, each in self._by_name.items()), "a name is of another adapter"
