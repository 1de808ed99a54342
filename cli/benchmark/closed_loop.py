"""A client's view of a workload: when each token of each request came, and the figures that follow from it.

The loop is closed: all first requests are there at once, and a conversation goes on as soon as its last token is seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cli.benchmark.requests import Request


@dataclass(slots=True)
class Record:
    """One request: when it was submitted, and each of its tokens with the time at which it came. Seconds.

    `trace_id` is "" where the request is not traced.
    """

    request: Request
    submitted: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    trace_id: str = ""

    def add(self, tokens: Sequence[int], now: float) -> bool:
        """Record tokens that came together; return whether they were the last."""
        self.tokens.extend(tokens)
        self.times.extend([now] * len(tokens))
        return len(self.tokens) >= self.request.max_new_tokens

    @property
    def first_token(self) -> float:
        """Time to first token (TTFT)."""
        return self.times[0] - self.submitted


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share of all values lies, interpolated; 0 of none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def steady_window(records: Sequence[Record]) -> tuple[float, float]:
    """Return the time in which every request decodes: from the last first token to the first end."""
    return max(each.times[0] for each in records), min(each.times[-1] for each in records)


def step_seconds(records: Sequence[Record]) -> float:
    """Return the median inter-token latency while every request decodes."""
    begin, end = steady_window(records)
    return statistics.median(
        later - earlier
        for each in records
        for earlier, later in pairwise(each.times)
        if begin <= earlier and later <= end
    )


def decode_rate(records: Sequence[Record]) -> float:
    """Return tokens a second of all requests together while every one decodes; of the whole run if they never do."""
    begin, end = steady_window(records)
    if end <= begin:
        begin, end = min(each.submitted for each in records), max(each.times[-1] for each in records)
    return sum(begin < time <= end for each in records for time in each.times) / (end - begin)


def figures(seconds: float, records: Iterable[Record]) -> dict[str, float]:
    """Return throughput, time to first token, inter-token latency (ITL) and end-to-end time.

    Their names and definitions are those of the peers' drivers, so that lines of both can stand side by side.
    """
    all_records = list(records)
    first = [each.first_token for each in all_records]
    gaps = [later - earlier for each in all_records for earlier, later in pairwise(each.times)]
    whole = [each.times[-1] - each.submitted for each in all_records]
    output = sum(len(each.tokens) for each in all_records)
    prompt = sum(len(each.request.prompt) for each in all_records)
    cached = sum(each.cached_tokens for each in all_records)
    return {
        "wall_s": seconds,
        "requests": len(all_records),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tok_s": output / seconds,
        "total_tok_s": (output + prompt) / seconds,
        "ttft_p50_ms": 1e3 * percentile(first, 0.5),
        "ttft_p99_ms": 1e3 * percentile(first, 0.99),
        "itl_p50_ms": 1e3 * percentile(gaps, 0.5),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
        "itl_mean_ms": 1e3 * statistics.fmean(gaps) if gaps else 0.0,
        "e2e_p50_ms": 1e3 * percentile(whole, 0.5),
        "prefix_hit_rate": cached / prompt if prompt else 0.0,
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over runs of the same workload."""
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


NOTES = {
    "wall_s": "seconds from the first request to the last token",
    "requests": "requests, follow-ups included",
    "prompt_tokens": "their prompt tokens",
    "output_tokens": "their output tokens",
    "output_tok_s": "output tokens a second",
    "total_tok_s": "prompt and output tokens a second",
    "ttft_p50_ms": "time to first token, milliseconds: median",
    "ttft_p99_ms": "99th percentile",
    "itl_p50_ms": "inter-token latency, milliseconds: median",
    "itl_p99_ms": "99th percentile",
    "itl_mean_ms": "mean",
    "e2e_p50_ms": "submission to last token, milliseconds: median",
    "prefix_hit_rate": "prompt tokens that the prefix cache served",
}


def agreement(expected: dict[str, list[int]], found: dict[str, list[int]]) -> float:
    """Return the share of equal tokens, place by place, over the requests that both have."""
    pairs = [(tokens, found[name]) for name, tokens in expected.items() if name in found]
    total = sum(len(tokens) for tokens, _ in pairs)
    same = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False))
    return same / total if total else 0.0
