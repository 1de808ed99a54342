"""The choice of a worker: a continuous cost in predicted seconds, filters with reasons (`verdict`), and a record.

    cost(w) = queue_delay(w) + adapter(w) + fetch(w) + prefill(prompt - hit(w) - fetched(w)) + decode_pressure(w)
              + unseen(w)

    queue_delay      prompt tokens ahead, the steps in flight, and the wait for a batch slot or for blocks
    adapter          the load of the request's adapter, where w does not have it in memory
    fetch            blocks that w lacks and another worker has, where that pays (`fetches.py`); often nothing
    prefill          uncached prompt tokens, and the step that samples the first token
    decode_pressure  the steps of the expected output, each as slow as a batch with this request in it
    unseen           of a worker that is at home with another router: one such request, which that may just be sending

`Dispatcher._hits` finds hit(w). There is no switch between affinity and balance: a hit is worth the prefill, or the
fetch, that it saves, and a busy worker costs more by its queue and its slower steps.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from common.contracts.clock import Clock
from common.contracts.types import Candidate, Decision, DecisionKind
from router.placement.fetches import FetchRates, Held, PricedFetch, price_fetch, usual_rates
from router.placement.placement_request import PlacementOutcome, PlacementRequest, may_recover, too_large, verdict
from router.placement.worker_model import Capacity, WorkerModel

MOST_PRICED = 64
MOST_HOLDERS = 16
# Of many workers at home with this router.
MOST_AT_HOME = 32
# Seconds between two looks at all workers for a deadline. A heartbeat may be as old.
LOOK_EVERY_S = 0.1
# Of the candidates with a cost, and of those that were filtered out.
MOST_NAMED = 8


def is_home(worker: WorkerModel) -> bool:
    """Return whether a worker is at home with this router, or with none."""
    return worker.share is None or worker.share.home


# The workers that a routing decision prices, and those that its record names: all of a few, some of many.
# A price costs ten microseconds, so a thousand of them would cost more than the request. Above MOST_PRICED workers
# those with the longest hits are priced, and others that are drawn at random: the cheapest of d drawn ones has on
# average the rank n / (d + 1), and routers that draw differently do not all run to one worker (Mitzenmacher, "The
# Power of Two Choices in Randomized Load Balancing", 2001).
def shortlist(
    workers: Sequence[WorkerModel], hits: Mapping[str, int], seed: int, at_home: Sequence[int] = ()
) -> Sequence[WorkerModel]:
    """Return the workers to price, in the given order; `hits` are blocks by worker id.

    `at_home` are the places of those that are at home with this router, where others have homes too.
    """
    if len(workers) <= MOST_PRICED:
        return workers
    holders = set[int]()
    if hits:
        held = [(hits[worker.worker_id], place) for place, worker in enumerate(workers) if worker.worker_id in hits]
        holders = {place for _, place in heapq.nlargest(MOST_HOLDERS, held)}
    rng, found = random.Random(seed), holders
    if at_home:
        found = holders.union(at_home if len(at_home) <= MOST_AT_HOME else rng.sample(at_home, MOST_AT_HOME))
    drawn = rng.sample(range(len(workers)), MOST_PRICED - len(found))
    return [workers[place] for place in sorted(found.union(drawn))]


def places_at_home(workers: Sequence[WorkerModel]) -> Sequence[int]:
    """Return the places of the workers that are at home with this router; none where no other router has work."""
    found = [place for place, worker in enumerate(workers) if is_home(worker)]
    return found if len(found) < len(workers) else ()


def named(candidates: Sequence[Candidate], chosen: str) -> tuple[Candidate, ...]:
    """Return the candidates that a record names: the chosen one, the cheapest, the best holder, some filtered out."""
    if len(candidates) <= MOST_NAMED:
        return tuple(candidates)
    priced = [each for each in candidates if each.cost is not None]
    out = [each for each in candidates if each.cost is None]
    kept = {each.name for each in heapq.nsmallest(MOST_NAMED, priced, key=lambda each: each.cost or 0.0)}
    kept |= {each.name for each in heapq.nlargest(MOST_NAMED, out, key=_hit_blocks)}
    kept |= {chosen, max(candidates, key=_hit_blocks).name}
    return tuple([each for each in candidates if each.name in kept])


def _hit_blocks(candidate: Candidate) -> float:
    return dict(candidate.figures).get("hit_blocks", 0.0)


def unnamed(candidates: Sequence[Candidate], kept: Sequence[Candidate], workers: int) -> Iterator[tuple[str, float]]:
    """Yield counts of the workers that a record does not name: not priced, dearer, and filtered out by reason."""
    if len(candidates) < workers:
        yield "not_priced", float(workers - len(candidates))
    names = {each.name for each in kept}
    rest = [each for each in candidates if each.name not in names]
    counts = Counter(each.rejected.partition(":")[0] if each.rejected else "dearer" for each in rest)
    for reason, count in sorted(counts.items()):
        yield f"more_{reason.replace(' ', '_')}", float(count)


# Lower bounds of the seconds to a first token, of all of many workers, from one look at them.
# A deadline that none of the priced workers keeps asks for all the others, and a client may send many such
# deadlines. To price a worker costs ten microseconds; to compare a bound costs less than one. The look is at no
# request in particular: what one client asks changes nothing for the others. So the bound has what is before any
# request, and the request's own work at the worker's rates. A request that needs more slots or blocks may have to
# wait for longer than its bound says.
@dataclass(frozen=True, slots=True)
class LeastTime:
    """Of the smallest request at one worker: seconds before it, of each prompt token, and of the step that samples."""

    worker: WorkerModel
    before_s: float
    token_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Pairs of least seconds to the first token and worker ids: with what is before a request there, and without."""

    full: Sequence[tuple[float, str]]
    work: Sequence[tuple[float, str]]
    recovers: bool
    """Whether a worker in trouble may soon be well, and serve the request."""

    def soonest(self) -> frozenset[str]:
        """Return the ids of those with the lowest bounds of both kinds."""
        half = MOST_PRICED // 2
        return frozenset(name for pairs in (self.full, self.work) for _, name in heapq.nsmallest(half, pairs))

    def least_s(self, but: Collection[str], passes: bool) -> float:
        """Return the least bound of the other workers; infinity where there is none."""
        pairs = self.work if passes else self.full
        return min((seconds for seconds, name in pairs if name not in but), default=math.inf)


class LeastTimes:
    """What the last look at all workers showed. It counts for `LOOK_EVERY_S`."""

    def __init__(self) -> None:
        self._looked_at, self._workers = float("-inf"), 0
        self._capacities: list[Capacity] = []
        # By worker id: seconds before a request, of a prompt token, of a step, and the place of its capacity.
        self._times: dict[str, tuple[float, float, float, int]] = {}
        # Those in trouble, and which of them may soon be well.
        self._away: dict[str, bool] = {}

    def is_old(self, workers: int, now: float) -> bool:
        """Return whether the last look is too old, or was at fewer workers."""
        return now - self._looked_at >= LOOK_EVERY_S or workers > self._workers

    def keep(self, times: Iterable[LeastTime], away: Iterable[WorkerModel], workers: int, now: float) -> None:
        """Keep a look at so many workers. Those that are `away` can serve nothing now."""
        places = dict[Capacity, int]()
        self._times = {
            each.worker.worker_id: (
                each.before_s,
                each.token_s,
                each.step_s,
                places.setdefault(each.worker.capacity, len(places)),
            )
            for each in times
        }
        self._away = {each.worker_id: not each.drains for each in away}
        self._capacities, self._looked_at, self._workers = list(places), now, workers

    def bounds(
        self,
        workers: Sequence[WorkerModel],
        hits: Mapping[str, int],
        prompt_tokens: int,
        avoids: Collection[str],
        fits: Callable[[Capacity], bool],
        held_blocks: int = 0,
    ) -> Bounds:
        """Return the bounds of a request at those of the workers that it `fits`; 0 for workers that are new.

        So many blocks are taken to be fetched in no time where they can be.
        """
        fitting = [fits(each) for each in self._capacities]
        sizes = [*(each.block_size for each in self._capacities), 1]  # the last one is of workers that are new
        free = [*(held_blocks if each.fetches_blocks else 0 for each in self._capacities), 0]
        full, work = list[tuple[float, str]](), list[tuple[float, str]]()
        for worker in workers:
            name = worker.worker_id
            if name in self._away or name in avoids:
                continue
            before_s, token_s, step_s, place = self._times.get(name, _NEW)
            if place >= 0 and not fitting[place]:
                continue
            blocks = max(hits.get(name, 0), free[place]) if hits else 0
            cached = min(blocks, (prompt_tokens - 1) // sizes[place]) * sizes[place] if blocks else 0
            own = (prompt_tokens - cached) * token_s + step_s
            work.append((own, name))
            full.append((before_s + own, name))
        return Bounds(full, work, self._recovers(workers, avoids, fits))

    def _recovers(
        self, workers: Sequence[WorkerModel], avoids: Collection[str], fits: Callable[[Capacity], bool]
    ) -> bool:
        if not any(self._away.values()):
            return False
        return any(
            self._away.get(each.worker_id) and each.worker_id not in avoids and fits(each.capacity) for each in workers
        )


_NEW = (0.0, 0.0, 0.0, -1)


# Assumed until the first worker has been measured.
PRIOR_PREFILL_TOKEN_S = 1e-4
PRIOR_STEP_S = 0.02
PRIOR_OUTPUT_TOKENS = 64.0
# A worker's own rates weigh half when other workers were measured so many seconds later; see `trust_in`.
TRUST_HALF_LIFE_S = 10.0


# The rates that are assumed for a worker: its own, those of all workers where they are newer, or priors.
@dataclass(frozen=True, slots=True)
class UsualRates:
    """Mean rates of all workers, assumed for a worker that has no measurements, or only old ones."""

    prefill_token: float
    step: float
    output_tokens: float
    latest: float

    @staticmethod
    def of(workers: Sequence[WorkerModel]) -> UsualRates:
        latest = max([worker.shown_at for worker in workers], default=float("-inf"))
        prefill, step, output = _Mean(), _Mean(), _Mean()
        for worker in workers:
            rates, trust = worker.rates, trust_in(worker, latest)
            prefill.add(rates.prefill_token.value, trust)
            step.add(rates.step.predict(1), trust)
            output.add(rates.output_tokens.value, trust)
        return UsualRates(
            prefill.value(PRIOR_PREFILL_TOKEN_S), step.value(PRIOR_STEP_S), output.value(PRIOR_OUTPUT_TOKENS), latest
        )


def trust_in(worker: WorkerModel, latest: float) -> float:
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


def believed(shown: float | None, usual: float, trust: float) -> float:
    """Return a rate between the one that a worker showed, if any, and the usual one."""
    return usual if shown is None else usual + trust * (shown - usual)


# The rest of the step that runs, which is half of it in the mean, and the step that is planned while that runs.
_STEPS_AHEAD: Final = 1.5
# With a measured stay of 0 s sequences would leave infinitely fast.
_LEAST_STAY_S: Final = 1e-4


# What a request waits for at a worker, beside the prompts before it: steps in flight, a batch slot, blocks.
def steps_ahead(worker: WorkerModel) -> float:
    """Return how many steps are before the first one with a new request in it."""
    return _STEPS_AHEAD if worker.sequences else 0.0


def departures(worker: WorkerModel, usual_stay: float, longest_stay: float) -> float:
    """Return how many sequences leave a worker in a second; infinity where none is there.

    By Little's law, n sequences that stay for t seconds leave at the rate n / t. A stay that was measured includes the
    wait at the worker, so all that are there count. One that is assumed is that of a sequence in the batch: the usual
    one, if its greatest output does not make it shorter.
    """
    there, measured = worker.sequences, worker.rates.sequence.value
    if not there:
        return math.inf
    if measured is not None:
        return there / max(measured, _LEAST_STAY_S)
    return min(there, worker.capacity.max_num_seqs) / max(min(usual_stay, longest_stay), _LEAST_STAY_S)


def wait_for_room(worker: WorkerModel, prompt_tokens: int, sequences: int, hit_blocks: int, leave: float) -> float:
    """Return predicted seconds until so many sequences have slots, and blocks for their prompt beside the hits.

    `leave` is how many sequences leave the worker in a second.
    """
    capacity, there = worker.capacity, worker.sequences
    slots = there + sequences - capacity.max_num_seqs
    blocks = capacity.fresh_blocks(prompt_tokens, hit_blocks) - worker.spare_blocks
    if slots <= 0 and blocks <= 0:
        return 0.0  # most often there is room now
    return max(0.0, slots / leave, _departures_for(blocks, worker) / leave)


def _departures_for(blocks: float, worker: WorkerModel) -> float:
    """Return how many sequences have to leave until so many more blocks are free.

    While sequences wait, one starts for each that leaves: those that run take the other blocks as they grow. So each of
    the first departures frees what one that waits wants. The later ones free what a sequence holds in the mean. Without
    sequences of this router there the wanted blocks are unknown; `spare_blocks` leaves them out too.
    """
    waiting, wanted = worker.load.waiting, worker.wanted_blocks
    running = max(1, min(worker.sequences - waiting, worker.capacity.max_num_seqs))
    freed = max(1.0, (worker.capacity.num_blocks - worker.unheld_blocks) / running)
    if not waiting or not wanted:
        return blocks / freed
    first = min(freed, wanted)
    return blocks / first if blocks <= waiting * first else waiting + (blocks - waiting * first) / freed


# Costs closer than this count as equal: signals are not more precise, and a tie must not favour the first worker.
TIE_SECONDS = 1e-4
# What was measured longer ago refuses no request for its deadline: a stay of sequences, and rates of an idle worker.
OLD_S = 30.0
# Added for a worker without its KV manager, which grants no blocks: about the time of a restart of the manager.
MANAGER_AWAY_S = 1.0
OTHERS_CHANGED = "other routers' placements moved it away from"
"""How the reason begins of a choice that others' placements changed; the other worker and its cost follow."""
TOO_LATE = "too late"
"""How the reason begins of a worker that would miss the deadline; the seconds follow."""
_BEST_FIRST = (PlacementOutcome.PLACED, PlacementOutcome.WAIT, PlacementOutcome.NO_WORKER, PlacementOutcome.TOO_LARGE)


@dataclass(frozen=True, slots=True)
class Choice:
    """A routing decision; `worker` is None unless the outcome is PLACED.

    `first_token_s` is in predicted seconds. `least_s` may refuse the request for its deadline: what is known of that at
    the chosen worker, or, where all with a free slot would be too late, the least at any worker that may serve it.
    """

    outcome: PlacementOutcome
    decision: Decision
    worker: WorkerModel | None = None
    hit_blocks: int = 0
    first_token_s: float = 0.0
    least_s: float = 0.0
    fetch: PricedFetch | None = None


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
    # Of the prefill, for each token.
    token_s: float
    fetch: PricedFetch | None = None
    fetch_s: float = 0.0
    adapter_s: float = 0.0
    # Of the queue delay and the decode pressure: what only other routers told of.
    others_s: float = 0.0
    unseen_s: float = 0.0

    @property
    def work_s(self) -> float:
        return 0.0 if self.unproven else self.adapter_s + self.fetch_s + self.prefill

    @property
    def known_s(self) -> float:
        return 0.0 if self.unproven else self.known_delay + self.adapter_s + self.fetch_s + self.prefill

    @property
    def first_token_s(self) -> float:
        return self.queue_delay + self.adapter_s + self.fetch_s + self.prefill

    @property
    def total(self) -> float:
        return self.first_token_s + self.decode_pressure + self.unseen_s

    @property
    def alone(self) -> float:
        """The total without what only other routers told of."""
        return self.total - self.others_s

    def counted_s(self, passes: bool) -> float:
        """Return the seconds to the first token that may make the request too late; it may pass what is before it."""
        return self.work_s if passes else self.known_s

    def too_late(self, left: float, counted: float) -> Candidate:
        """Return the record of a worker that would miss the deadline where another one keeps it."""
        reason = f"{TOO_LATE}: {left:.3f} s are left, and the first token is predicted in {counted:.3f} s"
        figures = (("hit_blocks", float(self.hit_blocks)),) if self.hit_blocks else ()
        return Candidate(self.worker.worker_id, rejected=reason, figures=figures)

    def candidate(self) -> Candidate:
        figures = [("hit_blocks", float(self.hit_blocks))]
        terms: tuple[tuple[str, float], ...] = (
            ("queue_delay", self.queue_delay),
            ("prefill", self.prefill),
            ("decode_pressure", self.decode_pressure),
        )
        if self.adapter_s:
            terms = (terms[0], ("adapter", self.adapter_s), *terms[1:])
        if self.fetch is not None:
            terms = (*terms[:-2], ("fetch", self.fetch_s), *terms[-2:])
            figures.append(("fetched_blocks", float(self.fetch.blocks)))
        if self.unseen_s:
            terms = (*terms, ("unseen", self.unseen_s))
        if self.others_s:
            figures.append(("others_s", self.others_s))
        if self.trust < 1.0:
            figures.append(("trust", self.trust))
        return Candidate(self.worker.worker_id, self.total, terms, figures=tuple(figures))


class Router:
    """Chooses workers. `seed` breaks ties, and draws the workers to price where there are many.

    With a decision's id it gives the same pick again.
    """

    def __init__(self, clock: Clock, new_id: Callable[[], str], seed: int) -> None:
        self._clock, self._new_id, self._seed = clock, new_id, seed
        self._least = LeastTimes()
        # The places at home of the last list of many workers, and the moves of homes until then.
        self._listed: Sequence[WorkerModel] = ()
        self._moves, self._at_home = 0, list[int]()

    def route(
        self,
        placement: PlacementRequest,
        workers: Sequence[WorkerModel],
        hits: Mapping[str, int],
        absent: Collection[tuple[str, str]] = (),
        decision_id: str = "",
        held: Held | None = None,
    ) -> Choice:
        """Return the choice among `workers`; `hits` are blocks by worker id, `absent` names of others with reasons.

        Workers that lack what is `held` may fetch it. The decision has the next id, or the one that is given.
        """
        now, decision_id = self._clock.monotonic(), decision_id or self._new_id()
        seen = self._shortlist(workers, hits, decision_id)
        found = _Priced.of(placement, seen, hits, now, held)
        if not found.costs and len(seen) < len(workers):
            # Nearly all are full: one of the others may have room, and of many with room a few are enough.
            verdicts = [verdict(each, placement, now)[0] for each in workers]
            room = [each for each, outcome in zip(workers, verdicts, strict=True) if outcome is PlacementOutcome.PLACED]
            if room:
                seen = shortlist(room, hits, self._drawn(decision_id), places_at_home(room))
                found = _Priced.of(placement, seen, hits, now, held)
            found.verdicts.update(verdicts)
        least_s: float | None = None
        if found.costs and not found.has_one_in_time(placement):
            look = self._look(placement, workers, seen, hits, held)
            seen, found, least_s = look.seen, look.priced, look.least_s(placement, placement.passes or bool(absent))
        found.leave_out_late(placement)
        best, tied = self._pick(found.costs, decision_id) if found.costs else (None, 0)
        outcome = next((each for each in _BEST_FIRST if each in found.verdicts), PlacementOutcome.NO_WORKER)
        chosen = best.worker.worker_id if best else outcome.value
        candidates = [cost.candidate() for cost in found.costs] + found.out
        without = min(found.costs, key=lambda each: each.alone, default=None)
        reasons = tuple(_changed_by_others(best, without)) if best is not None and without is not None else ()
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
            reasons=reasons,
            traceparent=placement.traceparent,
            worker=best.worker.worker_id if best else "",
        )
        if best is None:
            return Choice(outcome, decision)
        least_s = best.counted_s(placement.passes) if least_s is None else least_s
        return Choice(outcome, decision, best.worker, best.hit_blocks, best.first_token_s, least_s, best.fetch)

    def price_workers(
        self, placement: PlacementRequest, workers: Sequence[WorkerModel], hits: Mapping[str, int], later: bool = False
    ) -> list[WorkerCost]:
        """Return the price at each worker that may take the request now, or also `later`; of many at some of them."""
        seen = self._shortlist(workers, hits, placement.request_id)
        found = _Priced.of(placement, seen, hits, self._clock.monotonic())
        return found.now_or_later(placement) if later else found.costs

    def soonest_s(
        self,
        placement: PlacementRequest,
        workers: Sequence[WorkerModel],
        hits: Mapping[str, int],
        has_room: bool,
        held: Held | None = None,
    ) -> float:
        """Return the least known seconds to the first token at a worker that may serve it, now or later; 0: none may.

        `has_room` leaves out what is before it there: what remains is its own work. So does a worker in trouble that
        may soon be well: when it continues is unknown.
        """
        drawn = self._shortlist(workers, hits, placement.request_id)
        return self._look(placement, workers, drawn, hits, held).least_s(placement, has_room)

    def _shortlist(
        self, workers: Sequence[WorkerModel], hits: Mapping[str, int], decision_id: str
    ) -> Sequence[WorkerModel]:
        """Return the workers to price. Which of many are at home is looked for once for each list and move."""
        if len(workers) <= MOST_PRICED:
            return workers
        share = workers[0].share
        moves = 0 if share is None else share.pool.moves
        if workers is not self._listed or moves != self._moves:
            self._listed, self._moves, self._at_home = workers, moves, [*places_at_home(workers)]
        return shortlist(workers, hits, self._drawn(decision_id), self._at_home)

    def _look(
        self,
        placement: PlacementRequest,
        workers: Sequence[WorkerModel],
        drawn: Sequence[WorkerModel],
        hits: Mapping[str, int],
        held: Held | None,
    ) -> _Look:
        """Price the drawn workers, and of many those with the lowest bounds too."""
        now = self._clock.monotonic()
        if len(drawn) == len(workers):
            return _Look(workers, _Priced.of(placement, workers, hits, now, held))
        if self._least.is_old(len(workers), now):
            usual, well = UsualRates.of(workers), [each for each in workers if each.trouble(now) is None]
            away = [each for each in workers if each.trouble(now) is not None]
            self._least.keep((_least_time(each, usual, now) for each in well), away, len(workers), now)
        bounds = self._least.bounds(
            workers,
            hits,
            placement.prompt_tokens - placement.computed_elsewhere,
            placement.avoids,
            lambda each: not too_large(each, placement),
            held.blocks if held is not None else 0,
        )
        names = bounds.soonest().union(worker.worker_id for worker in drawn)
        seen = [worker for worker in workers if worker.worker_id in names]
        return _Look(seen, _Priced.of(placement, seen, hits, now, held), bounds, names)

    def _pick(self, costs: list[WorkerCost], decision_id: str) -> tuple[WorkerCost, int]:
        """Return the cheapest worker, or one of those that tie with it at random, and how many tie."""
        cheapest = min(cost.total for cost in costs)
        tied = [cost for cost in costs if cost.total <= cheapest + TIE_SECONDS]
        return tied[self._drawn(decision_id) % len(tied)], len(tied)

    def _drawn(self, decision_id: str) -> int:
        """Return a number that is random from one decision to the next, and the same for one decision."""
        return zlib.crc32(f"{self._seed}:{decision_id}".encode())


def _changed_by_others(best: WorkerCost, without: WorkerCost) -> Iterator[str]:
    """Yield a reason if another worker would be cheaper without what only other routers told of."""
    saved = best.alone - without.alone
    if saved > TIE_SECONDS:
        name = without.worker.worker_id
        yield f"{OTHERS_CHANGED} {name}: they add {without.others_s:.3f} s there, and it was cheaper by {saved:.3f} s"


def _ages(workers: Sequence[WorkerModel], now: float) -> Iterator[tuple[str, float]]:
    """Yield the age of each signal that enters the costs; assumed rates have no age."""
    for worker in workers:
        yield f"{worker.worker_id}.heartbeat", now - worker.heartbeat_at
        if worker.shown_at > float("-inf"):
            yield f"{worker.worker_id}.rates", now - worker.shown_at


@dataclass(frozen=True, slots=True)
class _Priced:
    """What each worker would cost, or why it is out. Those that are full or away may serve a request `later`."""

    usual: UsualRates
    now: float
    held: Held | None = None
    fetches: FetchRates | None = None
    costs: list[WorkerCost] = field(default_factory=list)
    out: list[Candidate] = field(default_factory=list)
    verdicts: set[PlacementOutcome] = field(default_factory=set)
    later: list[tuple[WorkerModel, int]] = field(default_factory=list)
    recovering: list[WorkerModel] = field(default_factory=list)
    # The longest hit at a worker that is at home with this router.
    home_blocks: int = 0

    @staticmethod
    def of(
        placement: PlacementRequest,
        workers: Sequence[WorkerModel],
        hits: Mapping[str, int],
        now: float,
        held: Held | None = None,
    ) -> _Priced:
        fetches = usual_rates(workers) if held is not None else None
        at_home = max([hits.get(each.worker_id, 0) for each in workers if is_home(each)], default=0) if hits else 0
        found = _Priced(UsualRates.of(workers), now, held, fetches, home_blocks=at_home)
        for worker in workers:
            outcome, reason = verdict(worker, placement, now)
            found.verdicts.add(outcome)
            hit_blocks = hits.get(worker.worker_id, 0)
            if outcome is PlacementOutcome.PLACED:
                found.costs.append(found.price(worker, placement, hit_blocks))
                continue
            figures = (("hit_blocks", float(hit_blocks)),) if hit_blocks else ()
            found.out.append(Candidate(worker.worker_id, rejected=reason, figures=figures))
            recovers = outcome is PlacementOutcome.NO_WORKER and may_recover(worker, placement)
            if recovers or outcome is PlacementOutcome.WAIT:
                found.later.append((worker, hit_blocks))
            if recovers:
                found.recovering.append(worker)
        return found

    def price(self, worker: WorkerModel, placement: PlacementRequest, hit_blocks: int) -> WorkerCost:
        return _cost(worker, placement, hit_blocks, self)

    def now_or_later(self, placement: PlacementRequest) -> list[WorkerCost]:
        """Return the price at each worker that may serve it."""
        return self.costs + [self.price(worker, placement, hits) for worker, hits in self.later]

    def least_s(self, placement: PlacementRequest, has_room: bool) -> float:
        """Return the least known seconds to the first token, now or later, as `Router.soonest_s` does."""
        passes = has_room or bool(self.recovering)
        return min((each.counted_s(passes) for each in self.now_or_later(placement)), default=0.0)

    def has_one_in_time(self, placement: PlacementRequest) -> bool:
        """Return whether some worker keeps the deadline, as far as that is known."""
        left, passes = placement.left, placement.passes
        return left is None or any(each.counted_s(passes) <= left for each in self.costs)

    def leave_out_late(self, placement: PlacementRequest) -> None:
        """Leave out the workers that would miss the deadline; where all would, those that are not the soonest."""
        if placement.left is None or not self.costs:
            return
        counted = [each.counted_s(placement.passes) for each in self.costs]
        most = max(placement.left, min(counted))
        pairs = list(zip(self.costs, counted, strict=True))
        self.out.extend(each.too_late(placement.left, seconds) for each, seconds in pairs if seconds > most)
        self.costs[:] = [each for each, seconds in pairs if seconds <= most]


@dataclass(frozen=True, slots=True)
class _Look:
    """The priced workers, and bounds for the others, whose ids are not among the `names`."""

    seen: Sequence[WorkerModel]
    priced: _Priced
    bounds: Bounds | None = None
    names: frozenset[str] = frozenset()

    def least_s(self, placement: PlacementRequest, has_room: bool) -> float:
        """Return the least known seconds to the first token at any worker, or fewer, as `Router.soonest_s` does."""
        if self.bounds is None:
            return self.priced.least_s(placement, has_room)
        passes = has_room or self.bounds.recovers or bool(self.priced.recovering)
        return min(self.priced.least_s(placement, passes), self.bounds.least_s(self.names, passes))


# What is before this one is before any request.
_SMALLEST = PlacementRequest("", prompt_tokens=1, max_len=1, max_tokens=1)


def _least_time(worker: WorkerModel, usual: UsualRates, now: float) -> LeastTime:
    cost = _cost(worker, _SMALLEST, 0, _Priced(usual, now))
    if cost.unproven:
        return LeastTime(worker, 0.0, 0.0, 0.0)
    return LeastTime(worker, cost.known_delay, cost.token_s, cost.prefill - cost.token_s)


def _cost(worker: WorkerModel, placement: PlacementRequest, hit_blocks: int, among: _Priced) -> WorkerCost:
    usual, held, fetches = among.usual, among.held, among.fetches
    # Where a worker has more of the prompt than all at home, routers meet for the hit and not for want of news.
    unseen = not is_home(worker) and hit_blocks <= among.home_blocks
    capacity, rates, trust = worker.capacity, worker.rates, trust_in(worker, usual.latest)
    sequences = worker.sequences + placement.sequences
    running = min(sequences, capacity.max_num_seqs)
    per_token = believed(rates.prefill_token.value, usual.prefill_token, trust)
    step = _step(worker, running, usual, trust)
    most_blocks = (placement.prompt_tokens - 1) // capacity.block_size
    hit_blocks, fetch, fetch_s = min(hit_blocks, most_blocks), None, 0.0
    uncached = placement.uncached(capacity, hit_blocks)
    if held is not None and fetches is not None and held.blocks > hit_blocks:
        fetch = price_fetch(worker, held, hit_blocks, most_blocks, per_token, fetches)
        if fetch is not None:
            fetch_s = fetch.seconds
            uncached = placement.uncached(capacity, hit_blocks + fetch.blocks)
    horizon = min(float(placement.max_tokens), usual.output_tokens)
    leave = departures(worker, usual.output_tokens * step, worker.most_output * step)
    room = wait_for_room(worker, placement.prompt_tokens, placement.sequences, hit_blocks, leave)
    known = worker.unplanned_prefill_tokens * per_token
    delay = worker.pending_prefill_tokens * per_token + room + steps_ahead(worker) * step
    if rates.sequence.age(among.now) <= OLD_S:
        known += room
    if not worker.load.manager_attached:
        delay += MANAGER_AWAY_S
    unproven = not worker.sequences and among.now - worker.shown_at > OLD_S
    prefill = uncached * per_token + step
    pressure = horizon * step
    adapter_s = 0.0 if placement.adapter is None else worker.adapters.seconds_until(placement.adapter)
    others_s, (more, more_tokens) = 0.0, worker.unreported
    if more or more_tokens:
        crowded = _step(worker, min(sequences + more, capacity.max_num_seqs), usual, trust)
        waits_s = more_tokens * per_token + (0.0 if worker.sequences else _STEPS_AHEAD * step)
        others_s, delay, pressure = waits_s + horizon * (crowded - step), delay + waits_s, horizon * crowded
    return WorkerCost(
        worker,
        hit_blocks,
        trust,
        delay,
        known,
        prefill,
        pressure,
        unproven,
        per_token,
        fetch,
        fetch_s,
        adapter_s,
        others_s,
        prefill if unseen else 0.0,
    )


def _step(worker: WorkerModel, running: int, usual: UsualRates, trust: float) -> float:
    """Return the predicted seconds of a step with so many sequences in it."""
    usual_step = usual.step * (1.0 + (running - 1) / worker.capacity.max_num_seqs)
    return believed(worker.rates.step.predict(running), usual_step, trust)
