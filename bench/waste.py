"""Slots that paging wastes, through the real ledger and lease agent: worked examples, and a workload by block size.

Waste is slots in rows that hold no token, over slots that do; the runway (blocks leased ahead of need) counts apart.
Nothing is timed here, and no model runs: the figures are exact for their seed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness import parser, report
from common.clock import ManualClock
from common.lease import Inventory, Report, Reserve
from common.types import SequenceId
from gpuworker.core.batch_plan import StepPlan, StepResult
from gpuworker.core.lease_agent import LeaseAgent
from gpuworker.core.outcomes import AgentConfig
from gpuworker.core.sequence import NewSequence
from gpuworker.core.stopping import StopRule
from kvmanager.core.config import LedgerConfig
from kvmanager.core.ledger import Ledger

BLOCK_SIZES = (4, 8, 16, 32, 64, 128, 256)
MAX_MODEL_LEN = 2048
SLOTS = 1 << 17


def new_ledger(config: LedgerConfig) -> Ledger:
    """Return an empty ledger."""
    ids = itertools.count(1)
    ledger = Ledger(config, ManualClock(), lambda: f"d{next(ids)}")
    ledger.rebuild(Inventory())
    return ledger


def paged_waste(lengths: Sequence[int], block_size: int) -> int:
    """Return the slots without a token after sequences of these lengths got their rows."""
    ledger = new_ledger(LedgerConfig(SLOTS // block_size, block_size, watermark=0.0))
    reserves = tuple(Reserve(SequenceId(i), length, length) for i, length in enumerate(lengths, start=1))
    ledger.apply(Report(reserve=reserves))
    ledger.schedule()
    return ledger.pool().row * block_size - sum(lengths)


def contiguous_waste(lengths: Sequence[int], maximum: int) -> int:
    """Return the slots without a token when each sequence reserves the maximum."""
    return len(lengths) * maximum - sum(lengths)


@dataclass(slots=True)
class Waste:
    """Sums over all steps of a workload, in slots."""

    used: int = 0
    in_rows: int = 0
    leased: int = 0
    contiguous: int = 0


def mixed_requests(count: int, seed: int) -> list[tuple[int, int]]:
    """Return (prompt, output) lengths: prompts log-normal with median 200 (32 to 1024), outputs 16 to 256."""
    rng = random.Random(seed)
    prompts = (round(math.exp(math.log(200.0) + 0.75 * rng.gauss(0.0, 1.0))) for _ in range(count))
    return [(max(32, min(1024, prompt)), rng.randint(16, 256)) for prompt in prompts]


def run_mixed(block_size: int, requests: Sequence[tuple[int, int]]) -> Waste:
    """Serve the requests, 64 at a time, and add the waste up over every step."""
    blocks = SLOTS // block_size
    agent = LeaseAgent(AgentConfig(blocks, block_size, max_num_seqs=64))
    ledger = new_ledger(LedgerConfig(blocks, block_size, max_num_seqs=64))
    agent.inventory()
    agent.attached(0)
    for index, (prompt, output) in enumerate(requests, start=1):
        tokens = tuple(random.Random(index).choices(range(1000), k=prompt))
        stop, longest = StopRule(output), prompt + output
        agent.submit(NewSequence(SequenceId(index), "", tokens, (), bytes(32), longest, stop, no_cache=True))
    waste, plan = Waste(), None
    while agent.has_work:
        if (said := agent.take_report()) is not None:
            ledger.apply(said)
            if (batch := ledger.schedule()) is not None:
                agent.apply(batch)
        plan = agent.plan()
        if plan is not None:
            _add_step(waste, plan, ledger, block_size)
            agent.complete(StepResult(plan.step, {row.sequence: (1,) for row in plan.rows if row.samples}))
    return waste


def _add_step(waste: Waste, plan: StepPlan, ledger: Ledger, block_size: int) -> None:
    pool = ledger.pool()
    waste.used += sum(row.start + row.length for row in plan.rows)
    waste.in_rows += sum(len(row.blocks) for row in plan.rows) * block_size
    waste.leased += pool.leased * block_size
    waste.contiguous += len(plan.rows) * MAX_MODEL_LEN


def main() -> None:
    """Run the benchmark."""
    flags = parser(__doc__)
    flags.add_argument("--requests", type=int, default=256, help="requests of the mixed workload")
    args = flags.parse_args()
    first, second = (800, 2300, 3900), (600, 900, 1300, 1700)
    figures: dict[str, float] = {
        "example_contiguous_slots": contiguous_waste(first, 4096),
        "example_paged_slots": paged_waste(first, 256),
        "example2_contiguous_slots": contiguous_waste(second, 2048),
        "example2_paged_slots": paged_waste(second, 256),
    }
    notes = {
        "example_contiguous_slots": "800, 2300 and 3900 tokens, 4096 reserved for each",
        "example_paged_slots": "the same in blocks of 256",
        "example2_contiguous_slots": "600, 900, 1300 and 1700 tokens, 2048 reserved for each",
        "example2_paged_slots": "the same in blocks of 256",
        "naive_waste_fraction": f"mixed workload, {MAX_MODEL_LEN} reserved for each: unused part of what is reserved",
    }
    requests = mixed_requests(args.requests, seed=0)
    for block_size in BLOCK_SIZES:
        waste = run_mixed(block_size, requests)
        figures[f"waste_block{block_size}"] = (waste.in_rows - waste.used) / waste.used
        figures[f"runway_block{block_size}"] = waste.leased / waste.used
        notes[f"waste_block{block_size}"] = "mixed workload: slots in rows without a token over slots with one"
        notes[f"runway_block{block_size}"] = "slots leased ahead of need over slots with a token"
    figures["naive_waste_fraction"] = 1 - waste.used / waste.contiguous
    report("waste", figures, notes, args.json)


if __name__ == "__main__":
    main()
