"""Runs the batches of a folder: of each tenant one at a time, the oldest first, beside those of other routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from starlette.types import ASGIApp

from common.contracts import limits
from common.contracts.errors import QuireError
from common.process.supervised import cancel_and_wait
from router.api.openai.batches.asking import asked
from router.api.openai.batches.folder import BatchFolder, Claim
from router.api.openai.batches.records import Batch
from router.api.openai.batches.run import BatchRun
from router.api.openai.batches.uploads import on_disk
from router.tenants.tenancy import Caller

log = logging.getLogger(__name__)

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
