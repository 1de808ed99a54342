"""What a prefetch gains for the first request behind it, and what copies ahead of need cost requests that run.

    python -m bench.prefetch --json
    python -m bench.prefetch --lengths 512,2048 --pairs 3 --rounds 3

A KV manager and two workers run as processes, each worker with one thread. For each length, prompts whose prefix the
first worker has come to the second one in interleaved threes: with a prefetch before, which has ended; without, so that
the request fetches; and a prefix that nobody has, which is computed. TTFT is that of the client.

Then streams run at both workers, and their tokens a second are compared: while prefixes come to the second worker one
after the other, so that copies ahead of need use up their budget, and while nothing comes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from bench.lib.harness import median_interval, progress, report
from bench.lib.worker_pair import BLOCK_SIZE, TAIL, Answer, Pair, Worker, measured, pair_flags, times_to_first_token
from common.wire.packing import pack_hashes
from quire.kvmanager.v1 import kvmanager_pb2 as pb

_PATIENCE: Final = 600.0
_LOOK_S: Final = 0.05
_STREAMS: Final = 3
"""At each worker."""
_TOKENS: Final = 256
_PREFIXES: Final = 24
"""Those that may come during a run; the run says how many blocks did."""
_WARM: Final = 2


async def wish(pair: Pair, prefix: Sequence[int]) -> bool:
    """Let a prefix come to the destination; return whether all of it is to come."""
    hashes = pack_hashes(pair.source.block_hashes(prefix))
    asked = pb.PrefetchPrefixRequest(worker_id="destination", block_hashes=hashes)
    answer = await pair.manager.PrefetchPrefix(asked, timeout=_PATIENCE)
    return answer.outcome == pb.PREFETCH_OUTCOME_ACCEPTED


async def pool_of(pair: Pair) -> pb.Pool:
    """Return the destination's pool."""
    answer = await pair.manager.GetPool(pb.GetPoolRequest(worker_id="destination"), timeout=_PATIENCE)
    return answer.pools[0]


async def until_come(pair: Pair) -> None:
    async with asyncio.timeout(_PATIENCE):
        while (await pool_of(pair)).ahead:  # noqa: ASYNC110 - over gRPC
            await asyncio.sleep(_LOOK_S)


async def prefetched(pair: Pair, length: int) -> tuple[float, float]:
    """Return the TTFT of a prompt whose prefix was prefetched, and the seconds that this took."""
    prefix, began = await pair.have(length), time.perf_counter()
    assert await wish(pair, prefix), "a part of the prefix is not to come"
    await until_come(pair)
    took = time.perf_counter() - began
    answer = await pair.destination.answer([*prefix, *pair.prompt(TAIL)], 1, f"prefetched-{pair.asked}")
    assert answer.cached == length // BLOCK_SIZE * BLOCK_SIZE, f"{answer.cached} of {length} tokens were there"
    return answer.times[0], took


async def fetched(pair: Pair, length: int) -> float:
    return await pair.fetched(await pair.have(length))


async def gains(pair: Pair, lengths: Sequence[int], pairs: int) -> dict[str, float]:
    """Return TTFTs behind a prefetch, over those of fetches and of computing."""
    figures = dict[str, float]()
    await times_to_first_token(pair, min(512, *lengths), _WARM)
    for length in lengths:
        ahead, took, demand, computed = list[float](), list[float](), list[float](), list[float]()
        for index in range(pairs):
            for which in (0, 1, 2)[index % 3 :] + (0, 1, 2)[: index % 3]:
                if which == 0:
                    ttft, seconds = await prefetched(pair, length)
                    ahead.append(ttft)
                    took.append(seconds)
                elif which == 1:
                    demand.append(await fetched(pair, length))
                else:
                    computed.append(await pair.computed(length))
            progress(f"{length} tokens: three {index + 1} of {pairs}", end=index + 1 == pairs)
        for name, others in (("fetched", demand), ("computed", computed)):
            ratio, lower, upper = median_interval([one / other for one, other in zip(ahead, others, strict=True)])
            key = f"ttft_over_{name}_{length}"
            figures |= {key: ratio, f"{key}_lower": lower, f"{key}_upper": upper}
        figures |= {f"ttft_prefetched_{length}": statistics.median(ahead)}
        figures |= {f"prefetch_seconds_{length}": statistics.median(took)}
    return figures


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens of streams at both workers a second, and a CPU second of both; blocks that came meanwhile."""

    by_clock: float
    by_cpu: float
    came: int


def cpu_seconds(pair: Pair) -> float:
    """Return the CPU seconds that both workers have taken."""
    return sum(sum(psutil.Process(each.process.pid).cpu_times()[:2]) for each in (pair.source, pair.destination))


async def throughput(pair: Pair, length: int, copying: bool) -> Rate:
    """Return what streams at both workers get while prefixes come, or while none do."""
    prefixes = [await pair.have(length) for _ in range(_PREFIXES)]  # both runs begin behind the same work
    before = (await pool_of(pair)).ahead_loads["prefetch"]
    all_run, streams = list[asyncio.Event](), list[asyncio.Task[Answer]]()
    for worker in (pair.source, pair.destination) * _STREAMS:
        all_run.append(asyncio.Event())
        streams.append(_stream(pair, worker, all_run[-1]))
    await asyncio.gather(*(each.wait() for each in all_run))
    feeder = asyncio.create_task(_feed(pair, prefixes if copying else []))
    began, busy = time.perf_counter(), cpu_seconds(pair)
    answers = await asyncio.gather(*streams)
    busy = cpu_seconds(pair) - busy
    ended = max(each.began + each.times[-1] for each in answers)
    tokens = sum(sum(each.began + at > began for at in each.times) for each in answers)
    if copying:
        assert not feeder.done(), "prefixes ran out before the streams had ended"
    feeder.cancel()
    await asyncio.gather(feeder, return_exceptions=True)
    came = (await pool_of(pair)).ahead_loads["prefetch"] - before
    await until_come(pair)
    return Rate(tokens / (ended - began), tokens / busy, came)


def _stream(pair: Pair, worker: Worker, runs: asyncio.Event) -> asyncio.Task[Answer]:
    return asyncio.create_task(worker.answer(pair.prompt(64), _TOKENS, f"stream-{pair.asked}", runs))


async def _feed(pair: Pair, prefixes: Sequence[Sequence[int]]) -> None:
    """Let prefixes come, two of them at most waiting, until all have come."""
    for prefix in prefixes:
        while (await pool_of(pair)).ahead > 1:  # noqa: ASYNC110 - over gRPC
            await asyncio.sleep(_LOOK_S)
        await wish(pair, prefix)
    await until_come(pair)


async def costs(pair: Pair, length: int, rounds: int) -> dict[str, float]:
    """Return the throughput of streams while blocks come ahead of need, over that while none do."""
    beside, alone = list[Rate](), list[Rate]()
    for index in range(rounds):
        for copying in (True, False) if index % 2 else (False, True):
            (beside if copying else alone).append(await throughput(pair, length, copying))
        progress(f"throughput: pair {index + 1} of {rounds}", end=index + 1 == rounds)
    figures = {"tokens_per_second": statistics.median(each.by_clock for each in alone)}
    figures["blocks_came"] = statistics.median(each.came for each in beside)
    for name, key in (("throughput_ratio", "by_clock"), ("throughput_ratio_cpu", "by_cpu")):
        pairs = zip(beside, alone, strict=True)
        ratio, lower, upper = median_interval([getattr(one, key) / getattr(other, key) for one, other in pairs])
        figures |= {name: ratio, f"{name}_lower": lower, f"{name}_upper": upper}
    return figures


NOTES = {
    "throughput_ratio": "tokens a second at both workers while blocks come ahead of need, over while none do",
    "throughput_ratio_cpu": "the same of tokens a CPU second of both workers, which other work disturbs less",
    "blocks_came": "blocks that came during a run of the streams",
}


def main() -> None:
    flags = pair_flags(__doc__, "512,2048", "interleaved threes of each length", "pairs of runs of streams")
    args = flags.parse_args()

    async def run(pair: Pair, lengths: list[int]) -> dict[str, float]:
        figures = await gains(pair, lengths, args.pairs) if args.pairs else {}
        return figures | (await costs(pair, min(512, *lengths), args.rounds) if args.rounds else {})

    report("prefetch", measured(args, 512, run), NOTES, args.json)


if __name__ == "__main__":
    main()
