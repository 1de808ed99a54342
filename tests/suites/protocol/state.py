"""What both sides of a world share: streams with their queues, manager processes, the attributes of a state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from common.contracts.lease import Attach, AttachOk, Copy, GrantBatch, Inventory, Report
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.lease_session import LeaseSession
from gpuworker.scheduling.sequence import Sequence
from kvmanager.contracts.ledger_config import EvictionName
from kvmanager.ledger.registry import WorkerRegistration, WorkerRegistry
from tests.suites.protocol.agent_copies import shallow
from tests.suites.protocol.content import Device
from tests.suites.protocol.index import Index, Publisher
from tests.suites.protocol.ledger_copies import copy_ledger, ledger_key
from tests.suites.protocol.scenario import Layers, Scenario

if TYPE_CHECKING:
    from common.contracts.transfers import Transfer
    from tests.suites.protocol.transfer_side import Disk, Image, Write

WORKER = "w"


@dataclass(slots=True)
class Link:
    """One stream: its two queues, the manager at its other end, and the session that this manager serves on it.

    Nothing more reaches a worker process that is dead (`deaf`).
    """

    session: int
    manager: int
    up: bool = True
    deaf: bool = False
    served: WorkerRegistration | None = None
    to_manager: tuple[tuple[Attach, Inventory] | Report, ...] = ()
    to_worker: tuple[AttachOk | GrantBatch, ...] = ()

    def clone(self, renewed: dict[int, WorkerRegistration]) -> Link:
        """Return a copy; `renewed` has the copies of sessions by the ids of their originals."""
        served = renewed.get(id(self.served), self.served)
        return Link(self.session, self.manager, self.up, self.deaf, served, self.to_manager, self.to_worker)


@dataclass(slots=True)
class ModelManager:
    """One manager process, what it has yet to write to the index, and the last reset of which it was told.

    Redis keeps the id of the last one for managers that start later.
    """

    core: WorkerRegistry
    publisher: Publisher = field(default_factory=Publisher)
    alive: bool = True
    told_reset: int = 0

    def session(self) -> WorkerRegistration | None:
        """Return the worker's session, if the manager has one."""
        return self.core._registrations.get(WORKER)

    def clone(self, renewed: dict[int, WorkerRegistration]) -> ModelManager:
        """Return an independent copy; enter the copies of its sessions in `renewed`."""
        core = shallow(self.core)
        core._registrations = {}
        for worker, session in self.core._registrations.items():
            twin = WorkerRegistration(session.attach, copy_ledger(session.ledger), session.ready)
            core._registrations[worker] = renewed[id(session)] = twin
        return ModelManager(core, self.publisher.clone(), self.alive, self.told_reset)

    def state_key(self) -> tuple[object, ...]:
        """Return everything that decides the future, hashable."""
        if not self.alive:
            return ()
        session = self.session()
        ledger = ledger_key(session.ledger) if session is not None else ()
        return self.core.epoch, self.core.last_reset, ledger, self.publisher.state_key()


class State:
    """The whole state of a world; the two sides of the protocol add their events."""

    eviction: ClassVar[EvictionName] = "lru"
    """The policy of eviction. What another one has learned would belong to the key of a state."""

    scenario: Scenario
    layers: tuple[Layers, ...]
    index: Index
    worker: LeaseSession
    device: Device
    links: list[Link]
    managers: list[ModelManager]
    paths: dict[SequenceId, list[int]]
    request_of: dict[SequenceId, int]
    flights: tuple[tuple[StepPlan, StepResult], ...]
    unsubmitted: tuple[int, ...]
    delivered: list[list[int]]
    ended: list[FinishReason | None]
    next_sequence: int
    now: float
    generations: int
    jumps: int
    incarnation: int
    # Resets of the prefix cache so far, and the blocks that the last one dropped and no step has written since.
    resets: int
    # The id of the last reset that Redis keeps.
    kept_reset: int
    dropped: frozenset[BlockId]
    # The hashes that it dropped of frames and of blocks that no sequence had, and that no step has computed since.
    void: frozenset[BlockHash]
    # The disk of the worker's machine, and what threads of the worker have in hand.
    disk: Disk
    reading: tuple[Transfer, ...]
    coming: tuple[Transfer, ...]
    writing: tuple[Write, ...]
    landing: tuple[tuple[Transfer, Image], ...]
    # How often a prompt may still be wished for ahead of need.
    wishes_left: int
    # Where layers keep states: the node behind whose token a sequence's states are, as the device has them.
    states: dict[SequenceId, int]
    # The copy of a part of a block that a sequence was granted last and that has not run, and the session of the grant.
    copying: dict[SequenceId, tuple[Copy, int]]
    # Whether an event since the last check may have changed the worker, and the managers; hashes of their parts of the
    # key, if known.
    worker_touched: bool
    managers_touched: bool
    worker_hash: int | None
    managers_hash: int | None

    @property
    def agent(self) -> LeaseAgent:
        return self.worker.agent

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep states, whose checkpoints are the blocks of the last group."""
        return self.layers[-1].keeps_states

    def tables_of(self, sequence: Sequence) -> list[list[BlockId]]:
        """Return the tables of pages that a sequence of the worker has, one for each of the groups of layers."""
        return [table.pages for table in sequence.tables] or [sequence.block_table]

    def pages_of(self, block: BlockId) -> tuple[BlockId, ...]:
        """Return the pages of a block of the worker, the block's name first."""
        made = self.agent._blocks.made
        return (block,) if made is None else made.pages.get(block, (block,))

    @property
    def link(self) -> Link | None:
        """The worker's present stream."""
        return self.links[-1] if self.links and self.links[-1].up else None
