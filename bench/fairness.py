"""What a huge request costs those behind it, how long a low priority waits, and how many keep their deadlines.

A huge prompt that is granted whole, and in parts, is compared by `bench/lib/long_prompts.py`.

    python -m bench.fairness --json
    python -m bench.fairness --groups --seeds 3 --json    and a huge prompt beside chats on the pages of Gemma 3 27B

The real ledger and lease agent run. Steps follow each other, each of the same 8 ms; no model runs, nothing is timed,
and the figures are exact for a seed. Each scenario runs by the rule alone (`_before`: in turn, by priority) and with
backfilling and admission by age (`_after`). Waits are seconds from arrival to the grant of the blocks.

The router's real queue orders requests with deadlines for slots at workers: in turn, whether or not they can still be
in time (`_before`), in turn without those that are hopeless (`_refused`), and the earliest deadline first without those
(`_after`).

In the same queue, one session of a tenant makes a thousand requests at once, and others of it one after the other: as
if none said of which session it is (`_before`), and by turns of sessions (`_after`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from bench.lib import long_prompts
from bench.lib.harness import parser, report
from common.contracts.clock import ManualClock
from common.contracts.lease import Inventory
from common.contracts.turns import DEFAULT_MAX_WAIT
from common.contracts.types import SequenceId
from gpuworker.scheduling.batch_plan import StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger
from router.placement.fair_queue import FairQueue, due_at

STEP_S: Final = 0.008
_FLOOD: Final = "flood"
BLOCKS, BLOCK_SIZE, PLACES = 1024, 16, 64
QUEUED_PLACES: Final = 16
"""Places at workers for the requests with deadlines, and for those of sessions."""
PARALLEL, SMALL_SESSIONS = 1000, 8
"""Requests that one session makes at once, and sessions of its tenant that make one after the other."""
HUGE: Final = BLOCKS * BLOCK_SIZE * 4 // 5
"""Tokens of the prompt of a huge request: four fifths of the pool."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: its step, its lengths in tokens, its priority."""

    step: int
    prompt: int
    output: int
    priority: int = 0


@dataclass(slots=True)
class Waits:
    """The steps that each admitted request waited, and how often a sequence was preempted."""

    steps: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0

    def seconds(self, indices: Sequence[int], horizon: int, arrivals: Sequence[Arrival]) -> list[float]:
        """Return the waits of requests; one that was not admitted has waited until the end."""
        waits = (self.steps.get(each, horizon - arrivals[each].step) for each in indices)
        return sorted(wait * STEP_S for wait in waits)


def mixed(per_second: float, seconds: float, seed: int, priority: int = 0) -> list[Arrival]:
    """Return Poisson arrivals: prompts of 64 tokens, outputs of 16 to 1,024 tokens, most of them short."""
    rng, at, found = random.Random(seed), 0.0, list[Arrival]()
    while (at := at + rng.expovariate(per_second)) < seconds:
        output = min(1024, max(16, round(rng.lognormvariate(4.5, 1.0))))
        found.append(Arrival(int(at / STEP_S), 64, output, priority))
    return found


def serve(arrivals: Sequence[Arrival], horizon: int, *, fair: bool) -> Waits:
    """Serve requests for so many steps, and return what each waited."""
    clock, ids = ManualClock(), itertools.count(1)
    agent = LeaseAgent(AgentConfig(BLOCKS, BLOCK_SIZE, max_num_seqs=PLACES, max_num_batched_tokens=2048))
    max_wait = DEFAULT_MAX_WAIT if fair else 0.0
    # Prompts are granted whole, so that a wait ends with all blocks.
    config = LedgerConfig(
        BLOCKS, BLOCK_SIZE, max_num_seqs=PLACES, backfill=fair, max_wait=max_wait, chunked_grants=False
    )
    ledger = Ledger(config, clock, lambda: f"d{next(ids)}")
    ledger.rebuild(Inventory())
    agent.inventory()
    agent.attached(0)
    waits, coming = Waits(), _numbered(arrivals)
    upcoming = next(coming, None)
    for step in range(horizon):
        while upcoming is not None and upcoming[1].step <= step:
            agent.submit_sequence(_sequence(*upcoming))
            upcoming = next(coming, None)
        if (said := agent.take_report()) is not None:
            ledger.apply_report(said)
            if (batch := ledger.schedule()) is not None:
                for admit in batch.admit:
                    index = int(admit.sequence) - 1
                    waits.steps.setdefault(index, step - arrivals[index].step)
                agent.apply_grant(batch)
        plan = agent.plan()
        if plan is not None:
            agent.complete(StepResult(plan.step, {row.sequence: (1,) for row in plan.rows if row.samples}))
        ledger.drain_decisions()
        clock.advance(STEP_S)
    waits.preemptions = ledger.pool_counts().totals.preemptions
    return waits


def huge_request(seed: int, seconds: float, *, fair: bool, per_second: float) -> dict[str, float]:
    """A request for four fifths of the pool comes after a third of the time of the mixed requests."""
    rest = mixed(per_second, seconds, seed)
    huge = Arrival(int(seconds / 3 / STEP_S), HUGE, 64)
    arrivals = sorted([*rest, huge], key=lambda each: each.step)
    horizon = int(1.5 * seconds / STEP_S)
    waits = serve(arrivals, horizon, fair=fair)
    index = arrivals.index(huge)
    own = waits.steps.get(index, horizon - huge.step)
    behind = [each for each in range(index + 1, len(arrivals)) if arrivals[each].step < huge.step + own]
    others = waits.seconds(behind, horizon, arrivals)
    return {
        "huge_wait_s": own * STEP_S,
        "behind_wait_p50_s": median(others),
        "behind_wait_p90_s": others[int(0.9 * len(others))],
        "huge_preemptions": float(waits.preemptions),
    }


def low_priority(seed: int, seconds: float, *, fair: bool) -> dict[str, float]:
    """Requests of a higher priority ask for more slots than there are; one of a low priority comes after a while."""
    rest = mixed(60.0, seconds, seed, priority=10)
    low = Arrival(int(seconds / 12 / STEP_S), 256, 64)
    arrivals = sorted([*rest, low], key=lambda each: each.step)
    horizon = int(seconds / STEP_S)
    waits = serve(arrivals, horizon, fair=fair)
    (wait,) = waits.seconds([arrivals.index(low)], horizon, arrivals)
    return {"low_priority_wait_s": wait}


@dataclass(frozen=True, slots=True)
class Timed:
    """A request of the router's queue, in seconds: its arrival, how long it holds a slot, the time for its answer."""

    at: float
    holds: float
    allowed: float

    @property
    def deadline(self) -> float:
        return self.at + self.allowed


def timed(load: float, seconds: float, seed: int) -> list[Timed]:
    """Return Poisson arrivals that use so much of the slots: some must be quick, others have 20 times as long."""
    rng, at, found = random.Random(seed), 0.0, list[Timed]()
    while (at := at + rng.expovariate(load * QUEUED_PLACES)) < seconds:
        holds = rng.expovariate(1.0)
        found.append(Timed(at, holds, holds + rng.choice((0.5, 2.0, 10.0))))
    return found


def in_time(requests: Sequence[Timed], *, earliest: bool, refuse: bool) -> float:
    """Return the share of requests that end in time: by the earliest deadline or in turn, hopeless ones refused or not.

    How long a request holds its slot is known here; a router predicts it.
    """
    clock = ManualClock()
    queue, running, kept = FairQueue[Timed](clock), list[float](), 0
    coming, left = deque(requests), len(requests)
    while coming or queue:
        now = min([coming[0].at] if coming else [], default=math.inf)
        if len(running) == QUEUED_PLACES and queue:
            now = min(now, running[0])
        clock.now = now
        while running and running[0] <= now:
            heapq.heappop(running)
        while coming and coming[0].at <= now:
            each = coming.popleft()
            queue.join_queue(queue.ticket(0, due=due_at(now, each.deadline if earliest else None)), each)
        while queue and len(running) < QUEUED_PLACES:
            ticket, each = queue.head()
            queue.serve_ticket(ticket)
            late = now + each.holds > each.deadline
            kept += not late
            if not (late and refuse):
                heapq.heappush(running, now + each.holds)
    return kept / left


def deadlines(seed: int, seconds: float) -> dict[str, float]:
    """Requests with deadlines use 0.9 and 1.1 of the slots."""
    found: dict[str, float] = {}
    for load in (0.9, 1.1):
        requests, name = timed(load, seconds, seed), f"in_time_load_{load:g}"
        found[f"{name}_before"] = in_time(requests, earliest=False, refuse=False)
        found[f"{name}_refused"] = in_time(requests, earliest=False, refuse=True)
        found[f"{name}_after"] = in_time(requests, earliest=True, refuse=True)
    return found


def session_waits(seed: int, seconds: float, *, named: bool) -> list[float]:
    """Return the waits of sessions with one request at a time, beside a session of a thousand parallel ones.

    Each request holds a slot for a second in the mean, and each small session thinks as long. They are of one tenant;
    not `named`, no request says of which session it is.
    """
    clock, rng = ManualClock(), random.Random(seed)
    queue, waits = FairQueue[tuple[str, float]](clock), list[float]()
    # What happens next: at a time, in the order in which it was said, a request of a session comes or ends.
    events: list[tuple[float, int, str, bool]] = []
    numbers = itertools.count()

    def later(after: float, session: str, ends: bool) -> None:
        heapq.heappush(events, (clock.now + after, next(numbers), session, ends))

    free = QUEUED_PLACES
    for _ in range(PARALLEL):
        later(0.0, _FLOOD, False)
    for number in range(SMALL_SESSIONS):
        later(rng.uniform(1.0, 2.0), f"small {number}", False)
    while events[0][0] < seconds:
        clock.now, _, session, ends = heapq.heappop(events)
        if ends:
            free += 1
            later(0.0 if session == _FLOOD else rng.expovariate(1.0), session, False)
        else:
            ticket = queue.ticket(0, due=due_at(clock.now, None), session=session if named else "")
            queue.join_queue(ticket, (session, clock.now))
        while queue and free:
            ticket, (served, came) = queue.head()
            queue.serve_ticket(ticket)
            free -= 1
            if served != _FLOOD:
                waits.append(clock.now - came)
            later(rng.expovariate(1.0), served, True)
    return sorted(waits)


def sessions(seed: int, seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, named in (("before", False), ("after", True)):
        waits = session_waits(seed, seconds, named=named)
        found[f"session_wait_p50_s_{name}"], found[f"session_wait_p90_s_{name}"] = (
            median(waits), waits[int(0.9 * len(waits))],
        )  # fmt: skip
    return found


def _numbered(arrivals: Sequence[Arrival]) -> Iterator[tuple[int, Arrival]]:
    return iter(enumerate(arrivals))


def _sequence(index: int, arrival: Arrival) -> NewSequence:
    tokens = (1,) * arrival.prompt
    stop, limit = StopRule(arrival.output), arrival.prompt + arrival.output
    number = SequenceId(index + 1)
    return NewSequence(number, "", tokens, (), bytes(32), limit, stop, priority=arrival.priority, no_cache=True)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--seeds", type=int, default=5, help="workloads; the figures are medians over them")
    flags.add_argument(
        "--seconds", type=float, default=60.0, help="of requests, in virtual time; twice that for priorities"
    )
    flags.add_argument("--rate", type=float, default=35.0, help="mixed requests a second beside the huge one")
    flags.add_argument("--groups", action="store_true", help="a huge prompt where layers are groups, and nothing else")
    args = flags.parse_args()
    if args.groups:
        report("fairness", long_prompts.figures_of(args.seeds, long_prompts.GROUPED), {}, args.json)
        return
    figures: dict[str, float] = {}
    for name, fair in (("before", False), ("after", True)):
        runs = [
            huge_request(seed, args.seconds, fair=fair, per_second=args.rate)
            | low_priority(seed, 2 * args.seconds, fair=fair)
            for seed in range(args.seeds)
        ]
        figures |= {f"{key}_{name}": median(run[key] for run in runs) for key in runs[0]}
    queued = [deadlines(seed, 10 * args.seconds) | sessions(seed, 20 * args.seconds) for seed in range(args.seeds)]
    figures |= {key: median(run[key] for run in queued) for key in queued[0]}
    figures |= long_prompts.figures_of(args.seeds)
    notes = {
        "long_gpu_exact_ttft_s_chunked": "first token of a prompt that is four fifths of the pool, granted in parts",
        "huge_wait_s_after": f"a prompt of {HUGE} tokens, four fifths of the pool, beside {args.rate:g} requests/s",
        "behind_wait_p50_s_after": "requests that came while the huge one waited",
        "low_priority_wait_s_after": (
            f"of at most {2 * args.seconds * 11 / 12:.0f} s, beside requests of a higher priority for every slot"
        ),
        "session_wait_p50_s_after": f"of {SMALL_SESSIONS} sessions beside one of {PARALLEL} parallel requests",
        "in_time_load_1.1_after": "share of requests that end by their deadline, where they need 1.1 of the slots",
    }
    report("fairness", figures, notes, args.json)


if __name__ == "__main__":
    main()
