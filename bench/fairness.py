"""What a huge request costs those behind it, and how long a low priority waits: real ledger and lease agent.

    python -m bench.fairness --json

Steps follow each other, each of the same 8 ms; no model runs, nothing is timed, and the figures are exact for a seed.
Each scenario runs by the rule alone (`_before`: in turn, by priority) and with backfilling and admission by age
(`_after`). Waits are seconds from arrival to the grant of the blocks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from bench.lib.harness import parser, report
from common.clock import ManualClock
from common.lease import Inventory
from common.types import SequenceId
from gpuworker.core.batch_plan import StepResult
from gpuworker.core.lease_agent import LeaseAgent
from gpuworker.core.outcomes import AgentConfig
from gpuworker.core.sequence import NewSequence
from gpuworker.core.stopping import StopRule
from kvmanager.core.config import DEFAULT_MAX_WAIT, LedgerConfig
from kvmanager.core.ledger import Ledger

STEP_S: Final = 0.008
BLOCKS, BLOCK_SIZE, PLACES = 1024, 16, 64
HUGE: Final = BLOCKS * BLOCK_SIZE * 4 // 5
"""Tokens of the prompt of a huge request: four fifths of the pool."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: its step, its lengths in tokens, its priority."""

    step: int
    prompt: int
    output: int
    priority: int = 0


@dataclass(slots=True)
class Waits:
    """The steps that each admitted request waited, and how often a sequence was preempted."""

    steps: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0

    def seconds(self, indices: Sequence[int], horizon: int, arrivals: Sequence[Arrival]) -> list[float]:
        """Return the waits of requests; one that was not admitted has waited until the end."""
        waits = (self.steps.get(each, horizon - arrivals[each].step) for each in indices)
        return sorted(wait * STEP_S for wait in waits)


def mixed(per_second: float, seconds: float, seed: int, priority: int = 0) -> list[Arrival]:
    """Return Poisson arrivals: prompts of 64 tokens, outputs of 16 to 1,024 tokens, most of them short."""
    rng, at, found = random.Random(seed), 0.0, list[Arrival]()
    while (at := at + rng.expovariate(per_second)) < seconds:
        output = min(1024, max(16, round(rng.lognormvariate(4.5, 1.0))))
        found.append(Arrival(int(at / STEP_S), 64, output, priority))
    return found


def serve(arrivals: Sequence[Arrival], horizon: int, *, fair: bool) -> Waits:
    """Serve requests for so many steps, and return what each waited."""
    clock, ids = ManualClock(), itertools.count(1)
    agent = LeaseAgent(AgentConfig(BLOCKS, BLOCK_SIZE, max_num_seqs=PLACES, max_num_batched_tokens=2048))
    max_wait = DEFAULT_MAX_WAIT if fair else 0.0
    config = LedgerConfig(BLOCKS, BLOCK_SIZE, max_num_seqs=PLACES, backfill=fair, max_wait=max_wait)
    ledger = Ledger(config, clock, lambda: f"d{next(ids)}")
    ledger.rebuild(Inventory())
    agent.inventory()
    agent.attached(0)
    waits, coming = Waits(), _numbered(arrivals)
    upcoming = next(coming, None)
    for step in range(horizon):
        while upcoming is not None and upcoming[1].step <= step:
            agent.submit(_sequence(*upcoming))
            upcoming = next(coming, None)
        if (said := agent.take_report()) is not None:
            ledger.apply(said)
            if (batch := ledger.schedule()) is not None:
                for admit in batch.admit:
                    index = int(admit.sequence) - 1
                    waits.steps.setdefault(index, step - arrivals[index].step)
                agent.apply(batch)
        plan = agent.plan()
        if plan is not None:
            agent.complete(StepResult(plan.step, {row.sequence: (1,) for row in plan.rows if row.samples}))
        ledger.drain_decisions()
        clock.advance(STEP_S)
    waits.preemptions = ledger.pool().totals.preemptions
    return waits


def huge_request(seed: int, seconds: float, *, fair: bool, per_second: float) -> dict[str, float]:
    """A request for four fifths of the pool comes after a third of the time of the mixed requests."""
    rest = mixed(per_second, seconds, seed)
    huge = Arrival(int(seconds / 3 / STEP_S), HUGE, 64)
    arrivals = sorted([*rest, huge], key=lambda each: each.step)
    horizon = int(1.5 * seconds / STEP_S)
    waits = serve(arrivals, horizon, fair=fair)
    index = arrivals.index(huge)
    own = waits.steps.get(index, horizon - huge.step)
    behind = [each for each in range(index + 1, len(arrivals)) if arrivals[each].step < huge.step + own]
    others = waits.seconds(behind, horizon, arrivals)
    return {
        "huge_wait_s": own * STEP_S,
        "behind_wait_p50_s": median(others),
        "behind_wait_p90_s": others[int(0.9 * len(others))],
        "huge_preemptions": float(waits.preemptions),
    }


def low_priority(seed: int, seconds: float, *, fair: bool) -> dict[str, float]:
    """Requests of a higher priority ask for more places than there are; one of a low priority comes after a while."""
    rest = mixed(60.0, seconds, seed, priority=10)
    low = Arrival(int(seconds / 12 / STEP_S), 256, 64)
    arrivals = sorted([*rest, low], key=lambda each: each.step)
    horizon = int(seconds / STEP_S)
    waits = serve(arrivals, horizon, fair=fair)
    (wait,) = waits.seconds([arrivals.index(low)], horizon, arrivals)
    return {"low_priority_wait_s": wait}


def _numbered(arrivals: Sequence[Arrival]) -> Iterator[tuple[int, Arrival]]:
    return iter(enumerate(arrivals))


def _sequence(index: int, arrival: Arrival) -> NewSequence:
    tokens = (1,) * arrival.prompt
    stop, limit = StopRule(arrival.output), arrival.prompt + arrival.output
    number = SequenceId(index + 1)
    return NewSequence(number, "", tokens, (), bytes(32), limit, stop, priority=arrival.priority, no_cache=True)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--seeds", type=int, default=5, help="workloads; the figures are medians over them")
    flags.add_argument(
        "--seconds", type=float, default=60.0, help="of requests, in virtual time; twice that for priorities"
    )
    flags.add_argument("--rate", type=float, default=35.0, help="mixed requests a second beside the huge one")
    args = flags.parse_args()
    figures: dict[str, float] = {}
    for name, fair in (("before", False), ("after", True)):
        runs = [
            huge_request(seed, args.seconds, fair=fair, per_second=args.rate)
            | low_priority(seed, 2 * args.seconds, fair=fair)
            for seed in range(args.seeds)
        ]
        figures |= {f"{key}_{name}": median(run[key] for run in runs) for key in runs[0]}
    notes = {
        "huge_wait_s_after": f"a prompt of {HUGE} tokens, four fifths of the pool, beside {args.rate:g} requests/s",
        "behind_wait_p50_s_after": "requests that came while the huge one waited",
        "low_priority_wait_s_after": (
            f"of at most {2 * args.seconds * 11 / 12:.0f} s, beside requests of a higher priority for every place"
        ),
    }
    report("fairness", figures, notes, args.json)


if __name__ == "__main__":
    main()
