"""Hands over each sequence when it ends, for the log that `quire replay` reads: lengths, times, names of blocks.

The names of a recording are made with a key that it alone has. They say which blocks were equal, and nothing of what
is in them; two recordings cannot be compared. While nothing records, a request costs one comparison.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from common.contracts.clock import Clock
from common.contracts.errors import Overloaded, QuotaViolation
from common.contracts.types import BlockHash

MAX_WATCHES: Final = 4
# Records that wait for one reader; the oldest go first when it reads too slowly.
MAX_WAITING: Final = 1000
_NAME_BYTES: Final = 6
_RETRY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class EndedSequence:
    """One sequence of a request that has ended. Times are readings of Clock.monotonic.

    `block_hashes` are those of the full blocks of prompt and output.
    """

    arrived: float
    ended: float
    first_token_at: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    block_size: int
    block_hashes: Sequence[BlockHash]
    worker_id: str
    tenant: str
    priority: int


@dataclass(frozen=True, slots=True)
class Tapped:
    """What a reader gets of a sequence. `arrived` is in seconds since the recording began, and may be below 0.

    `lost` counts the records that the reader was too slow for, just before this one.
    """

    sequence: EndedSequence
    arrived: float
    blocks: tuple[int, ...]
    tenant: str
    lost: int


class Watch:
    """One recording."""

    def __init__(self, began: float) -> None:
        self._began, self._key = began, secrets.token_bytes(32)
        self._waiting: deque[EndedSequence] = deque()
        self._lost = 0
        self._came = asyncio.Event()

    def put(self, sequence: EndedSequence) -> None:
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._waiting.append(sequence)
        self._came.set()

    async def take(self) -> Tapped:
        """Wait for the next record."""
        while not self._waiting:
            self._came.clear()
            await self._came.wait()
        lost, self._lost = self._lost, 0
        return self._named(self._waiting.popleft(), lost)

    def _named(self, sequence: EndedSequence, lost: int) -> Tapped:
        blocks = tuple([self._name(each) for each in sequence.block_hashes])
        tenant = f"{self._name(sequence.tenant.encode()):012x}" if sequence.tenant else ""
        return Tapped(sequence, sequence.arrived - self._began, blocks, tenant, lost)

    def _name(self, what: bytes) -> int:
        digest = hashlib.blake2b(what, digest_size=_NAME_BYTES, key=self._key).digest()
        return int.from_bytes(digest, "little")


class RequestTap:
    """The recordings that run. `ended` gets each request's sequences; it calls for them only while one runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watches: set[Watch] = set()

    def ended(self, sequences: Callable[[], Iterable[EndedSequence]]) -> None:
        if not self._watches:
            return
        for sequence in sequences():
            for watch in self._watches:
                watch.put(sequence)

    async def watch(self) -> AsyncGenerator[Tapped, None]:
        """Yield each sequence that ends from now on. Raises Overloaded where enough recordings run already."""
        if len(self._watches) >= MAX_WATCHES:
            what = f"{MAX_WATCHES} recordings run already; end one of them"
            raise Overloaded(QuotaViolation("router.recordings", what), _RETRY_S)
        watch = Watch(self._clock.monotonic())
        self._watches.add(watch)
        try:
            while True:
                yield await watch.take()
        finally:
            self._watches.discard(watch)
