"""Where every layer has a window, a sequence holds its window, however long it is."""

from __future__ import annotations

import itertools
from collections import deque

import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import InvalidRequest
from common.contracts.hashing import block_digests, block_hash_of
from common.contracts.lease import Inventory, Report, Reserve, blocks_needed
from common.contracts.types import TRIMMED, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger

SIZE, WINDOW = 4, 8
ROOT = bytes(32)


class Pair:
    """A worker and its manager; a report takes a step."""

    def __init__(self, num_blocks: int, budget: int = 64) -> None:
        ids = itertools.count(1)
        self.ledger = Ledger(LedgerConfig(num_blocks, SIZE, window=WINDOW), ManualClock(), lambda: f"d{next(ids)}")
        self.ledger.rebuild(Inventory())
        self.agent = LeaseAgent(AgentConfig(num_blocks, SIZE, budget, window=WINDOW))
        self.agent.inventory()
        self.agent.attached(0)
        self.flights: deque[StepPlan] = deque()
        self.numbers = itertools.count()
        self.most = 0

    def submit(self, prompt: int, output: int) -> None:
        number, limit = SequenceId(next(self.numbers)), prompt + output
        tokens = tuple(range(number * 1000, number * 1000 + prompt))
        digests = block_digests(ROOT, tokens, SIZE)
        hashes, last = tuple(map(block_hash_of, digests)), digests[-1] if digests else ROOT
        self.agent.submit_sequence(NewSequence(number, "", tokens, hashes, last, limit, StopRule(output)))

    def run(self) -> int:
        """Run everything to its end; return the output tokens."""
        tokens = 0
        for _ in range(3000):
            if not self.agent.has_work:
                break
            self.exchange()
            tokens += self.step()
            self.agent.check_invariants()
        assert not self.agent.has_work, "a sequence waits for ever"
        return tokens

    def exchange(self) -> None:
        """Bring the manager the worker's next report, and the worker the answer."""
        if (said := self.agent.take_report()) is not None:
            self.ledger.apply_report(said)
            self.ledger.check_invariants()
            if (batch := self.ledger.schedule()) is not None:
                self.agent.apply_grant(batch)

    def step(self) -> int:
        """Plan a step, and complete the one before it; return the output tokens."""
        plan = self.agent.plan()
        if plan is not None:
            self.flights.append(plan)
            held = [len(row.blocks) - row.blocks.count(TRIMMED) for row in plan.rows]
            self.most = max(self.most, *held)
        if not self.flights or (plan is not None and len(self.flights) < 2):
            return 0
        oldest = self.flights.popleft()
        done = self.agent.complete(StepResult(oldest.step, {row.sequence: (1,) for row in oldest.rows if row.samples}))
        return sum(map(len, done.tokens.values()))


@pytest.mark.parametrize(("prompt", "output"), [(8, 100), (100, 8), (107, 1), (1, 107)])
def test_108_tokens_run_in_a_pool_of_6_blocks_of_4(prompt: int, output: int) -> None:
    pair = Pair(6)
    pair.submit(prompt, output)
    assert pair.run() == output
    assert pair.ledger.pool_counts().totals.rejections == 0


def test_a_decode_holds_at_most_the_window_and_two_blocks() -> None:
    pair = Pair(64)
    pair.submit(4, 200)
    assert pair.run() == 200
    assert pair.most == blocks_needed(4, 204, SIZE, WINDOW) == 4


@pytest.mark.parametrize("budget", [3, 7, 64])
def test_prompts_that_do_not_fit_together_all_end(budget: int) -> None:
    pair = Pair(6, budget)
    for number in range(4):
        pair.submit(40 + 9 * number, 20)
    assert pair.run() == 4 * 20


def test_a_chunk_has_its_blocks_when_the_step_is_planned() -> None:
    """In a pool with room, a prompt of 400 tokens and a budget of 64 stalls once, after its first blocks."""
    pair = Pair(200)
    pair.submit(400, 2)
    stalls = 0
    for _ in range(12):
        stalls += bool(pair.agent.counts().stalled)
        pair.exchange()
        pair.step()
    assert stalls <= 2


def test_a_pool_that_does_not_hold_the_window_refuses() -> None:
    pair = Pair(3)
    with pytest.raises(InvalidRequest, match="need 4 blocks of 4; the worker has 3"):
        pair.submit(40, 8)
    pair.ledger.apply_report(Report(reserve=(Reserve(SequenceId(7), 40, 48),)))
    batch = pair.ledger.schedule()
    assert batch is not None
    assert batch.cancel == (7,)
