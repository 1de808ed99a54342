"""The executable model: the real cores of worker and manager, a device whose content is known, an unreliable network.

A world is one state. An event is a pair (name, argument): `World.events` lists those that may happen, `World.happen`
lets one happen and checks every invariant. Messages wait in two queues a link, and a broken link's queues may still be
delivered. So commands that were buffered before a break come late, as do reports that an old handler still has.
"""

from __future__ import annotations

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Attach, Copy, Inventory, Report
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId
from kvmanager.ledger.registry import WorkerRegistration
from tests.suites.protocol.agent_copies import agent_key, copy_agent, shallow
from tests.suites.protocol.index import Index
from tests.suites.protocol.invariants import Violation, check
from tests.suites.protocol.manager_side import CLOCK, ManagerSide
from tests.suites.protocol.scenario import Scenario, layers_of
from tests.suites.protocol.state import Link, ModelManager
from tests.suites.protocol.transfer_side import TRANSFERS, disk_with
from tests.suites.protocol.worker_side import WorkerSide

Event = tuple[str, int]
FAULTS = (
    *("cancel", "stream_break", "worker_crash", "manager_crash", "hand_over", "wipe", "reset"),
    *("rot", "close_disk", "age"),
)
"""The last one is none: time passes, and whoever waits is old."""
OF_WORKER = frozenset({"submit", "plan", "complete", "report", "to_worker", "cancel", "rot", "close_disk", *TRANSFERS})
"""Events that leave the managers as they are; all events may change the queues between them and the worker."""


class World(WorkerSide, ManagerSide):
    """One state of the model."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.layers = scenario, layers_of(scenario)
        self.index = Index()
        self.now = CLOCK.now = 0.0
        self.generations = self.jumps = self.resets = self.kept_reset = 0
        self.dropped: frozenset[BlockId] = frozenset()
        self.void: frozenset[BlockHash] = frozenset()
        self.incarnation = 0
        self.disk = disk_with(scenario.warm, scenario.block_size, self.layers)
        self.links: list[Link] = []
        self.managers: list[ModelManager] = []
        self.start_manager()
        self.start_worker()
        self.unsubmitted = tuple(range(len(scenario.requests)))
        self.delivered: list[list[int]] = [[] for _ in scenario.requests]
        self.ended: list[FinishReason | None] = [None] * len(scenario.requests)
        self.faults_left = dict(scenario.faults)
        self.wishes_left = scenario.wishes
        self.faults_in_all = scenario.max_faults
        self.worker_touched = self.managers_touched = True
        self.worker_hash = self.managers_hash = None

    # ------------------------------------------------------------ events

    def events(self) -> list[Event]:
        """List the possible events; some of them may turn out to change nothing."""
        found: list[Event] = [("submit", 0)] if self.unsubmitted else []
        found += [("plan", 0)] if len(self.flights) < 2 else []
        found += [("complete", 0)] if self.flights else []
        found += [("report", 0)] if self.link else [("connect", n) for n, m in enumerate(self.managers) if m.alive]
        for number, link in enumerate(self.links):
            if self._has_more(link):
                found += [("further", number)]
            elif link.to_manager:
                found += [("to_manager", number)]
            found += [("to_worker", number)] if link.to_worker else []
        if self.scenario.disk or self.scenario.peers:
            book = self.agent._transfers
            found += [("begin", 0)] if book._to_read or book._to_take else []
            found += [("read", 0)] if self.reading else []
            found += [("come", end) for end in self.scenario.peer_ends] if self.coming else []
            found += [("write", 0)] if self.writing else []
            found += [("land", 0)] if self.landing else []
        if self.wishes_left:
            found += [("wish", n) for n, m in enumerate(self.managers) if self.is_wished_at(m)]
        if self.scenario.with_index:
            found += [("flush", n) for n, m in enumerate(self.managers) if m.alive]
        return found

    def _has_more(self, link: Link) -> bool:
        """Whether a manager has still to answer the last report that it took from a link."""
        served, manager = link.served, self.managers[link.manager]
        return manager.alive and served is not None and manager.core.is_current(served) and served.ledger.has_more

    def faults(self) -> list[Event]:
        """List the possible faults."""
        found: list[Event] = []
        if self.faults_in_all:
            left = [kind for kind in FAULTS if self.faults_left.get(kind)]
            for kind in left:
                found += [(kind, argument) for argument in self._arguments(kind)]
        return found

    def _arguments(self, kind: str) -> list[int]:
        match kind:
            case "cancel":
                return sorted(request for request in self.request_of.values() if self.ended[request] is None)
            case "stream_break":
                return [0] if self.link else []
            case "manager_crash" | "reset":
                return [number for number, manager in enumerate(self.managers) if manager.alive]
            case "rot":
                return [frame for frame, entry in self.disk.entries if entry.image is not None]
            case "close_disk":
                return [0] if self.agent.disk_frames else []
            case _:
                return [0]

    def happen(self, event: Event) -> bool:
        """Let an event happen, and check every invariant unless it was nothing; False then. Raises Violation.

        Half of the events of a walk are nothing. What one of them changes all the same, the next check looks at.
        """
        happened = self.occur(event)
        if happened:
            check(self)
        return happened

    def occur(self, event: Event) -> bool:
        """Let an event happen. Raises Violation for what is wrong in the event itself, not for the state after it."""
        name, argument = event
        CLOCK.now = self.now
        if name in FAULTS:
            self.faults_left[name] -= 1
            self.faults_in_all -= 1
        worker, managers = self._touched_by(event)
        self.worker_touched, self.managers_touched = self.worker_touched or worker, self.managers_touched or managers
        self.worker_hash = None if worker else self.worker_hash
        self.managers_hash = None if managers else self.managers_hash
        try:
            return bool(getattr(self, name)(argument))
        except ProtocolViolation as broken:
            raise Violation.of_protocol(broken) from broken

    def _touched_by(self, event: Event) -> tuple[bool, bool]:
        """Return whether an event may change the worker, and whether it may change the managers."""
        name, number = event
        answers = name == "to_manager" and isinstance(self.links[number].to_manager[0], Report)
        return not answers and name != "further", name not in OF_WORKER

    # ------------------------------------------------------------ faults

    def cancel(self, request: int) -> bool:
        sequence = next(s for s, r in self.request_of.items() if r == request)
        self.agent.cancel_sequence(sequence)
        self._settle(self.agent.departures())
        return True

    def stream_break(self, _: int) -> bool:
        """The stream breaks while both sides live; the manager does not notice before the worker is back."""
        self._lose(self.links[-1])
        return True

    def worker_crash(self, _: int) -> bool:
        """The worker dies; the router submits what it had again, with the tokens that were delivered."""
        lost = sorted(self.request_of.values())
        for link in self.links:
            link.up, link.deaf, link.to_worker = False, True, ()
            link.to_manager = tuple(message for message in link.to_manager if isinstance(message, Report))
        self.start_worker()
        self.unsubmitted = (*lost, *self.unsubmitted)
        return True

    def manager_crash(self, number: int) -> bool:
        self.end_manager(self.managers[number])
        return True

    def hand_over(self, _: int) -> bool:
        """A second manager starts, and the worker's link breaks. The first manager continues without notice."""
        self.start_manager()
        if self.link is not None:
            self._lose(self.link)
        return True

    def wipe(self, _: int) -> bool:
        self.index.wipe()
        self.kept_reset = 0
        return True

    def age(self, _: int) -> bool:
        self.now += self.scenario.max_wait
        return True

    # ------------------------------------------------------------ copies

    def clone(self, event: Event | None = None) -> World:
        """Return an independent copy. One for an event alone shares with its original what the event does not touch."""
        worker, managers = self._touched_by(event) if event else (True, True)
        twin = World.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.index, twin.faults_left = self.index.clone(), self.faults_left.copy()
        renewed: dict[int, WorkerRegistration] = {}
        if managers:
            twin.managers = [manager.clone(renewed) for manager in self.managers]
        twin.links = [link.clone(renewed) for link in self.links]
        if worker:
            self._copy_worker_to(twin)
        return twin

    def _copy_worker_to(self, twin: World) -> None:
        twin.device, twin.worker = self.device.clone(), shallow(self.worker)
        twin.worker.agent = copy_agent(self.worker.agent)
        twin.paths = {sequence: nodes.copy() for sequence, nodes in self.paths.items()}
        twin.copying, twin.request_of = self.copying.copy(), self.request_of.copy()
        twin.states = self.states.copy()
        twin.delivered, twin.ended = [tokens.copy() for tokens in self.delivered], self.ended.copy()

    def state_key(self) -> tuple[object, ...]:
        """Return everything that decides the future, hashable; sessions count by which one is the present one."""
        if self.worker_hash is None:
            self.worker_hash = hash(self._worker_key())
        CLOCK.now = self.now
        if self.managers_hash is None:
            self.managers_hash = hash(tuple([manager.state_key() for manager in self.managers]))
        return (
            (self.worker_hash, self.managers_hash),
            tuple([self._link_key(link) for link in self.links]),
            (self.index.counter, self.index.fence, self.index.generation, self.index.entries),
            (self.unsubmitted, self.faults_in_all, tuple(self.faults_left.items()), self.wishes_left),
            (self.resets, self.kept_reset, self.dropped, self.void),
            (self.disk, self.reading, self.coming, self.writing, self.landing),
        )

    def _worker_key(self) -> tuple[object, ...]:
        return (
            agent_key(self.agent),
            (self.worker.open, self.worker.epoch_seen),
            tuple([tuple(slots) for slots in self.device.slots]),
            tuple([(s, r, self.paths[s][-1]) for s, r in self.request_of.items()]),
            tuple(self.ended),
            tuple(self.held_sources()),
            tuple(self.states.items()),
        )

    def held_sources(self) -> list[tuple[SequenceId, Copy]]:
        """Return copies that were granted in this session and have not run, of sequences that keep their blocks."""
        live, session = self.agent._sequences, self.worker.session
        return [
            (each, copy)
            for each, (copy, granted_in) in self.copying.items()
            if granted_in == session and each in live and copy.dst in live[each].block_table
        ]

    def _link_key(self, link: Link) -> tuple[object, ...]:
        current = link.served is not None and self.managers[link.manager].session() is link.served
        return (link.manager, link.up, link.deaf, current, _message_keys(link.to_manager), link.to_worker)


def _message_keys(messages: tuple[tuple[Attach, Inventory] | Report, ...]) -> tuple[object, ...]:
    return tuple([m if isinstance(m, Report) else m[1] for m in messages])
