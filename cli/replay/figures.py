"""What a replay comes to: figures of latency, hits and refusals, with intervals over the seeds of several replays."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cli.replay.simulation import Replay, Replayed
from cli.replay.trace import Trace

# A request counts as good when its first token came within so many seconds, and each further one within so many.
GOOD_FIRST_TOKEN_S: Final = 1.0
GOOD_TOKEN_S: Final = 0.1


class Objective(NamedTuple):
    """Seconds within which the first token of a good request comes, and each further one in the mean."""

    first_token: float
    token: float


GOOD: Final = Objective(GOOD_FIRST_TOKEN_S, GOOD_TOKEN_S)


_RESAMPLES: Final = 1000
_ENDS: Final = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of a figure over seeds, and the 95 % interval of that mean by bootstrap."""

    mean: float
    low: float
    high: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at a share of the sorted values, by nearest rank; nan of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def figures_of(replay: Replay, objective: Objective = GOOD) -> dict[str, float]:
    """Return the figures of one replay, in seconds, shares and counts."""
    served = [each for each in replay.requests if not each.refused]
    firsts = [each.first_token_s for each in served if each.first_token_s is not None]
    tokens = [each.token_s for each in served if each.token_s is not None]
    prompts = sum(each.arrival.prompt_tokens for each in served)
    good = sum(
        (each.first_token_s or 0.0) <= objective.first_token and (each.token_s or 0.0) <= objective.token
        for each in served
    )
    return {
        **_latencies(firsts, tokens),
        "hit_share": sum(each.cached_tokens for each in served) / prompts if prompts else 0.0,
        **(_by_source(served, prompts) if replay.moves else {}),
        "preemptions": float(sum(each.preemptions for each in served)),
        "refused": float(len(replay.requests) - len(served)),
        "tokens_per_s": sum(each.tokens for each in served) / replay.seconds if replay.seconds > 0 else 0.0,
        "goodput": good / replay.seconds if replay.seconds > 0 else 0.0,
    }


def _by_source(served: Sequence[Replayed], prompts: int) -> dict[str, float]:
    """Return the shares of prompt tokens by where they were before the request came."""
    host = sum(each.host_tokens for each in served)
    disk = sum(each.disk_tokens for each in served)
    peer = sum(each.peer_tokens for each in served)
    pool = sum(each.cached_tokens for each in served) - host - disk - peer
    found = {"hit_pool_share": pool, "hit_host_share": host, "hit_disk_share": disk, "hit_peer_share": peer}
    return {name: tokens / prompts if prompts else 0.0 for name, tokens in found.items()}


def recorded_figures(trace: Trace) -> dict[str, float]:
    """Return the same figures of what was recorded, as far as a log has them; empty for a foreign trace."""
    known = [(each, each.measured) for each in trace.arrivals if each.measured is not None]
    if not known:
        return {}
    steps = [(arrival.output_tokens - 1, found) for arrival, found in known if arrival.output_tokens > 1]
    prompts = sum(arrival.prompt_tokens for arrival, _ in known)
    firsts = [found.first_token_s for _, found in known]
    tokens = [(found.finished_s - found.first_token_s) / count for count, found in steps]
    return {**_latencies(firsts, tokens), "hit_share": sum(found.cached_tokens for _, found in known) / prompts}


def _latencies(firsts: Sequence[float], tokens: Sequence[float]) -> dict[str, float]:
    return {
        "ttft_p50_s": percentile(firsts, 0.5),
        "ttft_p90_s": percentile(firsts, 0.9),
        "ttft_p99_s": percentile(firsts, 0.99),
        "itl_p50_s": percentile(tokens, 0.5),
        "itl_p99_s": percentile(tokens, 0.99),
    }


def over_seeds(runs: Sequence[Mapping[str, float]]) -> dict[str, Interval]:
    """Return each figure's mean over replays of different seeds, and how sure it is."""
    return {name: _interval([run[name] for run in runs]) for name in runs[0]}


def _interval(values: Sequence[float]) -> Interval:
    mean = statistics.fmean(values)
    if len(set(values)) == 1:
        return Interval(mean, mean, mean)
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    low, high = (means[int(share * (_RESAMPLES - 1))] for share in _ENDS)
    return Interval(mean, low, high)
