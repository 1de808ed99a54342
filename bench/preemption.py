"""Whose blocks to take when they run out: what each order computes again, and how often it preempts one request.

    python -m bench.preemption --json

Real ledger and lease agent, prefix cache on; steps take what `COSTS` says. No model runs, nothing is timed, and the
figures are exact for a seed. Three workloads run by the default (`work`: the least work to lose, with a bound), without
that bound, and by `arrival` (the last that came). `recomputed` is what was computed more than once, over what had to
be computed; `most` is the greatest number of preemptions of one request.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Final

from bench.lib.harness import parser, report
from common.contracts.clock import ManualClock
from common.contracts.hashing import block_digests, block_hash_of
from common.contracts.lease import Inventory
from common.contracts.types import SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.step_costs import StepCosts
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import DEFAULTS, LedgerConfig, VictimOrder
from kvmanager.ledger.ledger import Ledger

COSTS: Final = StepCosts(base=0.008, decode=20e-6, prefill=20e-6)
BLOCK_SIZE, PLACES, BUDGET = 16, 128, 2048
ORDERS: Final[dict[str, tuple[VictimOrder, int]]] = {
    "work": ("work", DEFAULTS.max_preemptions),
    "unbounded": ("work", 0),
    "arrival": ("arrival", 0),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in seconds, and its lengths in tokens."""

    at: float
    prompt: int
    output: int

    def sequence(self, index: int) -> NewSequence:
        tokens = tuple(random.Random(index).choices(range(30_000), k=self.prompt))
        digests = block_digests(bytes(32), tokens, BLOCK_SIZE)
        hashes, last = tuple(map(block_hash_of, digests)), digests[-1] if digests else bytes(32)
        limit = self.prompt + self.output
        return NewSequence(SequenceId(index + 1), "", tokens, hashes, last, limit, StopRule(self.output))


@dataclass(slots=True)
class Run:
    """What serving a workload took."""

    seconds: float = 0.0
    computed: int = 0
    preempted: Counter[int] = field(default_factory=Counter)
    ends: dict[int, float] = field(default_factory=dict)


class Server:
    """One worker and its ledger in virtual time."""

    def __init__(self, num_blocks: int, order: VictimOrder, most: int) -> None:
        ids, self.clock, self.run = itertools.count(1), ManualClock(), Run()
        config = LedgerConfig(num_blocks, BLOCK_SIZE, max_num_seqs=PLACES, preemption=order, max_preemptions=most)
        self.ledger = Ledger(config, self.clock, lambda: f"d{next(ids)}")
        self.agent = LeaseAgent(AgentConfig(num_blocks, BLOCK_SIZE, BUDGET, max_num_seqs=PLACES))
        self.ledger.rebuild(Inventory())
        self.agent.inventory()
        self.agent.attached(0)

    def serve(self, arrivals: Sequence[Arrival]) -> Run:
        run, left = self.run, {index + 1: each.output for index, each in enumerate(arrivals)}
        coming = 0
        while left:
            while coming < len(arrivals) and arrivals[coming].at <= run.seconds:
                self.agent.submit_sequence(arrivals[coming].sequence(coming))
                coming += 1
            self._exchange()
            plan = self.agent.plan()
            pause = COSTS.base if self.agent.has_work else max(COSTS.base, arrivals[coming].at - run.seconds)
            self._advance(pause if plan is None else self._step(plan, left))
            run.ends |= {each: run.seconds for each, tokens in left.items() if not tokens}
            left = {each: tokens for each, tokens in left.items() if tokens}
        return run

    def _exchange(self) -> None:
        said = self.agent.take_report()
        if said is None:
            return
        self.run.preempted.update(number for number, _ in said.preempted)
        self.ledger.apply_report(said)
        batch = self.ledger.schedule()
        self.ledger.drain_decisions()
        self.ledger.drain_index_events()
        if batch is not None:
            self.agent.apply_grant(batch)

    def _step(self, plan: StepPlan, left: dict[int, int]) -> float:
        """Run a step, and return its seconds."""
        sampled = [row.sequence for row in plan.rows if row.samples]
        computed = sum(row.length for row in plan.rows)
        self.run.computed += computed
        self.agent.complete(StepResult(plan.step, dict.fromkeys(sampled, (1,))))
        for each in sampled:
            left[int(each)] -= 1
        return COSTS.of(len(sampled), computed - len(sampled))

    def _advance(self, seconds: float) -> None:
        self.run.seconds += seconds
        self.clock.advance(seconds)


def chats(rng: random.Random, count: int, per_second: float, documents: float = 0.0) -> list[Arrival]:
    """Return Poisson arrivals: short prompts, outputs of up to 1,024 tokens, and a share of long prompts."""
    at, found = 0.0, list[Arrival]()
    for _ in range(count):
        at += rng.expovariate(per_second)
        if rng.random() < documents:
            found.append(Arrival(at, rng.randint(2000, 6000), rng.randint(64, 512)))
        else:
            prompt, output = round(rng.lognormvariate(5.0, 0.7)), round(rng.lognormvariate(5.0, 1.0))
            found.append(Arrival(at, max(16, prompt), min(1024, max(16, output))))
    return found


WORKLOADS: Final[dict[str, tuple[int, Callable[[random.Random, int], list[Arrival]]]]] = {
    "chats": (700, lambda rng, count: chats(rng, count, 14.0)),
    "documents": (1000, lambda rng, count: chats(rng, count, 6.0, 0.15)),
    "at_once": (1500, lambda rng, count: chats(rng, count, 1e9)),
}
"""Blocks of the pool, and the requests."""


def figures_of(name: str, order: str, seeds: int, count: int) -> dict[str, float]:
    """Return the means over the seeds, and the most preemptions of all."""
    blocks, made = WORKLOADS[name]
    recomputed, rates, waits, preemptions, most = [], [], [], [], 0
    for seed in range(seeds):
        arrivals = made(random.Random(seed), count)
        run = Server(blocks, *ORDERS[order]).serve(arrivals)
        needed = sum(each.prompt + each.output - 1 for each in arrivals)
        recomputed.append(run.computed / needed - 1)
        rates.append(sum(each.output for each in arrivals) / run.seconds)
        waits.append(mean(run.ends[index + 1] - each.at for index, each in enumerate(arrivals)))
        preemptions.append(run.preempted.total())
        most = max(most, *run.preempted.values(), 0)
    return {
        f"recomputed_{name}_{order}": mean(recomputed),
        f"tokens_per_s_{name}_{order}": mean(rates),
        f"mean_s_{name}_{order}": mean(waits),
        f"preemptions_{name}_{order}": mean(preemptions),
        f"most_{name}_{order}": float(most),
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--seeds", type=int, default=5)
    flags.add_argument("--requests", type=int, default=300)
    args = flags.parse_args()
    figures: dict[str, float] = {}
    for name in WORKLOADS:
        for order in ORDERS:
            figures |= figures_of(name, order, args.seeds, args.requests)
    notes = {
        "recomputed_chats_work": "tokens computed more than once, over those that had to be computed",
        "mean_s_chats_work": "from arrival to the last token",
        "most_chats_work": f"preemptions of one request; the bound is {DEFAULTS.max_preemptions}",
    }
    report("preemption", figures, notes, args.json)


if __name__ == "__main__":
    main()
