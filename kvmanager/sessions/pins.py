"""Operators' pins around the core: kept in Redis, carried out at every attached worker, ended when they are over.

Redis has the pins of a namespace as one value, which the manager writes before it carries out a change. Until the value
was read once after a start, no pin can be changed: the new value would lack the pins of the last manager. The value has
the id of the last reset of the prefix cache, too: a worker that missed it is reset whenever it comes back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from google.protobuf.message import DecodeError

from common.contracts.clock import Clock
from common.contracts.errors import StaleEpoch, Unavailable
from common.contracts.hashing import KEY_BYTES
from common.contracts.limits import MAX_PIN_NAME_CHARS, MAX_PINNED_BLOCKS, MAX_PINNED_TENANT_CHARS, MAX_PINS
from common.contracts.types import BlockHash
from common.wire.packing import pack_hashes, unpack_hashes
from kvmanager.cache.pins import Pin, PinAtWorker, num_listed, one_worker_for_each_size
from kvmanager.contracts.ports import FenceLost, IndexUnavailable, KeptPins, Leading, PinsUnreadable
from kvmanager.index.writer import IndexWriter
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.registry import WorkerRegistry
from quire.kvmanager.v1 import kvmanager_pb2 as pb

log = logging.getLogger(__name__)

# Seconds between two looks at Redis: it may have been wiped, and has then to get the pins again.
_LOOK_S: Final = 10.0
_RETRY_S: Final = 1.0
# Seconds that a worker waits for its session because Redis does not say which reset was the last one.
_ATTACH_S: Final = 1.0
_LEAST_PAUSE_S: Final = 0.05
# Hashes that are looked for in one turn of the event loop: some 2 ms.
_A_TURN: Final = 1 << 13
# A stored value with more bytes is none that a manager has written.
_OTHER_FIELDS: Final = 64
_MOST_BYTES: Final = MAX_PINNED_BLOCKS * KEY_BYTES + MAX_PINS * (
    4 * (MAX_PIN_NAME_CHARS + MAX_PINNED_TENANT_CHARS) + _OTHER_FIELDS
)


class OperatorPins:
    """The pins of the namespace that the manager serves. `run` is its background task."""

    def __init__(self, manager: WorkerRegistry, index: IndexWriter, leading: Leading, clock: Clock) -> None:
        self._manager, self._index, self._leading, self._clock = manager, index, leading, clock
        self._changing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._namespace: object | None = None  # of the pins in memory; None: they were not read yet
        self._written = b""
        self._unreachable = False
        self._carried_out = True
        self._kept_reset = 0
        # Resets the workers that are attached and have missed the last reset, of which the last manager knew.
        self.on_missed_reset: Callable[[], None] = lambda: None

    @property
    def durable(self) -> bool:
        """Whether there is a Redis that keeps the pins."""
        return self._index.publisher is not None

    def wake(self) -> None:
        """Look at Redis and at the clock at once: a worker attaches, perhaps the first one."""
        self._wake.set()

    async def attaching(self) -> None:
        """Know the last reset before a worker attaches, which may have missed it: as far as Redis says soon enough."""
        with suppress(TimeoutError, IndexUnavailable, FenceLost, StaleEpoch, Unavailable):
            async with asyncio.timeout(_ATTACH_S), self._changing:
                if self._serves():
                    await self._load()
        self.wake()

    # ------------------------------------------------------------ operators

    async def pin(
        self, name: str, tenant: str, hashes: tuple[BlockHash, ...], tokens: int, seconds: float | None
    ) -> Pin:
        """Pin a prefix. Raises InvalidRequest beyond a bound, Unavailable when no worker or no Redis is there."""
        async with self._changing:
            await self._ready()
            expires = None if seconds is None else self._now() + seconds
            pin = Pin(name, tenant, hashes, tokens, expires)
            pins = self._manager.pins.with_pin(pin)
            for num_blocks, worker_id in one_worker_for_each_size(self._manager.pool_sizes()).items():
                self._manager.pins.check_fits(pins, worker_id, num_blocks)
                await asyncio.sleep(0)  # the most pins take some 30 ms: reports go between
            await self._change(pins, f"pinned {name} of {pin.owner}: {len(hashes)} blocks")
        return pin

    async def unpin(self, name: str) -> None:
        """Remove a pin. Raises NotFound, and Unavailable."""
        async with self._changing:
            await self._ready()
            await self._change(self._manager.pins.without(name), f"unpinned {name}")

    async def pins(self) -> tuple[Pin, ...]:
        """Return the pins, the oldest first. Raises Unavailable."""
        async with self._changing:
            await self._ready()
            return self._manager.pins.pins

    async def at_workers(self, pins: Sequence[Pin]) -> list[list[PinAtWorker]]:
        """Return what each attached worker has of each of these pins."""
        book, found, known = self._manager.pins, [list[PinAtWorker]() for _ in pins], dict[int, Mapping[str, str]]()
        for worker_id, num_blocks in sorted(self._manager.pool_sizes().items()):
            left_out = known.get(num_blocks)
            if left_out is None:
                left_out = known[num_blocks] = book.fitting(book.pins, num_blocks).left_out
                await asyncio.sleep(0)
            if worker_id in self._manager.pool_sizes():  # it may have left meanwhile
                there = await self._there(self._manager.ledger(worker_id), pins)
                for pin, blocks, workers in zip(pins, there, found, strict=True):
                    workers.append(PinAtWorker(worker_id, blocks, left_out.get(pin.name, "")))
            await asyncio.sleep(0)
        return found

    async def _there(self, ledger: Ledger, pins: Sequence[Pin]) -> list[int]:
        """Return how many leading blocks of each pin a worker has; reports go between."""
        found, looked = list[int](), 0
        for pin in pins:
            there, hashes = 0, pin.block_hashes
            for first in range(0, len(hashes), _A_TURN):
                end = min(first + _A_TURN, len(hashes))
                if looked + end - first > _A_TURN:
                    await asyncio.sleep(0)
                    looked = 0
                looked += end - first
                there += ledger.leading_blocks(hashes, first, end)
                if there < end:
                    break
            found.append(there)
        return found

    async def keep_reset(self) -> None:
        """Keep the id of the reset that was begun last. Where Redis does not take it now, `run` tries again."""
        async with self._changing:
            if not self._serves():
                return
            try:
                await self._load()
                await self._keep_reset()
            except (IndexUnavailable, FenceLost, StaleEpoch, Unavailable) as error:
                log.warning("the id of the reset cannot be kept now: %s", error)
                self._wake.set()

    async def _keep_reset(self) -> None:
        number = self._manager.last_reset
        value = _packed(self._manager.pins.pins, number)
        await self._write(value)
        self._written, self._kept_reset = value, number

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Read the pins once there is a namespace, end those that are over, and write them where Redis lost them."""
        while True:
            self._wake.clear()
            try:
                async with self._changing:
                    await self._round()
                self._unreachable, pause = False, self._until_next_end()
            except (IndexUnavailable, FenceLost, StaleEpoch, Unavailable) as error:
                if not self._unreachable:
                    log.warning("the pins cannot be read or written now: %s", error)
                self._unreachable, pause = True, _LOOK_S if isinstance(error, PinsUnreadable) else _RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    def _until_next_end(self) -> float:
        end = self._manager.pins.next_end() if self._serves() else None
        return _LOOK_S if end is None else min(_LOOK_S, max(_LEAST_PAUSE_S, end - self._now()))

    def _serves(self) -> bool:
        """Whether the pins are this manager's to end and to write."""
        return self._leading.leads() and self._index.namespace is not None

    async def _round(self) -> None:
        if not self._serves():
            return
        await self._load()
        book = self._manager.pins
        if not self._carried_out:
            await self._carry_out(book.pins, "a change was broken off")
        over = {each.name for each in book.pins} - {each.name for each in book.live(self._now())}
        if over:
            await self._change(book.live(self._now()), f"over: {', '.join(sorted(over))}")
        elif self._manager.last_reset != self._kept_reset:
            await self._keep_reset()
        elif self._written and await self._index.has_lost_pins():
            await self._write(self._written)
            log.warning("Redis had lost the pins; it has them again")

    async def _ready(self) -> None:
        """Make sure that the pins of the last manager are known. Raises Unavailable."""
        await self._leading.confirmed()
        if self._index.namespace is None:
            raise Unavailable("no worker has attached yet, so that the model is unknown; try again when one is there")
        try:
            await self._load()
        except (IndexUnavailable, FenceLost, StaleEpoch) as error:
            raise Unavailable(f"Redis, which keeps the pins, cannot be reached: {error}") from None

    async def _load(self) -> None:
        """Read the pins once for each namespace. Raises IndexUnavailable, and Unavailable where they are unreadable.

        A group without pins of its own begins with those of no group, because a running pool may be split.
        """
        namespace = self._index.namespace
        if namespace is self._namespace:
            return
        found = await self._index.read_pins(_MOST_BYTES)
        self._check_serving(namespace)
        stored, last_reset = _unpacked(found) if found is not None else ((), 0)
        value = _packed(stored, last_reset)
        if found is not None and not found.own:
            await self._index.write_pins(value)
            self._check_serving(namespace)
            log.info("pins: this group begins with those of managers without a group")
        self._namespace, self._written, self._kept_reset = namespace, value, last_reset
        if last_reset and not self._manager.last_reset:
            self._manager.begin_reset(last_reset)
            self.on_missed_reset()
        await self._carry_out(stored, f"read {len(stored)} pins" if stored else "")

    def _check_serving(self, namespace: object | None) -> None:
        """Check that this namespace is still the one that is served. Raises Unavailable."""
        if namespace is None or self._index.namespace is not namespace:
            raise Unavailable("this KV manager has stopped leading, or serves another model now; try again")

    async def _write(self, value: bytes) -> None:
        """Write the pins of the namespace in memory, and none of another one."""
        self._check_serving(self._namespace)
        await self._index.write_pins(value)

    async def _change(self, pins: tuple[Pin, ...], why: str) -> None:
        """Write the pins, then carry them out. Raises Unavailable; nothing is changed then."""
        value = _packed(pins, self._kept_reset)
        if len(value) > _MOST_BYTES:
            raise Unavailable(f"the pins would take {len(value)} bytes; at most {_MOST_BYTES} are kept: unpin one")
        try:
            await self._write(value)
        except (IndexUnavailable, FenceLost, StaleEpoch) as error:
            raise Unavailable(f"Redis, which keeps the pins, did not take the change: {error}") from None
        self._written = value
        await self._carry_out(pins, why)

    async def _carry_out(self, pins: Iterable[Pin], why: str) -> None:
        """Let every worker keep these pins; `run` does the rest where the call is cancelled."""
        self._manager.pins.set(pins)
        self._carried_out = False
        try:
            for worker_id in self._manager.workers():
                if worker_id in self._manager.pool_sizes():  # it may have left meanwhile
                    for _ in self._manager.pin_in_steps_at(worker_id, why):
                        await asyncio.sleep(0)  # reports go between
                await asyncio.sleep(0)
            self._carried_out = True
        finally:
            if not self._carried_out:
                self._wake.set()
        if why:
            log.info("pins: %s", why)

    def _now(self) -> float:
        return self._clock.time_ns() / 1e9


def _packed(pins: Iterable[Pin], last_reset: int) -> bytes:
    stored = pb.StoredPins(last_reset=last_reset)
    for each in pins:
        hashes = pack_hashes(each.block_hashes)
        stored.pins.add(
            name=each.name, tenant=each.tenant, block_hashes=hashes, num_tokens=each.num_tokens, expires=each.expires
        )
    return stored.SerializeToString(deterministic=True)


def _unpacked(kept: KeptPins) -> tuple[tuple[Pin, ...], int]:
    """Return the pins of a stored value, and the id of the last reset.

    Raises PinsUnreadable where no manager can have written it.
    """
    try:
        stored = pb.StoredPins.FromString(kept.value)
    except DecodeError:
        raise PinsUnreadable(kept.key, "is malformed; expected a StoredPins") from None
    if len(stored.pins) > MAX_PINS:
        raise PinsUnreadable(kept.key, f"has {len(stored.pins)} pins; expected at most {MAX_PINS}")
    if any(len(each.block_hashes) % KEY_BYTES for each in stored.pins):
        raise PinsUnreadable(kept.key, f"has a part of a hash; expected {KEY_BYTES} bytes for each block")
    pins = tuple(
        Pin(
            each.name,
            each.tenant,
            unpack_hashes(each.block_hashes),
            each.num_tokens,
            each.expires if each.HasField("expires") else None,
        )
        for each in stored.pins
    )
    if num_listed(pins) > MAX_PINNED_BLOCKS:
        raise PinsUnreadable(kept.key, f"has {num_listed(pins)} blocks; expected at most {MAX_PINNED_BLOCKS}")
    return pins, stored.last_reset
