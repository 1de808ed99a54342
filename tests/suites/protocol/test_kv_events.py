"""What subscribers of KV events are told equals what the manager's ledger has, through a long random life.

The real lease agent, its watch and the real ledger run. A subscriber applies the changes as it gets them, with as many
taken at once as a queue has room for. After each exchange of messages, tier by tier, it knows what the ledger knows.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from common.contracts.clock import ManualClock
from common.contracts.hashing import block_digests, block_hash_of, hash_in, key_of, next_digest
from common.contracts.transfers import Medium, Transfer, TransferEnd
from common.contracts.types import BlockHash, KvGroup, KvGroupKind, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.kv_events import CacheWatch, Change, Cleared, Removed, Stored, WatchedClaims
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger

ROOT = bytes(32)
SIZE = 4
MOST_LIVE = 24

FULL_AND_WINDOW = (KvGroup(KvGroupKind.FULL, 0, 2, (0,)), KvGroup(KvGroupKind.WINDOW, 6, 1, (1,)))


DIGESTS: dict[BlockHash | None, bytes] = {None: ROOT}
"""Of every block that a sequence had, by its hash: of them the hashes of its children are made."""


@dataclass
class Subscriber:
    """What somebody knows who applies all changes: the contents of each tier by their keys."""

    known: set[tuple[Medium, BlockHash]] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def apply(self, changes: Items[Change]) -> None:
        """Apply changes; each is of something that was not so before, and tokens hash to what is told with them."""
        for change in changes:
            self.seen[type(change).__name__] += 1
            match change:
                case Stored(medium, group, block_hash, origin):
                    assert (medium, key_of(block_hash, group)) not in self.known
                    self.known.add((medium, key_of(block_hash, group)))
                    assert block_hash_of(next_digest(DIGESTS[origin.parent], origin.tokens)) == block_hash
                case Removed(medium, group, block_hash):
                    self.known.remove((medium, key_of(block_hash, group)))
                case Cleared():
                    assert self.known
                    self.known.clear()

    def keys(self, medium: Medium) -> set[BlockHash]:
        return {key for where, key in self.known if where is medium}


class Life:
    """A worker and its manager, driven by random operations. A restarted process begins with an empty subscriber."""

    def __init__(self, seed: int, num_blocks: int, **sizes: Any) -> None:
        self.random = random.Random(seed)
        self.ledger_config = LedgerConfig(num_blocks, SIZE, max_num_seqs=8, **sizes)
        self.sizes, self.num_blocks = sizes, num_blocks
        self.number, self.resets = 0, 0
        self.seen: Counter[str] = Counter()
        self.prompts: list[tuple[int, ...]] = [()]
        self.watch, self.subscriber = CacheWatch(), Subscriber()
        self.agent = self.new_agent()
        self.flights: deque[StepPlan] = deque()
        self.reads: list[Transfer] = []
        self.clock, self.ids = ManualClock(), iter(range(1 << 30))
        self.attach()

    def new_agent(self) -> LeaseAgent:
        config = AgentConfig(self.num_blocks, SIZE, 16, max_num_seqs=8, runway_slots=8, **self.sizes)
        return LeaseAgent(replace(config, watch=self.watch))

    def attach(self) -> None:
        """Begin a session: the ledger is rebuilt from the inventory."""
        self.ledger = Ledger(self.ledger_config, self.clock, lambda: f"d{next(self.ids)}")
        self.ledger.rebuild(self.agent.inventory())
        self.agent.attached(0)
        self.exchange()

    # ------------------------------------------------------------ operations

    def submit(self) -> None:
        """Take a request that goes on from an earlier one, from a part of one, or from nothing."""
        if sum(1 for _ in self.agent.unfinished()) >= MOST_LIVE:
            return
        pick = self.random
        before = pick.choice(self.prompts)
        cut = before[: pick.randrange(len(before) + 1)]
        tokens = (cut + tuple(pick.randrange(2) for _ in range(pick.randrange(1, 20))))[:48]
        self.prompts = [*self.prompts[-20:], tokens]
        digests = block_digests(ROOT, tokens, SIZE)
        most = pick.randrange(1, 16)
        self.agent.submit_sequence(
            NewSequence(
                SequenceId(self.number),
                f"r{self.number}",
                tokens,
                tuple(map(block_hash_of, digests)),
                digests[-1] if digests else ROOT,
                len(tokens) + most,
                StopRule(most),
                priority=pick.randrange(2),
            )
        )
        self.number += 1

    def cancel(self) -> None:
        live = self.agent.unfinished()
        if live:
            self.agent.cancel_sequence(self.random.choice(live).id)
            self.agent.departures()

    def step(self) -> None:
        """Plan a step, complete the oldest one, and move what transfers have to move."""
        plan = self.agent.plan()
        if plan is not None:
            self.flights.append(plan)
        if self.flights and (plan is None or len(self.flights) == 2 or self.random.random() < 0.5):
            self.complete()
        self.move()

    def complete(self) -> None:
        plan = self.flights.popleft()
        tokens = {row.sequence: (self.random.randrange(2),) for row in plan.rows if row.samples}
        sequences = [self.agent.tokens_of(row.sequence) + tokens.get(row.sequence, ()) for row in plan.rows]
        for each in sequences:
            DIGESTS.update((block_hash_of(digest), digest) for digest in block_digests(ROOT, each, SIZE))
        self.agent.complete(StepResult(plan.step, tokens))

    def move(self) -> None:
        """Let transfers end: most are done, some fail."""
        reads, self.reads = [*self.reads, *self.agent.take_reads()], []
        for read in filter(self.agent.is_open, reads):
            if self.random.random() < 0.1:
                self.agent.end_transfer(read, TransferEnd.CORRUPT)
            elif self.agent.may_land(read):
                self.agent.end_transfer(read, TransferEnd.DONE)
            else:
                self.reads.append(read)
        for save in self.agent.take_saves(8):
            self.agent.end_transfer(save, TransferEnd.DONE if self.random.random() < 0.95 else TransferEnd.FAILED)

    def reset_cache(self) -> None:
        """Forget what no sequence uses. What the worker has released is said before: see the decision on KV events."""
        self.exchange()
        self.resets += 1
        self.ledger.reset_cache(self.resets)
        self.grant()

    def resync(self) -> None:
        """The stream breaks, or the manager is another process: steps go on until there is a session."""
        self.agent.detach()
        for _ in range(self.random.randrange(3)):
            self.step()
        self.attach()

    def fail(self) -> None:
        """A step fails: all sequences wait again in a new incarnation, and only the disk keeps what it has."""
        self.flights.clear()
        before, self.agent = self.agent, self.new_agent()
        self.agent.take_over([each for each in before.unfinished() if self.random.random() < 0.7])
        self.agent.restore_saved(before.saved_claims, before.reset)
        self.attach()

    def restart(self) -> None:
        """The process is another one. Its disk has what it had; no sequence is left, and a subscriber begins anew."""
        saved, reset = self.agent.saved_claims, self.agent.reset
        self.seen.update(self.subscriber.seen)
        self.watch, self.subscriber = CacheWatch(), Subscriber()
        self.flights.clear()
        self.agent = self.new_agent()
        self.agent.restore_saved(saved, reset)
        self.number += 1
        self.attach()

    # ------------------------------------------------------------ messages

    def exchange(self) -> None:
        """Send reports and grants until neither side has more."""
        self.grant()
        while (said := self.agent.take_report()) is not None:
            self.ledger.apply_report(said)
            self.grant()

    def grant(self) -> None:
        while True:
            batch = self.ledger.schedule()
            if batch is not None:
                self.agent.apply_grant(batch)
                self.agent.departures()
            if not self.ledger.has_more:
                break
        self.ledger.drain_decisions()
        self.ledger.drain_index_events()

    def operate(self) -> None:
        names = ("submit", "cancel", "step", "exchange", "reset_cache", "resync", "fail", "restart")
        name = self.random.choices(names, (25, 6, 60, 40, 1, 2, 0.7, 0.5))[0]
        getattr(self, name)()
        self.seen[name] += 1
        self.clock.advance(0.01)
        if self.random.random() < 0.5:
            self.subscriber.apply(self.watch.take_changes(self.random.choice((1, 3, 1000))))

    def compare(self) -> None:
        """Compare, tier by tier, what a subscriber knows with what the ledger has."""
        self.exchange()
        while self.watch.has_changes:
            self.subscriber.apply(self.watch.take_changes(1000))
        cache, unknown = self.ledger.state.store.cache, self.watch.unknown
        assert self.subscriber.keys(Medium.BLOCK) == cache.entries.keys()
        frames, saved = self.agent._frames.held, self.agent._transfers.saved.held
        assert isinstance(frames, WatchedClaims)
        assert isinstance(saved, WatchedClaims)
        for medium, entries, held in ((Medium.HOST, cache.below, frames), (Medium.DISK, cache.saved, saved)):
            told = self.subscriber.keys(medium)
            assert {key for key in entries.keys() - told if hash_in(key) not in unknown} == set()
            # The manager has dropped these, and has not ordered another content into their frames yet.
            left = told - entries.keys()
            assert {held.find(key) for key in left}.isdisjoint({None, *entries.values()})
            self.seen[f"left in {medium.name}"] += len(left)
            self.seen[f"told of {medium.name}"] += len(told)


POOLS: dict[str, dict[str, Any]] = {
    "one group": {"num_blocks": 40},
    "host memory": {"num_blocks": 40, "host_frames": 30},
    "disk": {"num_blocks": 40, "host_frames": 20, "disk_frames": 60},
    "window": {"num_blocks": 40, "window": 6},
    "groups": {"num_blocks": 90, "groups": FULL_AND_WINDOW, "host_frames": 60, "disk_frames": 90},
}


@pytest.mark.parametrize(("pool", "operations"), [("one group", 10_000), *((each, 2_000) for each in POOLS)])
def test_a_subscriber_knows_what_the_ledger_has(pool: str, operations: int) -> None:
    life = Life(5, **POOLS[pool])
    for number in range(operations):
        life.operate()
        if number % 5 == 0:
            life.compare()
    seen = life.seen + life.subscriber.seen
    share = operations / 2_000
    assert min(seen[name] for name in ("reset_cache", "resync", "fail", "restart")) > 2 * share, seen
    assert seen["Stored"] > 500 * share
    assert seen["Removed"] > 300 * share
    assert seen["Cleared"]
    if life.sizes.get("host_frames"):
        assert seen["told of HOST"] > 500
    if life.sizes.get("disk_frames"):
        assert seen["left in DISK"] < 0.2 * seen["told of DISK"]


def test_without_cached_blocks_nothing_is_kept_of_them() -> None:
    life = Life(6, **POOLS["disk"])
    for _ in range(500):
        life.operate()
    life.compare()
    for sequence in life.agent.unfinished():
        life.agent.cancel_sequence(sequence.id)
    while life.agent.has_work:
        life.step()
        life.exchange()
    life.reset_cache()
    life.subscriber.apply(life.watch.take_changes(1000))
    assert not life.subscriber.known
    watch = life.watch
    assert not any((watch._copies, watch._told, watch._changed, watch._origins, watch._entries_of, watch._unknown))
