"""Holds the submits of one router while their constraints are compiled, off the I/O loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from common.contracts.errors import EngineFailure, Overloaded, QuireError, QuotaViolation
from common.contracts.limits import MAX_GRAMMARS_WAITING
from common.contracts.types import Constraint
from gpuworker.structured.grammars import Grammar, GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb

Compiled = Callable[[pb.Submit, float, "Grammar | QuireError"], None]
_RETRY_S: Final = 1.0


class _Key(NamedTuple):
    """What is compiled once for all submits that wait for it; a tenant waits for its own turn alone."""

    tenant: str
    constraint: Constraint


class GrammarCompileQueue:
    """Lives on the I/O loop. Calls `compiled` with each submit, its arrival time, and its grammar or the refusal.

    Submits with the same constraint leave in the order of arrival, so a fork follows the sequence that it forks. When
    all places are taken, the tenant with the most constraints gives up its newest one for a tenant with fewer.
    """

    def __init__(self, compiler: GrammarCompiler, compiled: Compiled) -> None:
        self._compiler, self._compiled = compiler, compiled
        self._waiting: dict[_Key, list[tuple[pb.Submit, float]]] = {}
        self._work: dict[_Key, Future[Grammar]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, message: pb.Submit, constraint: Constraint, came: float) -> None:
        """Compile the constraint, then call `compiled`: at once if the constraint was compiled before."""
        self._compiler.know_ends(message.eos_token_ids)
        key = _Key(message.tenant, constraint)
        if key in self._waiting:
            self._waiting[key].append((message, came))
        elif (grammar := self._compiler.compiled(constraint)) is not None:
            self._compiled(message, came, grammar)
        elif self._has_room(key.tenant):
            self._waiting[key] = [(message, came)]
            work = self._work[key] = self._compiler.compile_soon(constraint, key.tenant)
            asyncio.wrap_future(work).add_done_callback(lambda done: self._done(key, done))
        else:
            self._compiled(message, came, _no_room())

    def withdraw(self, handle: int) -> pb.Submit | None:
        """Take back a waiting submit; None when none of this handle waits. A compilation without submits ends."""
        for key, waiting in self._waiting.items():
            for index, (message, _) in enumerate(waiting):
                if message.handle == handle:
                    del waiting[index]
                    self._cancel_if_unused(key)
                    return message
        return None

    def clear(self) -> None:
        for key in list(self._waiting):
            self._waiting[key].clear()
            self._cancel_if_unused(key)

    def _has_room(self, tenant: str) -> bool:
        """Return whether a constraint of the tenant may wait; make room for it at the cost of the longest line."""
        if len(self._work) < MAX_GRAMMARS_WAITING:
            return True
        held = Counter(key.tenant for key in self._work)
        longest, most = held.most_common(1)[0]
        newest = next(key for key in reversed(self._work) if key.tenant == longest)
        if most <= held[tenant] + 1 or not self._work[newest].cancel():
            return False
        del self._work[newest]
        for message, came in self._waiting.pop(newest):
            self._compiled(message, came, _no_room())
        return True

    def _cancel_if_unused(self, key: _Key) -> None:
        """Cancel a compilation that no submit waits for, unless it has begun."""
        if not self._waiting[key] and self._work[key].cancel():
            del self._waiting[key], self._work[key]

    def _done(self, key: _Key, done: asyncio.Future[Grammar]) -> None:
        if done.cancelled():
            return
        del self._work[key]
        error = done.exception()
        if error is not None and not isinstance(error, QuireError):
            error = EngineFailure(f"a constraint could not be compiled: {error!r}")
        for message, came in self._waiting.pop(key):
            self._compiled(message, came, error or done.result())


def _no_room() -> Overloaded:
    what = f"{MAX_GRAMMARS_WAITING} of {MAX_GRAMMARS_WAITING} constraints of this router wait to be compiled"
    return Overloaded(QuotaViolation("gpuworker.grammars", what), _RETRY_S)
