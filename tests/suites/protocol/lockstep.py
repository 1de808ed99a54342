"""Requests over a pool too small for all of them, in simulated time, with reports that take whole steps.

The real lease agent and the real ledger run. Beside them stands a policy in the worker's own process, which knows each
step's needs before the step: it preempts the latest sequence at once until every other one has its block. A prompt is
admitted there when all its blocks are free. The manager may grant a part of them before.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from common.contracts.clock import ManualClock
from common.contracts.lease import Inventory, Report
from common.contracts.types import SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.step_costs import StepCosts
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger

COSTS = StepCosts(base=0.005, decode=20e-6, prefill=20e-6)
BUDGET = 2048


@dataclass(frozen=True, slots=True)
class Crowd:
    """So many requests, and the pool. All outputs are equal, and all prompts but each `long_every`-th (0: all)."""

    requests: int
    prompt: int
    output: int
    num_blocks: int
    block_size: int = 16
    long_prompt: int = 0
    long_every: int = 0

    def prompts(self) -> Iterator[int]:
        """Yield the length of each prompt, in the order of arrival."""
        for number in range(1, self.requests + 1):
            yield self.long_prompt if self.long_every and number % self.long_every == 0 else self.prompt

    def sequences(self) -> Iterator[NewSequence]:
        for number, length in enumerate(self.prompts()):
            limit, stop = length + self.output, StopRule(self.output)
            yield NewSequence(SequenceId(number), "", (1,) * length, (), bytes(32), limit, stop, no_cache=True)


CROWD = Crowd(requests=300, prompt=64, output=512, num_blocks=4096)
LONG = Crowd(requests=120, prompt=64, output=192, num_blocks=1024, long_prompt=8192, long_every=12)
"""Each twelfth prompt takes half of the pool."""


@dataclass(frozen=True, slots=True)
class Split:
    """How fast worker and manager were, in output tokens a second, and how often a prompt began with a part."""

    rate: float
    chunked_grants: int


def seconds_of(computed: int, sampled: int) -> float:
    return COSTS.of(sampled, computed - sampled)


# ---------------------------------------------------------------- worker and manager


def split(crowd: Crowd, delay: int) -> Split:
    """Serve all; a report reaches the manager after `delay` further steps."""
    ids = itertools.count(1)
    config = LedgerConfig(crowd.num_blocks, crowd.block_size, max_num_seqs=crowd.requests)
    ledger = Ledger(config, ManualClock(), lambda: f"d{next(ids)}")
    ledger.rebuild(Inventory())
    agent = LeaseAgent(AgentConfig(crowd.num_blocks, crowd.block_size, BUDGET, max_num_seqs=crowd.requests))
    agent.inventory()
    agent.attached(0)
    for sequence in crowd.sequences():
        agent.submit_sequence(sequence)
    reports: deque[tuple[int, Report]] = deque()
    flights: deque[StepPlan] = deque()
    seconds, tokens = 0.0, 0
    for step in itertools.count():
        if not agent.has_work:
            return Split(tokens / seconds, ledger.pool_counts().totals.chunked_grants)
        if (said := agent.take_report()) is not None:
            reports.append((step + delay, said))
        while reports and reports[0][0] <= step:
            _exchange(agent, ledger, reports.popleft()[1])
        plan = agent.plan()
        if plan is not None:
            flights.append(plan)
            seconds += seconds_of(sum(row.length for row in plan.rows), sum(row.samples for row in plan.rows))
        elif not flights:
            seconds += COSTS.base
        if flights and (plan is None or len(flights) == 2):
            tokens += _complete(agent, flights.popleft())
    raise AssertionError


def _exchange(agent: LeaseAgent, ledger: Ledger, report: Report) -> None:
    ledger.apply_report(report)
    batch = ledger.schedule()
    ledger.drain_decisions()
    if batch is not None:
        agent.apply_grant(batch)
        agent.departures()


def _complete(agent: LeaseAgent, plan: StepPlan) -> int:
    done = agent.complete(StepResult(plan.step, {row.sequence: (1,) for row in plan.rows if row.samples}))
    return sum(map(len, done.tokens.values()))


# ---------------------------------------------------------------- the policy in the same process


@dataclass(slots=True, eq=False)
class _Local:
    tokens: int
    most: int
    computed: int = 0
    blocks: int = 0


class InProcess:
    """One scheduler with all blocks at hand."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd, self.free = crowd, crowd.num_blocks
        self.waiting = deque(_Local(length, length + crowd.output) for length in crowd.prompts())
        self.running: list[_Local] = []

    def rate(self) -> float:
        """Return output tokens a second."""
        seconds, tokens = 0.0, 0
        while self.waiting or self.running:
            rows = self._rows()
            sampled = [each for each, length in rows if each.computed + length == each.tokens]
            seconds += seconds_of(sum(length for _, length in rows), len(sampled))
            tokens += len(sampled)
            for each, length in rows:
                each.computed += length
            for each in sampled:
                self._sample(each)
        return tokens / seconds

    def _rows(self) -> list[tuple[_Local, int]]:
        left, preempted, rows = BUDGET, False, list[tuple[_Local, int]]()
        for each in self.running.copy():
            length = min(left, each.tokens - each.computed)
            if each not in self.running or not length:
                continue
            wanted = self._wanted(each, length)
            while wanted > self.free and each in self.running:
                self._preempt(self.running[-1])
                preempted = True
            if each in self.running:
                self._give(each, wanted)
                rows.append((each, length))
                left -= length
        while self.waiting and left and not preempted:
            each = self.waiting[0]
            wanted = self._wanted(each, each.tokens)
            if wanted + (self.crowd.num_blocks // 100 if self.running else 0) > self.free:
                break
            self.running.append(self.waiting.popleft())
            self._give(each, wanted)
            rows.append((each, min(left, each.tokens)))
            left -= rows[-1][1]
        return rows

    def _wanted(self, each: _Local, length: int) -> int:
        return max(0, -(-(each.computed + length) // self.crowd.block_size) - each.blocks)

    def _give(self, each: _Local, blocks: int) -> None:
        self.free -= blocks
        each.blocks += blocks

    def _preempt(self, each: _Local) -> None:
        self.running.remove(each)
        self._give(each, -each.blocks)
        each.computed = 0
        self.waiting.appendleft(each)

    def _sample(self, each: _Local) -> None:
        each.tokens += 1
        if each.tokens == each.most:
            self.running.remove(each)
            self._give(each, -each.blocks)


def main() -> None:
    """Print the rate of the policy in process, and that of the split over it by the delay of a report."""
    for name, crowd in (("equal requests", CROWD), ("some long prompts", LONG)):
        at_once = InProcess(crowd).rate()
        sys.stdout.write(f"{name}, in process: {at_once:.0f} tokens/s\n")
        for delay in (1, 3):
            found = split(crowd, delay)
            share, grants = found.rate / at_once, found.chunked_grants
            sys.stdout.write(f"reports {delay} steps late: {share:.3f} of that, {grants} chunked grants\n")


if __name__ == "__main__":
    main()
