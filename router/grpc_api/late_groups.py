"""Changes that are for all groups of KV managers, while a manager has not answered since the router's start.

Nobody knows its group. Mostly it is a standby of a group that is known, and there is nothing to do. If it leads another
group, that group gets the change once it answers. A router that stops before forgets that; `quire pins` shows it then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from grpc import aio

from common.errors import NotFound, QuireError, Unavailable
from common.limits import MAX_PINS
from router.grpc_api.manager_groups import ManagerGroups

log = logging.getLogger(__name__)

Ask: TypeAlias = Callable[[aio.Channel], Awaitable[object]]

MAX_LATE_CHANGES: Final = MAX_PINS + 1
_LOOK_S: Final = 0.5


@dataclass(slots=True)
class _Change:
    """What the managers at `unheard` may still have to be asked, unless their group is one of `reached`."""

    what: str
    ask: Ask
    unheard: set[str]
    reached: set[str]


class LateGroups:
    """The latest change of each kind that some manager may have missed. `run` is the background task.

    Hold `changing` during a change: an older one could otherwise arrive behind it.
    """

    def __init__(self, groups: ManagerGroups, look_s: float = _LOOK_S) -> None:
        self._groups, self._look_s = groups, look_s
        self.changing = asyncio.Lock()
        self._changes: dict[str, _Change] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._changes)

    def check_room(self, what: str) -> None:
        """Check that one more change can be kept. Raises Unavailable."""
        unheard = self._groups.unheard()
        if unheard and what not in self._changes and len(self._changes) >= MAX_LATE_CHANGES:
            names = ", ".join(sorted(unheard))
            why = f"{len(self._changes)} changes wait for the managers at {names}, which have not answered yet"
            raise Unavailable(f"{why}; start them, or leave them out of --manager")

    def keep(self, what: str, ask: Ask, unheard: Iterable[str], reached: Iterable[str]) -> None:
        """Keep a change for managers that were not heard. It replaces an earlier one of `what`, a pin's for example."""
        self.drop(what)
        missed = set(unheard)
        if missed:
            self._changes[what] = _Change(what, ask, missed, set(reached))
            self._news.set()

    def drop(self, what: str) -> None:
        self._changes.pop(what, None)

    async def run(self) -> None:
        """Look again and again, as long as a change is kept, whether a manager has answered by now."""
        while True:
            self._news.clear()
            if not self._changes:
                await self._news.wait()
            for change in list(self._changes.values()):
                async with self.changing:
                    if self._changes.get(change.what) is change:
                        await self._carry_out(change)
            await asyncio.sleep(self._look_s)

    async def _carry_out(self, change: _Change) -> None:
        """Ask the groups that are known by now. A group that leads nothing yet is asked again later."""
        for address in sorted(change.unheard):
            known = self._groups.group_at(address)
            if known is None:
                continue
            if known.group is not None and known.group not in change.reached:
                failure = await self._groups.ask(known.group, change.ask)
                if isinstance(failure, Unavailable):
                    continue
                self._say(change, known.group, failure)
                change.reached.add(known.group)
            change.unheard.discard(address)
        if not change.unheard:
            del self._changes[change.what]

    @staticmethod
    def _say(change: _Change, group: str, failure: QuireError | None) -> None:
        who = f"group {group}, which had not answered before,"
        if failure is None or isinstance(failure, NotFound):
            log.info("%s has the change: %s", who, change.what)
        else:
            log.warning("%s refuses the change: %s (%s)", who, change.what, failure)
