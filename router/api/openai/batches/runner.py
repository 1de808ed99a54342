"""Runs the batches of a folder: of each tenant one at a time, the oldest first, beside those of other routers."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, Final

from starlette.types import ASGIApp, Message

from common.batch.lines import BadLine, Item, parsed
from common.batch.results import AGAIN, BACKOFF, Result, ResultFile, asked_pause
from common.contracts import limits
from common.contracts.errors import QuireError
from common.process.supervised import cancel_and_wait
from router.api.openai.batches.folder import BatchFolder, Claim
from router.api.openai.batches.records import (
    CANCELLED,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    Batch,
    StoredFile,
)
from router.api.openai.batches.uploads import Uploads, on_disk
from router.tenants.tenancy import Caller


# What the routes of files and batches use; there is none where the router has no folder for them.
@dataclass(frozen=True, slots=True)
class BatchParts:
    """`now` are Unix seconds."""

    folder: BatchFolder
    uploads: Uploads
    runner: BatchRunner
    now: Callable[[], float]


log = logging.getLogger(__name__)


# Asks the router's own HTTP application, without a connection: a line of a batch is a request like any other.
@dataclass(slots=True)
class Answer:
    """What the application answered; a status of 500 where it failed before it could."""

    status: int = 500
    headers: dict[bytes, bytes] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    async def take(self, message: Message) -> None:
        """Take a part, as a server would send it."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        elif message.get("body"):
            self.parts.append(bytes(message["body"]))


async def asked(app: ASGIApp, caller: Caller, path: str, body: bytes, correlation: str) -> Answer:
    """Return the answer to a POST of JSON by a caller who was recognised before. A cancellation ends the request."""
    headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": correlation}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": {"caller": caller},
    }
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if not whole:
            await gone.wait()  # this client stays until it has its answer
        return whole.pop()

    answer = Answer()
    try:
        await app(scope, receive, answer.take)
    except Exception:  # the application has answered before it raises
        log.exception("a request of a batch failed")
    return answer


Ask = Callable[[Caller, str, bytes, str], Awaitable[Answer]]
# Seconds between two looks at what ends a batch early, and between two writings of its counts.
LOOK_S: Final = 1.0
# Below every request of a client.
_PRIORITY: Final = -limits.MAX_PRIORITY
# Bytes of lines that are read at once, and results that wait for the disk.
_READ_BYTES: Final = 256 << 10
_MOST_WAITING: Final = 16
_REFUSED_CALLER: Final = frozenset({401, 403})


# One batch on its way: its lines are sent, some at once, and each answer is written as it comes.
#     lines --> workers, each with one request --> results --> writer --> files of answers and of errors
# A router that is killed leaves the files as they are. The next one reads in them which lines have an answer, and
# sends the others. So a line that was sent in that moment is sent again.
@dataclass(frozen=True, slots=True)
class End:
    """How a batch ends; `code` and `words` say what is wrong with the batch, or with the lines that are left."""

    status: str
    code: str = ""
    words: str = ""


_DONE: Final = End(COMPLETED)
_LATE: Final = End(EXPIRED, "batch_expired", "the request was not done before the batch expired")
_UNWANTED: Final = End(CANCELLED, "batch_cancelled", "the request was not done before the batch was cancelled")
_REVOKED: Final = End(FAILED, "key_revoked", "the key that created the batch is not accepted any more")
_NO_INPUT: Final = End(FAILED, "invalid_input", "the input is gone from the disk of the router")
_NO_ROOM: Final = End(FAILED, "storage_full", "the tenant's files have too many bytes; delete some, and send the rest")


class Answers:
    """The two files of a batch, and the lines that have an answer. Used in threads, one at a time."""

    def __init__(self, folder: BatchFolder, claim: Claim) -> None:
        """Raises InvalidRequest or Unavailable where a file cannot be used."""
        tenant, batch = claim.batch.tenant, claim.batch
        self._lock = threading.Lock()
        self._good = ResultFile(folder.answers(tenant, batch.output_id))
        try:
            self._bad = ResultFile(folder.answers(tenant, batch.error_id))
        except BaseException:
            self._good.close()
            raise
        self.completed, self.failed = len(self._good.done), len(self._bad.done)
        self.done: set[str] = {*self._good.done, *self._bad.done}

    def add(self, results: Sequence[Result]) -> int:
        """Write results; return their bytes. Raises Unavailable on a full disk."""
        with self._lock:
            return sum((self._good if each.ok else self._bad).write(each) for each in results)

    def close(self, whole: bool = False) -> None:
        """Close the files; `whole`: they have their last line, which outlives the machine."""
        with self._lock:
            for each in (self._good, self._bad):
                if whole:
                    each.sync()
                each.close()


class Lines:
    """The requests that are left to send, for several workers."""

    def __init__(self, source: IO[bytes], done: Collection[str]) -> None:
        self._source, self._done = source, done
        self._ahead: deque[bytes] = deque()
        self._lock = asyncio.Lock()

    async def next(self) -> Item | None:
        """Return the next request, None after the last one. Raises BadLine for a file that was changed."""
        async with self._lock:
            while True:
                if not self._ahead:
                    self._ahead.extend(await on_disk(self._source.readlines, _READ_BYTES))
                if not self._ahead:
                    return None
                line = self._ahead.popleft()
                if line.strip() and (item := parsed(line)).custom_id not in self._done:
                    return item


class BatchRun:
    """Runs one batch that this process has claimed. `look` is set when something may have ended it."""

    def __init__(
        self,
        claim: Claim,
        ask: Ask,
        caller: Callable[[], Caller | None],
        now: Callable[[], float],
        places: asyncio.Semaphore,
    ) -> None:
        """`caller` returns who sends the lines; None once the tenant or its key is gone."""
        self._folder, self.batch = claim.folder, claim.batch
        self._claim, self._ask, self._caller, self._now, self._places = claim, ask, caller, now, places
        self._results: asyncio.Queue[Result] = asyncio.Queue(_MOST_WAITING)
        self._room, self._is_refused = 0, False
        self._saving = threading.Lock()
        self.look = asyncio.Event()

    async def run(self, at_once: int) -> None:
        """Return once the batch has ended. Raises Unavailable, or InvalidRequest, where the disk refuses."""
        self._answers = await on_disk(Answers, self._folder, self._claim)
        whole = False
        try:
            self._room = limits.MAX_BATCH_BYTES_A_TENANT - (await on_disk(self._folder.usage, self.batch.tenant))[1]
            self.batch = self.batch.at(IN_PROGRESS, self._now(), **self._counts())
            await self._save()
            end = await self._why_it_ends() or await self._sent(at_once)
            self.batch = self.batch.at(FINALIZING, self._now(), **self._counts())
            await self._save()
            if end in (_LATE, _UNWANTED):
                await self._leave_out(end)
            whole = True
        finally:
            await on_disk(self._answers.close, whole)
        await on_disk(self._finish, end)

    # ------------------------------------------------------------ the lines

    async def _sent(self, at_once: int) -> End:
        """Send what is left to send, until it is done or something ends the batch."""
        if (source := await on_disk(self._folder.source, self.batch)) is None:
            return _NO_INPUT
        with source:
            lines = Lines(source, self._answers.done)
            sending, watching = asyncio.create_task(self._send(lines, at_once)), asyncio.create_task(self._watch())
            writing = asyncio.create_task(self._write())
            try:
                await asyncio.wait({sending, writing, watching}, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()
                return (watching if watching.done() else sending).result()
            finally:
                await cancel_and_wait(sending, watching)
                await self._write_the_rest(writing)

    async def _send(self, lines: Lines, at_once: int) -> End:
        workers = [asyncio.create_task(self._work(lines)) for _ in range(at_once)]
        try:
            await asyncio.gather(*workers)
            await self._results.join()
        except BadLine as bad:
            return End(FAILED, "invalid_input", f"a line of the input {bad}")
        finally:
            await cancel_and_wait(*workers)
        return _REVOKED if self._is_refused else _DONE

    async def _work(self, lines: Lines) -> None:
        while not self._is_refused and (item := await lines.next()) is not None:
            if (result := await self._result(item)) is not None:
                await self._results.put(result)

    async def _result(self, item: Item) -> Result | None:
        """Return how a line ended; None where the batch may send no more, from then on."""
        body = json.dumps(item.body | {"priority": _PRIORITY}, ensure_ascii=False).encode()
        for attempt in itertools.count(1):
            async with self._places:
                if (caller := self._known_caller()) is None:
                    return None
                answer = await self._ask(caller, item.url, body, self.batch.id)
            if answer.status not in AGAIN:
                break
            await asyncio.sleep(asked_pause(answer.header(b"retry-after")) + BACKOFF.pause(attempt, random.random()))
        if answer.status in _REFUSED_CALLER and self._known_caller() is None:
            return None
        return Result(item.custom_id, answer.status, answer.header(b"x-quire-request-id"), raw=answer.body or b"null")

    def _known_caller(self) -> Caller | None:
        caller = self._caller()
        self._is_refused = self._is_refused or caller is None
        return caller

    # ------------------------------------------------------------ the answers

    async def _write(self) -> None:
        """Write results as they come. Raises Unavailable on a full disk."""
        while True:
            results = [await self._results.get()]
            while not self._results.empty():
                results.append(self._results.get_nowait())
            self._room -= await on_disk(self._answers.add, results)
            for each in results:
                self._answers.done.add(each.custom_id)
                self._answers.completed += each.ok
                self._answers.failed += not each.ok
                self._results.task_done()

    async def _write_the_rest(self, writing: asyncio.Task[None]) -> None:
        """Let the writer take what has come, and end it."""
        joining = asyncio.create_task(self._results.join())
        await asyncio.wait({joining, writing}, return_when=asyncio.FIRST_COMPLETED)
        await cancel_and_wait(joining, writing)

    def _counts(self) -> dict[str, Any]:
        return {"completed": self._answers.completed, "failed": self._answers.failed}

    async def _save(self) -> None:
        await on_disk(self._write_batch)

    def _write_batch(self) -> None:
        """Write the batch as it is now: a thread whose task was cancelled never writes an older one over it. Blocks."""
        with self._saving:
            self._folder.write(self.batch)

    # ------------------------------------------------------------ the end

    async def _watch(self) -> End:
        """Return why the batch ends early; write its counts meanwhile."""
        while (end := await self._why_it_ends()) is None:
            counted = self.batch.at(IN_PROGRESS, self._now(), **self._counts())
            if counted != self.batch:
                self.batch = counted
                await self._save()
            left = max(0.0, self.batch.expires_at - self._now())
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left)):
                    await self.look.wait()
            self.look.clear()
        return end

    async def _why_it_ends(self) -> End | None:
        """Return why the batch ends before all is done. Raises Unavailable while the disk is almost full."""
        if await on_disk(self._folder.cancelled_at, self.batch.tenant, self.batch.id) is not None:
            return _UNWANTED
        if self._now() >= self.batch.expires_at:
            return _LATE
        if self._caller() is None:
            return _REVOKED
        await on_disk(self._folder.check_disk)
        if self._room < 0:  # unless its client has deleted something since
            self._room = limits.MAX_BATCH_BYTES_A_TENANT - (await on_disk(self._folder.usage, self.batch.tenant))[1]
        return _NO_ROOM if self._room < 0 else None

    async def _leave_out(self, end: End) -> None:
        """Write an error for each line that was not done."""
        left = list[str]()
        if (source := await on_disk(self._folder.source, self.batch)) is not None:
            with source, suppress(BadLine):
                async for item in _all_of(Lines(source, self._answers.done)):
                    left.append(item.custom_id)
        errors = [Result(each, error=end.words, code=end.code) for each in left]
        await on_disk(self._answers.add, errors)
        self._answers.failed += len(errors)

    def _finish(self, end: End) -> None:
        """Make files of the answers, and write the end. Blocks."""
        batch, now = self.batch, int(self._now())
        shown = dict[str, str | None]()
        for kind, name in (("output", batch.output_id), ("error", batch.error_id)):
            size = self._folder.answers(batch.tenant, name).stat().st_size
            if size:
                kept_until = now + batch.output_seconds
                file = StoredFile(name, size, now, f"{batch.id}_{kind}.jsonl", "batch_output", kept_until)
                self._folder.describe(batch.tenant, file)
            else:
                self._folder.delete_file(batch.tenant, name)
            shown[f"{kind}_file_id"] = name if size else None
        problem = {"problem": end.words, "problem_code": end.code} if end.status == FAILED else {}
        if end is _UNWANTED:
            batch = batch.seen(self._folder.cancelled_at(batch.tenant, batch.id))
        self.batch = batch.at(end.status, now, **self._counts(), **shown, **problem)
        self._write_batch()


async def _all_of(lines: Lines) -> AsyncIterator[Item]:
    while (item := await lines.next()) is not None:
        yield item


KnownCaller = Callable[[str, str], Caller | None]
# Seconds between two looks for batches that no router runs, and after a failure of the disk.
_LOOK_S: Final = 5.0
_PAUSE_S: Final = 30.0
# Seconds between two looks for what is too old.
_SWEEP_S: Final = 600.0


class BatchRunner:
    """The batches that this router runs. `now` are Unix seconds; `at_once` bounds the requests of all of them."""

    def __init__(
        self,
        folder: BatchFolder,
        known: KnownCaller,
        now: Callable[[], float],
        at_once: int = limits.MAX_BATCH_REQUESTS,
    ) -> None:
        """`known` returns the caller of a tenant's name and a credential, None where it is not accepted any more."""
        self._folder, self._known, self._now = folder, known, now
        self._at_once, self._places = at_once, asyncio.Semaphore(at_once)
        # By the folder of the tenant; one that is over by its id.
        self._running: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, BatchRun] = {}
        self._not_before: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._swept = float("-inf")

    def wake(self, batch_id: str = "") -> None:
        """Look at once for a new batch, or at what a client wishes of one."""
        if (run := self._runs.get(batch_id)) is not None:
            run.look.set()
        self._wake.set()

    async def run(self, app: ASGIApp) -> None:
        """Run batches by asking an application, until this is cancelled; then others, or a next start, go on."""
        try:
            while True:
                try:
                    await self._look(app)
                except QuireError as error:
                    log.warning("batches cannot be looked for", extra={"reason": str(error)})
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await cancel_and_wait(*self._running.values())

    async def _look(self, app: ASGIApp) -> None:
        now = self._now()
        if now - self._swept >= _SWEEP_S:
            self._swept = now
            await on_disk(self._folder.sweep, now)
        for waiting in await on_disk(self._folder.waiting, now):
            # One that is over sends nothing: it waits for no turn.
            place = waiting.name if waiting.is_over else waiting.tenant
            full = len(self._running) >= limits.MAX_BATCHES_AT_ONCE and not waiting.is_over
            if full or place in self._running or self._not_before.get(waiting.name, now) > now:
                continue
            if (claim := await on_disk(self._folder.claim, waiting.tenant, waiting.name)) is not None:
                task = asyncio.create_task(self._run(claim, app), name=f"batch {waiting.name}")
                self._running[place] = task
                task.add_done_callback(partial(self._ended, place))

    def _ended(self, place: str, task: asyncio.Task[None]) -> None:
        del self._running[place]
        self._wake.set()

    async def _run(self, claim: Claim, app: ASGIApp) -> None:
        batch = claim.batch
        run = BatchRun(claim, partial(asked, app), partial(self._caller, batch), self._now, self._places)
        self._runs[batch.id] = run
        self._not_before.pop(batch.id, None)
        log.info("a batch is run", extra=_words(batch))
        try:
            await run.run(self._requests_of(batch))
            log.info("a batch has ended", extra=_words(run.batch))
        except QuireError as error:
            self._not_before[batch.id] = self._now() + _PAUSE_S
            log.warning("a batch pauses", extra=_words(run.batch) | {"reason": str(error)})
        except Exception:
            self._not_before[batch.id] = self._now() + _PAUSE_S
            log.exception("a batch pauses", extra=_words(run.batch))
        finally:
            del self._runs[batch.id]
            claim.release()

    def _caller(self, batch: Batch) -> Caller | None:
        return self._known(batch.tenant, batch.credential)

    def _requests_of(self, batch: Batch) -> int:
        """Return how many requests of a batch run at once: where a tenant may have few, half of these."""
        caller = self._caller(batch)
        allowed = [] if caller is None else [caller.tenant.limits.streams, caller.tenant.limits.sequences]
        return max(1, min([self._at_once, *(most // 2 for most in allowed if most is not None)]))


def _words(batch: Batch) -> dict[str, object]:
    return {
        "batch": batch.id,
        "tenant": batch.tenant,
        "status": batch.status,
        "requests": batch.total,
        "completed": batch.completed,
        "failed": batch.failed,
    }
