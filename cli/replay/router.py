"""The router of a replay: a real dispatcher and admission over workers and an index that are simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from cli.replay.worker import ReplayWorker
from common.contracts.clock import Clock
from common.contracts.index_format import pack_entry, unpack_entries
from common.contracts.turns import DEFAULT_MAX_WAIT
from common.contracts.types import BlockHash, PoolIdentity
from kvmanager.contracts.index_events import Cleared, IndexEvent, Stored
from router.contracts.index_answer import IndexAnswer
from router.contracts.ports import DecisionSink
from router.placement.admission import AdmissionLimiter, AdmissionLimits
from router.placement.routing import Router
from router.placement.run_rule import RunRule
from router.placement.run_search import RunSearch
from router.placement.shared_load import SharedLoad
from router.placement.worker_model import Capacity, Load, WorkerModel
from router.requests.dispatcher import Dispatcher
from router.workers.pool import PoolListener, WorkerPool

_GENERATION: Final = 1
"""Of all entries: no worker of a replay starts anew."""


class ReplayPool:
    """The workers as the dispatcher sees them: all are connected."""

    def __init__(self, identity: PoolIdentity) -> None:
        self.identity = identity
        self.shared: SharedLoad | None = None
        self.workers: dict[str, ReplayWorker] = {}
        self._models: list[WorkerModel] = []
        self._by_name: dict[str, WorkerModel] = {}
        self._listeners: list[PoolListener] = []

    def listen(self, listener: PoolListener) -> None:
        self._listeners.append(listener)

    def add(self, worker: ReplayWorker, capacity: Capacity, now: float) -> None:
        load = Load(unheld_blocks=capacity.num_blocks)
        self.workers[worker.worker_id] = worker
        model = self._by_name[worker.worker_id] = WorkerModel(worker.worker_id, capacity, load, now)
        self._models = [*self._models, model]
        if self.shared is not None:
            model.share = self.shared.join(worker.worker_id, b"")

    def heartbeat(self, worker_id: str, load: Load, now: float) -> None:
        model = self._by_name[worker_id]
        model.heartbeat(load, now)
        for listener in self._listeners:
            listener.capacity_changed(model)

    def models(self) -> list[WorkerModel]:
        return self._models

    def client(self, model: WorkerModel) -> ReplayWorker:
        return self.workers[model.worker_id]

    def absent(self) -> Sequence[tuple[str, str]]:
        return ()


class ReplayIndex:
    """The prefix index without Redis: which workers have registered a block."""

    connected = True

    def __init__(self, rule: RunRule | None = None) -> None:
        """`rule` is that of the pool; None: hits are the leading blocks."""
        self._rule = rule
        self._holders: dict[BlockHash, dict[str, None]] = {}
        self._slots: dict[str, int] = {}
        self.changes = 0

    @property
    def entries(self) -> int:
        """Pairs of a block and a worker that has it."""
        return sum(map(len, self._holders.values()))

    async def lookup(self, block_hashes: Sequence[BlockHash]) -> IndexAnswer:
        return IndexAnswer(self._search(self._rule, block_hashes) if self._rule else self._hits(block_hashes))

    def _hits(self, block_hashes: Sequence[BlockHash]) -> dict[str, int]:
        hits: dict[str, int] = {}
        alive: dict[str, None] | None = None
        for depth, block in enumerate(block_hashes):
            holders = self._holders.get(block, {})
            still = holders if alive is None else {each: None for each in alive if each in holders}
            hits |= {gone: depth for gone in alive or () if gone not in still}
            alive = still
            if not alive:
                return hits
        return hits | dict.fromkeys(alive or (), len(block_hashes))

    def _search(self, rule: RunRule, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Look for runs of blocks as a router does in Redis."""
        live = {slot: (worker_id, _GENERATION) for worker_id, slot in self._slots.items()}
        search = RunSearch(live, unpack_entries, rule, len(block_hashes))
        while places := search.wanted():
            search.feed([self._value(block_hashes[place]) for place in places])
        return search.hits()

    def _value(self, block: BlockHash) -> bytes:
        """Return what Redis would have of a block."""
        return b"".join(pack_entry(self._slots[each], _GENERATION) for each in self._holders.get(block, ()))

    def apply(self, worker_id: str, events: Sequence[IndexEvent]) -> None:
        self.changes += len(events)
        self._slots.setdefault(worker_id, len(self._slots))
        for event in events:
            if isinstance(event, Stored):
                self._holders.setdefault(event.hash, {})[worker_id] = None
            elif isinstance(event, Cleared):
                raise AssertionError("nothing resets the cache of a replay")
            else:
                holders = self._holders[event.hash]
                del holders[worker_id]
                if not holders:
                    del self._holders[event.hash]


class ReplayRouter:
    """One router process: its view of the workers, its queue, and the requests inside it."""

    def __init__(
        self,
        identity: PoolIdentity,
        chooser: Router,
        index: ReplayIndex,
        decisions: DecisionSink,
        clock: Clock,
        max_queued: int,
        max_wait: float = DEFAULT_MAX_WAIT,
    ) -> None:
        self.pool = ReplayPool(identity)
        self.dispatcher = Dispatcher(cast("WorkerPool", self.pool), chooser, index, decisions, clock, max_wait=max_wait)
        self.admission = AdmissionLimiter(AdmissionLimits(max_queued))

    def share_load(self, shared: SharedLoad) -> None:
        """Tell other routers of the load at workers that are added from now on, and be told."""
        self.pool.shared = shared
