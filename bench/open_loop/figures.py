"""Figures of one run of the load benchmark, from the traces of its clients and the CPU time of its processes.

The window begins when the load is steady and ends with the last arrival. Throughput counts the tokens that came within
it. Latencies, goodput and refusals are those of the requests that were due within it, followed to their end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bench.open_loop.plan import FINISHED, Floats, Seen

_SHARES = (50, 90, 99)
_STEADY_TOKENS = 0.9
BUSY_CLIENT = 0.9


@dataclass(frozen=True, slots=True)
class Slo:
    """The bounds of a request, in seconds: time to its first token, and all but a hundredth of the gaps after it."""

    ttft: float = 0.2
    itl: float = 0.1


@dataclass(frozen=True, slots=True)
class Window:
    """Start and end, on the clients' clock, and the bounds: lateness of the generator, in seconds, and the SLO."""

    begin: float
    end: float
    slo: Slo = Slo()
    lateness: float = 0.02

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def figures(seen: Seen, window: Window, output_tokens: int, cpu: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a run; `cpu` has the seconds that each role spent over the whole of it."""
    due = (seen.intended >= window.begin) & (seen.intended < window.end)
    ended = due & (seen.status == FINISHED)
    ttft, tpot, worst = latencies(seen)
    kept = ended & (ttft <= window.slo.ttft) & (np.nan_to_num(worst) <= window.slo.itl)
    came = (seen.times >= window.begin) & (seen.times < window.end)
    tokens = float(seen.counts[came].sum())
    done = (seen.done >= window.begin) & (seen.done < window.end) & (seen.status == FINISHED)
    found = {
        "offered_requests_s": due.sum() / window.seconds,
        "offered_tokens_s": due.sum() * output_tokens / window.seconds,
        "requests_s": done.sum() / window.seconds,
        "tokens_s": tokens / window.seconds,
        "goodput_requests_s": kept.sum() / window.seconds,
        "goodput_share": kept.sum() / max(1, due.sum()),
        **percentiles("ttft", 1e3 * ttft[ended]),
        **percentiles("itl", 1e3 * gaps(seen, ended)),
        **percentiles("tpot", 1e3 * tpot[ended & ~np.isnan(tpot)]),
        "in_flight": in_flight(seen, window.end),
        "backlog_growth": in_flight(seen, window.end) - in_flight(seen, window.begin),
        "faults": len(seen.faults),
        "lateness_p99_ms": percentile(1e3 * (seen.sent - seen.intended)[due], 99),
        "busiest_client": max(seen.cpu, default=0.0),
        "clients_cores": sum(seen.cpu),
    }
    for status in sorted(set(seen.status[due].tolist()) - {FINISHED}):
        found[f"status_{status}"] = float((seen.status[due] == status).sum())
    found["valid"] = found["lateness_p99_ms"] <= 1e3 * window.lateness and found["busiest_client"] <= BUSY_CLIENT
    found["steady"] = is_steady(found, window, seen)
    return {name: float(value) for name, value in found.items()} | costs(seen, cpu)


def is_steady(found: Mapping[str, float], window: Window, seen: Seen) -> bool:
    """Return whether the suite sustains the load: nothing refused or lost, backlog steady, 99 % of latencies in bounds.

    In a steady state the requests in flight at two moments far apart are nearly independent Poisson numbers: they
    differ by less than three times the root of twice their mean. Tokens that come in a window of some seconds differ
    from the due tokens by a few percent, because some of them belong to earlier requests.
    """
    noise = 3.0 * math.sqrt(2.0 * max(1.0, found["in_flight"]))
    return bool(
        found["backlog_growth"] <= noise
        and found["tokens_s"] >= _STEADY_TOKENS * found["offered_tokens_s"]
        and found["ttft_p99_ms"] <= 1e3 * window.slo.ttft
        and found["itl_p99_ms"] <= 1e3 * window.slo.itl
        and not seen.faults
        and all(status == FINISHED for status in seen.status.tolist())
    )


def latencies(seen: Seen) -> tuple[Floats, Floats, Floats]:
    """Return each request's time to first token from when it was due, its mean gap (TPOT), and its 99th gap of 100.

    Seconds; inf for a request without tokens, NaN for gaps of one with a single token.
    """
    count = len(seen.intended)
    ttft, tpot, worst = np.full(count, np.inf), np.full(count, np.nan), np.full(count, np.nan)
    for index in range(count):
        part = slice(seen.first[index], seen.first[index + 1])
        times = np.repeat(seen.times[part], seen.counts[part])
        if len(times):
            ttft[index] = times[0] - seen.intended[index]
        if len(times) > 1:
            between = np.diff(times)
            tpot[index], worst[index] = between.mean(), np.percentile(between, 99)
    return ttft, tpot, worst


def gaps(seen: Seen, wanted: np.typing.NDArray[np.bool_]) -> Floats:
    """Return the gaps between tokens of the wanted requests, in seconds; those that came together are 0 apart."""
    each = [
        np.diff(np.repeat(seen.times[a:b], seen.counts[a:b]))
        for a, b, want in zip(seen.first[:-1], seen.first[1:], wanted, strict=True)
        if want
    ]
    return np.concatenate(each) if each else np.empty(0)


def in_flight(seen: Seen, moment: float) -> int:
    """Return how many requests were due and had not ended at a moment."""
    return int(((seen.intended <= moment) & (seen.done > moment)).sum())


def percentile(values: Floats, share: float) -> float:
    """Return a percentile, interpolated; 0 of none."""
    return float(np.percentile(values, share)) if len(values) else 0.0


def percentiles(name: str, milliseconds: Floats) -> dict[str, float]:
    """Return the 50th, 90th and 99th."""
    return {f"{name}_p{share}_ms": percentile(milliseconds, share) for share in _SHARES}


def costs(seen: Seen, cpu: Mapping[str, float]) -> dict[str, float]:
    """Return the CPU time of each role over the whole run, in microseconds a token and milliseconds a request."""
    tokens, requests = max(1, int(seen.counts.sum())), max(1, len(seen.intended))
    found: dict[str, float] = {}
    for role, seconds in cpu.items():
        found[f"{role}_us_per_token"] = 1e6 * seconds / tokens
        found[f"{role}_ms_per_request"] = 1e3 * seconds / requests
    return found


NOTES = {
    "load_average_before": "the machine's load before it all: what else ran (best near 0)",
    "router_tokens_per_s": "highest rate carried, output tokens a second (0: none of those tried)",
    "router_tokens_per_s_on_a_core": "over the cores that the router used then: what a core of its own would carry",
    "router_requests_per_s": "the same of requests for one token, requests a second",
    "router_requests_per_s_on_a_core": "over the cores that the router used then",
    "router_added_ttft_ms_p50": "TTFT through the router minus straight to the worker, at half of that load: medians",
    "router_added_ttft_ms_p99": "99th percentiles",
    "half_load_samples": "requests of each kind, interleaved in one run",
    "half_load_valid": "1: the clients kept up",
    "streams_at_once": "streams that were open at one moment",
    "streams_finished": "of them ended as they should",
    "streams_tokens": "tokens that came, each of them checked",
    "streams_faults": "tokens lost, repeated, out of order or foreign",
    "streams_migrated": "streams that went on at another worker, as theirs was killed",
    "offered_requests_s": "requests that were due, a second",
    "offered_tokens_s": "output tokens that they asked for, a second",
    "requests_s": "requests that ended, a second",
    "tokens_s": "output tokens that came, a second",
    "goodput_requests_s": "requests a second that kept the SLO: TTFT, and 99 of 100 inter-token latencies",
    "goodput_share": "share of the requests that kept it",
    "ttft_p50_ms": "time to first token from when the request was due, milliseconds: median",
    "itl_p50_ms": "inter-token latency: median (0 where two came in one message)",
    "tpot_p50_ms": "mean inter-token latency of a request: median",
    "in_flight": "requests in flight at the end of the window",
    "backlog_growth": "more than at its beginning",
    "faults": "tokens lost, repeated, out of order or foreign",
    "lateness_p99_ms": "how late the generator sent, 99th percentile",
    "busiest_client": "cores that the busiest client process used",
    "clients_cores": "cores that all of them used",
    "router_us_per_token": "processor time of the routers, microseconds an output token",
    "router_ms_per_request": "and milliseconds a request",
    "router_cores": "cores that the routers used",
    "valid": "1: the generator kept up",
    "steady": "1: the load was carried: backlog steady, TTFT and ITL p99 in the SLO, nothing refused or lost",
}
