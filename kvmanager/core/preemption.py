"""Who gives up its blocks when the pool is used up: the lowest priority, and of those the latest.

"Latest" is by arrival, which a sequence keeps for life: one that was preempted and started again is no later for
that. So the senior sequence of the highest priority is never a victim, and a sequence is preempted at most once for
each block by which it and its seniors may still grow: that bounds the work that is lost and lets every sequence end.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.types import TRIMMED, Candidate
from kvmanager.core.block import Block
from kvmanager.core.sequence import Sequence


def private_blocks(sequence: Sequence, blocks: list[Block]) -> int:
    """Return how many blocks of a row no other row holds: what its preemption frees."""
    return sum(blocks[block].refs == 1 for block in sequence.block_table if block != TRIMMED)


def tokens_lost(sequence: Sequence, blocks: list[Block], block_size: int) -> int:
    """Return how many of its tokens must be computed again if its sealed blocks stay cached.

    It is for the decision record. The manager hears of lengths at admission and every few steps (`Report.computed`),
    so it may be some tokens low.
    """
    sealed = sum(block == TRIMMED or blocks[block].hash is not None for block in sequence.block_table)
    return max(0, max(sequence.num_tokens, sequence.computed) - sealed * block_size)


def seniority(sequence: Sequence) -> tuple[int, int]:
    """Return the key by which sequences are ordered, the most senior first."""
    return (-sequence.priority, sequence.arrival)


def choose_victim(running: Iterable[Sequence]) -> Sequence:
    """Return the least senior running sequence: in the end the pool is the most senior one's alone."""
    return max(running, key=seniority)


def candidates(running: Iterable[Sequence], blocks: list[Block]) -> tuple[Candidate, ...]:
    """Return every running sequence with the terms of the choice, the first to be preempted first."""
    found = []
    for sequence in sorted(running, key=seniority, reverse=True):
        terms = (
            ("priority", float(sequence.priority)),
            ("arrival", float(sequence.arrival)),
            ("private_blocks", float(private_blocks(sequence, blocks))),
            ("num_tokens", float(sequence.num_tokens)),
        )
        found.append(Candidate(sequence.name, terms=terms))
    return tuple(found)
