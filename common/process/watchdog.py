"""Notices that a service's work stands still although nothing explains it, and measures the lag of its event loop.

It also looks whether the process has file descriptors left.

Each service says in a pure file what waits (`*/watchdog.py`). One task here looks once in a while, and reports a
reason to health when the same work has waited for too long. It reports "" as soon as anything went on.

The lag is the time by which the task's own timer is late: so long did any other callback of the loop wait then.
`LoopTurns` measures something else, the processor time of every turn, for 3 % of a core. Ten timers a second are free
in a process that works, and the most of what an idle one does: it has one a second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, Histogram

from common.contracts.clock import until_tick
from common.process.standstill import Standstill

log = logging.getLogger(__name__)

_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})


# Notices that this process, or the machine, has no file descriptor left, and says so once.
# Without one no connection is accepted and none is opened. Event loop and gRPC try again by themselves, without a
# word.
class OpenFiles:
    """`look` once a second or so: it opens a file and closes it, some microseconds."""

    def __init__(self, opens: Callable[[], int] = lambda: os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) -> None:
        self._opens = opens
        self.exhausted = False

    def look(self) -> None:
        """Look whether a file can be opened, and log what has changed."""
        try:
            os.close(self._opens())
        except OSError as error:
            if error.errno in _NONE_LEFT and not self.exhausted:
                self.exhausted = True
                log.error("no file descriptor is left, so no connection can begin: %s", _words(error))
            return
        if self.exhausted:
            self.exhausted = False
            log.warning("there are file descriptors again; connections begin")


def _words(error: OSError) -> str:
    if error.errno == errno.ENFILE:
        return "the machine has none; raise fs.file-max, or end what holds them"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"the process has all {soft} that it may have; raise ulimit -n, or let clients close idle connections"


_PERIOD_S: Final = 0.1
_LOOK_S: Final = 1.0
_IDLE_SHARE: Final = 0.02
# Time between two looks that counts at most: what is more, the process itself did not run.
_MOST_S: Final = 2.0
_LAGS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Work:
    """What should go on now, in words, "" where nothing does; `done` differs whenever something went on."""

    waits: str
    done: object


# The work of a service by its part, such as each worker's ledger; "" for one that has no parts.
Look = Callable[[], Mapping[str, Work]]


def next_period(cpu_seconds: float, seconds: float) -> float:
    """Return the seconds to the next timer of a process that used so many seconds of processors in the last so many."""
    return _LOOK_S if cpu_seconds < _IDLE_SHARE * seconds else _PERIOD_S


class StallClock:
    """For how long the same work has waited. It reads no clock itself."""

    def __init__(self, bound: float) -> None:
        """`bound`: seconds after which work that waits counts as standing still."""
        self._bound = bound
        self._done: object = None
        self._waited, self._acted_at = 0.0, 0.0
        self._looked: float | None = None

    def look(self, work: Work, now: float) -> str:
        """Return why the work counts as standing still; "" if it does not."""
        passed = 0.0 if self._looked is None else min(now - self._looked, _MOST_S)
        self._looked = now
        if not work.waits or work.done != self._done:
            self._done, self._waited, self._acted_at = work.done, 0.0, 0.0
            return ""
        self._waited += passed
        return f"{work.waits}, for more than {self._bound:g} s (--stall-timeout)" if self._waited > self._bound else ""

    def is_due(self, seconds: float) -> bool:
        """Return whether the work has waited for so many seconds more since it began to, or since the last True."""
        due = self._waited > self._acted_at + seconds
        self._acted_at = self._waited if due else self._acted_at
        return due


class LastResort(NamedTuple):
    """What is done about a part whose work has stood still for so many seconds: `act` takes its name and the reason."""

    seconds: float
    act: Callable[[str, str], None]


class Watchdog:
    """Looks at the work of one service. `reasons` has why each part stands still, `reason` all of that in one line."""

    def __init__(
        self,
        bound: float,
        look: Look,
        report: Callable[[str], Awaitable[None]],
        registry: CollectorRegistry,
        last_resort: LastResort | None = None,
        standstill: Standstill | None = None,
    ) -> None:
        """The watchdog reports each late timer to `standstill`: an idle process has no other timer."""
        self._bound, self._look, self._report, self.last_resort = bound, look, report, last_resort
        self._clocks: dict[str, StallClock] = {}
        self._files = OpenFiles()
        self._lag = Histogram(
            "quire:event_loop_lag_seconds",
            "How late a timer of the event loop fires.",
            registry=registry,
            buckets=_LAGS,
        )
        self._stalled = Gauge("quire:stalled", "1 while work waits and nothing goes on.", registry=registry)
        self.standstill = standstill
        self.reason = ""
        self.reasons: Mapping[str, str] = {}

    async def run(self) -> None:
        """Look until this task is cancelled."""
        loop, period = asyncio.get_running_loop(), _PERIOD_S
        look_at = loop.time() + _LOOK_S
        while True:
            began, used, ran = loop.time(), time.process_time(), time.monotonic()
            await asyncio.sleep(pause := until_tick(ran, period))
            now = loop.time()
            if self.standstill is not None:
                self.standstill.ticked(ran, pause, time.monotonic())
            self._lag.observe(max(0.0, now - began - pause))
            period = next_period(time.process_time() - used, now - began)
            if now >= look_at:
                look_at = now + _LOOK_S - _PERIOD_S / 2  # a timer may fire a little early
                self._files.look()
                await self.check(now)

    async def check(self, now: float) -> None:
        """Look once, and report what has changed."""
        works = self._look()
        self._clocks = {name: self._clocks.get(name) or StallClock(self._bound) for name in works}
        looked = {name: self._clocks[name].look(work, now) for name, work in works.items()}
        known, self.reasons = self.reasons, {name: why for name, why in looked.items() if why}
        self._resort(known)
        reason = "; ".join(f"{name}: {why}" if name else why for name, why in self.reasons.items())
        if len(self.reasons) == len(works) > 1:
            reason = f"all {len(works)}: {reason}"
        if reason == self.reason:
            return
        before, self.reason = self.reason, reason
        self._stalled.set(bool(reason))
        if self.reasons.keys() - known.keys():
            log.error("work stands still: %s", reason)
        elif not reason:
            log.warning("the work goes on again")
        if bool(reason) != bool(before):
            await self._report(reason)

    def _resort(self, known: Collection[str]) -> None:
        """Act on the parts that have stood still for too long; of these, health said so at an earlier look."""
        if self.last_resort is None:
            return
        for name, why in self.reasons.items():
            if name in known and self._clocks[name].is_due(self.last_resort.seconds):
                self.last_resort.act(name, why)
