"""All workers of the router: their connections and models, which may get work, and listeners for changes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from common.contracts.adapters import AdapterRef, AdapterShare
from common.contracts.clock import Clock, until_tick
from common.contracts.errors import IdentityMismatch, ModelNotFound, QuireError, Unavailable
from common.contracts.limits import MAX_ADAPTER_NAME_CHARS, MAX_LOGGED_REASONS
from common.contracts.types import KvGroupKind, PoolIdentity
from common.rpc.server import Dial, open_channel
from router.contracts.identity import adopt, differences
from router.placement.adapters import AdapterNames, WorkerAdapters
from router.placement.shared_load import SharedLoad
from router.placement.worker_model import Load, WorkerModel, WorkerState
from router.workers.client import Pacing, RouterIdentity, WorkerClient
from router.workers.codec import WorkerFacts

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
_WORDS: Final = {
    WorkerState.CONNECTING: "not connected",
    WorkerState.DRAINING: "draining",
    WorkerState.HUNG: "hung",
    WorkerState.MISMATCHED: "of another model or pool",
    WorkerState.DETACHED: "without a KV manager",
}
# Seconds that a worker has to read the last messages of a router that leaves it. What it has not read become orphans.
# After its drain a router has 5 s in all before a suite kills it.
LAST_WORDS_S = 1.0


class PoolListener(Protocol):
    """Receives changes of the pool, on the event loop; must not block."""

    def capacity_changed(self, reported: WorkerModel | None = None) -> None:
        """A worker joined or left, or this one reported its load."""
        ...

    def cache_lost(self, worker_id: str) -> None:
        """A worker came back as a new process, with an empty cache."""
        ...


@dataclass(slots=True)
class Member:
    """One address. `model` and `facts` belong to the open connection; without one, `reason` says why."""

    client: WorkerClient
    task: asyncio.Task[None] | None = None
    worker_id: str = ""
    # Of the last connection: a worker that comes back with another one has lost its cache.
    incarnation: bytes = b""
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
    """Keeps a connection to every address that was added; implements WorkerListener."""

    def __init__(
        self,
        router: RouterIdentity,
        identity: PoolIdentity,
        clock: Clock,
        pacing: Pacing | None = None,
        dial: Dial = open_channel,
        manager_patience: float = float("inf"),
        adapter_names: AdapterNames | None = None,
    ) -> None:
        """The first worker fills in the unknown parts of `identity`; others must agree while any is connected."""
        self.identity = self._configured = identity
        self._router, self._clock, self._pacing, self._dial = router, clock, pacing or Pacing(), dial
        self._manager_patience = manager_patience
        self._members: dict[str, Member] = {}
        self._listeners: list[PoolListener] = []
        self._models: list[WorkerModel] | None = None
        self._migrating: set[WorkerClient] = set()
        self._adapter_names = adapter_names or AdapterNames()
        self._shared: SharedLoad | None = None

    def share_load(self, shared: SharedLoad) -> None:
        """Tell other routers of the load at workers that connect from now on, and be told."""
        self._shared = shared

    def listen(self, listener: PoolListener) -> None:
        self._listeners.append(listener)

    # ------------------------------------------------------------ membership

    def add_worker(self, address: str) -> None:
        """Begin to use the worker at HOST:PORT. Idempotent."""
        if address not in self._members:
            client = WorkerClient(address, self._router, self, self._pacing, self._dial)
            client.identity = self.identity
            self._members[address] = Member(client)
            self._run(address)

    def _run(self, address: str) -> None:
        member = self._members.get(address)
        if member is not None:
            member.task = asyncio.create_task(member.client.run(), name=f"worker {address}")
            member.task.add_done_callback(lambda task: self._ended(address, task))

    def _ended(self, address: str, task: asyncio.Task[None]) -> None:
        """Connect again after an unexpected error, such as one in a sink: the worker must not be lost for ever."""
        if not task.cancelled() and task.exception() is not None:
            log.error("unexpected error in the connection to %s", address, exc_info=task.exception())
            asyncio.get_running_loop().call_later(self._pacing.reconnect.longest, self._run, address)

    def remove(self, address: str) -> None:
        """Stop using an address; sequences there are Lost. What its cache held is forgotten."""
        member = self._members.pop(address, None)
        if member is None:
            return
        self._models = None
        self._leave_share(member)
        self._migrating.discard(member.client)
        member.client.abandon("the router uses it no longer", broken=False)
        if member.task is not None:
            self._leave(member, member.task)
        self._forget_cache(member)

    def _leave_share(self, member: Member) -> None:
        """Tell the others that this router has nothing more at a worker, whatever its sequences still release."""
        if self._shared is not None and member.model is not None and member.model.share is not None:
            self._shared.leave(member.model.share)
            member.model.share = None

    def _leave(self, member: Member, task: asyncio.Task[None]) -> None:
        """End a connection when its worker has read the last messages: what is not cancelled runs on as orphans.

        A worker whose heartbeat is late does not read, and is not waited for.
        """
        late = member.model is not None and member.model.silent(self._clock.monotonic())
        if member.client.ready and not late:
            member.client.leave()
            limit = asyncio.get_running_loop().call_later(LAST_WORDS_S, task.cancel)
            task.add_done_callback(lambda _: limit.cancel())
        else:
            task.cancel()

    async def aclose(self) -> None:
        tasks = [member.task for member in self._members.values() if member.task is not None]
        for address in list(self._members):
            self.remove(address)
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ queries

    def models(self) -> list[WorkerModel]:
        """Return the models of connected workers, in the order in which their addresses were added.

        The list is the same one until a worker joins or leaves, and never changed.
        """
        if self._models is None:
            self._models = [member.model for member in self._members.values() if member.model is not None]
        return self._models

    def context(self, of_checkpoint: int) -> int:
        """Return the longest context that some connected worker offers, in tokens, at most the checkpoint's."""
        return min(of_checkpoint, max((model.capacity.max_model_len for model in self.models()), default=of_checkpoint))

    def keeps_states(self) -> bool:
        """Return whether layers of the model keep states, so that prompts go on from checkpoints alone."""
        return any(group.kind is KvGroupKind.STATE for model in self.models() for group in model.capacity.groups)

    def find_adapter(self, name: str) -> AdapterRef | None:
        """Return the adapter that a model name stands for; None where no worker knows one of this name."""
        return self._adapter_names.find(name, [model.adapters for model in self.models()])

    def adapter_share(self, name: str, tenant: str) -> AdapterShare:
        """Return for whom a load of an adapter is: its owner, or the tenant whose request waits for it."""
        return self._adapter_names.share_of(name, tenant)

    def adapter_names(self) -> list[str]:
        """Return the names of all adapters that requests may be for."""
        return self._adapter_names.names([model.adapters for model in self.models()])

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound for a name that is neither one of the base nor of an adapter."""
        if name not in self._adapter_names.reserved and self.find_adapter(name) is None:
            raise ModelNotFound(f"model {name[:MAX_ADAPTER_NAME_CHARS]!r} is not served here", name)

    def absent(self) -> list[tuple[str, str]]:
        """Return (name, reason) of the workers that are not connected."""
        return [
            (member.name, f"{member.state.value}: {member.reason}")
            for member in self._members.values()
            if member.model is None
        ]

    def client(self, model: WorkerModel) -> WorkerClient:
        """Return the connection of a worker's model. Raises Unavailable when it is gone."""
        for member in self._members.values():
            if member.model is model:
                return member.client
        raise Unavailable(f"worker {model.worker_id} has just gone")

    def model_of(self, client: WorkerClient) -> WorkerModel | None:
        """Return the model of the worker at the other end of a connection, None while it is not open."""
        member = self._members.get(client.address)
        return member.model if member is not None and member.client is client else None

    def migrating(self) -> Collection[WorkerClient]:
        """Return the connections of workers whose sequences are to go on elsewhere, as of each one's last heartbeat."""
        return self._migrating

    def members(self) -> Collection[Member]:
        return self._members.values()

    def is_connected(self, address: str) -> bool:
        member = self._members.get(address)
        return member is not None and member.model is not None

    @property
    def usable(self) -> bool:
        """Whether some worker may be given work."""
        now = self._clock.monotonic()
        return any(model.trouble(now) is None for model in self.models())

    def trouble(self) -> str:
        """Return in words why no worker is usable, without names and addresses; "" if one is."""
        if self.usable:
            return ""
        now, states = self._clock.monotonic(), Counter[str]()
        for member in self._members.values():
            found = member.model.trouble(now) if member.model is not None else None
            states[_WORDS.get(found[0] if found else member.state, "not usable yet")] += 1
        counts = ", ".join(f"{count} {words}" for words, count in sorted(states.items()))
        return f"no worker takes requests: {counts or 'none is known'}"

    # ------------------------------------------------------------ watching

    async def watch_workers(self) -> None:
        """Check for hung workers until this task is cancelled."""
        while True:
            began = self._clock.monotonic()
            await asyncio.sleep(pause := until_tick(began, WATCH_SECONDS))
            self.check(late=max(0.0, self._clock.monotonic() - began - pause))

    def check(self, late: float = 0.0) -> None:
        """Update each worker's state; move the sequences of a hung worker if another worker is usable.

        Without a KV manager for too long, a worker loses the sequences that have put out nothing for as long. They go
        to another worker, or end with the reason. So they do at a worker that drains.

        `late`: seconds by which this check is late, because the router was stopped or had no processor. The heartbeats
        of that time are still unread.
        """
        now = self._clock.monotonic()
        for member in list(self._members.values()):
            if member.model is None:
                continue
            member.model.router_paused(late, now)
            before = member.state
            member.state, member.reason = member.model.trouble(now) or (WorkerState.CONNECTED, "")
            if member.state is not before:
                log.info("worker %s is %s", member.name, member.state, extra={"reason": member.reason})
                self._notify()
            if member.state is WorkerState.HUNG and member.model.outstanding and self.usable:
                member.client.abandon(f"hung: {member.reason}")
            if member.model.detached(now) and member.model.outstanding:
                member.client.abandon_silent(self._manager_patience, f"detached: {member.model.detached_words}")

    # ------------------------------------------------------------ WorkerListener

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
        for other in list(self._members.values()):
            if other is member or other.worker_id == facts.worker_id:
                self._renew(other, facts)
        now = self._clock.monotonic()
        member.worker_id, member.incarnation, member.facts = facts.worker_id, facts.incarnation, facts
        member.model = WorkerModel(
            facts.worker_id,
            facts.capacity,
            _idle(facts),
            heartbeat_at=now,
            manager_patience=self._manager_patience,
        )
        if self._shared is not None:
            member.model.share = self._shared.join(facts.worker_id, facts.incarnation)
        self._models = None
        member.state, member.reason = WorkerState.CONNECTED, ""
        member.logged_reasons.clear()
        log.info("worker %s connected", facts.worker_id, extra={"address": client.address})
        self._notify()

    def _renew(self, earlier: Member, facts: WorkerFacts) -> None:
        """Forget the cache of a worker that was at this address, or had this id, and was another process."""
        if earlier.incarnation != facts.incarnation:
            self._forget_cache(earlier)
        earlier.incarnation = b""

    def _forget_cache(self, member: Member) -> None:
        for listener in self._listeners if member.incarnation else ():
            listener.cache_lost(member.worker_id)

    def heartbeat(self, client: WorkerClient, load: Load) -> None:
        member = self._members.get(client.address)
        if member is not None and member.model is not None and member.client is client:
            member.model.heartbeat(load, self._clock.monotonic())
            if load.migrating:
                self._migrating.add(client)
            else:
                self._migrating.discard(client)
            self._notify(member.model)

    def adapters_changed(self, client: WorkerClient, adapters: WorkerAdapters) -> None:
        """Keep what a worker knows of adapters; a name of the base selects the base alone."""
        member = self._members.get(client.address)
        if member is None or member.model is None or member.client is not client:
            return
        clashes = self._adapter_names.note(member.model.adapters, adapters)
        if clashes:
            what = "worker %s has an adapter named %s, as the model is called here; no request can be for it: rename it"
            log.error(what, member.name, ", ".join(clashes))
        member.model.adapters = adapters
        self._notify()

    def disconnected(self, client: WorkerClient, error: QuireError) -> None:
        """Record why a worker cannot be used."""
        member = self._members.get(client.address)
        if member is None or member.client is not client:
            return
        mismatched = isinstance(error, IdentityMismatch)
        state = WorkerState.MISMATCHED if mismatched else WorkerState.CONNECTING
        self._log_absence(member, error)
        self._leave_share(member)
        member.model, member.facts, member.state, member.reason = None, None, state, str(error)
        self._models = None
        self._migrating.discard(client)
        if not self.models():
            # All workers may have been replaced: the next one fills in again what the configuration leaves open.
            self._agree(self._configured)
        self._notify()

    def _log_absence(self, member: Member, error: QuireError) -> None:
        """Log each reason once for all attempts to connect; a worker that never connected is not worth a warning."""
        # After the colon stand gRPC's details of one attempt, different each time.
        words = str(error).partition(":")[0]
        reasons = member.logged_reasons
        if member.model is None and (words in reasons or len(reasons) >= MAX_LOGGED_REASONS):
            return
        reasons.add(words)
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

    def _notify(self, reported: WorkerModel | None = None) -> None:
        for listener in self._listeners:
            listener.capacity_changed(reported)


def _idle(facts: WorkerFacts) -> Load:
    """Return the load that is assumed until the first heartbeat, which follows at once."""
    return Load(unheld_blocks=facts.capacity.num_blocks)
