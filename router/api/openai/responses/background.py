"""Responses that a router makes in the background, and their events. Clients may read the events from any number on."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from common.contracts import limits
from common.contracts.errors import FieldViolation, InvalidRequest, Overloaded, QuotaViolation
from router.api.openai.responses.store import ResponseStore


# The parts of the Responses API that the process makes, and closes at its end.
@dataclass(frozen=True, slots=True)
class ResponseParts:
    """Where responses are kept, and those that a router makes in the background."""

    store: ResponseStore
    background: BackgroundResponses


_RETRY_S: Final = 5.0
# Bytes of a text in Python, beyond its characters.
_LINE_BYTES: Final = 57


class EventLog:
    """The events of one response by their sequence number, the newest of them."""

    def __init__(self, most_bytes: int = limits.MAX_BACKGROUND_EVENTS_BYTES) -> None:
        self._lines: list[str] = []
        self._first, self._size, self._most = 0, 0, most_bytes
        self._ended = False
        self._grown = asyncio.Event()

    def write(self, lines: str) -> None:
        """Add whole events."""
        for line in lines.split("\n\n")[:-1]:
            self._lines.append(f"{line}\n\n")
            self._size += len(line) + _LINE_BYTES
        while self._size > self._most:
            self._drop_half()
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def check(self, after: int) -> None:
        """Raise InvalidRequest where events after this one are gone."""
        if after + 1 < self._first:
            what = f"is {after}; the events up to {self._first - 1} are gone; expected {self._first - 1} or more"
            raise InvalidRequest(FieldViolation("starting_after", what))

    async def after(self, number: int) -> AsyncGenerator[str, None]:
        """Yield the events after this number, those included that are still to come."""
        wanted = number + 1
        while True:
            grown = self._grown
            # A reader that is too slow goes on with the oldest event that is left.
            wanted = max(wanted, self._first)
            if lines := self._lines[wanted - self._first :]:
                wanted += len(lines)
                yield "".join(lines)
            elif self._ended:
                return
            else:
                await grown.wait()

    def _drop_half(self) -> None:
        count = max(1, len(self._lines) // 2)
        self._size -= sum(len(line) - 2 + _LINE_BYTES for line in self._lines[:count])
        del self._lines[:count]
        self._first += count

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


class Job:
    """A background response."""

    def __init__(self, tenant: str, name: str, body: Callable[[], dict[str, Any]], streamed: bool) -> None:
        """`body` returns the response as it is now."""
        self.tenant, self.name, self.body = tenant, name, body
        self.log = EventLog() if streamed else None
        self.task: asyncio.Task[None] | None = None
        # Whether the router ends it, and not its client; and set once it is stored for the first time.
        self.stopped, self.kept = False, asyncio.Event()

    @property
    def runs(self) -> bool:
        return self.task is not None and not self.task.done()

    def write(self, lines: str) -> None:
        if self.log is not None:
            self.log.write(lines)

    def end(self) -> None:
        self.kept.set()
        if self.log is not None:
            self.log.end()

    async def cancel(self) -> None:
        """End it, and wait until it is stored."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})


class BackgroundResponses:
    """The background responses of this router: bounded in number, of a tenant and of all."""

    def __init__(self, most: int = limits.MAX_BACKGROUND, most_of_tenant: int = limits.MAX_BACKGROUND_A_TENANT) -> None:
        self._most, self._most_of_tenant = most, most_of_tenant
        self._jobs: OrderedDict[tuple[str, str], Job] = OrderedDict()

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded when the tenant, or all together, have too many."""
        running = Counter(job.tenant for job in self._jobs.values() if job.runs)
        for count, most in ((running[tenant], self._most_of_tenant), (running.total(), self._most)):
            if count >= most:
                what = f"{count} background responses are in progress; at most {most}; wait for one or cancel it"
                raise Overloaded(QuotaViolation("router.background", what), _RETRY_S)

    async def start(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        """Work on a job for which there is room; return once it is stored for the first time."""
        self._drop_ended()
        job.task = asyncio.create_task(work, name=f"background {job.name}")
        self._jobs[job.tenant, job.name] = job
        await job.kept.wait()

    def find(self, tenant: str, name: str) -> Job | None:
        return self._jobs.get((tenant, name))

    def forget(self, job: Job) -> None:
        self._jobs.pop((job.tenant, job.name), None)

    async def aclose(self) -> None:
        """End all that still run."""
        running = [job for job in self._jobs.values() if job.runs]
        for job in running:
            job.stopped = True
        await asyncio.gather(*[job.cancel() for job in running])

    def _drop_ended(self) -> None:
        """Keep the events of as many ended responses as may run."""
        ended = [job for job in self._jobs.values() if not job.runs]
        for job in ended[: max(0, len(ended) + 1 - self._most)]:
            self.forget(job)
