"""Receives uploads: what comes is checked, and written to disk in large pieces."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, TypeVar

from common.contracts import limits
from common.contracts.errors import Overloaded, QuotaViolation, Unavailable
from router.api.openai.batches.folder import BatchFolder
from router.api.openai.batches.form import PURPOSE, Upload, UploadForm
from router.api.openai.batches.records import StoredFile, new_id

ResultT = TypeVar("ResultT")
# Bytes that are written at once.
_PIECE: Final = 1 << 20
_RETRY_S: Final = 5.0


async def on_disk(work: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Return what blocking work returns. Raises Unavailable where the disk refuses it, and as the work does."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except OSError as error:
        raise Unavailable(f"files cannot be read or written now: {error.strerror}; ask the operator") from None


class Uploads:
    """The uploads of this router: a few at once."""

    def __init__(self, folder: BatchFolder, now: Callable[[], float]) -> None:
        self._folder, self._now = folder, now
        self._running: Counter[str] = Counter()

    async def receive(self, tenant: str, boundary: bytes, body: AsyncIterator[bytes]) -> StoredFile:
        """Return the file of a form. Raises InvalidRequest, BodyTooLarge, Overloaded and Unavailable."""
        self._check_running(tenant)
        self._running[tenant] += 1
        try:
            room = await on_disk(self._folder.check_room, tenant)
            return await self._received(tenant, UploadForm(boundary, room), body)
        finally:
            self._running -= Counter([tenant])

    async def _received(self, tenant: str, form: UploadForm, body: AsyncIterator[bytes]) -> StoredFile:
        name = new_id("file-", self._now())
        part = await on_disk(self._folder.new_part, tenant, name)
        kept = False
        try:
            upload = await self._written(part, form, body)
            file = self._file(name, upload)
            await on_disk(self._folder.keep, tenant, file)
            kept = True
            return file
        finally:
            if not kept:
                with suppress(Unavailable):
                    await on_disk(lambda: part.unlink(missing_ok=True))

    async def _written(self, part: Path, form: UploadForm, body: AsyncIterator[bytes]) -> Upload:
        with await on_disk(part.open, "xb", 0) as opened:
            waiting = bytearray()
            async for piece in body:
                waiting += form.feed(piece)
                if len(waiting) >= _PIECE:
                    await on_disk(_write_all, opened, bytes(waiting))
                    waiting.clear()
                else:
                    await asyncio.sleep(0)  # a piece may be there without a wait
            upload = form.finish()
            await on_disk(_write_all, opened, bytes(waiting), True)
        return upload

    def _file(self, name: str, upload: Upload) -> StoredFile:
        now = int(self._now())
        return StoredFile(
            name, upload.size, now, upload.filename, PURPOSE, now + upload.seconds, upload.lines, upload.urls
        )

    def _check_running(self, tenant: str) -> None:
        running = self._running
        for count, most in (
            (running[tenant], limits.MAX_UPLOADS_A_TENANT),
            (running.total(), limits.MAX_UPLOADS),
        ):
            if count >= most:
                what = f"{count} files are being received; at most {most} at once"
                raise Overloaded(QuotaViolation("router.uploads", what), _RETRY_S)


def _write_all(file: IO[bytes], data: bytes, is_last: bool = False) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    if is_last:
        os.fsync(file.fileno())
