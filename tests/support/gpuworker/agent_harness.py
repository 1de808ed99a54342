"""Drives a LeaseAgent by hand: submits prompts, plays the manager, completes steps with chosen tokens."""

from __future__ import annotations

from typing import Any

from common.contracts.hashing import block_digests, block_hash_of, root_digest
from common.contracts.lease import Admit, Copy, GrantBatch, Inventory, Preempt, Report
from common.contracts.types import BlockHash, BlockId, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig, Applied, Completion
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule

EOS = 99


def keys(tokens: range | list[int], block_size: int) -> tuple[BlockHash, ...]:
    """Return the hashes of the full blocks of `tokens`, from the root that every prompt here has."""
    return tuple(
        block_hash_of(parent_digest)
        for parent_digest in block_digests(root_digest("m", "t", block_size), list(tokens), block_size)
    )


class Driver:
    """An attached agent on a tiny pool, and short methods for the actions of its manager and its engine."""

    def __init__(self, num_blocks: int = 8, block_size: int = 4, lease_target: int = 0, **config: Any) -> None:
        self.block_size = block_size
        self.agent = LeaseAgent(AgentConfig(num_blocks, block_size, **config))
        self.inventory: Inventory = self.agent.inventory()
        self.agent.attached(lease_target)
        self.lease_target = lease_target

    def submit(self, sequence: int, tokens: range | list[int], max_tokens: int = 4, **more: Any) -> SequenceId:
        root = root_digest("m", "t", self.block_size)
        digests = block_digests(root, list(tokens), self.block_size)
        rule = StopRule(max_tokens, eos_ids=frozenset({EOS}), min_tokens=more.pop("min_tokens", 0))
        new = NewSequence(
            SequenceId(sequence),
            f"r{sequence}",
            tuple(tokens),
            tuple(map(block_hash_of, digests)),
            digests[-1] if digests else root,
            len(tokens) + max_tokens,
            rule,
            **more,
        )
        self.agent.submit_sequence(new)
        return new.sequence

    def admission(self, sequence: int, row: list[int], shared: int = 0) -> Admit:
        return Admit(SequenceId(sequence), blocks(row), shared, shared * self.block_size)

    def admit(self, sequence: int, row: list[int], shared: int = 0, copy: tuple[Copy, ...] = ()) -> Applied:
        return self.agent.apply_grant(
            GrantBatch(self.lease_target, copy=copy, admit=(self.admission(sequence, row, shared),))
        )

    def lease(self, granted: list[int], target: int | None = None) -> Applied:
        self.lease_target = len(granted) if target is None else target
        return self.agent.apply_grant(GrantBatch(self.lease_target, lease=blocks(granted)))

    def preempt(self, sequence: int) -> Applied:
        return self.agent.apply_grant(GrantBatch(self.lease_target, preempt=(Preempt(SequenceId(sequence)),)))

    def plan(self) -> StepPlan:
        plan = self.agent.plan()
        assert plan is not None
        return plan

    def rows(self) -> list[tuple[int, int, int, tuple[int, ...], bool]]:
        """Plan a step; return its rows as plain tuples."""
        return [(r.sequence, r.start, r.length, r.blocks, r.samples) for r in self.plan().rows]

    def complete(self, plan: StepPlan, token: int = 50) -> Completion:
        """Complete a step in which every sampling row sampled `token`."""
        sampled: dict[SequenceId, tuple[int, ...]] = {row.sequence: (token,) for row in plan.rows if row.samples}
        completion = self.agent.complete(StepResult(plan.step, sampled))
        self.agent.check_invariants()
        return completion

    def step(self, token: int = 50) -> Completion:
        return self.complete(self.plan(), token)


def blocks(ids: list[int]) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def report_of(worker: Driver) -> Report:
    """Take the report that is due."""
    report = worker.agent.take_report()
    assert report is not None
    return report
