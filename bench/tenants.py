"""What one tenant's load does to another: time to first token under a flood, and shares under saturation.

    python -m bench.tenants --json

Simulated workers with steps of 8 ms and 32 slots. A victim keeps some streams running, each with requests one after
the other. First it is alone; then another tenant floods the suite with requests of many sequences. The ratio compares
medians of the victim's times to first token. For the shares, tenants of different weights all ask for more than the
suite has; their output tokens are compared with their weights.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeAlias

from bench.lib.harness import parser, report
from bench.lib.tenants import Prompts, Tenant, tenants_on_suite

PLACES = 32
_OPTIONS = ("--simulate", "base=8ms", "--max-num-seqs", str(PLACES), "--kv-blocks", "4096")
PROMPT_TOKENS, VICTIM_TOKENS, FLOOD_TOKENS = 64, 16, 256
VICTIM_STREAMS, FLOOD_STREAMS, FLOOD_SEQUENCES = 4, 64, 16
WEIGHTS = {"one": 1.0, "two": 2.0, "five": 5.0}
SATURATING_STREAMS, SATURATING_TOKENS = 2 * PLACES, 32
_SETTLE_SECONDS = 3.0
Ends: TypeAlias = list[tuple[float, int]]


async def _stream(tenant: Tenant, prompts: Prompts, times: list[float]) -> None:
    """Stream requests one after the other until the task is cancelled; note each time to first token."""
    while True:
        times.append((await tenant.ask(prompts.new(PROMPT_TOKENS), VICTIM_TOKENS)).first_token)


async def _load(
    tenant: Tenant, prompts: Prompts, max_tokens: int, sequences: int, ends: list[tuple[float, int]]
) -> None:
    """Make requests one after the other until the task is cancelled; note the end and the tokens of each."""
    while True:
        tokens = await tenant.ask_whole(prompts.new(PROMPT_TOKENS), max_tokens, sequences)
        ends.append((time.perf_counter(), tokens))


async def _for(seconds: float, *work: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.create_task(each) for each in work]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def victim_times(victim: Tenant, prompts: Prompts, seconds: float) -> list[float]:
    times: list[float] = []
    await _for(seconds, *(_stream(victim, prompts, times) for _ in range(VICTIM_STREAMS)))
    return times


async def flood(seconds: float) -> dict[str, float]:
    """Return the victim's times to first token alone and under a flood, in milliseconds, and their ratio."""
    async with tenants_on_suite(_OPTIONS, {"victim": "", "attacker": ""}) as tenants:
        prompts = Prompts(1)
        await victim_times(tenants["victim"], prompts, 1.0)  # warms up
        alone = await victim_times(tenants["victim"], prompts, seconds)
        flooding = asyncio.gather(
            *(_load(tenants["attacker"], prompts, FLOOD_TOKENS, FLOOD_SEQUENCES, []) for _ in range(FLOOD_STREAMS))
        )
        await asyncio.sleep(_SETTLE_SECONDS)
        under = await victim_times(tenants["victim"], prompts, seconds)
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
    before, after = statistics.median(alone), statistics.median(under)
    return {
        "victim_ttft_ratio": after / before,
        "victim_ttft_alone_ms": 1e3 * before,
        "victim_ttft_flood_ms": 1e3 * after,
        "victim_ttft_flood_p95_ms": 1e3 * statistics.quantiles(under, n=20)[-1],
        "victim_requests_flood": float(len(under)),
    }


async def shares(seconds: float) -> dict[str, float]:
    """Return each tenant's part of the output tokens over its part of the weights."""
    tables = {name: f"weight = {weight}" for name, weight in WEIGHTS.items()}
    async with tenants_on_suite(_OPTIONS, tables) as tenants:
        prompts = Prompts(2)
        ends: dict[str, Ends] = {name: [] for name in tenants}
        work = (
            _load(tenant, prompts, SATURATING_TOKENS, 1, ends[name])
            for name, tenant in tenants.items()
            for _ in range(SATURATING_STREAMS)
        )
        began = time.perf_counter()
        await _for(_SETTLE_SECONDS + seconds, *work)
    since = began + _SETTLE_SECONDS
    tokens = {name: sum(count for at, count in each if at >= since) for name, each in ends.items()}
    return _over_weights(tokens)


def _over_weights(tokens: Mapping[str, int]) -> dict[str, float]:
    total, weights = sum(tokens.values()), sum(WEIGHTS.values())
    found = {f"share_{name}": tokens[name] / total * weights / WEIGHTS[name] for name in WEIGHTS}
    return found | {"share_error_max": max(abs(share - 1.0) for share in found.values())}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--seconds", type=float, default=20.0, help="length of each of the three measurements")
    args = flags.parse_args()
    figures = asyncio.run(flood(args.seconds)) | asyncio.run(shares(args.seconds))
    streams = f"{FLOOD_STREAMS} streams of {FLOOD_SEQUENCES} sequences"
    notes = {
        "victim_ttft_ratio": f"median time to first token under a flood of {streams}, over that alone",
        "victim_ttft_alone_ms": f"median with {VICTIM_STREAMS} streams of its own",
        "victim_ttft_flood_ms": "median under the flood",
        "victim_ttft_flood_p95_ms": "95th percentile under the flood",
        "victim_requests_flood": "requests of the victim under the flood",
        "share_error_max": "greatest distance of a share from its weight",
    }
    notes |= {
        f"share_{name}": f"part of the tokens over part of the weights, weight {w:g}" for name, w in WEIGHTS.items()
    }
    report("tenants", figures, notes, args.json)


if __name__ == "__main__":
    main()
