"""The spans of a request from its decision records, after its end: the trace of one that was not sampled.

request                    the whole request
  reading                  the router's work on the request before it waits for a worker
  queue > lookup           until a worker was chosen
  constraint               the compilation of its constraint, by router and worker
  router still             what of the time before the first token the router did not run
  on the way               messages between router and worker
  worker still             what its worker did not run, or its steps took many times their usual
  reserve                  the wait for blocks, as the KV manager decided on it
  fetch                    the wait for blocks that came from the worker's disk or from another worker
  without manager          what of that wait its worker had no KV manager that answered
  prefill wait, prefill    what the worker did until the first token
  lacking blocks           what of that time it had no block for its next tokens
  decode                   from the first token on
  preempted, moved         what interrupted it, from the record of each kind on
  router still, on the way what of the time after the first token the worker had nothing to do with
  sending, client          the router's work on the output after the last token, and the client's reading

All seconds are those of the record of the end, by phase. Phases before the first token follow one another in this
order, and so do those after it; those that interrupted a request begin with their record, and have the sum of their
seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from common.contracts.types import Decision, DecisionKind
from router.observe.diagnosis.outcome import Outcome, Phase

ROUTER, MANAGER, WORKER = "router", "kvmanager", "gpuworker"
_NS: Final = 1_000_000_000
# The place of the first span, which is the parent of most.
_ROOT: Final = 0
# Phases in the order in which a request passes them, with the names of their spans in sampled traces.
_PHASES: Final = {
    Phase.READING: ("reading", ROUTER),
    Phase.QUEUE: ("queue", ROUTER),
    Phase.PREFILL_ELSEWHERE: ("prefill elsewhere", WORKER),
    Phase.ADAPTER: ("adapter load", WORKER),
    Phase.CONSTRAINT: ("constraint", WORKER),
    Phase.ROUTER_STILL: ("router still", ROUTER),
    Phase.ON_THE_WAY: ("on the way", ROUTER),
    Phase.WORKER_STILL: ("worker still", WORKER),
    Phase.BLOCKS: ("reserve", MANAGER),
    Phase.FETCH: ("fetch", WORKER),
    Phase.MANAGER_AWAY: ("without manager", WORKER),
    Phase.PREFILL_WAIT: ("prefill wait", WORKER),
    Phase.LOADING: ("load", WORKER),
    Phase.PREFILL: ("prefill", WORKER),
    Phase.STALLED: ("lacking blocks", WORKER),
    Phase.DECODE: ("decode", WORKER),
    Phase.SENDING: ("sending", ROUTER),
    Phase.CLIENT: ("client", ROUTER),
}
# Phases after the first token that are not part of the decoding, in the order of their spans.
_BESIDE_DECODE: Final = (Phase.ROUTER_STILL, Phase.ON_THE_WAY, Phase.SENDING, Phase.CLIENT)
_INTERRUPTIONS: Final = {
    Phase.PREEMPTED: ("preempted", MANAGER, DecisionKind.PREEMPTION),
    Phase.MOVED: ("moved", ROUTER, DecisionKind.MIGRATION),
}
# The span that has the decisions of a kind, if the request has it.
_PLACES: Final = {
    DecisionKind.ADMISSION: "queue",
    DecisionKind.QUEUED: "queue",
    DecisionKind.ROUTING: "queue",
    DecisionKind.MIGRATION: "moved",
    DecisionKind.SHORTFALL: "reserve",
    DecisionKind.GRANT: "reserve",
    DecisionKind.EVICTION: "reserve",
    DecisionKind.PREEMPTION: "reserve",
}


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended, with the records that concern it. A refused one has no outcome; times are in ns."""

    request_id: str
    began_ns: int
    ended_ns: int
    outcome: Outcome | None
    failure: str = ""
    decisions: tuple[Decision, ...] = ()


@dataclass(slots=True)
class RecordSpan:
    """A span; `parent` is the place of its parent among the spans, None for the first one."""

    name: str
    service: str
    start_ns: int
    end_ns: int
    parent: int | None = _ROOT
    failure: str = ""
    decisions: list[Decision] = field(default_factory=list)


def spans_of(ended: EndedRequest) -> list[RecordSpan]:
    """Return the spans, the request's first."""
    own = sorted(_own(ended), key=lambda each: each.time_ns)
    root = RecordSpan("request", ROUTER, ended.began_ns, ended.ended_ns, None, ended.failure)
    spans = [root]
    if ended.outcome is None:
        root.decisions = own
        return spans
    first_ns = _before_first_token(spans, ended.outcome)
    _after_first_token(spans, ended.outcome, first_ns)
    _interruptions(spans, ended.outcome, [each for each in own if each.beneficiary != ended.request_id])
    _attach(spans, own)
    return spans


def _own(ended: EndedRequest) -> Iterator[Decision]:
    """Yield the decisions on the request itself, each once. The end is not a decision, and may name other requests."""
    seen: set[str] = set()
    for each in ended.decisions:
        concerns = each.request_id == ended.request_id or each.kind is DecisionKind.PREEMPTION
        if concerns and each.kind is not DecisionKind.OUTCOME and each.decision_id not in seen:
            seen.add(each.decision_id)
            yield each


def _before_first_token(spans: list[RecordSpan], outcome: Outcome) -> int:
    """Add the phases before the first token; return when it came, or when the request ended without one."""
    seconds, at = dict(outcome.before), spans[_ROOT].start_ns
    lookup = _ns(seconds.get(Phase.LOOKUP, 0.0))
    for phase, (name, service) in _PHASES.items():
        took = _ns(seconds.get(phase, 0.0)) + (lookup if phase is Phase.QUEUE else 0)
        if not took:
            continue
        spans.append(RecordSpan(name, service, at, at + took))
        at += took
        if phase is Phase.QUEUE and lookup:
            spans.append(RecordSpan("lookup", ROUTER, at - lookup, at, len(spans) - 1))
    return spans[_ROOT].start_ns + _ns(outcome.first_token_s)


def _after_first_token(spans: list[RecordSpan], outcome: Outcome, at: int) -> None:
    """Add one span of the decoding with its interruptions, and what router, network and client took after it."""
    if not outcome.has_first_token:
        return
    seconds = dict(outcome.after)
    beside = [(phase, took) for phase in _BESIDE_DECODE if (took := _ns(seconds.get(phase, 0.0)))]
    end = at + _ns(outcome.total_s - outcome.first_token_s) - sum(took for _, took in beside)
    spans.append(RecordSpan("decode", WORKER, at, end))
    for phase, took in beside:
        name, service = _PHASES[phase]
        spans.append(RecordSpan(name, service, end, end + took))
        end += took


def _interruptions(spans: list[RecordSpan], outcome: Outcome, own: Iterable[Decision]) -> None:
    for phase, (name, service, kind) in _INTERRUPTIONS.items():
        seconds = sum(dict(part).get(phase, 0.0) for part in (outcome.before, outcome.after))
        if seconds:
            latest = spans[_ROOT].end_ns - _ns(seconds)
            start = next((each.time_ns for each in own if each.kind is kind), latest)
            spans.append(RecordSpan(name, service, start, start + _ns(seconds)))


def _attach(spans: list[RecordSpan], own: Iterable[Decision]) -> None:
    """Hand each decision to the first span of its kind; the whole request has the others."""
    named = {span.name: span for span in reversed(spans)}
    for each in own:
        named.get(_PLACES.get(each.kind, ""), spans[_ROOT]).decisions.append(each)


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
