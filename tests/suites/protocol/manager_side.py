"""The managers' side of a world: epochs and sessions of the real WorkerRegistry and Ledger, and their index writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.contracts.clock import ManualClock
from common.contracts.hashing import key_of
from common.contracts.lease import Attach, AttachRejected, Inventory, Report
from common.contracts.transfers import PeerSource
from common.contracts.types import BlockHash
from kvmanager.contracts import epochs
from kvmanager.contracts.index_events import Cleared
from kvmanager.contracts.ledger_config import ManagerConfig
from kvmanager.contracts.ports import Reach
from kvmanager.ledger.ahead_table import AheadKind
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.registry import WorkerRegistry
from tests.suites.protocol import content
from tests.suites.protocol.index import Replaced, Wiped
from tests.suites.protocol.invariants import check_part
from tests.suites.protocol.state import WORKER, Link, ModelManager, State

CLOCK = ManualClock()
"""The clock of all worlds. Each sets it to its own time before an event."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """A peer that has, as the manager believes, all blocks of each `every`-th prompt.

    Where the pool has groups, it has each `every`-th of all contents.
    """

    every: int
    worker_id: str = "peer"
    ahead: int = 0

    def __call__(self, reach: Reach) -> tuple[Oracle, int] | None:
        count = reach(self)
        return (self, count) if count else None

    def find_run(self, block_hashes: Sequence[BlockHash], first: int, end: int) -> int:
        return 0 if block_hashes[-1][0] % self.every else end - first

    def has_content(self, key: BlockHash, parent: BlockHash, depth: int) -> bool:
        return not (key[0] + key[-1]) % self.every

    def has_any(self, keys: frozenset[BlockHash]) -> bool:
        return any(not (key[0] + key[-1]) % self.every for key in keys)

    def serve(self, keys: Sequence[BlockHash]) -> PeerSource:
        return PeerSource(self.worker_id, bytes(16), "127.0.0.1:1", bytes(16), 0)


class ManagerSide(State):
    """Events of the manager processes."""

    def start_manager(self) -> None:
        """Start a manager process, which takes its epoch."""
        config = ManagerConfig(
            runway_slots=self.scenario.runway_slots,
            runway_reach=self.scenario.runway_reach,
            watermark=0.0,
            eviction=self.eviction,
            max_preemptions=self.scenario.max_preemptions,
            chunked_grants=self.scenario.first_part > 0,
            first_part=self.scenario.first_part,
            least_saved=self.scenario.least_saved,
            tail_share=self.scenario.tail_share,
            max_wait=self.scenario.max_wait,
            in_turn=self.scenario.in_turn,
        )
        manager = ModelManager(WorkerRegistry(config, CLOCK, lambda: ""))
        manager.core.last_reset = manager.told_reset = self.kept_reset
        self.managers.append(manager)
        self.take_epoch(manager, seen=0)

    def to_manager(self, number: int) -> bool:
        """A message reaches a manager, which answers with a batch if there is anything to say."""
        link = self.links[number]
        manager = self.managers[link.manager]
        message, link.to_manager = link.to_manager[0], link.to_manager[1:]
        if not manager.alive:
            return True
        if isinstance(message, Report):
            self._take_report(link, manager, message)
        elif link.up:
            self._attach(link, manager, *message)
        return True

    def _take_report(self, link: Link, manager: ModelManager, report: Report) -> None:
        if link.served is None or not manager.core.is_current(link.served):
            return  # of a session that is over
        ledger = manager.core.ledger(WORKER)
        ledger.apply_report(report)
        self._answer(link, manager, ledger, self.scenario.admissions)

    def further(self, number: int) -> bool:
        """A manager goes on with its answer to a report; anything else may have happened since the last batch."""
        link = self.links[number]
        manager = self.managers[link.manager]
        self._answer(link, manager, manager.core.ledger(WORKER), self.scenario.admissions)
        return True

    def _answer(self, link: Link, manager: ModelManager, ledger: Ledger, most: int | None = None) -> None:
        before = ledger.state.ahead.part
        batch = ledger.schedule(most)
        if ledger.state.ahead.part is not before:
            check_part(ledger)
        if batch is not None and not link.deaf:
            link.to_worker = (*link.to_worker, batch)
        self._publish(manager, ledger)

    def _publish(self, manager: ModelManager, ledger: Ledger) -> None:
        events = ledger.drain_index_events()
        ledger.drain_decisions()
        if self.scenario.with_index and any(isinstance(event, Cleared) for event in events):
            self.republish(manager)
        elif self.scenario.with_index:
            manager.publisher.follow(events)

    def _attach(self, link: Link, manager: ModelManager, attach: Attach, inventory: Inventory) -> None:
        core, old = manager.core, manager.session()
        if old is not None:
            core.detach(old)
        if core.needs_epoch(attach) and not self._renew_epoch(manager, attach.epoch_seen):
            return
        served = core.attach(attach)
        assert not isinstance(served, AttachRejected)
        link.served = served
        if self.scenario.peers:
            served.ledger.state.peers = Oracle(self.scenario.peers)
        ok = core.complete(served, inventory)
        link.to_worker = (*link.to_worker, ok)
        served.ledger.drain_index_events()
        if self.scenario.with_index:
            self.republish(manager)
        self._answer(link, manager, served.ledger)

    def is_wished_at(self, manager: ModelManager) -> bool:
        """Return whether somebody may wish for a prompt at a manager: the worker is attached there."""
        session = manager.session()
        return manager.alive and session is not None and session.ready

    def wish(self, number: int) -> bool:
        """Somebody wants one of the prompts, another one each time, in host memory; nobody waits for it."""
        manager, size = self.managers[number], self.scenario.block_size
        session = manager.session()
        assert session is not None
        self.wishes_left -= 1
        tokens = self.scenario.requests[5 * self.wishes_left % len(self.scenario.requests)].prompt
        nodes = content.path(tokens)
        hashes = [content.key(nodes[end - 1], size) for end in range(size, len(tokens) + 1, size)]
        session.ledger.wish_prefix(AheadKind.PREFETCH, hashes, "")
        for link in self.links:
            if link.served is session:
                self._answer(link, manager, session.ledger)
        self._publish(manager, session.ledger)
        return True

    def reset(self, number: int) -> bool:
        """An operator resets the prefix cache. What it drops is known where the worker has its latest session.

        The ledger of an earlier one may count a block as cached that a sequence has used since.
        """
        manager = self.managers[number]
        session = manager.session()
        self.resets += 1
        self.kept_reset = manager.told_reset = self.resets
        self.dropped, self.void = frozenset(), frozenset()
        latest = self.links[-1] if self.links else None
        if session is not None and session.ready and latest is not None and latest.served is session:
            self.dropped = frozenset(session.ledger.state.store.pool.cached)
            if self.scenario.frames:
                self.void = self._not_in_use(session.ledger)
        manager.core.reset_cache(self.resets)
        if session is not None and session.ready:
            for link in self.links:
                if link.served is session:
                    self._answer(link, manager, session.ledger)
            self._publish(manager, session.ledger)  # where no link has messages any more, the order is lost
        return True

    def _not_in_use(self, ledger: Ledger) -> frozenset[BlockHash]:
        """Return the hashes in frames and cached blocks, without those that a sequence has computed or reads."""
        store, read = ledger.state.store, set[BlockHash | None]()
        for known in ledger.state.sequences.live.values():
            read.update(store.blocks.hash[block] for block in known.held_blocks())
        groups = range(len(self.layers))
        for each in self.agent._sequences.values():
            # What a planned step has written counts: every group has its content of a place then.
            held = {self.device.block_key(block) for block in self.tables_of(each)[0][:: self.layers[0].pages]}
            read.update(key_of(known, group) for known in held if known for group in groups)
        reports = [message for link in self.links for message in link.to_manager if isinstance(message, Report)]
        sealed = [*(seal for report in reports for seal in report.seal), *self.agent._report._seal]
        read.update(key_of(key, group) for _, key in sealed for group in groups)
        below = store.cache.below.keys() | store.cache.saved.keys()
        found = {store.blocks.hash[block] for block in store.pool.cached} | below
        return frozenset(key for key in found - read if key is not None)

    def _renew_epoch(self, manager: ModelManager, seen: int) -> bool:
        """Take a higher epoch, with a random jump; a manager that sees that it was replaced ends itself."""
        try:
            self.take_epoch(manager, seen)
        except Replaced:
            self.end_manager(manager)
            return False
        return True

    def take_epoch(self, manager: ModelManager, seen: int) -> None:
        """As EpochKeeper does, without its file: each new process has lost it. Raises Replaced."""
        own = manager.core.epoch
        least = epochs.next_epoch(own=own, seen=seen)
        manager.core.adopt_epoch(self.index.acquire(least, own, self.random_jump()))

    def republish(self, manager: ModelManager) -> None:
        """Publish the whole membership under a new generation, after a rebuild."""
        session = manager.session()
        if session is not None and session.ready:
            self.generations += 1
            manager.publisher.restart(self.generations, session.ledger.index_snapshot())

    def random_jump(self) -> int:
        """After a wipe two managers could each compute the same next epoch: none may be taken twice."""
        if self.index.counter is not None:
            return 0
        self.jumps += 1
        return 100 * self.jumps

    def end_manager(self, manager: ModelManager) -> None:
        """A manager is gone, and its streams with it; there is always another one, or a supervisor starts it."""
        manager.alive = False
        for link in self.links:
            if self.managers[link.manager] is manager:
                self._lose(link)
                link.to_manager = ()
        if not any(each.alive for each in self.managers):
            self.start_manager()

    def flush(self, number: int) -> bool:
        """Let a manager make one call to the index."""
        manager = self.managers[number]
        try:
            return manager.publisher.flush(self.index, manager.core.epoch)
        except Replaced:
            self.end_manager(manager)
        except Wiped:
            if self._renew_epoch(manager, seen=0):
                self.republish(manager)
        return True

    def _lose(self, link: Link) -> None:
        """A stream breaks. What is in its queues has arrived and waits in buffers: sessions decide that it is void."""
        link.up = False
        link.to_manager = tuple(message for message in link.to_manager if isinstance(message, Report))
        if not link.deaf:
            self.worker.note_loss(link.session)
