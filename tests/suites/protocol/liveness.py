"""Searches small configurations for one in which somebody waits although nothing that it waits for can end.

The real lease agent and the real ledger run in lockstep, with messages that take some steps. An episode has no faults,
so when neither side has anything more to do, every sequence must have ended. `python -m tests.suites.protocol.liveness
SECONDS` searches for so long and prints what it covered.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

from common.contracts.clock import ManualClock
from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import block_digests, block_hash_of
from common.contracts.lease import GrantBatch, Inventory, Report, held_blocks
from common.contracts.types import KvGroup, KvGroupKind, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger
from tests.suites.protocol.grant_order import OrderBroken, OrderCheck
from tests.suites.protocol.invariants import Violation
from tests.suites.protocol.search import Found

ROOT = bytes(32)
MOST_ROUNDS = 20_000
EOS = 9


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at a round. Each of its sequences may have `max_tokens` and ends with number `output`."""

    round: int
    prompt: tuple[int, ...]
    max_tokens: int
    output: int
    priority: int = 0
    tenant: str = ""
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Episode:
    """One configuration and what comes to it. A round takes one second and a message takes `delay` rounds."""

    config: LedgerConfig
    arrivals: tuple[Arrival, ...]
    budget: int = 64
    delay: int = 0
    most: int | None = None
    cancels: frozenset[tuple[int, int]] = frozenset()
    """Rounds, and the requests that are cancelled then."""


class Hang(Exception):
    """Sequences live and neither side has anything more to do."""


@dataclass(slots=True)
class Covered:
    """What an episode had, so that a search can show that it looked where it should."""

    rounds: int = 0
    preemptions: int = 0
    chunked_grants: int = 0
    by_age: int = 0
    passed: int = 0
    outranked: int = 0
    """Rounds in which a higher priority waited while a begun prompt lacked blocks."""


@dataclass
class Run:
    """One episode in progress."""

    episode: Episode
    clock: ManualClock = field(default_factory=ManualClock)
    covered: Covered = field(default_factory=Covered)
    reports: deque[tuple[int, Report]] = field(default_factory=deque)
    batches: deque[tuple[int, GrantBatch]] = field(default_factory=deque)
    flights: deque[StepPlan] = field(default_factory=deque)

    def __post_init__(self) -> None:
        config, ids = self.episode.config, iter(range(1 << 30))
        self.ledger = Ledger(config, self.clock, lambda: f"d{next(ids)}")
        self.ledger.rebuild(Inventory())
        sizes = AgentConfig(
            config.num_blocks,
            config.block_size,
            self.episode.budget,
            window=config.window,
            groups=config.groups,
            runway_slots=config.runway_slots,
            max_num_seqs=config.max_num_seqs,
        )
        self.agent = LeaseAgent(sizes)
        self.agent.inventory()
        self.agent.attached(0)
        self.order = OrderCheck(self.ledger)
        self.outputs: Counter[SequenceId] = Counter()

    def to_its_end(self) -> Covered:
        """Serve all requests. Raises Hang, OrderBroken, or what the cores raise."""
        arrivals = deque(sorted(self.episode.arrivals, key=lambda each: each.round))
        number = idle = 0
        for now in range(MOST_ROUNDS):
            moved = False
            while arrivals and arrivals[0].round <= now:
                arrival, parent = arrivals.popleft(), number
                for _ in range(arrival.sequences):
                    self._submit(number, arrival, parent)
                    number += 1
                moved = True
            for due, request in self.episode.cancels:
                if due == now and request < number:
                    self.agent.cancel_sequence(SequenceId(request))
                    self.agent.departures()
            moved |= self._round(now)
            self.clock.advance(1.0)
            # What a plan finds is reported in the next round.
            idle = 0 if moved else idle + 1
            if idle < 3:
                continue
            if not arrivals and not self.agent.has_work:
                self._check_rest()
                self.covered.rounds = now
                return self.covered
            if not arrivals:
                raise Hang(self._words())
        raise Hang(f"they have not ended after {MOST_ROUNDS} rounds: {self._words()}")

    def _submit(self, number: int, arrival: Arrival, parent: int) -> None:
        config, prompt = self.episode.config, arrival.prompt
        digests = block_digests(ROOT, prompt, config.block_size) if config.prefix_caching else []
        new = NewSequence(
            SequenceId(number),
            f"r{number}",
            prompt,
            tuple(map(block_hash_of, digests)),
            digests[-1] if digests else ROOT,
            len(prompt) + arrival.max_tokens,
            StopRule(arrival.max_tokens, eos_ids=frozenset({EOS})),
            priority=arrival.priority,
            tenant=arrival.tenant,
            no_cache=not config.prefix_caching,
            fork_of=SequenceId(parent) if parent != number else None,
        )
        self.agent.submit_sequence(new)
        self.outputs[new.sequence] = arrival.output

    def _round(self, now: int) -> bool:
        """Transfer each part once; return whether any had something to do."""
        moved = bool(self.reports or self.batches or self.flights)
        if (said := self.agent.take_report()) is not None:
            self.reports.append((now + self.episode.delay, said))
            moved = True
        while self.reports and self.reports[0][0] <= now:
            self._serve(now, self.reports.popleft()[1])
        while self.batches and self.batches[0][0] <= now:
            self.agent.apply_grant(self.batches.popleft()[1])
            self.agent.departures()
        plan = self.agent.plan()
        if plan is not None:
            self.flights.append(plan)
            moved = True
        if self.flights and (plan is None or len(self.flights) == 2):
            self._complete(self.flights.popleft())
        return moved

    def _serve(self, now: int, report: Report) -> None:
        ledger = self.ledger
        ledger.apply_report(report)
        while True:
            self._look()
            self.order.before()
            batch = ledger.schedule(self.episode.most)
            self.order.after(ledger.drain_decisions())
            ledger.drain_index_events()
            if batch is not None:
                self.batches.append((now + self.episode.delay, batch))
            if not ledger.has_more:
                break
        if now % 16 == 0:
            ledger.check_invariants()

    def _look(self) -> None:
        state = self.ledger.state
        part = state.sequences.find_begun_prompt()
        waiting = [state.sequences.live[each] for each in state.sequences.queue]
        self.covered.outranked += part is not None and any(each.priority > part.priority for each in waiting)

    def _complete(self, plan: StepPlan) -> None:
        tokens = {}
        for row in plan.rows:
            if row.samples:
                self.outputs[row.sequence] -= 1
                tokens[row.sequence] = (EOS if self.outputs[row.sequence] <= 0 else 1,)
        self.agent.complete(StepResult(plan.step, tokens))

    def _check_rest(self) -> None:
        state = self.ledger.state
        self.ledger.check_invariants()
        pool, totals = state.store.pool, state.totals
        self.covered.preemptions, self.covered.chunked_grants = totals.preemptions, totals.chunked_grants
        self.covered.by_age, self.covered.passed = self.order.by_age, self.order.passed
        if state.sequences.live or state.sequences.queue or pool.available != len(pool.blocks):
            raise Hang(f"blocks or sequences stay behind: {self._words()}")

    def _words(self) -> str:
        state = self.ledger.state
        lines = [f"{each.name} priority {each.priority} {each.phase.value} {len(each.block_table)}/{each.max_blocks}"
                 f" blocks, {each.lacking(state.config.block_size)} lacking, by age {each.by_age}"
                 for each in state.sequences.live.values()]  # fmt: skip
        pool = state.store.pool
        head = f"blocked by {state.admission.blocked_by!r}, {pool.available} available, {pool.leased} leased"
        return "; ".join([head, *lines])


# ---------------------------------------------------------------- configurations


def episode(seed: int) -> Episode:
    """Return an episode around one prompt that begins with a part of its blocks, aged ones and higher priorities."""
    rng = random.Random(seed)
    size = rng.choice((2, 4, 8, 16))
    blocks = rng.choice((12, 16, 24, 32, 48, 64, 100, 200))
    config = LedgerConfig(
        blocks,
        size,
        prefix_caching=rng.random() < 0.5,
        window=rng.choice((0,) * 9 + (2 * size,)),
        max_num_seqs=rng.choice((1, 2, 3, 4, 8, 16, 64)),
        watermark=rng.choice((0.0, 0.01, 0.01, 0.05, 0.2)),
        runway_slots=rng.choice((2, 8, 32)),
        runway_reach=rng.choice((32, 128)),
        max_preemptions=rng.choice((0, 1, 4)),
        chunked_grants=rng.random() < 0.9,
        first_part=rng.choice((1, size, 4 * size)),
        backfill=rng.random() < 0.7,
        max_wait=rng.choice((0.0, 3.0, 10.0, 30.0)),
        in_turn=rng.choice((1, 2, 7)),
    )
    arrivals = tuple(_arrivals(rng, config))
    cancels = frozenset((rng.randrange(200), rng.randrange(len(arrivals))) for _ in range(rng.choice((0, 0, 0, 3))))
    return Episode(
        config,
        arrivals,
        budget=rng.choice((size, 4 * size, 16 * size)),
        delay=rng.choice((0, 0, 1, 3)),
        most=rng.choice((None, None, 1, 2)),
        cancels=cancels,
    )


def episode_in_groups(seed: int) -> Episode:
    """Return the same episode where the pool has groups of layers, and hardly more pages than its longest request."""
    rng, found = random.Random(f"groups {seed}"), episode(seed)
    size, blocks = found.config.block_size, found.config.num_blocks
    kinds = rng.choices((KvGroupKind.WINDOW, KvGroupKind.CHUNK), k=rng.choice((1, 1, 2)))
    runs = [KvGroup(kind, rng.randint(1, 5 * size), rng.choice((1, 1, 3)), ()) for kind in kinds]
    groups = (KvGroup(KvGroupKind.FULL, 0, rng.choice((1, 2)), ()), *runs)
    if rng.random() < 0.5:
        groups = (*groups[: rng.choice((1, 2))], KvGroup(KvGroupKind.STATE, 0, rng.choice((1, 4, 20)), ()))
    pages = sum(group.pages * held_blocks(group, blocks, size) for group in groups)
    config = replace(found.config, window=0, groups=groups, num_blocks=pages + rng.choice((0, 1, pages // 4)))
    return replace(found, config=config)


def _arrivals(rng: random.Random, config: LedgerConfig) -> Iterator[Arrival]:
    """Yield requests of which some take most of the pool; most of their outputs are short, so that more happens."""
    capacity, size = config.num_blocks * config.block_size, config.block_size
    spread = rng.choice((1, 10, 60))
    tenants = rng.choice((("",), ("",), ("red", "blue")))
    priorities = rng.choice(((0,), (0, 0, 1), (0, 1, 2)))
    lengths = rng.choice(((1, 2, size), (size, 4 * size), (1, size, capacity)))
    for number in range(rng.randint(4, 16)):
        share = rng.choice((0.02, 0.1, 0.3, 0.5, 0.7, 0.95, 1.0))
        prompt = max(1, min(capacity - 1, int(share * capacity) - rng.randint(0, 3)))
        most = max(1, min(rng.choice(lengths), capacity - prompt))
        alike = (number % 2,) * prompt
        yield Arrival(
            rng.randrange(spread),
            alike if rng.random() < 0.5 else tuple(rng.choices((0, 1), k=prompt)),
            most,
            output=rng.randint(1, min(most, 4 * size)),
            priority=rng.choice(priorities),
            tenant=rng.choice(tenants),
            sequences=rng.choice((1, 1, 1, 1, 2)),
        )


@dataclass(frozen=True, slots=True)
class Liveness:
    """Episodes from a seed on, as a search that may kill a mutant: I10 is a hang, I15 a broken order."""

    first_seed: int = 0
    episodes: int = 400
    in_groups: bool = False

    def up_to(self, found: Found) -> Liveness:
        return self if found.seed is None else replace(self, first_seed=found.seed, episodes=1)

    def run(self) -> Found:
        found, episode_of = Found(), episode_in_groups if self.in_groups else episode
        for seed in range(self.first_seed, self.first_seed + self.episodes):
            found.states, found.seed = found.states + 1, seed
            try:
                found.steps += Run(episode_of(seed)).to_its_end().rounds
            except Hang as hang:
                found.violation = Violation("I10", str(hang))
            except OrderBroken as broken:
                found.violation = Violation("I15", str(broken))
            except ProtocolViolation as broken:
                found.violation = Violation.of_protocol(broken)
            if found.violation is not None:
                break
        return found

    def __str__(self) -> str:
        return "liveness in groups" if self.in_groups else "liveness"


def main() -> None:
    """Search for so many seconds from a seed on, and print what was covered."""
    seconds, first = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    deadline, covered, seed = time.monotonic() + seconds, Counter[str](), first
    while time.monotonic() < deadline:
        try:
            covered.update(asdict(Run(episode(seed)).to_its_end()))
        except (Hang, OrderBroken, ProtocolViolation) as failure:
            sys.exit(f"seed {seed}: {type(failure).__name__}: {failure}")
        seed += 1
    sys.stdout.write(f"{seed - first} episodes from seed {first}: {dict(covered)}\n")


if __name__ == "__main__":
    main()
