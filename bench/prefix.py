"""The gain of prefix caching: the same requests with and without it, on a random model on the CPU.

There are two workloads, over a KV manager process. In one, requests with one long system prompt are submitted together,
so that most of the shared prefix is still being computed at admission. In the other, each turn of a conversation sends
the whole history again. Runs with and without caching alternate, each with prompts of its own, so no run finds blocks
of an earlier one.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from bench.lib.checkpoints import SMALL
from bench.lib.harness import median_interval, parser, progress, report
from bench.lib.models import cpu_runner
from bench.lib.workers import BenchWorker, Run, manager_process
from gpuworker.scheduling.outcomes import AgentConfig

BLOCK_SIZE, BLOCKS = 16, 4096
SYSTEM_TOKENS, TAIL_TOKENS, OUTPUT_TOKENS, REQUESTS = 768, 32, 32, 16
CONVERSATIONS, TURNS, USER_TOKENS, TURN_OUTPUT = 8, 4, 64, 48


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, int(str(SMALL["vocab_size"]))) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Figures:
    """One run: output tokens a second, median time to first token in seconds, part of the prompt tokens cached."""

    throughput: float
    first_token: float
    cached: float


def shared(worker: BenchWorker, seed: int) -> Figures:
    """Submit requests with one system prompt all at once."""
    rng = random.Random(seed)
    system = _tokens(rng, SYSTEM_TOKENS)
    run = worker.load([system + _tokens(rng, TAIL_TOKENS) for _ in range(REQUESTS)], OUTPUT_TOKENS)
    return _figures([run])


def multiturn(worker: BenchWorker, seed: int) -> Figures:
    """Let conversations go on turn by turn, each with its whole history as the prompt."""
    rng = random.Random(seed)
    histories = [_tokens(rng, USER_TOKENS) for _ in range(CONVERSATIONS)]
    runs = []
    for _ in range(TURNS):
        runs.append(worker.load(histories, TURN_OUTPUT))
        outputs = runs[-1].outputs.values()
        histories = [
            history + output + _tokens(rng, USER_TOKENS) for history, output in zip(histories, outputs, strict=True)
        ]
    return _figures(runs)


def _figures(runs: list[Run]) -> Figures:
    first_tokens = [seconds for run in runs for seconds in run.first_tokens]
    prompt_tokens = sum(run.prompt_tokens for run in runs)
    return Figures(
        throughput=sum(run.tokens for run in runs) / sum(run.seconds for run in runs),
        first_token=statistics.median(first_tokens),
        cached=sum(run.cached_tokens for run in runs) / prompt_tokens,
    )


def compare(
    on: BenchWorker, off: BenchWorker, workload: Callable[[BenchWorker, int], Figures], runs: int
) -> dict[str, float]:
    """Alternate runs with and without caching; return ratios of their medians, after one run of each that warms up."""
    pairs: list[tuple[Figures, Figures]] = []
    for index in range(runs + 1):
        with_cache, without = workload(on, 1000 + index), workload(off, 2000 + index)
        if index:
            pairs.append((with_cache, without))
            progress(f"{workload.__name__}: run {index} of {runs}", end=index == runs)
    speedup, lower, upper = median_interval([a.throughput / b.throughput for a, b in pairs])
    name = workload.__name__
    return {
        f"speedup_{name}": speedup,
        f"speedup_{name}_lower": lower,
        f"speedup_{name}_upper": upper,
        f"ttft_ratio_{name}": statistics.median(a.first_token / b.first_token for a, b in pairs),
        f"cached_fraction_{name}": statistics.median(a.cached for a, _ in pairs),
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--runs", type=int, default=7, help="runs of each workload with caching and without")
    args = flags.parse_args()
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        address, _ = stack.enter_context(manager_process(BLOCK_SIZE))
        workers = []
        for caching in (True, False):
            config = AgentConfig(BLOCKS, BLOCK_SIZE, max_num_seqs=64, prefix_caching=caching)
            runner, geometry = cpu_runner(config)
            workers.append(stack.enter_context(BenchWorker(runner, config, address, geometry)))
        for workload in (shared, multiturn):
            figures |= compare(workers[0], workers[1], workload, args.runs)
    notes = {
        "speedup_shared": f"{REQUESTS} requests at once, {SYSTEM_TOKENS} shared tokens: throughput with over without",
        "speedup_shared_lower": "lower end of its 95 % bootstrap interval",
        "speedup_shared_upper": "upper end",
        "ttft_ratio_shared": "median time to first token, with over without",
        "cached_fraction_shared": "prompt tokens that were not computed again",
        "speedup_multiturn": f"{CONVERSATIONS} conversations of {TURNS} turns: throughput with over without",
        "speedup_multiturn_lower": "lower end of its 95 % bootstrap interval",
        "speedup_multiturn_upper": "upper end",
        "ttft_ratio_multiturn": "median time to first token, with over without",
        "cached_fraction_multiturn": "prompt tokens that were not computed again",
    }
    report("prefix", figures, notes, args.json)


if __name__ == "__main__":
    main()
