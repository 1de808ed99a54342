"""A huge prompt beside chats, in virtual time: what grants in parts change for it, for those behind it, and in all.

The real ledger and lease agent run, steps take what `Machine.costs` says, and figures are exact for a seed. Requests
state either the length at which they end, or 1,024 tokens of which most use a part.

The pools of `GROUPED` have groups of layers as Gemma 3 27B has. There the huge prompt is compared without grants in
parts and without backfilling too: with neither, with each alone, and with both.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from common.contracts.clock import ManualClock
from common.contracts.lease import Inventory, held_blocks
from common.contracts.types import KvGroup, KvGroupKind, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.step_costs import StepCosts
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger

BLOCK_SIZE: Final = 16
MOST: Final = 1024
"""Tokens of the longest output."""
_TOKEN, _LAST = 1, 2


@dataclass(frozen=True, slots=True)
class Machine:
    """A worker and its chats: `cap` bounds the prompt tokens of a step beside others, `huge_at` is in seconds.

    Where the pool has `groups`, `blocks` are pages.
    """

    costs: StepCosts
    blocks: int
    slots: int
    budget: int
    cap: int
    per_second: float
    seconds: float
    huge_at: float
    groups: tuple[KvGroup, ...] = ()

    @property
    def huge(self) -> int:
        """The tokens of a prompt that takes four fifths of the pool."""
        most = self.blocks * 4 // 5
        if not self.groups:
            return most * BLOCK_SIZE
        windows = sum(each.pages * held_blocks(each, most, BLOCK_SIZE) for each in self.groups[1:])
        return (most - windows) // self.groups[0].pages * BLOCK_SIZE


_FAST: Final = StepCosts(base=0.008, decode=20e-6, prefill=40e-6)
MACHINES: Final = {
    "gpu": Machine(_FAST, 2048, 96, 2048, 0, 15.0, 40.0, 18.0),
    "gpu_capped": Machine(_FAST, 2048, 96, 2048, 256, 15.0, 40.0, 18.0),
    "cpu": Machine(StepCosts(base=0.05, decode=1e-3, prefill=1e-3), 2048, 128, 512, 0, 1.6, 300.0, 130.0),
}
_GEMMA: Final = (KvGroup(KvGroupKind.FULL, 0, 5, ()), KvGroup(KvGroupKind.WINDOW, 1024, 26, ()))
GROUPED: Final = {
    "gemma": Machine(_FAST, 16_384, 96, 2048, 0, 8.0, 40.0, 15.0, _GEMMA),
    "gemma_capped": Machine(_FAST, 16_384, 96, 2048, 256, 8.0, 40.0, 15.0, _GEMMA),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: its second, its lengths in tokens, and the output that it states."""

    at: float
    prompt: int
    output: int
    stated: int

    def sequence(self, index: int) -> NewSequence:
        stop = StopRule(self.stated, stop_token_ids=frozenset((_LAST,)))
        tokens, limit = (_TOKEN,) * self.prompt, self.prompt + self.stated
        return NewSequence(SequenceId(index + 1), "", tokens, (), bytes(32), limit, stop, no_cache=True)


@dataclass(slots=True)
class Run:
    """What serving a workload took: the second of each first token, and how many tokens there were by when."""

    first: dict[int, float] = field(default_factory=dict)
    sampled: list[tuple[float, int]] = field(default_factory=list)
    preemptions: int = 0

    def tokens_by(self, second: float) -> int:
        return max((count for at, count in self.sampled if at <= second), default=0)


class Server:
    """One worker and its ledger."""

    def __init__(self, machine: Machine, *, chunked: bool, backfill: bool = True) -> None:
        self.machine, self.run, self.now = machine, Run(), 0.0
        ids, self.clock = itertools.count(1), ManualClock()
        config = LedgerConfig(
            machine.blocks,
            BLOCK_SIZE,
            max_num_seqs=machine.slots,
            groups=machine.groups,
            chunked_grants=chunked,
            backfill=backfill,
        )
        self.ledger = Ledger(config, self.clock, lambda: f"d{next(ids)}")
        self.agent = LeaseAgent(
            AgentConfig(
                machine.blocks,
                BLOCK_SIZE,
                machine.budget,
                long_prefill_cap=machine.cap,
                max_num_seqs=machine.slots,
                groups=machine.groups,
            )
        )
        self.ledger.rebuild(Inventory())
        self.agent.inventory()
        self.agent.attached(0)

    def serve(self, arrivals: Sequence[Arrival]) -> Run:
        left = {index + 1: each.output for index, each in enumerate(arrivals)}
        coming, tokens = 0, 0
        while any(left.values()):
            while coming < len(arrivals) and arrivals[coming].at <= self.now:
                self.agent.submit_sequence(arrivals[coming].sequence(coming))
                coming += 1
            self._exchange()
            plan = self.agent.plan()
            if plan is None:
                idle = not self.agent.has_work
                self._advance(max(self.machine.costs.base, arrivals[coming].at - self.now if idle else 0.0))
                continue
            sampled = self._step(plan, left)
            tokens += len(sampled)
            self.run.sampled.append((self.now, tokens))
            for each in sampled:
                self.run.first.setdefault(each, self.now)
        self.run.preemptions = self.ledger.pool_counts().totals.preemptions
        return self.run

    def _exchange(self) -> None:
        said = self.agent.take_report()
        if said is None:
            return
        self.ledger.apply_report(said)
        batch = self.ledger.schedule()
        self.ledger.drain_decisions()
        if batch is not None:
            self.agent.apply_grant(batch)

    def _step(self, plan: StepPlan, left: dict[int, int]) -> list[int]:
        """Run a step, and return who got a token."""
        sampled = [row.sequence for row in plan.rows if row.samples]
        computed = sum(row.length for row in plan.rows)
        tokens = {each: (_LAST if left[int(each)] == 1 else _TOKEN,) for each in sampled}
        self.agent.complete(StepResult(plan.step, tokens))
        for each in sampled:
            left[int(each)] -= 1
        self._advance(self.machine.costs.of(len(sampled), computed - len(sampled)))
        return [int(each) for each in sampled]

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        self.clock.advance(seconds)


def workload(machine: Machine, seed: int, *, exact: bool) -> tuple[list[Arrival], int]:
    """Return Poisson arrivals of chats with one prompt of four fifths of the pool, and the number of that one."""
    rng, at, found = random.Random(seed), 0.0, list[Arrival]()
    while (at := at + rng.expovariate(machine.per_second)) < machine.seconds:
        prompt, output = round(rng.lognormvariate(5.0, 0.7)), round(rng.lognormvariate(5.0, 1.0))
        output = min(MOST, max(16, output))
        found.append(Arrival(at, min(2000, max(16, prompt)), output, output if exact else MOST))
    huge = Arrival(machine.huge_at, machine.huge, 64, 64)
    arrivals = sorted([*found, huge], key=lambda each: each.at)
    return arrivals, arrivals.index(huge) + 1


_GRANTS: Final = {"whole": (False, True), "chunked": (True, True)}
_GROUPED_GRANTS: Final = {"off": (False, False), "parts": (True, False), "backfill": (False, True), "on": (True, True)}


def compare(machine: Machine, seed: int, *, exact: bool) -> dict[str, float]:
    """Return the figures of each way to grant; those behind came while the huge one waited for its first token, by the
    first way.
    """
    arrivals, huge = workload(machine, seed, exact=exact)
    start, figures, ways = machine.huge_at, dict[str, float](), _GROUPED_GRANTS if machine.groups else _GRANTS
    runs = {
        name: Server(machine, chunked=chunked, backfill=backfill).serve(arrivals)
        for name, (chunked, backfill) in ways.items()
    }
    until = next(iter(runs.values())).first[huge]
    behind = [n for n, each in enumerate(arrivals, 1) if start <= each.at < until and n != huge]
    end = until + (until - start)
    for name, run in runs.items():
        waits = sorted(run.first[each] - arrivals[each - 1].at for each in behind)
        figures |= {
            f"ttft_s_{name}": run.first[huge] - start,
            f"behind_p50_s_{name}": median(waits),
            f"behind_p90_s_{name}": waits[int(0.9 * len(waits))],
            f"tokens_per_s_{name}": (run.tokens_by(end) - run.tokens_by(start)) / (end - start),
            f"preemptions_{name}": float(run.preemptions),
        }
    return figures


def figures_of(seeds: int, machines: Mapping[str, Machine] = MACHINES) -> dict[str, float]:
    """Return the medians over the seeds, for each machine and both ways to state a length."""
    found: dict[str, float] = {}
    for machine, stated in itertools.product(machines, ("exact", "generous")):
        runs = [compare(machines[machine], seed, exact=stated == "exact") for seed in range(seeds)]
        found |= {f"long_{machine}_{stated}_{key}": median(run[key] for run in runs) for key in runs[0]}
    return found
