"""The decision records of one request, sorted by what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from common.contracts.types import TENANT_CANDIDATE, Candidate, Decision, DecisionKind, ShortfallReason
from router.observe.diagnosis.outcome import Outcome, outcome_of
from router.placement.routing import OTHERS_CHANGED

RecordT = TypeVar("RecordT")

# What a manager chooses when the whole pool could not hold a sequence; the router names the limit instead.
REFUSED_BY_MANAGER: Final = "refused"


@dataclass(frozen=True, slots=True)
class Option:
    """A worker in a routing decision: its predicted seconds and their terms, its hits, or why it was left out.

    It would have fetched `fetched_blocks` from another worker.
    """

    worker: str
    cost: float | None
    terms: tuple[tuple[str, float], ...]
    hit_blocks: int
    rejected: str
    fetched_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice of a worker; `moved_because` says why the request left its last one.

    `by_others` is how what other routers told changed the choice.
    """

    time_ns: int
    worker: str
    options: tuple[Option, ...]
    moved_because: str = ""
    by_others: str = ""

    @property
    def chosen(self) -> Option | None:
        return next((each for each in self.options if each.worker == self.worker), None)


@dataclass(frozen=True, slots=True)
class Queued:
    """No worker could take the request at once: why each could not, and how many requests were before it."""

    time_ns: int
    ahead: int
    workers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds blocks that a sequence waits for: one request, or all sequences of a tenant."""

    name: str
    blocks: int
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A sequence waits for blocks or a batch slot; `head` is the request that goes before it, if any.

    One that waits for a fetch `needed` so many blocks, which come from `head`.
    """

    time_ns: int
    reason: str
    head: str
    requests: tuple[Holder, ...]
    tenants: tuple[Holder, ...]
    needed: int
    head_needed: int
    available: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A sequence got its blocks after a wait at the manager; its missing prefix was evicted for `evicted_for`.

    It lacks blocks of its prompt then (`lacking`) if it begins with a part. `passed_by` sequences of a higher priority
    were admitted while it waited. For `fetch_seconds` of its wait blocks came from elsewhere.
    """

    time_ns: int
    chosen: str
    waited: float
    evicted: int
    reasons: tuple[str, ...]
    evicted_for: str
    lacking: int = 0
    passed_by: int = 0
    fetch_seconds: float = 0.0

    @property
    def lacked(self) -> float:
        """For how long it waited for other reasons than a fetch."""
        return max(0.0, self.waited - self.fetch_seconds)


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence lost its blocks. The sealed ones of `loadable_tokens` go to host memory if they are evicted."""

    time_ns: int
    victim: str
    beneficiary: str
    reason: str
    blocks_freed: int
    tokens_lost: int
    loadable_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """What the client was told beside the answer, when the request was admitted."""

    time_ns: int
    words: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request was refused at its arrival, or its sequence by the manager; `subject` is the limit."""

    time_ns: int
    subject: str
    words: str


@dataclass(frozen=True, slots=True)
class RequestHistory:
    """All records of one request. `unread` names the services whose records could not be read, with the reason."""

    request_id: str
    outcome: Outcome | None = None
    began_ns: int = 0
    tenant: str = ""
    runs: int = 0
    notes: tuple[Note, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    placements: tuple[Placement, ...] = ()
    queued: tuple[Queued, ...] = ()
    shortfalls: tuple[Shortfall, ...] = ()
    grants: tuple[Grant, ...] = ()
    lost_to: tuple[Preemption, ...] = ()
    gained_from: tuple[Preemption, ...] = ()
    unread: tuple[str, ...] = field(default=())

    @property
    def lacks(self) -> tuple[Shortfall, ...]:
        """What it waited for, but for fetches."""
        return tuple([each for each in self.shortfalls if each.reason != ShortfallReason.FETCH])

    @property
    def unit(self) -> str:
        """What its pool counts, as its outcome says."""
        return "page" if self.outcome is not None and self.outcome.counts_pages else "block"


def request_history(request_id: str, decisions: Iterable[Decision], unread: Iterable[str] = ()) -> RequestHistory:
    """Return the history of a request from records in any order. A record that came twice counts once."""
    found = {each.decision_id: each for each in decisions}
    records = _last_run(request_id, sorted(found.values(), key=lambda each: (each.time_ns, each.decision_id)))
    own = [each for each in records if each.request_id == request_id]
    outcomes = [outcome_of(each) for each in own if each.kind is DecisionKind.OUTCOME]
    return RequestHistory(
        request_id=request_id,
        outcome=outcomes[-1] if outcomes else None,
        began_ns=min((each.time_ns for each in own), default=0),
        tenant=next((each.tenant for each in own if each.tenant), ""),
        runs=sum(each.request_id == request_id and _ends(each) for each in found.values()),
        notes=tuple(
            [Note(each.time_ns, words) for each in own if each.kind is DecisionKind.ADMISSION for words in each.reasons]
        ),
        refusals=_all(own, (DecisionKind.REJECTION,), _refusal),
        placements=_all(own, (DecisionKind.ROUTING, DecisionKind.MIGRATION), _placement),
        queued=_all(own, (DecisionKind.QUEUED,), _queued),
        shortfalls=_all(own, (DecisionKind.SHORTFALL,), _shortfall),
        grants=_all(own, (DecisionKind.GRANT,), _grant),
        lost_to=tuple([_preemption(each) for each in _preemptions(records) if each.victim == request_id]),
        gained_from=tuple([_preemption(each) for each in _preemptions(records) if each.beneficiary == request_id]),
        unread=tuple(unread),
    )


def _ends(decision: Decision) -> bool:
    """Return whether a request has no further record of its own: it ended, or the router refused it."""
    refused = decision.kind is DecisionKind.REJECTION and decision.chosen != REFUSED_BY_MANAGER
    return refused or decision.kind is DecisionKind.OUTCOME


def _last_run(request_id: str, records: list[Decision]) -> list[Decision]:
    """Return the records after the last but one end: a client may use one id for several requests in turn."""
    ends = [at for at, each in enumerate(records) if each.request_id == request_id and _ends(each)]
    return records[ends[-2] + 1 :] if len(ends) > 1 else records


def _all(
    records: Iterable[Decision], kinds: tuple[DecisionKind, ...], make: Callable[[Decision], RecordT]
) -> tuple[RecordT, ...]:
    return tuple([make(each) for each in records if each.kind in kinds])


def _preemptions(records: Iterable[Decision]) -> list[Decision]:
    return [each for each in records if each.kind is DecisionKind.PREEMPTION]


def _number(decision: Decision | Candidate, name: str) -> int:
    return int(dict(decision.figures).get(name, 0.0))


def _first(reasons: tuple[str, ...]) -> str:
    return reasons[0] if reasons else ""


def _refusal(decision: Decision) -> Refusal:
    return Refusal(decision.time_ns, decision.chosen, "; ".join(decision.reasons))


def _placement(decision: Decision) -> Placement:
    options = tuple(
        [
            Option(
                each.name,
                each.cost,
                each.terms,
                _number(each, "hit_blocks"),
                each.rejected,
                _number(each, "fetched_blocks"),
            )
            for each in decision.candidates
        ]
    )
    moved = _first(decision.reasons) if decision.kind is DecisionKind.MIGRATION else ""
    by_others = next((each for each in decision.reasons if each.startswith(OTHERS_CHANGED)), "")
    return Placement(decision.time_ns, decision.chosen, options, moved, by_others)


def _queued(decision: Decision) -> Queued:
    workers = tuple([(each.name, each.rejected) for each in decision.candidates if each.rejected])
    return Queued(decision.time_ns, _number(decision, "ahead"), workers)


def _shortfall(decision: Decision) -> Shortfall:
    requests, tenants = [], []
    for each in decision.candidates:
        terms = dict(each.terms)
        holder = Holder(each.name, int(terms.get("blocks", 0.0)), int(terms.get("sequences", 1.0)))
        if each.name.startswith(TENANT_CANDIDATE):
            tenants.append(Holder(each.name.removeprefix(TENANT_CANDIDATE), holder.blocks, holder.sequences))
        else:
            requests.append(holder)
    names = ("needed", "head_needed", "available", "num_blocks")
    numbers = (_number(decision, name) for name in names)
    reason = _first(decision.reasons)
    return Shortfall(decision.time_ns, reason, decision.beneficiary, tuple(requests), tuple(tenants), *numbers)


def _grant(decision: Decision) -> Grant:
    waited = dict(decision.figures).get("waited_seconds", 0.0)
    return Grant(
        time_ns=decision.time_ns,
        chosen=decision.chosen,
        waited=waited,
        evicted=_number(decision, "evicted"),
        reasons=decision.reasons,
        evicted_for=decision.beneficiary,
        lacking=_number(decision, "lacking_blocks"),
        passed_by=_number(decision, "passed_by"),
        fetch_seconds=dict(decision.figures).get("fetch_seconds", 0.0),
    )


def _preemption(decision: Decision) -> Preemption:
    numbers = (_number(decision, name) for name in ("blocks_freed", "tokens_lost", "loadable_tokens"))
    reason = _first(decision.reasons)
    return Preemption(decision.time_ns, decision.victim, decision.beneficiary, reason, *numbers)
