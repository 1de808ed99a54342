"""An injection that fails: what it waited for and what came instead. It ends the run with one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import redis.exceptions
from grpc import aio

from quire.api.errors import QuireError

# What the suite, the machine and its tools answer with. Any other error is a mistake of the benchmark.
_OUTSIDE: Final = (OSError, aio.AioRpcError, redis.exceptions.RedisError, QuireError)


class InjectionFailed(Exception):
    """What an injection waited for did not come. `where` says at which fault of the plan."""

    def __init__(self, expected: str, came: str, where: str = "") -> None:
        super().__init__(expected, came, where)
        self.expected, self.came, self.where = expected, came, where

    def __str__(self) -> str:
        return f"{self.where or 'an injection'} failed: expected {self.expected}, came: {self.came}"

    def line(self, bench: str) -> str:
        """Return the line that ends a run of this benchmark."""
        return f"bench.{bench}: {self}; the run ends there without figures"


@contextmanager
def injecting(where: str) -> Iterator[None]:
    """Raise InjectionFailed, with the place in the plan, for whatever goes wrong outside the benchmark."""
    try:
        yield
    except InjectionFailed as failed:
        raise InjectionFailed(failed.expected, failed.came, where) from failed
    except _OUTSIDE as error:
        raise InjectionFailed("no error", _words(error), where) from error


@asynccontextmanager
async def patience(seconds: float, expected: str, came: Callable[[], str]) -> AsyncIterator[None]:
    """Bound what is waited for. Raises InjectionFailed with what has come by then."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise InjectionFailed(f"{expected} within {seconds:g} s", came()) from None


@contextmanager
def failing_alone() -> Iterator[None]:
    """Raise a failed injection by itself where a group of tasks raises nothing else."""
    try:
        yield
    except BaseExceptionGroup as group:
        failed, others = group.split(InjectionFailed)
        if failed is None or others is not None:
            raise
        raise failed.exceptions[0] from None


def _words(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, aio.AioRpcError):
        said = f"{error.code().name} {error.details() or ''}"
    else:
        said = f"{type(error).__name__} {error}"
    return " ".join(said.split())
