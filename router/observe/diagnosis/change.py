"""Why a measure changed from one span of time to the next: its change, divided among causes, tenants and workers.

The hit rate is cached tokens over prompt tokens, and the latency the mean time to the first token. Both are
    constant + sum of amounts / sum of weights
over requests, so their change divides exactly:

* by components (phases, miss reasons): each adds its own amount, and changes by the difference of two quotients;
* by groups (tenants, workers): a group of weight share w and own measure m adds  mean(w) * dm  because it changed, and
  dw * (mean(m) - M)  because there is more or less of it, where M is the mean of the whole measure.

All parts of a division add up to the change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Final

from router.observe.diagnosis.outcome import Outcome

HIT_RATE, LATENCY = "hit_rate", "first_token"
# A miss without a reason: the worker had to compute at least the last token, or corrected what the grant said.
_REST: Final = "rest"
# What a request waited for and did not get: it is a part of what was missed.
_FETCH_FAILED: Final = "fetch_failed"
# Fewer requests than this in a span make a weak comparison.
FEW: Final = 20


@dataclass(frozen=True, slots=True)
class Part:
    """A cause's part of a change.

    `before` and `after` are what a component adds to the measure, or the own measure of a group (None without
    requests). `share_before` and `share_after` are a group's shares of the weight.
    """

    name: str
    before: float | None
    after: float | None
    change: float
    share_before: float | None = None
    share_after: float | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide a change; the parts add up to it, the largest first."""

    by: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """The measure of one span of time, None without requests, and how many requests it counts."""

    value: float | None
    requests: int
    p50: float | None = None
    p95: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What changed between two spans; `change` is None where one of them has no requests."""

    measure: str
    before: Span
    after: Span
    change: float | None
    divisions: tuple[Division, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Sample:
    """What one request adds: its weight, the amounts of its components, and its groups."""

    weight: float
    parts: Mapping[str, float]
    groups: Mapping[str, str] = field(default_factory=dict)
    alone: float = 0.0


def hit_rate_change(before: Iterable[Outcome], after: Iterable[Outcome]) -> Change:
    """Return why the share of cached prompt tokens changed, over requests that had blocks."""
    measure = _Measure(HIT_RATE, 1.0, "miss reason", ("tenant", "worker"))
    return _change(measure, _hit_samples(before), _hit_samples(after))


def latency_change(before: Iterable[Outcome], after: Iterable[Outcome]) -> Change:
    """Return why the mean time to the first token changed, over requests that had one."""
    measure = _Measure(LATENCY, 0.0, "phase", ("tenant", "worker", "miss reason"))
    return _change(measure, _latency_samples(before), _latency_samples(after))


@dataclass(frozen=True, slots=True)
class _Measure:
    name: str
    constant: float
    component: str
    groups: tuple[str, ...]


def _hit_samples(span: Iterable[Outcome]) -> list[_Sample]:
    return [_hit_sample(each) for each in span if each.admissions and each.prompt_tokens]


def _latency_samples(span: Iterable[Outcome]) -> list[_Sample]:
    return [_latency_sample(each) for each in span if each.has_first_token]


def _hit_sample(outcome: Outcome) -> _Sample:
    missed = max(0, outcome.prompt_tokens - outcome.cached_tokens)
    failed = min(missed, outcome.unfetched_blocks * outcome.block_size)
    parts = {outcome.miss or _REST: -float(missed - failed)} | ({_FETCH_FAILED: -float(failed)} if failed else {})
    return _Sample(float(outcome.prompt_tokens), parts, _groups(outcome))


def _latency_sample(outcome: Outcome) -> _Sample:
    return _Sample(1.0, dict(outcome.before), _groups(outcome), outcome.first_token_s)


def _groups(outcome: Outcome) -> dict[str, str]:
    return {"tenant": outcome.tenant, "worker": outcome.worker, "miss reason": outcome.miss or _REST}


def _change(measure: _Measure, before: Sequence[_Sample], after: Sequence[_Sample]) -> Change:
    constant = measure.constant
    first, second = _span(before, constant), _span(after, constant)
    if first.value is None or second.value is None:
        return Change(measure.name, first, second, None, ())
    divisions = [Division(measure.component, _components(before, after))]
    divisions += [Division(name, _by_group(before, after, constant, name)) for name in measure.groups]
    several = tuple([each for each in divisions if each.by == measure.component or len(each.parts) > 1])
    return Change(measure.name, first, second, second.value - first.value, several)


def _span(samples: Sequence[_Sample], constant: float) -> Span:
    if not samples:
        return Span(None, 0)
    seconds = sorted(each.alone for each in samples)
    timed = constant == 0.0
    p50, p95 = (quantile(seconds, share) if timed else None for share in (0.5, 0.95))
    return Span(_value(samples, constant), len(samples), p50, p95)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of all is not above."""
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


def _value(samples: Sequence[_Sample], constant: float) -> float:
    amounts = fsum(amount for each in samples for amount in each.parts.values())
    return constant + amounts / _weight(samples)


def _components(before: Sequence[_Sample], after: Sequence[_Sample]) -> tuple[Part, ...]:
    added = [_added(samples) for samples in (before, after)]
    names = sorted(added[0].keys() | added[1].keys())
    pairs = [(name, added[0].get(name, 0.0), added[1].get(name, 0.0)) for name in names]
    return _largest_first(Part(name, first, second, second - first) for name, first, second in pairs)


def _added(samples: Sequence[_Sample]) -> dict[str, float]:
    amounts: dict[str, list[float]] = {}
    for each in samples:
        for name, amount in each.parts.items():
            amounts.setdefault(name, []).append(amount)
    weight = _weight(samples)
    return {name: fsum(found) / weight for name, found in amounts.items()}


def _by_group(before: Sequence[_Sample], after: Sequence[_Sample], constant: float, by: str) -> tuple[Part, ...]:
    middle = (_value(before, constant) + _value(after, constant)) / 2
    first, second = _split(before, by), _split(after, by)
    whole_before, whole_after = _weight(before), _weight(after)
    parts = []
    for name in first.keys() | second.keys():
        old, new = first.get(name, []), second.get(name, [])
        shares = _weight(old) / whole_before, _weight(new) / whole_after
        values = _value(old, constant) if old else None, _value(new, constant) if new else None
        parts.append(Part(name, *values, _group_change(shares, values, middle), *shares))
    return _largest_first(parts)


def _weight(samples: Iterable[_Sample]) -> float:
    return fsum(each.weight for each in samples)


def _group_change(shares: tuple[float, float], values: tuple[float | None, float | None], middle: float) -> float:
    """Return what a group adds to the change; one that is new or gone changes by its weight alone."""
    known = [each for each in values if each is not None]
    first, second = known[0], known[-1]
    own = (shares[0] + shares[1]) / 2 * (second - first)
    return own + (shares[1] - shares[0]) * ((first + second) / 2 - middle)


def _split(samples: Sequence[_Sample], by: str) -> dict[str, list[_Sample]]:
    found: dict[str, list[_Sample]] = {}
    for each in samples:
        found.setdefault(each.groups[by], []).append(each)
    return found


def _largest_first(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda each: (-abs(each.change), each.name)))
