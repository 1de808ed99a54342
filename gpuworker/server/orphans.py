"""Orphans: sequences of a router whose stream was lost. They run on for a grace, and another router may adopt them.

Blocks are the scarce thing, so orphans are bounded in number and bytes, for each tenant and in all. Over a bound the
oldest ends, and at the end of the grace all do.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from common.contracts.limits import (
    MAX_ORPHAN_BYTES,
    MAX_ORPHAN_BYTES_A_TENANT,
    MAX_ORPHANS,
    MAX_ORPHANS_A_TENANT,
    ORPHANS_ALONE,
)
from common.contracts.types import FinishReason, SequenceId
from gpuworker.engine.ports import EngineOutputs
from gpuworker.server.live_sequence import LiveSequence, gather
from quire.gpuworker.v1 import gpuworker_pb2 as pb

_INCARNATION_BYTES: Final = 16
# Bytes of an answer to Find; a larger one would break the stream.
_MOST_BYTES: Final = 15 << 20


class OrphanEnd(StrEnum):
    """How orphans ended or went on; the values are labels of metrics."""

    KEPT = "kept"
    RESUMED = "resumed"
    EXPIRED = "expired"
    DROPPED = "dropped"
    REPLACED = "replaced"


@dataclass(slots=True)
class _Orphan:
    live: LiveSequence
    router: bytes
    since: float
    bytes: int = 0


class _Nowhere:
    """Takes outputs for which there is no router."""

    def begin_turn(self, at: float, lost: float) -> None: ...

    def tokens(self, step: int, handle: int, tokens: object, logprobs: object) -> None: ...

    def prompt_logprobs(self, handle: int, logprobs: object) -> None: ...

    def admitted(self, handle: int, admit: object, waited: object) -> None: ...

    def recounted(self, handle: int, cached_tokens: int) -> None: ...

    def started(self, handle: int, started: object) -> None: ...

    def delayed(self, handle: int, compiled: float = 0.0, stalled: float = 0.0, away: float = 0.0) -> None: ...

    def preempted(self, handle: int) -> None: ...

    def finished(self, handle: int, end: object) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    """What one lost stream left, and when."""

    names: tuple[SequenceId, ...]
    since: float


class Orphans:
    """Lives on the I/O loop. `cancel` ends a sequence in the engine; `grace` is in seconds, 0 keeps none.

    The grace is for clients on their way to another router. While `has_router` says that none is connected, it is
    extended, and it begins anew with the next one (`router_came`).
    """

    def __init__(
        self, grace: float, cancel: Callable[[SequenceId, FinishReason], None], has_router: Callable[[], bool]
    ) -> None:
        self._grace, self._cancel, self._has_router = grace, cancel, has_router
        self._extended: list[_Left] = []
        self._orphans: dict[SequenceId, _Orphan] = {}  # the oldest first
        self._leaving: dict[SequenceId, LiveSequence] = {}  # cancelled; the engine has not said so yet
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.outcomes: Counter[OrphanEnd] = Counter()
        """How many sequences met each outcome, in this life of the worker."""

    def __len__(self) -> int:
        return len(self._orphans)

    @property
    def size(self) -> int:
        return self._bytes.total()

    @property
    def handed_over(self) -> int:
        """The number of ended sequences that were to go on at other workers, which may not have them."""
        return sum(orphan.live.handed_over and orphan.live.ended for orphan in self._orphans.values())

    @property
    def waits(self) -> bool:
        """Whether the engine's outputs concern any of these."""
        return bool(self._orphans or self._leaving)

    # ------------------------------------------------------------ routers

    def keeps(self, router: bytes) -> bool:
        """Return whether the sequences of a router are kept when it is lost. `router` is its incarnation."""
        return self._grace > 0 and len(router) == _INCARNATION_BYTES

    def take_sequence(self, router: bytes, left: Sequence[LiveSequence]) -> None:
        """Keep what a lost router left; `router` is b"" for one that stood still.

        The clients of that one may have left it, and be on their way to another router when it is here again.
        """
        now = time.monotonic()
        for live in left:
            self._add(live, router, now)
        if left:
            self._expire_later(_Left(tuple(live.id for live in left), now))

    def router_came(self) -> None:
        """Give what waited for any router its grace from now on."""
        extended, self._extended = self._extended, []
        for left in extended:
            self._expire_later(left)

    def returned(self, router: bytes) -> None:
        """End the orphans of a router that is here again: it has moved its sequences to other workers."""
        if len(router) == _INCARNATION_BYTES:
            self._end([name for name, orphan in self._orphans.items() if orphan.router == router], OrphanEnd.REPLACED)

    def replaced(self, request: tuple[str, str]) -> None:
        """End the orphans of a request whose client begins anew."""
        if self._orphans:
            self._end([orphan.live.id for orphan in self._of(request)], OrphanEnd.REPLACED)

    def close(self) -> None:
        """End all: the worker stops."""
        self._end(list(self._orphans), OrphanEnd.EXPIRED)

    # ------------------------------------------------------------ the engine

    def deliver(self, outputs: EngineOutputs) -> None:
        """Keep the outputs of orphans."""
        live = {name: orphan.live for name, orphan in self._orphans.items()} | self._leaving
        gather(live, outputs, _NOWHERE)
        for end in outputs.finished:
            self._leaving.pop(end.sequence, None)
            if (one := live.get(end.sequence)) is not None:
                one.close(end)
        grown = {sequence for sequence, _ in outputs.tokens} | outputs.prompt_logprobs.keys()
        for name in grown & self._orphans.keys():
            self._measure(self._orphans[name])
        self._keep_bounds()

    # ------------------------------------------------------------ the next router

    def found(self, query: int, request: tuple[str, str], held: bool) -> pb.Found:
        """Return the answer to Find. `held` says whether another stream has sequences of the request."""
        found = pb.Found(query=query, held=held)
        now = time.monotonic()
        first: pb.Submit | None = None
        for orphan in sorted(self._of(request), key=lambda each: each.live.message.index):
            message = _message_of(orphan, first, now)
            first = first or message.submit
            found.orphans.append(message)
        return found if found.ByteSize() <= _MOST_BYTES else pb.Found(query=query, held=held)

    def adopt(self, sequence: int) -> LiveSequence | None:
        """Give an orphan to the router that takes it over; None when it has gone."""
        orphan = self._remove(SequenceId(sequence))
        if orphan is None:
            return None
        self.outcomes[OrphanEnd.RESUMED] += 1
        return orphan.live

    def _of(self, request: tuple[str, str]) -> list[_Orphan]:
        return [orphan for orphan in self._orphans.values() if orphan.live.request == request]

    # ------------------------------------------------------------ bounds

    def _add(self, live: LiveSequence, router: bytes, now: float) -> None:
        orphan = self._orphans[live.id] = _Orphan(live, router, now)
        self._count[live.message.tenant] += 1
        self.outcomes[OrphanEnd.KEPT] += 1
        if live.spans is not None and not live.ended:
            live.spans.orphaned()
        self._measure(orphan)
        self._keep_bounds()

    def _measure(self, orphan: _Orphan) -> None:
        size = orphan.live.bytes
        self._bytes[orphan.live.message.tenant] += size - orphan.bytes
        orphan.bytes = size

    def _keep_bounds(self) -> None:
        """Drop what is too much: ended sequences before those that still run, of each the oldest first."""
        if len(self._orphans) > MAX_ORPHANS or self.size > MAX_ORPHAN_BYTES:
            for name in self._droppable(self._orphans):
                if len(self._orphans) > MAX_ORPHANS or self.size > MAX_ORPHAN_BYTES:
                    self._end([name], OrphanEnd.DROPPED)
        for tenant in [name for name in self._count if self._has_too_much(name)]:
            for name in self._droppable(
                [each for each, orphan in self._orphans.items() if orphan.live.message.tenant == tenant]
            ):
                if self._has_too_much(tenant):
                    self._end([name], OrphanEnd.DROPPED)

    def _droppable(self, names: Iterable[SequenceId]) -> list[SequenceId]:
        return sorted(names, key=lambda name: not self._orphans[name].live.ended)

    def _has_too_much(self, tenant: str) -> bool:
        return self._count[tenant] > MAX_ORPHANS_A_TENANT or self._bytes[tenant] > MAX_ORPHAN_BYTES_A_TENANT

    def _expire_later(self, left: _Left) -> None:
        asyncio.get_running_loop().call_later(self._grace, self._is_due, left)

    def _is_due(self, left: _Left) -> None:
        rest = left.since + ORPHANS_ALONE * self._grace - time.monotonic()
        if self._has_router() or rest <= 0.0:
            self._expire(left)
        else:
            self._extended.append(left)
            asyncio.get_running_loop().call_later(rest, self._no_router_came, left)

    def _no_router_came(self, left: _Left) -> None:
        if left in self._extended:
            self._extended.remove(left)
            self._expire(left)

    def _expire(self, left: _Left) -> None:
        """End what was orphaned then and still is."""
        orphans = self._orphans
        self._end(
            [each for each in left.names if each in orphans and orphans[each].since == left.since], OrphanEnd.EXPIRED
        )

    def _end(self, names: Iterable[SequenceId], outcome: OrphanEnd) -> None:
        for name in names:
            orphan = self._remove(name)
            if orphan is None:
                continue
            self.outcomes[outcome] += 1
            if not orphan.live.ended:
                self._leaving[name] = orphan.live
                self._cancel(name, FinishReason.CANCELLED)

    def _remove(self, name: SequenceId) -> _Orphan | None:
        orphan = self._orphans.pop(name, None)
        if orphan is not None:
            tenant = orphan.live.message.tenant
            self._count[tenant] -= 1
            self._bytes[tenant] -= orphan.bytes
            if not self._count[tenant]:
                del self._count[tenant], self._bytes[tenant]
        return orphan


_NOWHERE: Final = _Nowhere()


def _message_of(orphan: _Orphan, first: pb.Submit | None, now: float) -> pb.Orphan:
    live, kept = orphan.live, orphan.live.kept
    assert kept is not None
    return pb.Orphan(
        sequence=live.id,
        submit=_submit_of(live.message, first),
        output_tokens=len(kept.tokens),
        logprobs_dropped=kept.logprobs.dropped,
        prompt_logprobs_dropped=kept.scored.dropped,
        submitted_seconds=now - live.submitted,
        orphaned_seconds=now - orphan.since,
        admitted_seconds=_ago(kept.admitted_at, now),
        first_token_seconds=_ago(kept.first_token_at, now),
        last_token_seconds=_ago(kept.last_token_at, now),
        ended=live.ended,
    )


def _submit_of(message: pb.Submit, first: pb.Submit | None) -> pb.Submit:
    """Return the submit of an orphan, without what the first one of its request says already."""
    if first is None:
        whole = pb.Submit()
        whole.CopyFrom(message)
        for field in ("handle", "block_hashes", "parent_digest", "fork_of"):
            whole.ClearField(field)
        return whole
    own = pb.Submit(
        index=message.index,
        output_tokens_before=message.output_tokens_before,
        prompt_logprobs_before=message.prompt_logprobs_before,
        continuation=message.continuation,
    )
    if message.prompt_token_ids != first.prompt_token_ids:
        own.prompt_token_ids = message.prompt_token_ids
    return own


def _ago(moment: float | None, now: float) -> float | None:
    return None if moment is None else now - moment
