"""A suite for fuzzing, a loop that talks to it, and the checks that hold whatever was sent to it."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from grpc import aio
from hypothesis import HealthCheck, Phase, settings

from cli.commands.debug import dump, services
from tests.support.lost_status import ENDED
from tests.support.suite import Suite, greedy

T = TypeVar("T")
# Bounds a hang: a request that takes longer was not answered.
PATIENCE: Final = 60.0
_EXAMPLES: Final = 25
# Without Hypothesis' explanations, which trace every line; nothing is kept between two runs.
ANY: Final = settings(
    max_examples=_EXAMPLES,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
_GOOD: Final = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
# Tasks that a service may have more than before: those of watches and of housekeeping that come and go.
_MORE_TASKS: Final = 20


def seconds(share: float) -> float:
    """Return the seconds of a part of `make fuzz` that may take this share of all."""
    return share * float(os.environ.get("FUZZ_SECONDS", "60"))


def again_and_again(test: Callable[[], None], share: float, reached: Callable[[], bool] = lambda: True) -> None:
    """Run a test of Hypothesis, each time with other examples, until its share of the time has passed.

    On a slow machine it goes on until what must be reached is reached, for a bounded time.
    """
    began = time.monotonic()
    while True:
        test()
        if time.monotonic() - began >= (seconds(share) if reached() else PATIENCE):
            return


def check_status(code: grpc.StatusCode, details: str | None) -> None:
    """Fail for a status that shows a defect of the server: UNKNOWN, a bug, a hang, a process that is gone.

    INTERNAL with a reason refuses a message that breaks the lease protocol; a bug has none.
    """
    reason = (details or "internal error").lower()
    refused = code is grpc.StatusCode.INTERNAL and (details == ENDED or "internal error" not in reason)
    assert refused or code in _GOOD, f"{code.name}: {details}"


class Fuzzed:
    """A suite whose processes must live through whatever comes. `run` runs a coroutine to its end."""

    def __init__(self, suite: Suite, runner: asyncio.Runner, state_dir: Path) -> None:
        self.suite, self._runner, self._state_dir = suite, runner, state_dir
        self.recent: deque[str] = deque(maxlen=10)
        self._pids = self._running()
        self._tasks = self._count_tasks()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def check(self) -> None:
        """Fail with the last messages unless all processes are the same, serve, and hold nothing of what was sent."""
        words = "\n".join(["the last messages were:", *self.recent])
        assert self._running() == self._pids, f"a process ended; {words}\n" + "\n".join(self.suite.lines[-30:])
        outcome = self.run(self.suite.generate(greedy([40, 41, 42], 4), PATIENCE))
        assert len(outcome.tokens) == 4, words
        self.run(self.suite.until_all_free(len(self.suite.stack.options.worker_ports)))
        counts = self._count_tasks()
        grown = {name: (self._tasks[name], count) for name, count in counts.items() if count > self._most(name)}
        assert not grown, f"tasks that do not end: {grown}; {words}"

    def _most(self, name: str) -> int:
        return self._tasks[name] + _MORE_TASKS

    def _running(self) -> dict[str, int | None]:
        return {name: child.pid for name, child in self.suite.stack.children.items()}

    def _count_tasks(self) -> dict[str, int]:
        """Return the tasks of each service that are not gRPC's own."""
        found = (dump(service, PATIENCE) for service in services(self._state_dir, None))
        return {f"{each['service']} {each['pid']}": len(each["tasks"]) for each in found}


async def call_unary(channel: aio.Channel, method: str, message: bytes) -> None:
    """Call a method that answers once, or with a stream; check its status."""
    call: Any = channel.unary_unary(method)
    try:
        await call(message, timeout=PATIENCE)
    except aio.AioRpcError as error:
        check_status(error.code(), error.details())


async def call_streaming(channel: aio.Channel, method: str, message: bytes, quiet: float | None = None) -> None:
    """Read a method's stream to its end, or until nothing comes for `quiet` seconds if given; check its status."""
    begin: Any = channel.unary_stream(method)
    call = begin(message, timeout=PATIENCE)
    try:
        async with asyncio.timeout(quiet) as limit:
            async for _ in call:
                limit.reschedule(quiet and asyncio.get_running_loop().time() + quiet)
    except TimeoutError:
        pass
    except aio.AioRpcError as error:
        check_status(error.code(), error.details())
    finally:
        call.cancel()


async def call_both_ways(
    channel: aio.Channel,
    method: str,
    messages: list[bytes],
    quiet: float,
    is_last: Callable[[bytes], bool] = lambda answer: False,
) -> list[bytes]:
    """Send messages on a stream, read until nothing comes for `quiet` seconds, leave; check a status that comes.

    Return what came. It leaves at once after an answer that `is_last`.
    """
    came: list[bytes] = []
    begin: Any = channel.stream_stream(method)
    call = begin(timeout=PATIENCE)
    try:
        for message in messages:
            await call.write(message)
        await call.done_writing()
        async with asyncio.timeout(quiet) as limit:
            async for answer in call:
                came.append(answer)
                if is_last(answer):
                    break
                limit.reschedule(asyncio.get_running_loop().time() + quiet)
    except TimeoutError:
        pass
    except (aio.AioRpcError, asyncio.InvalidStateError):  # a write to a stream that has ended
        check_status(await call.code(), await call.details())
    finally:
        call.cancel()
    return came
