"""The prefix index in Redis: one fenced Lua call for each change."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError, ResponseError

from common.contracts import index_format
from common.contracts.errors import StaleEpoch
from kvmanager.contracts.ports import FenceLost, IndexCall, IndexUnavailable, KeptPins, PinsUnreadable, WorkerEntry
from kvmanager.contracts.slots import Loss, NoSlot
from kvmanager.index import scripts as index_scripts

_Argument = str | bytes | int

TIMEOUT_S: Final = 2.0
EPOCH_JUMP: Final = 1 << 16
# Members of the set of workers that a renewal looks at; the set is clean after some renewals.
_DRAWN: Final = 512
# How Redis begins its error about a key of another type than a command takes.
_WRONG_TYPE: Final = "WRONGTYPE"
_REFUSALS: Final = {-1: NoSlot.FULL, -2: NoSlot.ELSEWHERE}


class RedisIndexStore:
    """The index of one namespace. Lifetimes in seconds; `jump` draws the step where Redis counts no epoch.

    `term` is that of the manager in its `group`; 0: it is in no group. Each group has a fence of its own, so several
    groups may write one index, each for its own workers.
    """

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        prefix_ttl: float,
        lease_ttl: float,
        jump: Callable[[], int] = lambda: secrets.randbelow(EPOCH_JUMP),
        term: int = 0,
        group: str = "",
    ) -> None:
        self._redis, self._namespace, self._jump, self._term = redis, namespace, jump, term
        self._group = group
        self._terms = index_format.term_key(namespace, group)
        self._prefix_ms, self._lease_ms = round(1000 * prefix_ttl), round(1000 * lease_ttl)
        self._fence = index_format.fence_key(namespace, group)
        self._root = index_format.prefix_key_root(namespace)
        self._acquire = redis.register_script(index_scripts.ACQUIRE)
        self._register = redis.register_script(index_scripts.REGISTER)
        self._update = redis.register_script(index_scripts.UPDATE)
        self._renew = redis.register_script(index_scripts.RENEW)
        self._retire = redis.register_script(index_scripts.RETIRE)
        self._keep_pins = redis.register_script(index_scripts.PINS)
        self._read_pins = redis.register_script(index_scripts.PINS_READ)
        self._pins = index_format.pins_key(namespace, group)

    async def acquire(self, least: int, held: int) -> int:
        keys = [index_format.epoch_key(self._namespace), self._fence, self._terms]
        with unavailable():
            taken, epoch = await self._acquire(keys=keys, args=[least, held, self._jump(), self._term])
        if not taken:
            raise StaleEpoch(f"a manager of epoch {epoch} has taken over from this one, of epoch {held}")
        return int(epoch)

    async def register(self, epoch: int, worker: WorkerEntry) -> int | NoSlot:
        arguments: list[_Argument] = [
            self._namespace,
            worker.worker_id,
            worker.incarnation,
            worker.address,
            worker.generation,
        ]
        limits: list[_Argument] = [self._lease_ms, index_format.MAX_SLOTS, worker.session, self._group]
        slot = int(await self._call(self._register, epoch, [], [*arguments, *limits]))
        return _REFUSALS[slot] if slot < 0 else slot

    async def update(self, epoch: int, slot: int, generation: int, call: IndexCall) -> bool:
        keys = [self._root + key for key in (*call.removes, *call.adds)]
        owners = index_format.slot_key(self._namespace, 0)[:-1]
        entry = index_format.pack_entry(slot, generation)
        written = await self._call(self._update, epoch, keys, [entry, self._prefix_ms, len(call.removes), owners])
        return int(written) >= 0

    async def renew(self, epoch: int, slots: Mapping[int, int], discovery: Mapping[str, str]) -> Mapping[int, Loss]:
        of_slot = index_format.slot_key, index_format.liveness_key
        keys = [key(self._namespace, slot) for slot in slots for key in of_slot]
        lost = await self._call(self._renew, epoch, keys, [self._lease_ms, *slots.values()])
        with unavailable():
            try:
                await self._announce(discovery)
            except ResponseError as error:
                if _WRONG_TYPE not in str(error):  # behind the number of the command in a pipeline
                    raise
                # No manager wrote it, and no worker would be found for as long as it stood there.
                await self._redis.delete(index_format.DISCOVERY_WORKERS_KEY)
                await self._announce(discovery)
        in_order = tuple(slots)
        return {in_order[abs(place) - 1]: Loss.TAKEN if place > 0 else Loss.GONE for place in lost}

    async def _announce(self, discovery: Mapping[str, str]) -> None:
        """Write what routers read of workers, and forget workers that are gone."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for worker_id, value in discovery.items():
                pipeline.set(index_format.discovery_key(worker_id), value, px=self._lease_ms)
            if discovery:
                pipeline.sadd(index_format.DISCOVERY_WORKERS_KEY, *discovery)
            pipeline.srandmember(index_format.DISCOVERY_WORKERS_KEY, _DRAWN)
            *_, drawn = await pipeline.execute()
        if others := set(drawn) - {worker_id.encode() for worker_id in discovery}:
            await self._forget_departed(others)

    async def _forget_departed(self, drawn: Collection[bytes]) -> None:
        """Take workers without an entry out of the set: a manager that was killed could not retire its own."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for worker_id in drawn:
                pipeline.exists(index_format.discovery_key("").encode() + worker_id)
            found = await pipeline.execute()
        departed = [worker_id for worker_id, exists in zip(drawn, found, strict=True) if not exists]
        if departed:
            await self._redis.srem(index_format.DISCOVERY_WORKERS_KEY, *departed)

    async def retire(self, epoch: int, slot: int, generation: int, worker_id: str) -> None:
        keys = [index_format.slot_key(self._namespace, slot), index_format.liveness_key(self._namespace, slot)]
        if await self._call(self._retire, epoch, keys, [generation, secrets.randbits(32)]):
            with unavailable():
                await self._redis.srem(index_format.DISCOVERY_WORKERS_KEY, worker_id)

    async def read_pins(self, most_bytes: int) -> KeptPins | None:
        keys = [self._pins, *([index_format.pins_key(self._namespace)] if self._group else [])]
        with unavailable():
            found = await self._read_pins(keys=keys, args=[most_bytes])
        if not found:
            return None
        place, num_bytes, *value = found
        key = keys[place - 1]
        if num_bytes < 0:
            raise PinsUnreadable(key, "holds another type of value; expected a string")
        if not value:
            raise PinsUnreadable(key, f"has {num_bytes} bytes; expected at most {most_bytes}")
        return KeptPins(key, value[0], own=place == 1)

    async def has_pins(self) -> bool:
        with unavailable():
            return bool(await self._redis.exists(self._pins))

    async def write_pins(self, epoch: int, value: bytes) -> None:
        await self._call(self._keep_pins, epoch, [self._pins], [value, int(bool(self._group))])

    async def close(self) -> None:
        await self._redis.aclose()

    async def _call(
        self, script: AsyncScript, epoch: int, keys: Sequence[str | bytes], arguments: Sequence[_Argument]
    ) -> Any:
        with unavailable():
            fence, *result = await script(keys=[self._fence, *keys], args=[epoch, *arguments])
        if result:
            return result[0]
        if fence > epoch:
            raise StaleEpoch(f"a manager of epoch {fence} has taken over from this one, of epoch {epoch}")
        found = fence or "gone, or no number that a manager can have written"
        raise FenceLost(f"the index was wiped or overwritten: its fence is {found}; this manager's epoch is {epoch}")


@contextmanager
def unavailable() -> Iterator[None]:
    """Raise IndexUnavailable for an error of Redis, or of the way to it."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise IndexUnavailable(str(error)) from error
