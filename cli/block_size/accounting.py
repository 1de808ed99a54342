"""Counts the slots that paging wastes: of sequences at one moment by arithmetic, of a run by the real ledger and agent.

Waste is the number of reserved slots without a token over the number of slots with one. The runway (blocks leased
ahead of need) counts apart. No model runs and nothing is timed, so the figures are exact.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from common.contracts.clock import ManualClock
from common.contracts.lease import Inventory, Report, unread_blocks
from common.contracts.types import TRIMMED, KvGroup, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import LedgerConfig, LedgerOptions
from kvmanager.ledger.ledger import Ledger

BLOCK_SIZES: Final = (4, 8, 16, 32, 64, 128, 256)
MAX_NUM_SEQS: Final = 64
_LEAST_SLOTS: Final = 1 << 17
# Requests that are asked for at once, until some wait for blocks; and tokens of a step that hold all their prompts.
_WAITING: Final = 16
_MOST_STEP: Final = 1 << 22
_USUAL: Final = LedgerOptions()
_LARGEST_BLOCK: Final = BLOCK_SIZES[-1]

Lengths = tuple[int, int]
"""Prompt and output tokens of a request."""


@dataclass(frozen=True, slots=True)
class ReservedSlots:
    """The slots that sequences reserve at one moment, and those of them that hold a token."""

    reserved: int
    used: int

    @property
    def wasted(self) -> int:
        return self.reserved - self.used

    @property
    def waste(self) -> float:
        """Reserved slots without a token, over slots with one."""
        return self.wasted / self.used


def contiguous_slots(lengths: Sequence[int], max_len: int) -> ReservedSlots:
    """Return the slots of sequences of these lengths where each reserves `max_len` slots."""
    return ReservedSlots(len(lengths) * max_len, sum(lengths))


def paged_slots(lengths: Sequence[int], block_size: int) -> ReservedSlots:
    """Return the slots of sequences of these lengths where each has whole blocks for its tokens, and shares none."""
    return ReservedSlots(sum(-(-length // block_size) for length in lengths) * block_size, sum(lengths))


def new_ledger(config: LedgerConfig) -> Ledger:
    ids = itertools.count(1)
    ledger = Ledger(config, ManualClock(), lambda: f"d{next(ids)}")
    ledger.rebuild(Inventory())
    return ledger


@dataclass(slots=True)
class Waste:
    """Sums over all steps of a run, in slots; `rows` counts the sequences of each step, `steps` idle ones too."""

    used: int = 0
    in_rows: int = 0
    leased: int = 0
    rows: int = 0
    steps: int = 0
    preempted: int = 0

    @property
    def share(self) -> float:
        """Allocated slots without a token, over slots with one."""
        return (self.in_rows - self.used) / self.used

    @property
    def runway_share(self) -> float:
        """Slots leased ahead of need, over slots with a token."""
        return self.leased / self.used

    def contiguous_share(self, maximum: int) -> float:
        """Return the unused part of the reserved slots when each sequence reserves the maximum length."""
        return 1 - self.used / (self.rows * maximum)


def count_waste(block_size: int, requests: Sequence[Lengths]) -> Waste:
    """Serve requests of these lengths, MAX_NUM_SEQS at a time, and add the waste up over every step."""
    return _served(block_size, requests, _blocks_for(block_size, requests))[0]


def count_pressed(block_size: int, requests: Sequence[Lengths], blocks: int) -> Waste:
    """Serve the same from a pool of so many blocks; add up the steps alone before which a sequence lacked blocks."""
    return _served(block_size, requests, blocks)[1]


def count_fitting(block_size: int, requests: Sequence[Lengths], blocks: int) -> Waste:
    """Serve requests from a pool of so many blocks, as many at once as it holds; add up the steady steps.

    Those are the steps from the first quarter's admission to the last request's, so that others always wait. Blocks of
    the longest request are regions that each sequence reserves whole. Prompts are computed in one step. `preempted`
    counts all steps.
    """
    waste, asked = Waste(), 0
    whole = all(sum(each) <= block_size for each in requests)
    # What never grows needs no block kept free for growth. Nothing passes another one: memory alone counts.
    options = LedgerOptions(watermark=0.0 if whole else _USUAL.watermark, backfill=False)
    agent, ledger = _new_pair(AgentConfig(blocks, block_size, _MOST_STEP, max_num_seqs=len(requests)), options)
    while agent.has_work or asked < len(requests):
        waits = False
        while not waits:
            for lengths in requests[asked : asked + max(0, _WAITING - ledger.pool_counts().waiting)]:
                asked += 1
                agent.submit_sequence(_sequence(asked, lengths))
            if (said := agent.take_report()) is not None:
                ledger.apply_report(said)
                if (batch := ledger.schedule()) is not None:
                    agent.apply_grant(batch)
                    waste.preempted += len(batch.preempt)
            waits = ledger.pool_counts().waiting > 0 or asked == len(requests)
        plan = agent.plan()
        if plan is None:
            continue
        if len(requests) // 4 < asked - ledger.pool_counts().waiting < len(requests):
            waste.steps += 1
            _add_step(waste, plan, ledger, block_size)
        agent.complete(StepResult(plan.step, {row.sequence: (1,) for row in plan.rows if row.samples}))
    return waste


def count_reserved(reserve: Callable[[Lengths], int], requests: Sequence[Lengths], slots: int) -> Waste:
    """Count the same where a sequence has a region of `reserve` slots for its whole life, in order of arrival.

    Regions lie without gaps between them, which no allocator reaches for regions of several sizes. Raises ValueError
    where one is larger than all slots.
    """
    if (largest := max(map(reserve, requests), default=0)) > slots:
        raise ValueError(f"a region of {largest} slots; expected {slots} at most, which is all there are")
    waste, asked, free = Waste(), 0, slots
    running: list[tuple[int, int, int]] = []  # tokens after this step, tokens at the end, reserved slots
    while running or asked < len(requests):
        while asked < len(requests) and reserve(requests[asked]) <= free:
            prompt, output = requests[asked]
            running.append((prompt, prompt + output - 1, reserve(requests[asked])))
            free, asked = free - running[-1][2], asked + 1
        if len(requests) // 4 < asked < len(requests):
            waste.steps += 1
            waste.rows += len(running)
            waste.used += sum(tokens for tokens, _, _ in running)
            waste.in_rows += slots - free
        free += sum(region for tokens, end, region in running if tokens >= end)
        running = [(tokens + 1, end, region) for tokens, end, region in running if tokens < end]
    return waste


def count_steps(block_size: int, requests: Sequence[Lengths], blocks: int, delay: int) -> int:
    """Return the steps that it takes to serve them, where a report is answered so many steps later."""
    return _served(block_size, requests, blocks, delay)[0].steps


@dataclass(slots=True)
class GroupPages:
    """Pages over all steps of a run: those in tables of a group, and those of blocks that the step reads or writes."""

    held: int = 0
    read: int = 0

    @property
    def unread(self) -> int:
        return self.held - self.read


@dataclass(slots=True)
class GroupSums:
    """Pages of each group, and `leased` pages of none, over all `steps` with rows of a run."""

    groups: tuple[GroupPages, ...]
    leased: int = 0
    steps: int = 0


def count_pages(block_size: int, requests: Sequence[Lengths], groups: Sequence[KvGroup]) -> GroupSums:
    """Serve requests of these lengths from a pool with groups of layers in which none waits; add its pages up."""
    sums = GroupSums(tuple([GroupPages() for _ in groups]))
    pages = _blocks_for(block_size, requests) * sum(group.pages for group in groups)
    for plan, ledger in _each_step(block_size, requests, pages, groups=groups):
        if plan is None:
            continue
        sums.steps += 1
        sums.leased += ledger.pool_counts().leased
        for row in plan.rows:
            end = row.start + row.length
            for group, table, found in zip(groups, row.tables, sums.groups, strict=True):
                found.held += len(table) - table.count(TRIMMED)
                found.read += group.pages * (-(-end // block_size) - unread_blocks(group, row.start, block_size))
    return sums


def _served(block_size: int, requests: Sequence[Lengths], blocks: int, delay: int = 0) -> tuple[Waste, Waste]:
    """Return the waste of all steps, and of those before which a sequence lacked blocks."""
    waste, pressed = Waste(), Waste()
    for plan, ledger in _each_step(block_size, requests, blocks, delay):
        waste.steps += 1
        if plan is not None:
            _add_step(waste, plan, ledger, block_size)
            if ledger.pool_counts().capacity or ledger.state.sequences.find_stalled():
                _add_step(pressed, plan, ledger, block_size)
    return waste, pressed


def _each_step(
    block_size: int, requests: Sequence[Lengths], blocks: int, delay: int = 0, groups: Sequence[KvGroup] = ()
) -> Iterator[tuple[StepPlan | None, Ledger]]:
    """Serve requests, and yield each step before it runs; None is an idle one. With `groups`, `blocks` are pages."""
    kinds, reports = tuple(groups), deque[tuple[int, Report]]()
    agent, ledger = _new_pair(AgentConfig(blocks, block_size, max_num_seqs=MAX_NUM_SEQS, groups=kinds))
    for index, lengths in enumerate(requests, start=1):
        agent.submit_sequence(_sequence(index, lengths))
    for step in itertools.count():
        if not agent.has_work:
            return
        if (said := agent.take_report()) is not None:
            reports.append((step + delay, said))
        while reports and reports[0][0] <= step:
            ledger.apply_report(reports.popleft()[1])
            if (batch := ledger.schedule()) is not None:
                agent.apply_grant(batch)
        plan = agent.plan()
        yield plan, ledger
        if plan is not None:
            agent.complete(StepResult(plan.step, {row.sequence: (1,) for row in plan.rows if row.samples}))


def _new_pair(config: AgentConfig, options: LedgerOptions = _USUAL) -> tuple[LeaseAgent, Ledger]:
    """Return an agent that is attached, and its ledger."""
    agent = LeaseAgent(config)
    sizes = {name: getattr(config, name) for name in ("num_blocks", "block_size", "max_num_seqs", "groups")}
    ledger = new_ledger(LedgerConfig(**sizes, **asdict(options)))
    agent.inventory()
    agent.attached(0)
    return agent, ledger


def _blocks_for(block_size: int, requests: Sequence[Lengths]) -> int:
    """Return the size of a pool in which no sequence waits: slots that are a power of two, in blocks."""
    needed = max((MAX_NUM_SEQS * (prompt + output + _LARGEST_BLOCK) for prompt, output in requests), default=1)
    return max(_LEAST_SLOTS, 1 << (needed - 1).bit_length()) // block_size


def _sequence(index: int, lengths: Lengths) -> NewSequence:
    prompt, output = lengths
    tokens = tuple(random.Random(index).choices(range(1000), k=prompt))
    stop = StopRule(output)
    return NewSequence(SequenceId(index), "", tokens, (), bytes(32), prompt + output, stop, no_cache=True)


def _add_step(waste: Waste, plan: StepPlan, ledger: Ledger, block_size: int) -> None:
    waste.used += sum(row.start + row.length for row in plan.rows)
    waste.in_rows += sum(len(row.blocks) for row in plan.rows) * block_size
    waste.leased += ledger.pool_counts().leased * block_size
    waste.rows += len(plan.rows)
