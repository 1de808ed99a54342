"""Audits the worker's own bookkeeping: the holders of each block, its fill, and the content of steps in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from common.contracts.types import TRIMMED, SequenceId, SequencePhase
from gpuworker.scheduling.batch_plan import StepPlan
from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.sequence import Sequence


def violations(
    sequences: Mapping[SequenceId, Sequence], blocks: BlockStates, in_flight: Iterable[StepPlan], block_size: int
) -> list[str]:
    """Return every rule that does not hold, in words; empty when all is well."""
    return [
        *_holders(sequences, blocks),
        *_claims(blocks, block_size),
        *(text for sequence in sequences.values() for text in _progress(sequence, blocks)),
        *_flights(sequences, in_flight),
    ]


def _holders(sequences: Mapping[SequenceId, Sequence], blocks: BlockStates) -> list[str]:
    held = Counter(block for s in sequences.values() for block in s.block_table if block != TRIMMED)
    found = [f"block {block} is in the pool and in a row" for block in blocks.pool if held[block]]
    if len(set(blocks.pool)) != len(blocks.pool):
        found.append("a block is in the pool twice")
    counted = {block: n for block, n in enumerate(blocks.holders) if n}
    if counted != dict(held):
        found.append(f"holders are counted as {counted}, the rows say {dict(held)}")
    return found


def _claims(blocks: BlockStates, block_size: int) -> list[str]:
    found = [f"block {block} is claimed while in the pool" for block in blocks.pool if block in blocks.content]
    found += [f"block {block} is claimed and not full" for block in blocks.content if blocks.fill[block] != block_size]
    return found


def _progress(sequence: Sequence, blocks: BlockStates) -> list[str]:
    name, found = f"sequence {sequence.id}", []
    if sequence.phase is SequencePhase.WAITING:
        if sequence.block_table or sequence.in_flight or sequence.sampling:
            found.append(f"{name} waits and has a row or a step")
        return found
    if sequence.snapshot is not None and list(sequence.snapshot) != sequence.block_table:
        found.append(f"{name} has a stale snapshot of its row")
    if sequence.num_computed_tokens > len(sequence.tokens) + sequence.sampling:
        found.append(f"{name} computes position {sequence.num_computed_tokens} of unknown tokens")
    if not sequence.in_flight and sequence.sampling:
        found.append(f"{name} awaits a token from no step")
    return found


def _flights(sequences: Mapping[SequenceId, Sequence], in_flight: Iterable[StepPlan]) -> list[str]:
    flights = Counter(row.sequence for plan in in_flight for row in plan.rows)
    found = [f"sequence {s} is in a step and forgotten" for s in flights if s not in sequences]
    found += [
        f"sequence {s.id} counts {s.in_flight} steps in flight, there are {flights[s.id]}"
        for s in sequences.values()
        if s.in_flight != flights[s.id]
    ]
    return found
