"""Searches for a sequence that lacks blocks and does not have them by the step that was foreseen.

The real lease agent and the real ledger run in lockstep. All requests have one priority and one tenant, run to their
greatest lengths, and none is cancelled. A preemption voids a promise, and a stall puts it off: a sequence ends later
then than was foreseen. I34 is that promise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from common.contracts.lease import Report, held_blocks
from common.contracts.types import KvGroup, KvGroupKind, SequenceId, SequencePhase
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from tests.suites.protocol.grant_order import count_lacking
from tests.suites.protocol.invariants import Violation
from tests.suites.protocol.liveness import Arrival, Covered, Episode, Run
from tests.suites.protocol.search import Found

LATE: Final = 3
"""Steps that pass until a release is reported and what it frees is granted, with two steps in flight."""


class Promised(Run):
    """An episode in which each promise is noted when it is first made, and looked at with each report."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # By sequence: the step, without the stalls before it; None: the promise was kept, or is not looked at.
        self._promises: dict[SequenceId, int | None] = {}
        self._preemptions = self._stalls = 0

    def _serve(self, now: int, report: Report) -> None:
        super()._serve(now, report)
        state = self.ledger.state
        kept = state.admission.reservation
        self._stalls += bool(state.sequences.find_stalled())
        if state.sequences.preempting or state.totals.preemptions > self._preemptions:
            self._preemptions = state.totals.preemptions
            self._promises = {} if kept is None else {kept.sequence: None}
        elif kept is not None and kept.until is not None and kept.sequence not in self._promises:
            behind = self._is_anybody_behind(kept.sequence)
            self._promises[kept.sequence] = None if behind else kept.until - self._stalls
        for number, until in list(self._promises.items()):
            sequence = state.sequences.live.get(number)
            if sequence is None or self._has_all(sequence):
                self._promises[number] = None
            elif until is not None and state.worker.steps > until + self._stalls + LATE:
                words = f"its blocks by step {until + self._stalls}, and waits in {state.worker.steps}"
                raise Violation("I34", f"{sequence.name} was to have {words}")

    def _is_anybody_behind(self, head: SequenceId) -> bool:
        """Return whether another prompt runs whose windows go on: where pages are few, that takes many steps."""
        return any(
            len(run.table) < len(each.block_table) and not run.checkpoints
            for each in self.ledger.state.sequences.live.values()
            if each.id != head
            for run in each.runs
        )

    def _has_all(self, sequence: Sequence) -> bool:
        """Return whether what a sequence lacks is in its tables, or leased."""
        state = self.ledger.state
        if sequence.phase is not SequencePhase.RUNNING:
            return False
        return count_lacking(state.config, sequence) <= state.store.pool.leased


def _in_groups(rng: random.Random, size: int, whole: int) -> tuple[tuple[KvGroup, ...], int]:
    """Return groups of some shape, and the pages that the longest sequence of a pool holds at once."""
    kinds = rng.choices((KvGroupKind.WINDOW, KvGroupKind.CHUNK), k=rng.choice((0, 1, 1, 2)))
    runs = [KvGroup(kind, rng.randint(1, 4 * size), rng.choice((1, 3)), ()) for kind in kinds]
    states = (KvGroup(KvGroupKind.STATE, 0, rng.choice((1, 4)), ()),) * (not runs or rng.random() < 0.3)
    groups = (KvGroup(KvGroupKind.FULL, 0, rng.choice((1, 2)), ()), *runs, *states)
    return groups, sum(group.pages * held_blocks(group, whole, size) for group in groups)


def episode_of_passing(seed: int) -> Episode:
    """Return an episode: two or three run, a huge one comes, and small ones come all the time."""
    rng = random.Random(seed)
    size = rng.choice((2, 4))
    huge = 18 * size
    groups, pages = _in_groups(rng, size, -(-huge // size))
    config = LedgerConfig(
        pages + rng.choice((0, 2, pages // 3)),
        size,
        groups=groups,
        prefix_caching=rng.random() < 0.5,
        watermark=0.0,
        max_wait=0.0,
        first_part=rng.choice((1, 4 * size, 64 * size)),
        runway_slots=rng.choice((2, 8)),
        runway_reach=8,
        least_saved=rng.choice((2, 64)),
    )
    return Episode(config, tuple(_arrivals(rng, size, huge)), budget=16 * size)


def _arrivals(rng: random.Random, size: int, huge: int) -> Iterator[Arrival]:
    def small(at: int, most: int) -> Arrival:
        length = rng.randint(2, most)
        return Arrival(at, tuple(rng.choices((0, 1), k=rng.randint(1, 2 * size))), length, output=length)

    yield from (small(0, 4 * size) for _ in range(rng.randint(2, 3)))
    yield Arrival(2, (0,) * (huge - 2), 2, output=2)
    yield from (small(at, 3 * size) for at in range(3, 40) if rng.random() < 0.6)


@dataclass(frozen=True, slots=True)
class Promises:
    """Episodes from a seed on, as a search that may kill a mutant."""

    first_seed: int = 0
    episodes: int = 300

    def up_to(self, found: Found) -> Promises:
        """Return the episode that found it; the mutants share it, and so does the search with the real rules."""
        return replace(self, first_seed=self.first_seed if found.seed is None else found.seed, episodes=1)

    def run(self) -> Found:
        found = Found()
        for seed in range(self.first_seed, self.first_seed + self.episodes):
            found.states, found.seed = found.states + 1, seed
            try:
                found.steps += keep_promises(seed).rounds
            except Violation as broken:
                found.violation = broken
                break
        return found

    def __str__(self) -> str:
        return "promises"


def keep_promises(seed: int) -> Covered:
    """Serve an episode to its end, and return what it covered. Raises Violation where a promise is broken."""
    return Promised(episode_of_passing(seed)).to_its_end()
