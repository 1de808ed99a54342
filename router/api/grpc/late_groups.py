"""Changes that are for all groups of KV managers, while a manager has not answered since the router's start.

Its group is unknown. Usually the manager is a standby of a known group, and there is nothing to do. If it leads another
group, that group gets the change once it answers. A router that stops before forgets that; `quire pins` shows it then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from grpc import aio

from common.contracts.errors import InvalidRequest, NotFound, QuireError, Unavailable
from common.contracts.limits import MAX_PINS
from router.api.grpc.manager_groups import Answers, ManagerGroups

log = logging.getLogger(__name__)

Ask: TypeAlias = Callable[[aio.Channel], Awaitable[object]]
# Asks a group that has a change, with what it answered then, what a late group is to be asked now; None: nothing.
Recheck: TypeAlias = Callable[[aio.Channel, Any], Awaitable[Ask | None]]

MAX_LATE_CHANGES: Final = MAX_PINS + 1
_LOOK_S: Final = 0.5
# A change that only removes a pin is kept for so long.
_REMOVAL_KEPT_S: Final = 86_400.0


@dataclass(slots=True)
class _Change:
    """What groups that are first heard later have to be asked, unless they are among those that were `reached`."""

    what: str
    ask: Ask
    answers: Answers[Any]
    removes_from: float
    recheck: Recheck | None
    reached: set[str]
    warned: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Turn:
    """Who changes one thing now, and how many wait or change."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class LateGroups:
    """The latest change of each kind that some manager may have missed. `run` is the background task.

    Hold `changing` of a kind during a change: an older one of that kind could otherwise arrive behind it.

    A change is kept until all managers of now are heard, and at least as many new ones as were missing when it was
    made: a name of DNS may stand for other addresses by then, and for none in between.

    Another router may have passed on a later change of the same kind. So the groups that have the change are asked
    before it is brought to another one, and what they keep by then counts.
    """

    def __init__(self, groups: ManagerGroups, look_s: float = _LOOK_S) -> None:
        self._groups, self._look_s = groups, look_s
        self._changes: dict[str, _Change] = {}
        self._turns: dict[str, _Turn] = {}
        self._bringing = set[str]()
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._changes)

    @asynccontextmanager
    async def changing(self, what: str) -> AsyncIterator[None]:
        """Let no other change of this kind begin meanwhile."""
        turn = self._turns.setdefault(what, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[what]

    def make_room(self, what: str) -> None:
        """See to it that one more change can be kept: one that only removes a pin makes way. Raises Unavailable."""
        self._forget_removals()
        unheard = self._groups.unheard()
        if not unheard or what in self._changes:
            return
        if len(self._changes.keys() | self._turns.keys() | {what}) <= MAX_LATE_CHANGES:
            return
        names, now = ", ".join(sorted(unheard)), time.monotonic()
        removals = [change for change in self._changes.values() if change.removes_from <= now]
        if not removals:
            why = f"{len(self._changes)} changes wait for the managers at {names}, which have not answered yet"
            raise Unavailable(f"{why}; start them, or leave them out of --manager")
        oldest = min(removals, key=lambda each: each.removes_from)
        log.warning("the managers at %s will not get the end of %s: too many changes wait", names, oldest.what)
        del self._changes[oldest.what]

    def keep_change(
        self,
        what: str,
        ask: Ask,
        answers: Answers[Any],
        removes_from: float = math.inf,
        recheck: Recheck | None = None,
    ) -> None:
        """Keep a change for managers that were not heard. It replaces an earlier one of `what`, a pin's for example.

        From `removes_from` on, in seconds of the monotonic clock, it does nothing but remove a pin. Without a `recheck`
        all changes of its kind do the same, so neither their order counts nor what other routers have passed on.
        """
        self._changes.pop(what, None)
        if answers.unheard:
            reached = set(answers.asked)
            self._changes[what] = _Change(what, ask, answers, removes_from, recheck, reached)
            self._news.set()

    async def run(self) -> None:
        """Look again and again, as long as a change is kept, whether a new group has answered by now.

        One that hangs keeps no change from a group that is heard meanwhile.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                if not self._changes:
                    await self._news.wait()
                self._forget_removals()
                for group in self._lacking() - self._bringing:
                    self._bringing.add(group)
                    tasks.create_task(self._bring_all(group))
                self._forget_done()
                await asyncio.sleep(self._look_s)

    def _lacking(self) -> set[str]:
        """Return the groups that lack a change."""
        heard = self._groups.heard()
        for change in self._changes.values():
            # A manager that was asked before its first answer has said its group since.
            asked = heard.intersection(change.answers.asked.values())
            change.reached |= {self._groups.group_at(address) for address in asked}
        return {group for change in self._changes.values() for group in self._groups.known() - change.reached}

    async def _bring_all(self, group: str) -> None:
        try:
            await self._bring(group)
        finally:
            self._bringing.discard(group)

    async def _bring(self, group: str) -> None:
        """Ask a group for each change that it lacks, until it does not answer: it is asked again later."""
        for change in list(self._changes.values()):
            if group in change.reached:
                continue
            turn: AbstractAsyncContextManager[None] = self.changing(change.what) if change.recheck else nullcontext()
            async with turn:
                if self._changes.get(change.what) is not change:
                    continue
                ask = await self._wanted_now(change)
                if ask is None:
                    log.info("group %s does not get a change, as a later one was made: %s", group, change.what)
                    change.reached.add(group)
                    continue
                if isinstance(ask, Unavailable):
                    self._say(change, group, ask)
                    continue
                failure = await self._groups.ask(group, ask)
                self._say(change, group, failure)
                if not _is_final(failure):
                    return
                change.reached.add(group)

    async def _wanted_now(self, change: _Change) -> Ask | Unavailable | None:
        """Return what a late group is to be asked by what the others keep; Unavailable where none of them says it."""
        if change.recheck is None:
            return change.ask
        failure: QuireError | None = None
        heard, asked = self._groups.heard(), change.answers.asked
        for name, answer in zip(change.answers.groups, change.answers.found, strict=True):
            # A manager that was asked before its first answer has said its group since.
            group = self._groups.group_at(asked[name]) if asked[name] in heard else name
            found = await self._groups.answer_of(group, _with(change.recheck, answer))
            if not isinstance(found, QuireError):
                return found
            failure = found
        return Unavailable(f"no group that has it says whether it still counts: {failure}")

    def _forget_removals(self) -> None:
        ended = time.monotonic() - _REMOVAL_KEPT_S
        for change in [each for each in self._changes.values() if each.removes_from <= ended]:
            del self._changes[change.what]

    def _forget_done(self) -> None:
        if self._groups.unheard():
            return
        known, heard = self._groups.known(), self._groups.heard()
        for change in list(self._changes.values()):
            came = heard - change.answers.heard - set(change.answers.asked.values())
            if len(came) >= len(change.answers.unheard) and known <= change.reached:
                del self._changes[change.what]

    @staticmethod
    def _say(change: _Change, group: str, failure: QuireError | None) -> None:
        who = f"group {group}, which had not answered before,"
        if failure is None or isinstance(failure, NotFound):
            log.info("%s has the change: %s", who, change.what)
        elif isinstance(failure, InvalidRequest):
            log.warning("%s refuses the change: %s (%s)", who, change.what, failure)
        elif group not in change.warned:
            change.warned.add(group)
            log.warning("%s lacks a change and is asked again: %s (%s)", who, change.what, failure)


def _with(recheck: Recheck, answer: object) -> Callable[[aio.Channel], Awaitable[Ask | None]]:
    return lambda channel: recheck(channel, answer)


def _is_final(failure: QuireError | None) -> bool:
    """Return whether it makes no difference to ask again."""
    return failure is None or isinstance(failure, InvalidRequest | NotFound)
