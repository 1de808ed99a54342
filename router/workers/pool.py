"""All workers that the router knows: which may be given work, what is known of each, who is told when that changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from common.clock import Clock
from common.errors import IdentityMismatch, QuireError, Unavailable
from common.types import PoolIdentity
from router.core.identity import adopt, differences
from router.core.worker_model import Load, WorkerModel, WorkerState
from router.workers.client import Pacing, RouterIdentity, WorkerClient
from router.workers.codec import WorkerFacts

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5


class PoolListener(Protocol):
    """Who uses the pool; called on the event loop, must not block."""

    def capacity_changed(self) -> None:
        """A worker joined, left, or told its load."""
        ...

    def cache_lost(self, worker_id: str) -> None:
        """A worker came back as a new process: nothing that it had cached is there."""
        ...


@dataclass(slots=True)
class Member:
    """One address. `model` and `facts` are of the connection that is open, else None; `reason` says why none is."""

    client: WorkerClient
    task: asyncio.Task[None] | None = None
    worker_id: str = ""
    state: WorkerState = WorkerState.CONNECTING
    reason: str = "not connected yet"
    facts: WorkerFacts | None = None
    model: WorkerModel | None = None
    # The reasons that were logged since the last connection.
    logged_reasons: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The worker's id once it is known, else its address."""
        return self.worker_id or self.client.address


class WorkerPool:
    """Holds a connection to every address it is told of; implements WorkerListener."""

    def __init__(
        self,
        router: RouterIdentity,
        identity: PoolIdentity,
        clock: Clock,
        pacing: Pacing | None = None,
    ) -> None:
        """Unknown parts of `identity` are the first worker's; all others must agree with it while any is there."""
        self.identity = self._configured = identity
        self._router, self._clock, self._pacing = router, clock, pacing or Pacing()
        self._members: dict[str, Member] = {}
        self._incarnations: dict[str, bytes] = {}
        self._listeners: list[PoolListener] = []

    def listen(self, listener: PoolListener) -> None:
        """Add one who is told of changes."""
        self._listeners.append(listener)

    # ------------------------------------------------------------ membership

    def add(self, address: str) -> None:
        """Begin to use the worker at HOST:PORT; nothing happens when it is known."""
        if address not in self._members:
            client = WorkerClient(address, self._router, self, self._pacing)
            client.identity = self.identity
            self._members[address] = Member(client)
            self._run(address)

    def _run(self, address: str) -> None:
        member = self._members.get(address)
        if member is not None:
            member.task = asyncio.create_task(member.client.run(), name=f"worker {address}")
            member.task.add_done_callback(lambda task: self._ended(address, task))

    def _ended(self, address: str, task: asyncio.Task[None]) -> None:
        """Begin again after a bug, such as one in what a sequence's sink does: the worker is not lost for ever."""
        if not task.cancelled():
            log.error("unexpected error in the connection to %s", address, exc_info=task.exception())
            asyncio.get_running_loop().call_later(self._pacing.reconnect.longest, self._run, address)

    def remove(self, address: str) -> None:
        """Stop using an address; sequences there are Lost."""
        member = self._members.pop(address, None)
        if member is not None and member.task is not None:
            member.task.cancel()

    async def aclose(self) -> None:
        """Close every connection."""
        tasks = [member.task for member in self._members.values() if member.task is not None]
        for address in list(self._members):
            self.remove(address)
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ what the frontend asks

    def models(self) -> list[WorkerModel]:
        """Return what is known of the workers that are connected, in the order of their addresses' arrival."""
        return [member.model for member in self._members.values() if member.model is not None]

    def context(self, of_checkpoint: int) -> int:
        """Return the tokens of the longest sequence that some connected worker takes, at most the checkpoint's."""
        return min(of_checkpoint, max((model.capacity.max_model_len for model in self.models()), default=of_checkpoint))

    def absent(self) -> list[tuple[str, str]]:
        """Return (name, reason) of the workers that are not connected."""
        return [
            (member.name, f"{member.state.value}: {member.reason}")
            for member in self._members.values()
            if member.model is None
        ]

    def client(self, model: WorkerModel) -> WorkerClient:
        """Return the connection of a model that `models` returned. Raises Unavailable when it is gone."""
        for member in self._members.values():
            if member.model is model:
                return member.client
        raise Unavailable(f"worker {model.worker_id} has just gone")

    def members(self) -> Collection[Member]:
        """Return all, for the status."""
        return self._members.values()

    def is_connected(self, address: str) -> bool:
        """Return whether the stream to an address is open."""
        member = self._members.get(address)
        return member is not None and member.model is not None

    @property
    def usable(self) -> bool:
        """Whether some worker may be given work."""
        now = self._clock.monotonic()
        return any(model.trouble(now) is None for model in self.models())

    # ------------------------------------------------------------ watching

    async def watch(self) -> None:
        """Look after hung workers until this task is cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self.check()

    def check(self) -> None:
        """Note each worker's state; take the sequences of one that hangs away from it if another can run them."""
        now = self._clock.monotonic()
        for member in list(self._members.values()):
            if member.model is None:
                continue
            before = member.state
            member.state, member.reason = member.model.trouble(now) or (WorkerState.CONNECTED, "")
            if member.state is not before:
                log.info("worker %s is %s", member.name, member.state, extra={"reason": member.reason})
                self._tell_all()
            if member.state is WorkerState.HUNG and member.model.outstanding and self.usable:
                member.client.abandon(f"hung: {member.reason}")

    # ------------------------------------------------------------ what clients tell

    def connected(self, client: WorkerClient, facts: WorkerFacts) -> None:
        """Take a worker into use. Raises IdentityMismatch, or Unavailable when its id is in use already."""
        member = self._members.get(client.address)
        if member is None or member.client is not client:
            raise Unavailable("the router uses it no longer")
        if found := differences(self.identity, facts.identity):
            raise IdentityMismatch(found)
        for other in self._members.values():
            if other.model is not None and other.worker_id == facts.worker_id:
                raise Unavailable(f"worker {facts.worker_id} is connected at {other.client.address} already")
        self._agree(adopt(self.identity, facts.identity))
        known = self._incarnations.get(facts.worker_id)
        self._incarnations[facts.worker_id] = facts.incarnation
        now = self._clock.monotonic()
        member.worker_id, member.facts = facts.worker_id, facts
        member.model = WorkerModel(facts.worker_id, facts.capacity, _idle(facts), heartbeat_at=now)
        member.state, member.reason = WorkerState.CONNECTED, ""
        member.logged_reasons.clear()
        log.info("worker %s connected", facts.worker_id, extra={"address": client.address})
        for listener in self._listeners if known not in (None, facts.incarnation) else ():
            listener.cache_lost(facts.worker_id)
        self._tell_all()

    def heartbeat(self, client: WorkerClient, load: Load) -> None:
        """Take in a worker's load."""
        member = self._members.get(client.address)
        if member is not None and member.model is not None and member.client is client:
            member.model.heartbeat(load, self._clock.monotonic())
            self._tell_all()

    def disconnected(self, client: WorkerClient, error: QuireError) -> None:
        """Note why a worker cannot be used."""
        member = self._members.get(client.address)
        if member is None or member.client is not client:
            return
        mismatched = isinstance(error, IdentityMismatch)
        state = WorkerState.MISMATCHED if mismatched else WorkerState.CONNECTING
        self._log_absence(member, error)
        member.model, member.facts, member.state, member.reason = None, None, state, str(error)
        if not self.models():
            # Whoever comes next may be of another kind, as far as it was left open: all workers may have been replaced.
            self._agree(self._configured)
        self._tell_all()

    def _log_absence(self, member: Member, error: QuireError) -> None:
        """Say once why a worker is not there, however often it is tried; that one is still to come is no warning."""
        # What follows the colon is gRPC's account of one try, different each time.
        words = str(error).partition(":")[0]
        if member.model is None and words in member.logged_reasons:
            return
        member.logged_reasons.add(words)
        bad = member.model is not None or isinstance(error, IdentityMismatch)
        log.log(
            logging.WARNING if bad else logging.INFO,
            "worker %s is not connected",
            member.name,
            extra={"reason": str(error)},
        )

    def _agree(self, identity: PoolIdentity) -> None:
        self.identity = identity
        for member in self._members.values():
            member.client.identity = identity

    def _tell_all(self) -> None:
        for listener in self._listeners:
            listener.capacity_changed()


def _idle(facts: WorkerFacts) -> Load:
    """What is assumed until the first heartbeat, which follows at once."""
    return Load(unheld_blocks=facts.capacity.num_blocks)
