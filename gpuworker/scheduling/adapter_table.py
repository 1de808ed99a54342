"""The adapters that a worker knows: by name, which of them are in memory, who uses them, and who leaves for another.

    known --fill--> held --evict, or another content under the name--> known, or forgotten
                     ^ |
                use  | | release
                     +-+

What is held is bounded. A held adapter that no sequence uses is the first to leave, the least recently used one. One
whose name has got another content, or was removed, counts until its last sequence has ended: its memory is taken. It
counts for its tenant too.

Loads that find no room wait in line (`Claim`). Tenants take turns in it: whoever has been served stands behind those
who were there. Once a load has waited for TURN_S, an adapter in use closes for it: it takes no new sequences, and
leaves with its last one. So streams that keep coming for what is held do not hold off the others. The tenant that
holds the most gives way first, and nobody's adapter closes for a tenant that would then hold more than it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from common.contracts.adapters import NOBODYS, AdapterShare
from common.contracts.errors import (
    NotFound,
    Overloaded,
    PermissionDenied,
    QuotaViolation,
    RateLimited,
    Unavailable,
)
from common.contracts.limits import MAX_ADAPTERS, MAX_OWN_ADAPTERS

_RETRY_SECONDS = 1.0
TURN_S: Final = 2.0
"""Seconds that a load waits before an adapter closes for it, and that an adapter is held before it closes."""
CLAIM_S: Final = 5.0
"""Seconds after which a load that nobody asks for any more has left the line. Routers ask many times a second."""


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
    filled_s: float = field(default=0.0, repr=False)
    tenant: str = ""
    """For whom it was loaded."""
    closed_for: str = ""
    """The adapter that waits for its room: no new sequence is to come; empty: it is open."""

    @property
    def is_open(self) -> bool:
        """Whether sequences may come: it is in memory, and no other one waits for its room."""
        return self.weights is not None and not self.closed_for


@dataclass(eq=False, slots=True)
class Claim:
    """A load that waits for room: since when, behind which turn of its tenant, and when it was last asked for."""

    adapter: Adapter
    share: AdapterShare
    since: float
    turn: float
    asked: float


class AdapterTable:
    """Not safe to use from several threads. Every `now` is in seconds of one clock, which never goes back."""

    def __init__(self, max_held: int) -> None:
        self.max_held = max_held
        self._by_name: dict[str, Adapter] = {}
        self._in_memory: dict[str, Adapter] = {}  # those of them that are
        self._leaving: set[Adapter] = set()  # without a name, in memory until their last sequences end
        self._claims: dict[str, Claim] = {}
        # The claims in the order of their turns; None: it is to be found anew.
        self._sorted: list[Claim] | None = None
        self._uses = 0
        self.changes = 0
        """Rises with each change of what is known, and of what is open."""

    @property
    def known(self) -> Sequence[Adapter]:
        """The adapters that requests can name, in the order in which they came."""
        return tuple(self._by_name.values())

    @property
    def num_held(self) -> int:
        """Adapters in memory, those among them that are about to leave."""
        return len(self._in_memory) + len(self._leaving)

    @property
    def waiting(self) -> Sequence[str]:
        """The adapters that wait for room, in the order of their turns."""
        return [each.adapter.name for each in self._line()]

    def get(self, name: str) -> Adapter:
        """Return an adapter by its name. Raises NotFound."""
        found = self._by_name.get(name)
        if found is None:
            raise NotFound(f"adapter {name!r} is not known at this worker; load it")
        return found

    def add(self, adapter: Adapter, share: AdapterShare = NOBODYS) -> Adapter:
        """Make an adapter known under its name, in place of another content; return it, or the same one that is there.

        Raises Overloaded where too many names are known, and RateLimited where too many of its tenant's own are.
        """
        there = self._by_name.get(adapter.name)
        if there is not None and there.fingerprint == adapter.fingerprint:
            there.source = adapter.source
            return there
        if there is None and len(self._by_name) >= MAX_ADAPTERS:
            what = f"{MAX_ADAPTERS} adapters are known at this worker; unload some"
            raise Overloaded(QuotaViolation("worker.adapters", what), _RETRY_SECONDS)
        if there is None and share.owns(adapter.name) and sum(map(share.owns, self._by_name)) >= MAX_OWN_ADAPTERS:
            what = f"{MAX_OWN_ADAPTERS} of its own adapters are known at this worker, the most it may have; unload some"
            raise RateLimited(QuotaViolation(f"tenant {share.tenant}.adapters", what), _RETRY_SECONDS)
        if there is not None:
            self.remove(adapter.name)
        self._by_name[adapter.name] = adapter
        self.changes += 1
        return adapter

    def remove(self, name: str) -> None:
        """Forget a name; sequences that use the adapter go on. Raises NotFound."""
        left = self.get(name)
        del self._by_name[name]
        self._in_memory.pop(name, None)
        self.changes += 1
        self.leave_line(name)
        left.closed_for = ""
        if left.users:
            self._leaving.add(left)
        else:
            left.weights = None

    # ------------------------------------------------------------ room

    def fill(self, adapter: Adapter, weights: object, share: AdapterShare = NOBODYS, now: float = 0.0) -> list[Adapter]:
        """Put a known adapter into memory; return those that left for it.

        Raises as `check_room` does.
        """
        self.check_room(adapter, share, now)
        left = [] if adapter.is_open else self._leavers(adapter, share, now)
        for each in left:
            each.weights, each.closed_for = None, ""
            del self._in_memory[each.name]
        if adapter.weights is None:
            adapter.filled_s, adapter.tenant = now, share.tenant
            self.changes += 1
        adapter.weights = weights
        self._in_memory[adapter.name] = adapter
        self._touch(adapter)
        self.leave_line(adapter.name)
        self._sorted = None
        for claim in self._claims.values():
            if claim.share.tenant == share.tenant:
                claim.turn = now
        return left

    def check_room(self, adapter: Adapter, share: AdapterShare = NOBODYS, now: float = 0.0) -> None:
        """Let a load take its place in the line, or keep it.

        Raises Overloaded unless `fill` may follow: where all that are held are in use, others come first, or the
        tenant's own adapters in use take too many bytes (RateLimited). Raises PermissionDenied as `check_bytes` does.
        """
        self._expire(now)
        if adapter.is_open:
            self.leave_line(adapter.name)
        else:
            self._leavers(adapter, share, now)

    def note_read(self, seconds: float) -> None:
        """Note that an adapter was read for so long: nobody could ask meanwhile, and no load leaves the line for it."""
        for claim in self._claims.values():
            claim.asked += seconds

    def may_take(self, adapter: Adapter) -> bool:
        """Return whether there is room that nobody waits for."""
        return not self._claims and adapter.weights is None and self.num_held < self.max_held

    def leave_line(self, name: str) -> None:
        """Let a load wait no longer; what closed for it is open again."""
        if self._claims.pop(name, None) is not None:
            self._sorted = None
        for each in self._in_memory.values():
            if each.closed_for == name:
                each.closed_for = ""
                self.changes += 1

    def _leavers(self, adapter: Adapter, share: AdapterShare, now: float) -> list[Adapter]:
        """Return those that leave for an adapter whose turn it is. Raises as `check_room` does."""
        check_bytes(adapter, share)
        claim = self._claim(adapter, share, now)
        own = [each for each in self._held() if share.owns(each.name) and each is not adapter]
        leaving = sum(each.num_bytes for each in self._leaving if share.owns(each.name))
        bounded = share.max_bytes and share.owns(adapter.name)
        over = sum(each.num_bytes for each in own) + leaving + adapter.num_bytes - share.max_bytes if bounded else 0
        left = _first(own, over, claim)
        if sum(each.num_bytes for each in left) < over:
            self._close_one(claim, own, now)
            in_use = sum(each.num_bytes for each in own if each.users)
            taken = f"its adapters in use take {in_use + leaving} bytes of a worker's memory"
            what = f"{taken}, and adapter {adapter.name!r} {adapter.num_bytes}"
            what = f"{what}; at most {share.max_bytes}{self._words_of(claim)}"
            raise RateLimited(QuotaViolation(f"tenant {share.tenant}.adapter_bytes", what), _RETRY_SECONDS)
        if adapter.weights is not None:  # it has closed for another one, and opens when that is there or has gone
            raise self._full(claim)
        return left or self._one_leaver(claim, now)

    def _one_leaver(self, claim: Claim, now: float) -> list[Adapter]:
        """Return whom a load drives out: nobody where there is room. Raises Overloaded where others come first."""
        free = self.max_held - self.num_held
        unused = [each for each in self._held() if not each.users]
        room = free + len(unused)
        ahead = self._are_ahead(claim, max(0, room))
        if ahead >= room:
            self._close_one(claim, self._held(), now)
            raise self._full(claim)
        return [] if free > ahead else [min(unused, key=lambda each: _leaves_before(each, claim))]

    # ------------------------------------------------------------ the line

    def _claim(self, adapter: Adapter, share: AdapterShare, now: float) -> Claim:
        claim = self._claims.get(adapter.name)
        if claim is None or claim.adapter is not adapter:
            claim = self._claims[adapter.name] = Claim(adapter, share, now, now, now)
            self._sorted = None
        claim.asked, claim.share = now, share
        return claim

    def _expire(self, now: float) -> None:
        for name in [name for name, each in self._claims.items() if now - each.asked > CLAIM_S]:
            self.leave_line(name)

    def _line(self) -> list[Claim]:
        if self._sorted is None:
            self._sorted = sorted(self._claims.values(), key=lambda each: (each.turn, each.since))
        return self._sorted

    def _are_ahead(self, claim: Claim, most: int) -> int:
        """Return how many loads before one take room, up to `most`: not those that wait for their own tenant, or are
        still held.
        """
        before = itertools.takewhile(lambda each: each is not claim, self._line())
        taking = (each for each in before if each.adapter.weights is None and not self._waits_for_its_own(each))
        return sum(1 for _ in itertools.islice(taking, most))

    def _waits_for_its_own(self, claim: Claim) -> bool:
        share = claim.share
        if not share.max_bytes or not share.owns(claim.adapter.name):
            return False
        in_use = sum(each.num_bytes for each in self._taking() if each.users and share.owns(each.name))
        return in_use + claim.adapter.num_bytes > share.max_bytes

    def _close_one(self, claim: Claim, among: Iterable[Adapter], now: float) -> None:
        """Close an adapter for a load that has waited long: of the tenant that holds the most, the one held longest."""
        name, tenant = claim.adapter.name, claim.share.tenant
        if now - claim.since < TURN_S or any(each.closed_for == name for each in self._held()):
            return
        holds = dict[str, int]()
        for each in self._taking():
            claimed = self._claims.get(each.closed_for)
            of = each.tenant if claimed is None else claimed.share.tenant
            holds[of] = holds.get(of, 0) + 1
        holds[tenant] = holds.get(tenant, 0) + 1
        ripe = [
            each
            for each in among
            if each.is_open and each.users and now - each.filled_s >= TURN_S
            if claim.share.owns(each.name) or holds[each.tenant] >= holds[tenant]
        ]
        if ripe:
            min(ripe, key=lambda each: (-holds[each.tenant], each.filled_s, each.used_at)).closed_for = name
            self.changes += 1

    def _full(self, claim: Claim) -> Overloaded:
        in_use = sum(each.users > 0 for each in self._held()) + len(self._leaving)
        kept = f"all {in_use}" if in_use == self.num_held else f"{in_use} of {self.num_held}"
        what = f"{kept} adapters in memory are in use, and --max-loras is {self.max_held}{self._words_of(claim)}"
        return Overloaded(QuotaViolation("worker.loras", what), _RETRY_SECONDS)

    def _words_of(self, claim: Claim) -> str:
        ahead = self._line().index(claim)
        return f"; {ahead} other loads come first" if ahead else ""

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

    def _held(self) -> list[Adapter]:
        """Return those in memory that have a name."""
        return [*self._in_memory.values()]

    def _taking(self) -> list[Adapter]:
        """Return all that take memory: those in memory that have a name, and those about to leave."""
        return [*self._in_memory.values(), *self._leaving]

    def _touch(self, adapter: Adapter) -> None:
        self._uses += 1
        adapter.used_at = self._uses

    def check_invariants(self) -> None:
        """Raise AssertionError where the books contradict themselves."""
        assert self.num_held <= self.max_held or self._leaving, "more adapters are held than may be"
        assert all(each.users and each.weights is not None for each in self._leaving), "one left that nobody uses"
        assert all(name == each.name for name, each in self._by_name.items()), "a name is of another adapter"
        held = {name: each for name, each in self._by_name.items() if each.weights is not None}
        assert self._in_memory == held, "what is in memory is another"
        for each in self._by_name.values():
            assert not each.closed_for or each.closed_for in self._claims, f"{each.name} is closed for nobody"
            assert not each.closed_for or each.weights is not None, f"{each.name} is closed, and not in memory"
        assert all(self._by_name.get(name) is each.adapter for name, each in self._claims.items()), "one waits unknown"


def check_bytes(adapter: Adapter, share: AdapterShare) -> None:
    """Raise PermissionDenied for an adapter that alone takes more than all of its tenant's may."""
    if share.max_bytes and share.owns(adapter.name) and adapter.num_bytes > share.max_bytes:
        what = f"adapter {adapter.name!r} takes {adapter.num_bytes} bytes of a worker's memory"
        most = f"all of tenant {share.tenant} may take {share.max_bytes} (adapter_bytes)"
        raise PermissionDenied(f"{what}, and {most}; ask the operator for more, or train a smaller rank")


def _leaves_before(adapter: Adapter, claim: Claim) -> tuple[bool, bool, int]:
    """Return the place of an unused adapter among those that may leave: what closed for this load is the first."""
    mine = adapter.closed_for == claim.adapter.name
    return not mine, bool(adapter.closed_for), adapter.used_at


def _first(own: Sequence[Adapter], num_bytes: int, claim: Claim) -> list[Adapter]:
    """Return the first unused ones to leave that take so many bytes together; all where they take less."""
    left, found = list[Adapter](), 0
    for each in sorted((each for each in own if not each.users), key=lambda each: _leaves_before(each, claim)):
        if found >= num_bytes:
            break
        left.append(each)
        found += each.num_bytes
    return left
