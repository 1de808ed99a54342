"""What the router predicted of requests against what happened: waits at the worker, hits, prefill, first token.

A prediction is that of the last choice of a worker, the actual value is of the record that ends the request. Both begin
at the choice: they exclude the wait in the router's queue. Requests that moved between workers, that had no first
token, or whose choice is not among the records do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from common.contracts.types import Candidate, Decision, DecisionKind
from router.observe.diagnosis.change import quantile
from router.observe.diagnosis.outcome import Outcome, Phase, outcome_of

# Terms of the cost that come before the first token.
BEFORE_FIRST_TOKEN: Final = ("queue_delay", "fetch", "prefill")
# Phases before the choice, and those that it does not predict.
_BEFORE_CHOICE: Final = (Phase.READING, Phase.QUEUE, Phase.LOOKUP, Phase.CONSTRAINT, Phase.ROUTER_STILL)
# Phases at the worker before it computes.
_WAITS: Final = (Phase.BLOCKS, Phase.MANAGER_AWAY, Phase.PREFILL_WAIT, Phase.STALLED)
# A prediction within this factor of the actual value is near it.
NEAR: Final = 2.0
# Seconds that are too short to be far off.
_SHORT_S: Final = 0.001


class Measure(StrEnum):
    WAIT = "wait"
    FETCH = "fetch"
    HITS = "hit_tokens"
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"


@dataclass(frozen=True, slots=True)
class Pair:
    """A predicted and an actual value: seconds, or tokens."""

    predicted: float
    actual: float

    @property
    def error(self) -> float:
        """How much too high the prediction was."""
        return self.predicted - self.actual


@dataclass(frozen=True, slots=True)
class Predicted:
    """One request, its worker, when the choice was made, and its pairs."""

    request_id: str
    worker: str
    time_ns: int
    pairs: Mapping[Measure, Pair]


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measure over many requests: medians, and errors. `near` is the share of predictions within a factor of two.

    `error_p50` has its sign: above 0 the router predicts too much. `off_p50` and `off_p90` are sizes of errors.
    """

    measure: Measure
    requests: int
    predicted_p50: float
    actual_p50: float
    error_p50: float
    off_p50: float
    off_p90: float
    near: float


def chosen_candidate(decision: Decision) -> Candidate | None:
    """Return the worker that a routing decision took, as it was priced; None where none was taken."""
    found = next((each for each in decision.candidates if each.name == decision.worker), None)
    return found if found is not None and found.cost is not None else None


def predicted_s(decision: Decision) -> float | None:
    """Return the predicted seconds from a decision to the first token; None where no worker was chosen."""
    chosen = chosen_candidate(decision)
    if chosen is None:
        return None
    return sum(seconds for name, seconds in chosen.terms if name in BEFORE_FIRST_TOKEN)


def actual_s(outcome: Outcome | None) -> float | None:
    """Return the measured seconds from the choice of a worker to the first token.

    None without one, and for a request that moved: its last decision is not the one that its first token followed.
    """
    if outcome is None or not outcome.has_first_token or outcome.moves:
        return None
    return max(0.0, outcome.first_token_s - sum(dict(outcome.before).get(each, 0.0) for each in _BEFORE_CHOICE))


def predictions(records: Iterable[Decision]) -> list[Predicted]:
    """Return the requests that count, in the order of their choices; `records` are choices and ends in any order."""
    routes: dict[str, Decision] = {}
    ends: dict[str, Outcome] = {}
    for each in sorted(records, key=lambda record: record.time_ns):
        if each.kind is DecisionKind.ROUTING and chosen_candidate(each) is not None:
            routes[each.request_id] = each
        elif each.kind is DecisionKind.OUTCOME:
            ends[each.request_id] = outcome_of(each)
    found = ((route, _pairs(route, ends.get(request_id))) for request_id, route in routes.items())
    return [Predicted(route.request_id, route.worker, route.time_ns, pairs) for route, pairs in found if pairs]


def _pairs(route: Decision, outcome: Outcome | None) -> dict[Measure, Pair]:
    actual, chosen = actual_s(outcome), chosen_candidate(route)
    if outcome is None or actual is None or chosen is None:
        return {}
    terms, figures, before = dict(chosen.terms), dict(chosen.figures), dict(outcome.before)
    pairs = {
        Measure.WAIT: Pair(terms.get("queue_delay", 0.0), sum(before.get(each, 0.0) for each in _WAITS)),
        Measure.PREFILL: Pair(terms.get("prefill", 0.0), before.get(Phase.PREFILL, 0.0)),
        Measure.FIRST_TOKEN: Pair(predicted_s(route) or 0.0, actual),
    }
    fetch = Pair(terms.get("fetch", 0.0), before.get(Phase.FETCH, 0.0))
    if fetch.predicted or fetch.actual:
        pairs[Measure.FETCH] = fetch
    if outcome.block_size:
        hits = (figures.get("hit_blocks", 0.0) + figures.get("fetched_blocks", 0.0)) * outcome.block_size
        pairs[Measure.HITS] = Pair(hits, float(outcome.cached_tokens))
    return pairs


def calibrations(found: Sequence[Predicted]) -> tuple[Calibration, ...]:
    """Return each measure that some request has."""
    by_measure = ((each, [one.pairs[each] for one in found if each in one.pairs]) for each in Measure)
    return tuple([_calibration(measure, pairs) for measure, pairs in by_measure if pairs])


def _calibration(measure: Measure, pairs: Sequence[Pair]) -> Calibration:
    off = sorted(abs(each.error) for each in pairs)
    short = 0.0 if measure is Measure.HITS else _SHORT_S
    return Calibration(
        measure=measure,
        requests=len(pairs),
        predicted_p50=quantile(sorted(each.predicted for each in pairs), 0.5),
        actual_p50=quantile(sorted(each.actual for each in pairs), 0.5),
        error_p50=quantile(sorted(each.error for each in pairs), 0.5),
        off_p50=quantile(off, 0.5),
        off_p90=quantile(off, 0.9),
        near=sum(_is_near(each, short) for each in pairs) / len(pairs),
    )


def _is_near(pair: Pair, short: float) -> bool:
    least, most = sorted((max(pair.predicted, short), max(pair.actual, short)))
    return most <= NEAR * least
