"""Holds the submits of one router while their constraints are compiled, off the I/O loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.errors import EngineFailure, QuireError
from common.types import Constraint
from gpuworker.structured.grammars import Grammar, GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb

Compiled = Callable[[pb.Submit, float, "Grammar | QuireError"], None]


class GrammarCompileQueue:
    """Lives on the I/O loop. Calls `compiled` with each submit, its arrival time, and its grammar or the refusal.

    Submits with the same constraint leave in the order of arrival, so a fork follows the sequence that it forks.
    """

    def __init__(self, compiler: GrammarCompiler, compiled: Compiled) -> None:
        self._compiler, self._compiled = compiler, compiled
        self._waiting: dict[Constraint, list[tuple[pb.Submit, float]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __contains__(self, handle: int) -> bool:
        return any(message.handle == handle for waiting in self._waiting.values() for message, _ in waiting)

    def put(self, message: pb.Submit, constraint: Constraint, came: float) -> None:
        """Compile the constraint, then call `compiled`: at once if the constraint was compiled before."""
        if constraint in self._waiting:
            self._waiting[constraint].append((message, came))
        elif (grammar := self._compiler.compiled(constraint)) is not None:
            self._compiled(message, came, grammar)
        else:
            self._waiting[constraint] = [(message, came)]
            work = asyncio.wrap_future(self._compiler.compile_soon(constraint))
            work.add_done_callback(lambda done: self._done(constraint, done))

    def withdraw(self, handle: int) -> pb.Submit | None:
        """Take back a waiting submit; None when none of this handle waits."""
        for waiting in self._waiting.values():
            for index, (message, _) in enumerate(waiting):
                if message.handle == handle:
                    return waiting.pop(index)[0]
        return None

    def clear(self) -> None:
        for waiting in self._waiting.values():
            waiting.clear()

    def _done(self, constraint: Constraint, done: asyncio.Future[Grammar]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, QuireError):
            error = EngineFailure(f"a constraint could not be compiled: {error!r}")
        for message, came in self._waiting.pop(constraint):
            self._compiled(message, came, error or done.result())
