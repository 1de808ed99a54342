"""What the routers of a pool tell each other of their load at the workers, and which workers are at home with which.

A heartbeat is up to 0.1 s old, and routers that see the same one choose the same worker. So each router tells the
others what it has outstanding at each worker: not events, but figures that replace those before. A notice that is
lost, late, doubled or reordered therefore does no lasting harm: the next one sets the figures right. A router that
tells nothing for `FORGET_S` is forgotten.

Even figures that are a few milliseconds old let routers meet at the worker that is best for all. So each worker is at
home with one of the routers that have work, and routing makes those of other homes a little dearer (`routing.py`).
Routers that know the same workers divide them alike; where they differ for a moment, they only prefer others.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

# Of a router that stands still, or is gone: seconds until what it told counts no more.
FORGET_S = 3.0
# Seconds between two notices that name all workers, and so end what a lost one left: less than between two calls of a
# router that is alone.
WHOLE_EVERY_S = 0.9
MAX_ROUTERS = 64
# Workers in one notice, and of one router: as many as discovery finds.
MAX_TOLD_WORKERS = 1024
ROUTER_BYTES = WORKER_BYTES = 8

_VERSION: Final = 1
_WHOLE: Final = 1
# Version, flags, bytes of an entry, router, number of the notice.
_HEADER: Final = struct.Struct("<BBB8sQ")
# Worker, sequences, prompt tokens to be computed.
_ENTRY: Final = struct.Struct("<8sII")
_SIGNATURE_BYTES: Final = 16
_MOST: Final = (1 << 32) - 1
_LONGEST_ENTRY: Final = 64
MAX_NOTICE_BYTES: Final = _SIGNATURE_BYTES + _HEADER.size + MAX_TOLD_WORKERS * _LONGEST_ENTRY


class Told(NamedTuple):
    """What a router has outstanding at a worker: sequences, and those tokens of their prompts that wait."""

    sequences: int
    prefill_tokens: int


NOTHING: Final = Told(0, 0)


@dataclass(frozen=True, slots=True)
class Notice:
    """Figures of one router, by worker key. Workers that a `whole` one leaves out have nothing of that router.

    The numbers of a router's notices rise.
    """

    router: bytes
    number: int
    whole: bool
    workers: Mapping[bytes, Told]


def worker_key(worker_id: str, incarnation: bytes) -> bytes:
    """Return the 8 bytes that name one process of a worker to all routers."""
    return hashlib.blake2b(worker_id.encode() + b"\0" + incarnation, digest_size=WORKER_BYTES).digest()


# ---------------------------------------------------------------- the bytes of a notice


def pack_notice(notice: Notice, key: bytes | None = None) -> bytes:
    """Return the bytes of a notice, signed if the pool has a key."""
    flags = _WHOLE if notice.whole else 0
    parts = [_HEADER.pack(_VERSION, flags, _ENTRY.size, notice.router, notice.number)]
    parts += [
        _ENTRY.pack(worker, min(told.sequences, _MOST), min(told.prefill_tokens, _MOST))
        for worker, told in notice.workers.items()
    ]
    body = b"".join(parts)
    return _signature(key, body) + body


def unpack_notice(value: bytes, key: bytes | None = None) -> Notice:
    """Return the notice in bytes that anybody may have written. Raises ValueError with what is wrong with them.

    The entries of later versions may be longer: their first fields stay what they are.
    """
    if len(value) > MAX_NOTICE_BYTES:
        raise ValueError(f"it has {len(value)} bytes; at most {MAX_NOTICE_BYTES} were expected")
    signature, body = (value[:_SIGNATURE_BYTES], value[_SIGNATURE_BYTES:]) if key is not None else (b"", value)
    if len(body) < _HEADER.size:
        raise ValueError(f"it has {len(value)} bytes, fewer than a notice")
    if not hmac.compare_digest(signature, _signature(key, body)):
        raise ValueError("it is not signed with the pool's key")
    version, flags, size, router, number = _HEADER.unpack_from(body)
    entries = len(body) - _HEADER.size
    if version != _VERSION:
        raise ValueError(f"it has version {version}; {_VERSION} was expected: the routers differ")
    if not _ENTRY.size <= size <= _LONGEST_ENTRY or entries % size:
        raise ValueError(f"its entries have {entries} bytes, which are no whole number of {size} bytes each")
    if entries // size > MAX_TOLD_WORKERS:
        raise ValueError(f"it names {entries // size} workers; at most {MAX_TOLD_WORKERS} were expected")
    if size == _ENTRY.size:
        found = list(_ENTRY.iter_unpack(memoryview(body)[_HEADER.size :]))
    else:
        found = [_ENTRY.unpack_from(body, place) for place in range(_HEADER.size, len(body), size)]
    workers = {worker: Told(sequences, prefill_tokens) for worker, sequences, prefill_tokens in found}
    return Notice(router, number, bool(flags & _WHOLE), workers)


def _signature(key: bytes | None, body: bytes) -> bytes:
    if key is None:
        return b""
    return hmac.digest(key, b"quire-shared-load-v1\0" + body, "sha256")[:_SIGNATURE_BYTES]


# ---------------------------------------------------------------- what is told, and what was heard


@dataclass(slots=True, eq=False)
class WorkerShare:
    """One worker, as this router has load there, and as the others told it. `home`: of this router."""

    key: bytes
    pool: SharedLoad
    own: Told = NOTHING
    # Of all others together.
    sequences: int = 0
    prefill_tokens: int = 0
    home: bool = True

    def set_own(self, sequences: int, prefill_tokens: int) -> None:
        """Note what this router has outstanding there by now."""
        self.own = Told(max(0, sequences), max(0, prefill_tokens))
        self.pool.changed[self.key] = self
        self.pool.on_change()


@dataclass(slots=True)
class _Router:
    """Another router: its last notice, when that was heard, and until when it counts as one that has work.

    That is work at workers of this router: a pool of other workers may have the same stream.
    """

    number: int
    heard_at: float
    works_until: float = -math.inf
    workers: dict[bytes, Told] = field(default_factory=dict)


class SharedLoad:
    """What this router tells, and what it was told. Holds at most MAX_ROUTERS times MAX_TOLD_WORKERS figures."""

    def __init__(self, router: bytes) -> None:
        """`router` are bytes that differ from those of every other process."""
        self.router = router[:ROUTER_BYTES].ljust(ROUTER_BYTES, b"\0")
        # Workers whose own figures changed since the last notice.
        self.changed: dict[bytes, WorkerShare] = {}
        # Called when own figures change.
        self.on_change: Callable[[], object] = lambda: None
        # Rises when workers change homes.
        self.moves = 0
        self._shares: dict[bytes, WorkerShare] = {}
        self._others: dict[bytes, _Router] = {}
        self._homes = [self.router]
        self._number, self._whole_at = 0, -math.inf

    @property
    def others(self) -> int:
        """How many other routers are heard."""
        return len(self._others)

    # ------------------------------------------------------------ workers

    def join(self, worker_id: str, incarnation: bytes) -> WorkerShare:
        """Return the share of a worker that has just connected; a share that it had before counts no more."""
        key = worker_key(worker_id, incarnation)
        share = self._shares[key] = WorkerShare(key, self)
        for other in self._others.values():
            told = other.workers.get(key, NOTHING)
            share.sequences += told.sequences
            share.prefill_tokens += told.prefill_tokens
        self.changed[key] = share
        self._settle()
        return share

    def leave(self, share: WorkerShare) -> None:
        """Forget a worker: what this router had there is over."""
        if self._shares.get(share.key) is share:
            del self._shares[share.key]
            self._settle()
        share.own = NOTHING
        self.changed[share.key] = share

    # ------------------------------------------------------------ telling

    def tell(self, now: float) -> Notice | None:
        """Return what the others do not know yet; everything once in WHOLE_EVERY_S; None without news."""
        whole = now - self._whole_at >= WHOLE_EVERY_S
        if whole:
            self._whole_at = now
            told = [(share.own.sequences, share) for share in self._shares.values() if share.own != NOTHING]
            told.sort(key=lambda each: -each[0])
            named = {share.key: share.own for _, share in told[:MAX_TOLD_WORKERS]}
            self.changed.clear()
        elif self.changed:
            keys = list(self.changed)[:MAX_TOLD_WORKERS]
            named = {key: self.changed.pop(key).own for key in keys}
        else:
            return None
        self._number += 1
        return Notice(self.router, self._number, whole, named)

    # ------------------------------------------------------------ hearing

    def hear(self, notice: Notice, now: float) -> bool:
        """Take the figures of another router; False where they are its own, were overtaken, or are of too many."""
        if notice.router == self.router:
            return False
        other = self._others.get(notice.router)
        if other is None:
            if len(self._others) >= MAX_ROUTERS:
                return False
            other = self._others[notice.router] = _Router(-1, now)
        if notice.number <= other.number:
            return False
        other.number, other.heard_at = notice.number, now
        if notice.whole:
            self._set(other, [(key, NOTHING) for key in other.workers if key not in notice.workers])
        self._set(other, notice.workers.items())
        if not other.workers.keys().isdisjoint(self._shares):
            other.works_until = now + FORGET_S
        self._divide(now)
        return True

    def _set(self, other: _Router, told: Iterable[tuple[bytes, Told]]) -> None:
        known, shares = other.workers, self._shares
        for key, after in told:
            before = known.get(key, NOTHING)
            if after == before:
                continue
            if after == NOTHING:
                del known[key]
            elif key in known or len(known) < MAX_TOLD_WORKERS:
                known[key] = after
            else:
                continue
            if (share := shares.get(key)) is not None:
                share.sequences += after.sequences - before.sequences
                share.prefill_tokens += after.prefill_tokens - before.prefill_tokens

    def expire(self, now: float) -> None:
        """Forget the routers that have told nothing for FORGET_S."""
        for router in [key for key, other in self._others.items() if now - other.heard_at >= FORGET_S]:
            other = self._others.pop(router)
            self._set(other, [(key, NOTHING) for key in other.workers])
        self._divide(now)

    # ------------------------------------------------------------ homes

    def _divide(self, now: float) -> None:
        """Let the workers be at home with the routers that have work, in turn; this router always counts."""
        homes = sorted([self.router, *(key for key, other in self._others.items() if now < other.works_until)])
        if homes != self._homes:
            self._homes = homes
            self._settle()

    def _settle(self) -> None:
        self.moves += 1
        own, routers = self._homes.index(self.router), len(self._homes)
        for place, key in enumerate(sorted(self._shares)):
            self._shares[key].home = place % routers == own
