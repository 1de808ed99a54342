"""A manager's membership in its group: it holds the lease while it leads, and watches the leader while it stands by.

`leadership.py` has the rules. One task makes the attempts; everything else asks `leads`, or waits for `confirmed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Final

from grpc import aio

from common.contracts.clock import Clock
from common.contracts.errors import StaleEpoch, Unavailable
from common.process.supervised import Supervisor, cancel_and_wait
from common.rpc.server import Dial
from kvmanager.contracts.ports import IndexUnavailable, LeaderState
from kvmanager.group.leadership import Change, GroupLease, Leadership, Lease
from kvmanager.group.processes import has_ended
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

_PAUSE_S: Final = 0.05
_CONNECT_S: Final = 1.0


# Watches the owner of a lease, and tells for certain that its process has ended.
# Certain are two observations: nothing listens at the owner's address any more, or another process does. They count
# only after this owner has answered at that address: else the address may be wrong, or a firewall may refuse it. A
# connection that breaks or times out is none: the owner may be hung, or the network between may be cut.
async def owner_gone(lease: Lease, dial: Dial, resigned: Callable[[], None]) -> None:
    """Return once the owner's process has ended for certain. `resigned` is called when the owner stops leading."""
    met = False
    while True:
        answered = await _answered(lease, dial, resigned)
        met = met or lease.owner in answered
        if met and (answered - {lease.owner} or await nothing_listens(lease.address)):
            return
        await asyncio.sleep(_PAUSE_S)


async def _answered(lease: Lease, dial: Dial, resigned: Callable[[], None]) -> set[str]:
    """Follow the process at the owner's address until the stream breaks; return who answered there.

    The stream ends here when another process answers.
    """
    answered: set[str] = set()
    async with dial(lease.address) as channel:
        call = kvmanager_pb2_grpc.KvManagerServiceStub(channel).WatchLeader(kvmanager_pb2.WatchLeaderRequest())
        with suppress(aio.AioRpcError):
            async for response in call:
                answered.add(response.owner)
                if response.owner != lease.owner:
                    break
                if not response.leads:
                    resigned()
    return answered


async def nothing_listens(address: str) -> bool:
    """Return whether the machine at HOST:PORT answers that no process listens there."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


log = logging.getLogger(__name__)


class GroupMember:
    """One manager of a group. `address` is where the others reach it; its task finds that out first.

    `lead` is awaited when this manager becomes the leader, with the namespace that the last leader wrote; `stand_by`
    when it leads no more, with words about it. `replaced` is called when the index has a newer manager of this group
    although this one holds the lease: somebody wrote over the lease or over the fence.
    """

    def __init__(
        self,
        leadership: Leadership,
        lease: GroupLease,
        clock: Clock,
        dial: Dial,
        lead: Callable[[str], Awaitable[None]],
        stand_by: Callable[[str], Awaitable[None]],
        replaced: Callable[[StaleEpoch], None],
    ) -> None:
        self._core, self._lease, self._clock, self._dial = leadership, lease, clock, dial
        self._lead, self._stand_by, self._replaced = lead, stand_by, replaced
        self.address, self.group = "", lease.group
        self.takeovers = 0
        self._namespace = self._last_namespace = ""
        self._serving, self._leaving = False, False
        self._doubt: StaleEpoch | None = None
        self._doubted_in = 0  # round
        self._calls, self._reachable = asyncio.Lock(), True
        self._begun = self._finished = 0  # rounds
        self._wake, self._turn = asyncio.Event(), asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._watched: Lease | None = None
        self._state = LeaderState(leadership.owner, since=clock.monotonic(), group=lease.group)

    # ------------------------------------------------------------ questions

    @property
    def term(self) -> int:
        return self._core.term

    @property
    def settled(self) -> bool:
        """Whether this manager leads, or stands by a leader that it knows."""
        return self._state.settled

    def leads(self) -> bool:
        """Return whether this manager may grant blocks now."""
        return self._serving and self._doubt is None and self._core.leads(self._clock.monotonic())

    async def confirmed(self) -> None:
        """Return once it is known that this manager leads. Raises Unavailable, which names the leader, if it does not.

        This waits only where the leader's process stood still for too long.
        """
        while not self.leads():
            if not self._serving or self._leaving:
                raise Unavailable(self._words(), retry_after_s=0.1)
            await self._fresh_round()

    async def writes(self, namespace: str) -> None:
        """Note in the lease which index this leader is about to write. Raises Unavailable if it leads no more."""
        self._namespace = namespace
        await self._fresh_round()
        await self.confirmed()

    async def states(self) -> AsyncGenerator[LeaderState, None]:
        """Yield who leads, as this manager knows it, and again after each change."""
        shown = None
        while True:
            turn = self._turn
            if self._state != shown:
                shown = self._state
                yield shown
            else:
                await turn.wait()

    # ------------------------------------------------------------ life

    def start(self, supervisor: Supervisor, find_address: Callable[[], Awaitable[str]]) -> None:
        async def run() -> None:
            self.address = await find_address()
            await self._run()

        supervisor.run_task("group lease", run)

    def doubt(self, error: StaleEpoch) -> None:
        """Note that the index has a newer manager; the lease tells whether it is the new leader."""
        self._doubt, self._doubted_in = error, self._begun
        self._hurry()

    async def resign(self) -> None:
        """Give the lease up at once, so that another manager takes over, and take it no more."""
        self._leaving = True
        with suppress(IndexUnavailable):
            async with self._calls:  # an attempt in flight would take the lease again
                await self._lease.resign()
        self._core.resigned(self._clock.monotonic())
        self._serving = False
        self._show()

    async def aclose(self) -> None:
        """End the watch of another leader. The supervisor ends the rest."""
        self._leaving = True
        if self._watch is not None:
            await cancel_and_wait(self._watch)
        await self._lease.close()

    # ------------------------------------------------------------ attempts

    async def _run(self) -> None:
        while not self._leaving:
            self._wake.clear()
            self._begun += 1
            await self._round()
            self._finished = self._begun
            self._show()
            self._announce()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._core.next_attempt(self._clock.monotonic())):
                    await self._wake.wait()
        await asyncio.Event().wait()  # the supervisor would begin it again

    async def _round(self) -> None:
        """Make one attempt, and carry out what it changed."""
        core, sent_at = self._core, self._clock.monotonic()
        attempt = core.attempt(sent_at)
        try:
            async with self._calls:
                if self._leaving:
                    return None
                found = await self._lease.hold(attempt, self.address, self._namespace)
        except IndexUnavailable as error:
            if self._reachable:
                log.warning("the lease of the group cannot be reached: %s", error)
            self._reachable = False
            return await self._changed(core.unreachable(self._clock.monotonic()))
        self._reachable = True
        if isinstance(found, Lease):
            self._last_namespace = found.namespace
            if has_ended(found.owner):
                core.gone(found.term)
            await self._changed(core.refused(self._clock.monotonic(), found))
            return await self._follow(found)
        change = core.held(sent_at, found)
        await self._changed(change)
        if self._doubt is not None and self._begun > self._doubted_in:
            self._replaced(self._doubt)
        return None

    async def _changed(self, change: Change) -> None:
        if change in (Change.LOST, Change.NEW_TERM):
            self._serving, self._doubt, self._namespace = False, None, ""
            words = self._words()
            log.warning("leads no more: %s", words)
            self._show()
            await self._stand_by(words)
        if change in (Change.GAINED, Change.NEW_TERM):
            await self._follow(None)
            self.takeovers += 1
            log.info("leads now", extra={"term": self._core.term})
            self._namespace = self._last_namespace
            await self._lead(self._last_namespace)
            self._serving, self._doubt = not self._leaving, None  # `resign` may have ended meanwhile

    async def _follow(self, lease: Lease | None) -> None:
        """Watch the owner of this lease, and no other one."""
        known = self._watched
        if lease is not None and known is not None and (lease.term, lease.address) == (known.term, known.address):
            return
        self._watched = lease
        if self._watch is not None:
            await cancel_and_wait(self._watch)
            self._watch = None
        if lease is not None and lease.address != self.address:
            self._watch = asyncio.create_task(self._until_gone(lease), name="watch of the leader")

    async def _until_gone(self, lease: Lease) -> None:
        try:
            await owner_gone(lease, self._dial, self._hurry)
        except Exception:  # without the watch, the lease still runs out
            log.exception("the watch of the leader at %s ended by an error", lease.address)
            return
        log.warning("the leader's process at %s has ended", lease.address)
        self._core.gone(lease.term)
        self._hurry()

    # ------------------------------------------------------------ signals

    def _hurry(self) -> None:
        self._core.hurry()
        self._wake.set()

    async def _fresh_round(self) -> None:
        """Return after a round that began after this call."""
        wanted = self._begun + 1
        self._hurry()
        while self._finished < wanted and not self._leaving:
            await self._turn.wait()

    def _show(self) -> None:
        leader = self._core.leader
        serving = self._serving and self._core.term > 0
        address = self.address if serving else leader.address if leader is not None else ""
        term = self._core.term if serving else leader.term if leader is not None else 0
        since = self._state.since if serving == self._state.leads else self._clock.monotonic()
        state = LeaderState(self._core.owner, serving, term, address, since, self.group)
        if state != self._state:
            self._state = state
            self._announce()

    def _announce(self) -> None:
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    def _words(self) -> str:
        leader = self._core.leader
        if self._leaving:
            return "this KV manager is shutting down; another one of its group leads soon"
        if leader is None:
            return "this KV manager does not lead its group now, and knows of no other one that does"
        return f"this KV manager stands by; {leader.address} leads its group"


class Alone:
    """A manager without a group: it always leads."""

    takeovers = 0
    term = 0
    group = ""

    def __init__(self, owner: str, clock: Clock) -> None:
        self._owner, self._since, self.address = owner, clock.monotonic(), ""

    def leads(self) -> bool:
        return True

    async def confirmed(self) -> None:
        return None

    async def writes(self, namespace: str) -> None:
        return None

    async def states(self) -> AsyncGenerator[LeaderState, None]:
        """Yield that this manager leads; there is no change."""
        yield LeaderState(self._owner, leads=True, leader=self.address, since=self._since)
        await asyncio.Event().wait()
