"""Eviction with retention against a second implementation that looks at all blocks each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.contracts.clock import ManualClock
from common.contracts.lease import Reserve, RetainedBlocks
from common.contracts.types import BlockHash, BlockId, SequenceId
from kvmanager.contracts.block import ROOT
from kvmanager.contracts.index_events import Removed
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.audit import audit
from kvmanager.ledger.evicting import evict_until_free
from kvmanager.ledger.ledger_state import LedgerState
from tests.support.kvmanager.ledgers import counted_ids

BLOCKS, MOST, ALL_TENANTS, LONGEST = 7, 2, 3, 80.0
MOST_TERMS = 4
Chain = tuple[BlockHash, ...]
ASKS = st.builds(
    RetainedBlocks,
    first=st.integers(0, 3),
    end=st.integers(1, 4),
    priority=st.sampled_from((10, 35, 36, 60, 100)),
    seconds=st.sampled_from((0.0, 1.0, 10.0, 100.0)),
)


@dataclass
class Content:
    """What the second implementation knows of one hash. `released` is None while the content is in use.

    `stamp` is when it was released, or unpinned while it was cached.
    """

    parent: BlockHash
    users: int = 1
    released: int | None = None
    stamp: int = 0
    terms: list[tuple[int, float, str]] = field(default_factory=list)

    def priority(self, now: float) -> int:
        live = [each for each, until, _ in self.terms if until > now]
        raised = [each for each in live if each > 35]
        return max(raised) if raised else live[-1] if live else 35


class Naive:
    """All contents by their hash. Nothing is remembered that a look at all of them could tell."""

    def __init__(self) -> None:
        self.contents: dict[BlockHash, Content] = {}
        self.pinned: list[BlockHash] = []
        self.time = 0

    def leaves(self) -> list[BlockHash]:
        parents = {each.parent for each in self.contents.values()}
        return [key for key, each in self.contents.items() if each.released is not None and key not in parents]

    def rank(self, key: BlockHash, now: float) -> int:
        return 101 if key in self.pinned else self.contents[key].priority(now)

    def victims(self, now: float) -> tuple[list[BlockHash], bool]:
        """Return the contents one of which goes next, and whether the policy chooses among them."""
        ranked = {key: self.rank(key, now) for key in self.leaves()}
        early = [key for key, priority in ranked.items() if priority < 35]
        usual = [key for key, priority in ranked.items() if priority == 35]
        if usual and not early:
            return usual, True
        first = min(early or ranked, key=lambda key: (ranked[key], self.contents[key].stamp))
        return [first], False

    def use(self, key: BlockHash, parent: BlockHash) -> None:
        found = self.contents.get(key)
        if found is None:
            self.contents[key] = Content(parent)
            return
        found.users += 1
        if found.released is not None:
            found.released = None
            found.terms = [each for each in found.terms if each[0] > 35]

    def mark(self, key: BlockHash, asks: list[tuple[int, float]], tenant: str, now: float) -> None:
        """Let a content have what its request asks of it; asks of 35, and those that are over, are left out."""
        content = self.contents[key]
        old = [each for each in content.terms if each[0] > 35 and each[1] > now]
        raised = self._needed({each for each in asks if each[0] > 35})
        if not raised and not old:
            if asks and content.users == 1:
                content.terms = [(*asks[-1], tenant)]
            return
        needed = self._needed({*raised, *(each[:2] for each in old)})
        owner = old[0][2] if needed == [each[:2] for each in old] else tenant
        content.terms = [(*each, owner) for each in needed]

    @staticmethod
    def _needed(terms: set[tuple[int, float]]) -> list[tuple[int, float]]:
        """Leave out what another term surpasses in both; of more than four, the highest and the longest stay."""
        needed = [each for each in terms if not any(o != each and o[0] >= each[0] and o[1] >= each[1] for o in terms)]
        needed.sort(reverse=True)
        while len(needed) > MOST_TERMS:
            del needed[-2]
        return needed

    def release(self, key: BlockHash, tenants: str, now: float) -> None:
        content = self.contents[key]
        content.users -= 1
        if content.users:
            return
        self.time += 1
        content.released = content.stamp = self.time
        self._expire(now)
        if key not in self.pinned and content.priority(now) > 35:
            self._make_room(content.terms[0][2], tenants, now)

    @property
    def most_of_all(self) -> int:
        return max(0, ALL_TENANTS - len(self.pinned))

    def retained(self, now: float) -> list[Content]:
        cached = [key for key, each in self.contents.items() if each.released is not None and key not in self.pinned]
        return [self.contents[key] for key in cached if self.contents[key].priority(now) > 35]

    def _expire(self, now: float) -> None:
        for each in self.contents.values():
            if each.released is not None:
                each.terms = [term for term in each.terms if term[1] > now]

    def pin(self, keys: list[BlockHash], tenants: str, now: float) -> None:
        """Pin these contents alone. One that is pinned no more, or pinned now, is as if it were cached just now."""
        for key in [each for each in self.pinned if each not in keys]:
            self.pinned.remove(key)
            if self._stamped(key):
                self._expire(now)
                content = self.contents[key]
                if content.priority(now) > 35:
                    self._make_room(content.terms[0][2], tenants, now)
        for key in keys:
            if key not in self.pinned:
                self.pinned.append(key)
                if self._stamped(key):
                    self._expire(now)

    def _stamped(self, key: BlockHash) -> bool:
        """Note the time of a content if it is cached, and return whether it is."""
        content = self.contents.get(key)
        if content is None or content.released is None:
            return False
        self.time += 1
        content.stamp = self.time
        return True

    def surplus(self, tenants: str, now: float) -> list[Content]:
        """Return the contents one of which falls back next because pins leave too little room; none: they fit."""
        retained = self.retained(now)
        if len(retained) <= self.most_of_all:
            return []
        of = {name: [each for each in retained if each.terms[0][2] == name] for name in tenants}
        most = max(map(len, of.values()))
        return [min(each, key=lambda content: content.stamp) for each in of.values() if len(each) == most]

    def _make_room(self, tenant: str, tenants: str, now: float) -> None:
        retained = self.retained(now)
        of = {name: [each for each in retained if each.terms[0][2] == name] for name in tenants}
        largest = max(tenants, key=lambda name: (len(of[name]), name == tenant))
        if len(of[tenant]) > MOST:
            largest = tenant
        elif len(retained) <= self.most_of_all:
            return
        min(of[largest], key=lambda each: each.stamp).terms.clear()


def chain_of(path: list[int]) -> Chain:
    return tuple(BlockHash(bytes(path[: depth + 1]).ljust(16, b".")) for depth in range(len(path)))


@dataclass
class Running:
    sequence: Sequence
    chain: Chain


class Machine(RuleBasedStateMachine):
    policy: Any = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.naive, self.running = ManualClock(), Naive(), list[Running]()
        config = LedgerConfig(
            BLOCKS, 1, eviction=self.policy, retention_share=MOST / BLOCKS + 1e-9, max_retention=LONGEST
        )
        self.state = LedgerState(config, self.clock, counted_ids())
        self.number = 0

    @initialize()
    def begin_empty(self) -> None:
        audit(self.state)

    @rule(
        path=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        asks=st.one_of(
            st.lists(ASKS, min_size=1, max_size=3),
            st.just([RetainedBlocks(0, 4, 0, 100.0)]),
            st.integers(1, 4).map(lambda end: [RetainedBlocks(0, end, 90 - 10 * n, 1.0 + 9 * n) for n in range(5)]),
        ),
        tenant=st.sampled_from("ab"),
    )
    def request_begins(self, path: list[int], asks: list[RetainedBlocks], tenant: str) -> None:
        chain = chain_of(path)
        state, now = self.state, self.clock.monotonic()
        pool, hits = state.store.pool, state.store.cache.find_longest_prefix(chain, len(chain))
        fresh = len(chain) - len(hits)
        if fresh > pool.available - sum(block in pool.cached for block in hits):
            return
        for block in hits:
            pool.hold_block(block)
        for key, parent in zip(chain[: len(hits)], (ROOT, *chain), strict=False):
            self.naive.use(key, parent)
        self._make_free(fresh, now)
        self.number += 1
        reserve = Reserve(SequenceId(self.number), len(chain), len(chain), tenant=tenant, retention=tuple(asks))
        sequence = Sequence(reserve, self.number, 1, now)
        sequence.n_shared = sequence.own_from = len(hits)
        sequence.block_table = list(hits)
        for index in range(len(hits), len(chain)):
            block = pool.take_block()
            state.store.blocks.index[block] = index
            parent = chain[index - 1] if index else ROOT
            state.store.publish_block(block, chain[index], parent)
            self.naive.use(chain[index], parent)
            sequence.block_table.append(block)
        self.running.append(Running(sequence, chain))

    def _make_free(self, fresh: int, now: float) -> None:
        """Let both make room, and compare block by block who goes; a policy may choose among several."""
        self.state.store.cache.drain_events()
        evict_until_free(self.state, fresh, None)
        for event in self.state.store.cache.drain_events():
            assert isinstance(event, Removed)
            allowed, free_choice = self.naive.victims(now)
            if free_choice and self.policy == "lru":
                allowed = [min(allowed, key=lambda key: self.naive.contents[key].released or 0)]
            assert event.hash in allowed
            del self.naive.contents[event.hash]
        self.state.decisions.drain()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def request_ends(self, data: st.DataObject) -> None:
        each = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        now, sequence = self.clock.monotonic(), each.sequence
        for index, key in enumerate(each.chain):
            asks = [
                (asked.priority, now + min(asked.seconds, LONGEST))
                for asked in sequence.retention
                if asked.priority != 35 and asked.seconds and index < asked.end
                if asked.priority > 35 or index >= max(asked.first, sequence.n_shared)
            ]
            self.naive.mark(key, asks, sequence.tenant, now)
        self.state.store.retention.mark_blocks(sequence, sequence.block_table)
        for block, key in zip(reversed(sequence.block_table), reversed(each.chain), strict=True):
            self.state.store.release_blocks((BlockId(block),))
            self.naive.release(key, "ab", now)

    @rule(path=st.lists(st.integers(0, 1), max_size=3), other=st.lists(st.integers(0, 1), max_size=1))
    def operator_pins(self, path: list[int], other: list[int]) -> None:
        """Pin the blocks of a prompt or two, and no others."""
        now, chains = self.clock.monotonic(), [chain_of(path), chain_of(other)]
        keys = list(dict.fromkeys(key for chain in chains for key in chain))
        retention = self.state.store.retention
        retention.expire_terms()
        for _ in retention.pin_in_steps(dict.fromkeys(keys, "op")):
            pass
        self.naive.pin(keys, "ab", now)
        while candidates := self.naive.surplus("ab", now):
            held = {each.hash for each in retention.held.values()}
            contents = self.naive.contents
            gone = [each for each in candidates if next(k for k in contents if contents[k] is each) not in held]
            assert gone, "the first one falls back of a tenant that retains the most"
            gone[0].terms.clear()

    @rule(seconds=st.sampled_from((0.5, 1.0, 9.0, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def both_have_the_same(self) -> None:
        now = self.clock.monotonic()
        self.state.store.retention.expire_terms()
        assert set(self.state.store.cache.entries) == set(self.naive.contents)
        cached = {key: each for key, each in self.naive.contents.items() if each.released is not None}
        assert {self.state.store.blocks.hash[block] for block in self.state.store.pool.cached} == set(cached)
        ranked = {key: self.naive.rank(key, now) for key in cached}
        expected = {key: priority for key, priority in ranked.items() if priority != 35}
        assert {each.hash: each.priority for each in self.state.store.retention.held.values()} == expected
        pool, blocks = self.state.store.pool, self.state.store.blocks
        assert len(pool.free) + len(pool.cached) + pool.in_use == len(blocks)
        if not self.running:
            audit(self.state)


@pytest.mark.searches
@pytest.mark.parametrize("policy", ["lru", "frequency", "utility"])
def test_eviction_with_retention_is_that_of_a_second_implementation(policy: str) -> None:
    machine = type(f"Machine_{policy}", (Machine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))
