"""The choice of a worker: one continuous cost in predicted seconds, filters with reasons, and a record of all of it.

    cost(w) = queue_delay(w) + prefill(prompt - hit(w)) + decode_pressure(w)

    queue_delay      prompt tokens ahead, the steps in flight, and the wait for a place in the batch or for blocks
    prefill          uncached prompt tokens, and the step that samples the first token
    decode_pressure  the steps of the expected output, each as slow as a batch with this request in it

There is no switch between affinity and balance. A hit is worth the prefill that it saves, and a busy worker costs more
by its queue and its slower steps.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.clock import Clock
from common.lease import blocks_needed
from common.types import Candidate, Decision, DecisionKind
from router.core.shortlist import named, shortlist, unnamed
from router.core.worker_model import WorkerModel
from router.core.worker_wait import departures, steps_ahead, wait_for_room

# Costs closer than this count as equal: signals are no more precise, and a tie must not favour the first worker.
TIE_SECONDS = 1e-4
# Sequences at a worker per place in its batch: some wait there, so that the batch stays full between two messages.
OVERCOMMIT = 2
# Times as many for tenants below their share: the places of others do not count for them.
ENTITLED = 2
# Assumed until the first worker has been measured.
PRIOR_PREFILL_TOKEN_S = 1e-4
PRIOR_STEP_S = 0.02
PRIOR_OUTPUT_TOKENS = 64.0
# A worker's own rates weigh half when other workers were measured so many seconds later; see _trust.
TRUST_HALF_LIFE_S = 10.0
# What was measured longer ago refuses no request for its deadline: a stay of sequences, and rates of an idle worker.
OLD_S = 30.0
# Added for a worker without its KV manager, which grants no blocks: about the time of a restart of the manager.
MANAGER_AWAY_S = 1.0


class Outcome(StrEnum):
    PLACED = "placed"
    WAIT = "wait"
    NO_WORKER = "no_worker"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Sequences to place at one worker. `prompt_tokens` include output of an earlier run.

    `max_len` bounds prompt and output of one sequence.
    """

    request_id: str
    prompt_tokens: int
    max_len: int
    max_tokens: int
    sequences: int = 1
    traceparent: str = ""
    # Whether the tenant is below its share: its sequences may go to a worker whose places others hold.
    entitled: bool = False
    # Workers that are not to serve it.
    avoids: frozenset[str] = frozenset()
    # Seconds until its deadline.
    left: float | None = None
    # Whether it passes what is before it at a worker, so that its own work alone can make it late.
    passes: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A routing decision; `worker` is None unless the outcome is PLACED.

    `first_token_s` is in predicted seconds. `known_s` is its part that may refuse a request for its deadline, `work_s`
    that without what is before the request at the worker.
    """

    outcome: Outcome
    decision: Decision
    worker: WorkerModel | None = None
    hit_blocks: int = 0
    first_token_s: float = 0.0
    known_s: float = 0.0
    work_s: float = 0.0

    def counted_s(self, passes: bool) -> float:
        """Return the seconds that may refuse a request for its deadline; it may pass what is before it."""
        return self.work_s if passes else self.known_s


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """Predicted seconds. `known_delay` is the part of `queue_delay` that was measured lately.

    An idle worker whose rates are old is `unproven`: it would get no more requests, and so never be measured again, if
    one bad rate refused them all for their deadlines.
    """

    worker: WorkerModel
    hit_blocks: int
    trust: float
    queue_delay: float
    known_delay: float
    prefill: float
    decode_pressure: float
    unproven: bool

    @property
    def work_s(self) -> float:
        return 0.0 if self.unproven else self.prefill

    @property
    def known_s(self) -> float:
        return 0.0 if self.unproven else self.known_delay + self.prefill

    @property
    def total(self) -> float:
        return self.queue_delay + self.prefill + self.decode_pressure

    def counted_s(self, placement: PlacementRequest) -> float:
        """Return the seconds to the first token that may make the request too late here."""
        return self.work_s if placement.passes else self.known_s

    def too_late(self, left: float, counted: float) -> Candidate:
        """Return the record of a worker that would miss the deadline where another one keeps it."""
        reason = f"too late: {left:.3f} s are left, and the first token is predicted in {counted:.3f} s"
        figures = (("hit_blocks", float(self.hit_blocks)),) if self.hit_blocks else ()
        return Candidate(self.worker.worker_id, rejected=reason, figures=figures)

    def candidate(self) -> Candidate:
        terms = (
            ("queue_delay", self.queue_delay),
            ("prefill", self.prefill),
            ("decode_pressure", self.decode_pressure),
        )
        figures = [("hit_blocks", float(self.hit_blocks))]
        if self.trust < 1.0:
            figures.append(("trust", self.trust))
        return Candidate(self.worker.worker_id, self.total, terms, figures=tuple(figures))


class Router:
    """Chooses workers. `seed` breaks ties, and draws the workers to price where there are many (`shortlist.py`).

    With a decision's id it gives the same pick again.
    """

    def __init__(self, clock: Clock, new_id: Callable[[], str], seed: int) -> None:
        self._clock, self._new_id, self._seed = clock, new_id, seed

    def route(
        self,
        placement: PlacementRequest,
        workers: Sequence[WorkerModel],
        hits: Mapping[str, int],
        absent: Collection[tuple[str, str]] = (),
        decision_id: str = "",
    ) -> Choice:
        """Return the choice among `workers`; `hits` are blocks by worker id, `absent` names of others with reasons.

        The decision has the next id, or the one that is given.
        """
        now, decision_id = self._clock.monotonic(), decision_id or self._new_id()
        seen = shortlist(workers, hits, self._drawn(decision_id))
        found = _Priced.of(placement, seen, hits, now)
        if not found.costs and len(seen) < len(workers):
            # Nearly all are full: one of the others may have room, and of many with room a few are enough.
            verdicts = [verdict(each, placement, now)[0] for each in workers]
            room = [each for each, outcome in zip(workers, verdicts, strict=True) if outcome is Outcome.PLACED]
            if room:
                seen = shortlist(room, hits, self._drawn(decision_id))
                found = _Priced.of(placement, seen, hits, now)
            found.verdicts.update(verdicts)
        if found.costs and not found.has_one_in_time(placement) and len(seen) < len(workers):
            seen = workers
            found = _Priced.of(placement, seen, hits, now)
        found.leave_out_late(placement)
        best, tied = self._pick(found.costs, decision_id) if found.costs else (None, 0)
        outcome = next((each for each in _BEST_FIRST if each in found.verdicts), Outcome.NO_WORKER)
        chosen = best.worker.worker_id if best else outcome.value
        candidates = [cost.candidate() for cost in found.costs] + found.out
        kept = (*named(candidates, chosen), *(Candidate(name, rejected=reason) for name, reason in absent))
        names = {each.name for each in kept}
        decision = Decision(
            decision_id=decision_id,
            kind=DecisionKind.ROUTING,
            time_ns=self._clock.time_ns(),
            chosen=chosen,
            request_id=placement.request_id,
            candidates=kept,
            signal_ages=tuple(_ages([worker for worker in seen if worker.worker_id in names], now)),
            figures=(
                ("prompt_tokens", float(placement.prompt_tokens)),
                ("tied", float(tied)),
                ("seed", float(self._seed)),
                *unnamed(candidates, kept, len(workers)),
            ),
            traceparent=placement.traceparent,
            worker=best.worker.worker_id if best else "",
        )
        if best is None:
            return Choice(outcome, decision)
        first_token_s = best.queue_delay + best.prefill
        return Choice(outcome, decision, best.worker, best.hit_blocks, first_token_s, best.known_s, best.work_s)

    def _pick(self, costs: list[WorkerCost], decision_id: str) -> tuple[WorkerCost, int]:
        """Return the cheapest worker, or one of those that tie with it at random, and how many tie."""
        cheapest = min(cost.total for cost in costs)
        tied = [cost for cost in costs if cost.total <= cheapest + TIE_SECONDS]
        return tied[self._drawn(decision_id) % len(tied)], len(tied)

    def _drawn(self, decision_id: str) -> int:
        """Return a number that is random from one decision to the next, and the same for one decision."""
        return zlib.crc32(f"{self._seed}:{decision_id}".encode())


def places_of(worker: WorkerModel) -> int:
    """Return how many sequences a worker may have, those that wait there included."""
    return OVERCOMMIT * worker.capacity.max_num_seqs


def must_wait(worker: WorkerModel, placement: PlacementRequest, now: float) -> bool:
    """Return whether a worker could take the request later, and not now: too many sequences are there."""
    return verdict(worker, placement, now)[0] is Outcome.WAIT


def _ages(workers: Sequence[WorkerModel], now: float) -> Iterator[tuple[str, float]]:
    """Yield the age of each signal that enters the costs; assumed rates have no age."""
    for worker in workers:
        yield f"{worker.worker_id}.heartbeat", now - worker.heartbeat_at
        if worker.shown_at > float("-inf"):
            yield f"{worker.worker_id}.rates", now - worker.shown_at


TOO_LARGE = "too large"
"""How the reason begins of a worker that could never hold the request; the request's sizes follow."""
_BEST_FIRST = (Outcome.PLACED, Outcome.WAIT, Outcome.NO_WORKER, Outcome.TOO_LARGE)


def verdict(worker: WorkerModel, placement: PlacementRequest, now: float) -> tuple[Outcome, str]:
    """Return PLACED when the worker may be chosen, else the outcome without it and the reason."""
    capacity = worker.capacity
    if placement.max_len > capacity.max_model_len:
        return Outcome.TOO_LARGE, f"{TOO_LARGE}: {placement.max_len} tokens of at most {capacity.max_model_len}"
    needed = blocks_needed(placement.prompt_tokens, placement.max_len, capacity.block_size, capacity.window)
    if needed > capacity.num_blocks:
        return Outcome.TOO_LARGE, f"{TOO_LARGE}: {needed} blocks of {capacity.num_blocks} in its pool"
    if worker.worker_id in placement.avoids:
        return Outcome.NO_WORKER, "another worker is wanted: it has computed the prompt"
    if trouble := worker.trouble(now):
        return Outcome.NO_WORKER, f"{trouble[0].value}: {trouble[1]}"
    limit = max(places_of(worker) * (ENTITLED if placement.entitled else 1), placement.sequences)
    if worker.sequences + placement.sequences > limit:
        return Outcome.WAIT, f"over limit: {worker.sequences} sequences of at most {limit}"
    return Outcome.PLACED, ""


def soonest_first_token(
    placement: PlacementRequest, workers: Sequence[WorkerModel], hits: Mapping[str, int], now: float, has_room: bool
) -> float:
    """Return the least known seconds to the first token at a worker that may serve it, now or later; 0: none may.

    `has_room` leaves out what is before it there: what remains is its own work. So does a worker in trouble that may
    soon be well: nobody knows when it goes on with what it has.
    """
    found, others = [], _Others.of(workers)
    for worker in workers:
        outcome = verdict(worker, placement, now)[0]
        recovers = outcome is Outcome.NO_WORKER and _may_recover(worker, placement)
        if recovers or outcome in (Outcome.PLACED, Outcome.WAIT):
            found.append(_cost(worker, placement, hits.get(worker.worker_id, 0), others, now))
            has_room = has_room or recovers
    return min((each.work_s if has_room else each.known_s for each in found), default=0.0)


def _may_recover(worker: WorkerModel, placement: PlacementRequest) -> bool:
    return worker.worker_id not in placement.avoids and not worker.drains


@dataclass(frozen=True, slots=True)
class _Priced:
    """What each worker would cost, or why it is out."""

    costs: list[WorkerCost]
    out: list[Candidate]
    verdicts: set[Outcome]

    @staticmethod
    def of(placement: PlacementRequest, workers: Sequence[WorkerModel], hits: Mapping[str, int], now: float) -> _Priced:
        found, others = _Priced([], [], set()), _Others.of(workers)
        for worker in workers:
            outcome, reason = verdict(worker, placement, now)
            found.verdicts.add(outcome)
            hit_blocks = hits.get(worker.worker_id, 0)
            if outcome is Outcome.PLACED:
                found.costs.append(_cost(worker, placement, hit_blocks, others, now))
            else:
                figures = (("hit_blocks", float(hit_blocks)),) if hit_blocks else ()
                found.out.append(Candidate(worker.worker_id, rejected=reason, figures=figures))
        return found

    def has_one_in_time(self, placement: PlacementRequest) -> bool:
        """Return whether some worker keeps the deadline, as far as that is known."""
        return placement.left is None or any(each.counted_s(placement) <= placement.left for each in self.costs)

    def leave_out_late(self, placement: PlacementRequest) -> None:
        """Leave out the workers that would miss the deadline; where all would, those that are not the soonest."""
        if placement.left is None or not self.costs:
            return
        counted = [each.counted_s(placement) for each in self.costs]
        most = max(placement.left, min(counted))
        pairs = list(zip(self.costs, counted, strict=True))
        self.out.extend(each.too_late(placement.left, seconds) for each, seconds in pairs if seconds > most)
        self.costs[:] = [each for each, seconds in pairs if seconds <= most]


@dataclass(frozen=True, slots=True)
class _Others:
    """Mean rates of all workers, assumed for a worker that has no measurements, or only old ones."""

    prefill_token: float
    step: float
    output_tokens: float
    latest: float

    @staticmethod
    def of(workers: Sequence[WorkerModel]) -> _Others:
        latest = max([worker.shown_at for worker in workers], default=float("-inf"))
        prefill, step, output = _Mean(), _Mean(), _Mean()
        for worker in workers:
            rates, trust = worker.rates, _trust(worker, latest)
            prefill.add(rates.prefill_token.value, trust)
            step.add(rates.step.predict(1), trust)
            output.add(rates.output_tokens.value, trust)
        return _Others(
            prefill.value(PRIOR_PREFILL_TOKEN_S), step.value(PRIOR_STEP_S), output.value(PRIOR_OUTPUT_TOKENS), latest
        )


def _trust(worker: WorkerModel, latest: float) -> float:
    """Return the weight of a worker's own rates against the mean of all workers.

    A worker that was disturbed while it was measured looks slow, gets no requests, and so is never measured again. Its
    own rates therefore lose half their weight with every TRUST_HALF_LIFE_S by which the latest measurement of any
    worker is newer. The worker then looks like the others and gets requests again. An idle pool forgets nothing.
    """
    if worker.shown_at == latest:
        return 1.0
    return math.pow(0.5, (latest - worker.shown_at) / TRUST_HALF_LIFE_S)


class _Mean:
    """A weighted mean of what is known."""

    __slots__ = ("_sum", "_weight")

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float | None, weight: float) -> None:
        if value is not None:
            self._sum += value * weight
            self._weight += weight

    def value(self, prior: float) -> float:
        return self._sum / self._weight if self._weight else prior


def _cost(worker: WorkerModel, placement: PlacementRequest, hit_blocks: int, others: _Others, now: float) -> WorkerCost:
    capacity, rates, trust = worker.capacity, worker.rates, _trust(worker, others.latest)
    sequences = worker.sequences + placement.sequences
    running = min(sequences, capacity.max_num_seqs)
    per_token = _believed(rates.prefill_token.value, others.prefill_token, trust)
    usual_step = others.step * (1.0 + (running - 1) / capacity.max_num_seqs)
    step = _believed(rates.step.predict(running), usual_step, trust)
    hit_blocks = min(hit_blocks, (placement.prompt_tokens - 1) // capacity.block_size)
    uncached = placement.prompt_tokens - hit_blocks * capacity.block_size
    horizon = min(float(placement.max_tokens), others.output_tokens)
    leave = departures(worker, others.output_tokens * step, worker.most_output * step)
    room = wait_for_room(worker, placement.prompt_tokens, placement.sequences, hit_blocks, leave)
    known = worker.pending_prefill_tokens * per_token
    delay = known + room + steps_ahead(worker) * step
    if rates.sequence.age(now) <= OLD_S:
        known += room
    if not worker.load.manager_attached:
        delay += MANAGER_AWAY_S
    unproven = not worker.sequences and now - worker.shown_at > OLD_S
    return WorkerCost(worker, hit_blocks, trust, delay, known, uncached * per_token + step, horizon * step, unproven)


def _believed(shown: float | None, usual: float, trust: float) -> float:
    return usual if shown is None else usual + trust * (shown - usual)
