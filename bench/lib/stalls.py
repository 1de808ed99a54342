"""Inter-token latency of running decodes while a long prompt is computed, over a step of the whole token budget.

A conversation starts with the decodes and goes on after a few tokens, with a prompt that fills the budget beside them.
A gap counts if it overlaps the time from that prompt's submission to its first token.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from itertools import pairwise

from bench.lib.workers import BenchWorker, Run
from cli.benchmark.closed_loop import percentile
from cli.benchmark.requests import Request, Workload, equal_requests

DECODES = 8
_PROMPT, _OUTPUT, _FEW = 16, 48, 8
NOTES = {
    "budget_step_ms": "a prompt that fills the token budget, alone, to its first token, ms",
    "itl_p99_during_prefill": f"99th percentile of the latency of {DECODES} decodes meanwhile, over budget_step_ms",
}


def arrival(length: int, seed: int) -> Workload:
    """Return decodes, and a conversation whose second prompt has `length` tokens."""
    decodes = equal_requests(DECODES, _PROMPT, _OUTPUT, seed).initial
    rng = random.Random(f"stall/{seed}")
    first, said = ([rng.randrange(3, 32000) for _ in range(count)] for count in (_PROMPT, length - _PROMPT - _FEW))
    return Workload("stall", [*decodes, Request("long", first, _FEW, 0)], 2, {(0, 1): said})


def gaps_of(run: Run) -> Iterator[float]:
    """Yield the gaps of the decodes that overlap the computation of the long prompt."""
    (long,) = [each for each in run.records.values() if each.request.turn == 1]
    for record in run.records.values():
        if record.request.conversation < 0:
            pairs = pairwise(record.times)
            yield from (later - now for now, later in pairs if now < long.times[0] and later > long.submitted)


def measure(worker: BenchWorker, repeat: int) -> dict[str, float]:
    """Return the time of a step of the whole budget, and the gaps over it: the median of the runs."""
    length = worker.config.max_num_batched_tokens - DECODES
    ratios, steps = [], []
    for turn in range(repeat):
        steps.append(worker.drive(equal_requests(1, length, 1, 300 + turn)).seconds)
        ratios.append(percentile(gaps_of(worker.drive(arrival(length, 400 + turn))), 0.99) / steps[-1])
    return {"budget_step_ms": 1e3 * min(steps), "itl_p99_during_prefill": statistics.median(ratios)}
