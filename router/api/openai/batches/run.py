"""One batch on its way: its lines are sent, some at once, and each answer is written as it comes.

    lines --> workers, each with one request --> results --> writer --> files of answers and of errors

A router that is killed leaves the files as they are. The next one reads in them which lines have an answer, and sends
the others. So a line that was sent in that moment is sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Final

from common.batch.lines import BadLine, Item, parsed
from common.batch.results import Result, ResultFile
from common.batch.retries import AGAIN, BACKOFF, asked_pause
from common.contracts import limits
from common.process.supervised import cancel_and_wait
from router.api.openai.batches.asking import Answer
from router.api.openai.batches.folder import BatchFolder, Claim
from router.api.openai.batches.records import CANCELLED, COMPLETED, EXPIRED, FAILED, FINALIZING, IN_PROGRESS, StoredFile
from router.api.openai.batches.uploads import on_disk
from router.tenants.tenancy import Caller

Ask = Callable[[Caller, str, bytes, str], Awaitable[Answer]]
# Seconds between two looks at what ends a batch early, and between two writings of its counts.
LOOK_S: Final = 1.0
# Below every request of a client.
_PRIORITY: Final = -limits.MAX_PRIORITY
# Bytes of lines that are read at once, and results that wait for the disk.
_READ_BYTES: Final = 256 << 10
_MOST_WAITING: Final = 16
_REFUSED_CALLER: Final = frozenset({401, 403})


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
