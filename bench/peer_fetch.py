"""What a prefix gains that another worker has: fetched over computed, the forecast, and what it costs the source.

    python -m bench.peer_fetch --json
    python -m bench.peer_fetch --lengths 512,2048 --pairs 3

A KV manager and two workers run as processes, each worker with one thread. For each length, prompts come in interleaved
pairs to the second worker: one that the first one has computed, so that its blocks are fetched, and one that nobody
has. Behind the prefix stand a few tokens of the prompt's own. TTFT is that of the client.

`forecast_error_p50` compares what the manager expected of a fetch with what the wait took, as its grant says both; the
first fetches connect, and teach nothing. Then streams run at the first worker, and gaps between their tokens are
compared: while the second worker fetches from it, and while the second worker has nothing to do. The second one then
yields every processor, as if it ran on another host.

The workers tell the manager that computing is dear, so that it fetches at every length, also where that does not pay.

Every fetched prompt must have had all its blocks from the other worker, and every computed one none. So blocks moved
where they should, and nowhere else.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Final

from bench.lib.harness import median_interval, progress, report
from bench.lib.worker_pair import BLOCK_SIZE, Pair, measured, pair_flags, times_to_first_token

_RESAMPLES: Final = 1000
_STREAMS: Final = 4
_FETCHES: Final = 3
"""Of each run of the source's streams."""
_WARM: Final = 2
"""Fetches that count for nothing: the first ones connect."""
_PATIENCE: Final = 600.0


def p99(gaps: Sequence[float]) -> float:
    return sorted(gaps)[min(len(gaps) - 1, int(0.99 * len(gaps)))]


async def gaps_of_source(pair: Pair, length: int, tokens: int, fetching: bool) -> list[float]:
    """Return the gaps of streams that run at the source while the destination fetches from it, or has nothing to do."""
    prefixes = [await pair.have(length) for _ in range(_FETCHES if fetching else 0)]
    all_run = [asyncio.Event() for _ in range(_STREAMS)]
    running = [
        asyncio.create_task(pair.source.answer(pair.prompt(64), tokens, f"stream-{pair.asked}", runs))
        for runs in all_run
    ]
    await asyncio.gather(*(runs.wait() for runs in all_run))
    began, ended = time.perf_counter(), time.perf_counter() + _PATIENCE
    for prefix in prefixes:
        await pair.fetched(prefix)
    if prefixes:
        ended = time.perf_counter()
    return [gap for answer in await asyncio.gather(*running) for gap in answer.gaps(began, ended)]


def crossing(lengths: Sequence[int], first: Sequence[float], second: Sequence[float]) -> float:
    """Return the length from which the first of two lines of least squares is below; 0: always, -1: never."""
    one, other = statistics.linear_regression(lengths, first), statistics.linear_regression(lengths, second)
    if one.slope >= other.slope:
        return -1.0
    return max(0.0, (one.intercept - other.intercept) / (other.slope - one.slope))


async def measure(pair: Pair, lengths: Sequence[int], pairs: int) -> dict[str, float]:
    figures, fetched, computed = dict[str, float](), list[float](), list[float]()
    await times_to_first_token(pair, min(512, *lengths), _WARM)
    warm = len(pair.fetches)
    for length in lengths:
        ones, others = await times_to_first_token(pair, length, pairs)
        ratio, lower, upper = median_interval([one / other for one, other in zip(ones, others, strict=True)])
        name = f"ttft_ratio_{length}"
        figures |= {name: ratio, f"{name}_lower": lower, f"{name}_upper": upper}
        fetched.append(statistics.median(ones))
        computed.append(statistics.median(others))
        figures |= {f"ttft_fetched_{length}": fetched[-1], f"ttft_computed_{length}": computed[-1]}
    errors = [abs(each.expected - each.seconds) / each.seconds for each in pair.fetches[warm:] if each.expected]
    compute, per_block = pair.destination.process.costs
    figures |= {
        "forecast_error_p50": statistics.median(errors) if errors else -1.0,
        "forecasts": len(errors),
        "blocks_fetched": sum(each.blocks for each in pair.fetches),
        "compute_over_fetch_forecast": compute / per_block if per_block else 0.0,
    }
    if len(lengths) > 1:
        whole = [each.seconds for each in pair.fetches[warm:]]
        sizes = [each.blocks * BLOCK_SIZE for each in pair.fetches[warm:]]
        line = [compute / BLOCK_SIZE * length for length in sizes]
        figures["break_even_predicted_tokens"] = crossing(sizes, whole, line)
        figures["break_even_measured_tokens"] = crossing(lengths, fetched, computed)
    return figures


async def cost_of_source(pair: Pair, length: int, rounds: int) -> dict[str, float]:
    with_fetches, without = list[list[float]](), list[list[float]]()
    pair.destination.process.yield_processors()
    for index in range(rounds):
        for fetching in (True, False) if index % 2 else (False, True):
            gaps = await gaps_of_source(pair, length, 192, fetching)
            (with_fetches if fetching else without).append(gaps)
        progress(f"streams of the source: round {index + 1} of {rounds}", end=index + 1 == rounds)
    ratio, lower, upper = pooled_ratio(with_fetches, without)
    return {
        "source_itl_p99_ratio": ratio,
        "source_itl_p99_ratio_lower": lower,
        "source_itl_p99_ratio_upper": upper,
        "source_itl_p99": p99([gap for gaps in with_fetches for gap in gaps]),
        "source_itl_p99_idle": p99([gap for gaps in without for gap in gaps]),
    }


def pooled_ratio(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the p99 of all ones over that of all others, and its 95 % interval by the bootstrap over rounds.

    One round has too few gaps for a p99 of its own.
    """

    def ratio(rounds: Sequence[int]) -> float:
        first, second = ([gap for each in rounds for gap in of[each]] for of in (ones, others))
        return p99(first) / p99(second)

    rng, numbers = random.Random(0), range(len(ones))
    drawn = sorted(ratio(rng.choices(numbers, k=len(ones))) for _ in range(_RESAMPLES))
    return ratio(numbers), drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES)]


NOTES = {
    "forecast_error_p50": "what the manager expected of a fetch beside what it took, over what it took; -1: none",
    "compute_over_fetch_forecast": "what computing a block costs the destination, over fetching one, without the setup",
    "break_even_predicted_tokens": "length from which a fetch beats the forecast of computing; 0: always, -1: never",
    "break_even_measured_tokens": "length from which the measured TTFT is lower; 0: always, -1: never",
    "source_itl_p99_ratio": "p99 of gaps of the source's streams while blocks are fetched from it, over without",
    "blocks_fetched": "blocks that came from the other worker, all of which were asked for",
}


def main() -> None:
    flags = pair_flags(
        __doc__, "512,2048,8192", "interleaved pairs of each length", "pairs of runs of the source's streams"
    )
    args = flags.parse_args()

    async def run(pair: Pair, lengths: list[int]) -> dict[str, float]:
        figures = await measure(pair, lengths, args.pairs)
        return figures | (await cost_of_source(pair, min(2048, max(lengths)), args.rounds) if args.rounds else {})

    report("peer_fetch", measured(args, 64, run), NOTES, args.json)


if __name__ == "__main__":
    main()
