"""The measurements of the load benchmark: one rate, the highest sustained rate, the router's cost, streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.open_loop.figures import Slo, Window, figures, in_flight, latencies, percentile
from bench.open_loop.plan import FINISHED, Api, Plan, Seen
from bench.open_loop.suite import LoadSuite

Row = dict[str, float]
_CLOSED_SECONDS, _CLOSED_OF_SATURATION = 3.0, 0.9
_PROBES_A_SECOND = 25.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a load's requests, and the measured time: steady after `warm` seconds, then `seconds` more.

    `simulated`: its tokens can be checked. `streams` is how many run at once where a capacity is estimated.
    """

    prompt_tokens: int
    output_tokens: int
    model: Path
    vocabulary: int
    simulated: bool
    api: Api = "grpc"
    warm: float = 2.0
    seconds: float = 4.0
    streams: int = 512
    seed: int = 0
    slo: Slo = field(default_factory=Slo)

    def plan(self, suite: LoadSuite, rate: float, cv: float = 1.0) -> Plan:
        """Return an open loop of such requests."""
        return Plan(
            api=self.api,
            address=suite.http if self.api == "http" else suite.router,
            start=0.0,
            seconds=self.warm + self.seconds,
            rate=rate,
            output_tokens=self.output_tokens,
            results="",
            prompt_tokens=self.prompt_tokens,
            cv=cv,
            seed=self.seed,
            vocabulary=self.vocabulary,
            check=str(self.model) if self.simulated and self.api == "grpc" else "",
        )

    def window(self, start: float) -> Window:
        """Return the window of a run whose arrivals began at `start`."""
        return Window(start + self.warm, start + self.warm + self.seconds, self.slo)


async def at_rate(suite: LoadSuite, shape: Shape, rate: float, cv: float = 1.0) -> Row:
    """Return the figures of one rate, in requests a second."""
    (seen,), cpu, start, elapsed = await _measured(suite, shape.plan(suite, rate, cv))
    found = figures(seen, shape.window(start), shape.output_tokens, cpu)
    return {"rate": rate, "cv": cv} | found | {f"{role}_cores": spent / elapsed for role, spent in cpu.items()}


async def _measured(suite: LoadSuite, *plans: Plan) -> tuple[list[Seen], dict[str, float], float, float]:
    """Run plans; return the clients' traces, the CPU time of each role, the start of the arrivals, and the seconds."""
    before, began = suite.cpu_seconds(), time.monotonic()
    seen = await suite.run(*plans)
    cpu = {role: spent - before.get(role, 0.0) for role, spent in suite.cpu_seconds().items()}
    return seen, cpu, suite.started, time.monotonic() - began


async def capacity(suite: LoadSuite, shape: Shape) -> float:
    """Return the requests a second that end in a closed loop of many streams: the start of the search."""
    plan = replace(shape.plan(suite, 1.0), streams=shape.streams, seconds=_CLOSED_SECONDS)
    (seen,) = await suite.run(plan)
    begin, end = suite.started + _CLOSED_SECONDS / 3, suite.started + _CLOSED_SECONDS
    came = (seen.times >= begin) & (seen.times < end)
    return float(seen.counts[came].sum()) / (end - begin) / shape.output_tokens


async def saturation(probe: Callable[[float], Awaitable[Row]], guess: float, probes: int) -> list[Row]:
    """Search the highest sustained rate; return the row of each rate that was tried.

    The search starts at `guess`: up by a quarter while the rate is sustained, down by a quarter while it is not, then
    by bisection.
    """
    rows: list[Row] = []
    rate, refused = guess, math.inf
    for _ in range(probes):
        rows.append(await probe(rate))
        if not _carried(rows[-1]):
            refused = rate
        carried = highest_carried(rows)
        if carried is None:
            rate = 0.75 * refused
        elif refused == math.inf:
            rate = 1.25 * carried["rate"]
        else:
            rate = (carried["rate"] + refused) / 2
    return rows


def highest_carried(rows: Sequence[Row]) -> Row | None:
    """Return the row of the highest sustained rate, None where there was none."""
    return max(filter(_carried, rows), key=lambda row: row["rate"], default=None)


def _carried(row: Row) -> bool:
    return bool(row["steady"] and row["valid"])


async def find_saturation(suite: LoadSuite, shape: Shape, probes: int, on_row: Callable[[Row], None]) -> list[Row]:
    """Search the highest rate that the suite sustains; return the rows that were measured on the way."""

    async def probe(rate: float) -> Row:
        row = await at_rate(suite, shape, rate)
        on_row(row)
        return row

    return await saturation(probe, _CLOSED_OF_SATURATION * await capacity(suite, shape), probes)


async def added_ttft(suite: LoadSuite, shape: Shape, rate: float) -> Row:
    """Return the time that the router adds to a first token while it serves `rate` requests a second.

    Single-token requests go through the router and straight down a stream to the worker, in random order, from
    clients that do nothing else; the only difference between the two is the router. Milliseconds, of their percentiles.
    """
    load = shape.plan(suite, rate)
    through = replace(load, rate=_PROBES_A_SECOND, output_tokens=1, seed=shape.seed + 1, channels=1)
    direct = replace(through, api="direct", address=suite.worker, certs=suite.certs, seed=shape.seed + 2)
    (seen, *probes), cpu, start, elapsed = await _measured(suite, load, through, direct)
    window = shape.window(start)
    routed, straight = (_first_tokens(each, window) for each in probes)
    loaded = figures(seen, window, shape.output_tokens, cpu)
    found = {
        f"router_added_ttft_ms_p{share}": percentile(routed, share) - percentile(straight, share) for share in (50, 99)
    }
    return found | {
        "half_load_routed_ttft_ms_p50": percentile(routed, 50),
        "half_load_direct_ttft_ms_p50": percentile(straight, 50),
        "half_load_samples": float(min(len(routed), len(straight))),
        "half_load_tokens_s": loaded["tokens_s"],
        "half_load_valid": float(loaded["valid"] and max(map(_lateness, probes)) <= window.lateness),
        "half_load_router_cores": cpu["router"] / elapsed,
    }


def _first_tokens(seen: Seen, window: Window) -> np.typing.NDArray[np.float64]:
    ttft, _, _ = latencies(seen)
    due = (seen.intended >= window.begin) & (seen.intended < window.end) & (seen.status == FINISHED)
    found: np.typing.NDArray[np.float64] = 1e3 * ttft[due]
    return found


def _lateness(seen: Seen) -> float:
    return percentile(seen.sent - seen.intended, 99)


async def many_streams(suite: LoadSuite, shape: Shape, opening: float, kill_after: float | None) -> Row:
    """Open all of the shape's streams, `opening` a second, follow each to its end, and check every token.

    `kill_after`: seconds after the last was opened until a worker is killed (SIGKILL); its streams go on elsewhere.
    """
    opened = shape.streams / opening
    plan = replace(shape.plan(suite, 1.0), streams=shape.streams, opening=opening, seconds=opened, patience=120.0)
    killer = asyncio.create_task(_kill(suite, opened + kill_after)) if kill_after is not None else None
    try:
        (seen,), cpu, start, elapsed = await _measured(suite, plan)
    finally:
        if killer is not None:
            killer.cancel()
    ttft, _, _ = latencies(seen)
    for fault in seen.faults[:5]:
        print(f"  fault: {fault}")
    return {
        "streams": len(seen.intended),
        "streams_at_once": max(in_flight(seen, moment) for moment in seen.intended[-10:]),
        "streams_finished": int((seen.status == FINISHED).sum()),
        "streams_tokens": int(seen.counts.sum()),
        "streams_tokens_due": shape.streams * shape.output_tokens,
        "streams_faults": len(seen.faults),
        "streams_migrated": await suite.counted("quire:migrations_total"),
        "streams_ttft_p99_ms": 1e3 * percentile(ttft[np.isfinite(ttft)], 99),
        "streams_lateness_p99_ms": 1e3 * _lateness(seen),
        "streams_seconds": float(seen.done.max() - start),
        "streams_router_cores": cpu["router"] / elapsed,
    }


async def _kill(suite: LoadSuite, seconds: float) -> None:
    await asyncio.sleep(seconds)
    suite.kill_worker(0)


def words(row: Mapping[str, float]) -> str:
    state = "carried" if row["steady"] else "not carried"
    if not row["valid"]:
        state = "INVALID: the clients fell behind"
    return (
        f"{row['rate']:8.1f} requests/s (cv {row['cv']:g}): {row['tokens_s']:7.0f} tokens/s, "
        f"TTFT {row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f} ms, ITL p99 {row['itl_p99_ms']:.0f} ms, "
        f"goodput {row['goodput_requests_s']:.1f}/s, router {row['router_us_per_token']:.1f} us a token; {state}"
    )
