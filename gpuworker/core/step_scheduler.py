"""Composes one step: decodes come first, chunks of prompts fill the rest of one token budget.

Readiness is a property of blocks: a sequence computes from its first unfilled slot on, whichever sequence filled the
earlier slots. A shared prefix has no owner, so nothing is lost when one of the sequences that share it ends.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from common.types import BlockId, SequenceId
from gpuworker.core.batch_plan import ScheduledRow
from gpuworker.core.block_states import BlockStates
from gpuworker.core.sequence import Sequence


@dataclass(slots=True)
class Composition:
    """The effect of one step on the running sequences.

    `bound` are blocks that sequences took from the pool; `stalled` found none; `deferred` counts those that found no
    budget and keep their order.
    """

    rows: list[ScheduledRow] = field(default_factory=list)
    bound: list[tuple[SequenceId, BlockId]] = field(default_factory=list)
    stalled: list[SequenceId] = field(default_factory=list)
    deferred: int = 0


def _seniority(sequence: Sequence) -> tuple[int, int]:
    return sequence.seniority


class StepScheduler:
    """The running sequences in seniority order: higher priority first, then earlier arrival."""

    def __init__(self, blocks: BlockStates, block_size: int, budget: int, long_prefill_cap: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.shift = block_size.bit_length() - 1
        self.budget = budget
        self.long_prefill_cap = long_prefill_cap
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def add(self, sequence: Sequence) -> None:
        insort(self.prefilling, sequence, key=_seniority)

    def remove(self, sequence: Sequence) -> None:
        (self.prefilling if sequence in self.prefilling else self.decoding).remove(sequence)

    def compose(self) -> Composition:
        """Compose the next step from every running sequence that can sample its next token or come nearer to it."""
        step = Composition()
        left = self._compose_decodes(step, self.budget)
        self._compose_prefills(step, left)
        return step

    def _compose_decodes(self, step: Composition, left: int) -> int:
        fill, shift = self.blocks.fill, self.shift
        for sequence in self.decoding:
            if len(sequence.tokens) + sequence.sampling >= sequence.limit:
                continue  # its last token is being sampled
            if not left:
                step.deferred += 1
                continue
            start = sequence.num_computed_tokens
            index = start >> shift
            if index == len(sequence.block_table) and not self._bind(sequence, step):
                continue
            fill[sequence.block_table[index]] += 1
            sequence.num_computed_tokens = start + 1
            sequence.sampling += 1
            sequence.in_flight += 1
            blocks = sequence.snapshot or sequence.blocks()
            step.rows.append(ScheduledRow(sequence.new.sequence, start, 1, blocks, True))
            left -= 1
        return left

    def _compose_prefills(self, step: Composition, left: int) -> None:
        cap = self.long_prefill_cap if self.running > 1 else 0
        done = []
        for sequence in self.prefilling:
            self.advance(sequence)
            if not left:
                step.deferred += 1
                continue
            start = sequence.num_computed_tokens
            length = self._take(sequence, min(left, cap) if cap else left, step)
            if not length:
                continue
            left -= length
            samples = sequence.num_computed_tokens == len(sequence.tokens)
            sequence.in_flight += 1
            step.rows.append(ScheduledRow(sequence.id, start, length, sequence.blocks(), samples))
            if samples:
                sequence.sampling += 1
                done.append(sequence)
        for sequence in done:
            self.prefilling.remove(sequence)
            insort(self.decoding, sequence, key=_seniority)

    def advance(self, sequence: Sequence) -> None:
        """Move past positions that any row has filled; the sequence computes its last token itself."""
        last, size, fill = len(sequence.tokens) - 1, self.block_size, self.blocks.fill
        block_table = sequence.block_table
        while sequence.num_computed_tokens < last:
            index = sequence.num_computed_tokens >> self.shift
            filled = index * size + fill[block_table[index]] if index < len(block_table) else 0
            if filled <= sequence.num_computed_tokens:
                return
            sequence.num_computed_tokens = min(filled, last)

    def _take(self, sequence: Sequence, room: int, step: Composition) -> int:
        """Write up to `room` unfilled positions in a row from `num_computed_tokens` on; return how many."""
        start, end = sequence.num_computed_tokens, min(sequence.num_computed_tokens + room, len(sequence.tokens))
        fill, row, size = self.blocks.fill, sequence.block_table, self.block_size
        while sequence.num_computed_tokens < end:
            index, offset = sequence.num_computed_tokens >> self.shift, sequence.num_computed_tokens & (size - 1)
            if index == len(row) and not self._bind(sequence, step):
                break
            if fill[row[index]] > offset:
                break  # another row filled it: a slot is written once; the next step continues after it
            length = min(size - offset, end - sequence.num_computed_tokens)
            fill[row[index]] += length
            sequence.num_computed_tokens += length
        return sequence.num_computed_tokens - start

    def _bind(self, sequence: Sequence, step: Composition) -> bool:
        block = self.blocks.bind()
        if block is None:
            step.stalled.append(sequence.id)
            return False
        sequence.append_block(block)
        step.bound.append((sequence.id, block))
        return True

    def lease_want(self, runway_slots: int) -> int:
        """Return how many blocks the running sequences will bind within their next `runway_slots` slots.

        A prompt counts from its last token on: its own blocks came with the admission. The token that reaches a
        sequence's limit is never computed, so its slot is never needed.
        """
        want, shift, round_up = 0, self.shift, self.block_size - 1
        for sequence in self.decoding:
            slots = min(sequence.num_computed_tokens + runway_slots, sequence.limit - 1)
            want += max(0, ((slots + round_up) >> shift) - len(sequence.block_table))
        for sequence in self.prefilling:
            slots = min(len(sequence.tokens) - 1 + runway_slots, sequence.limit - 1)
            want += max(0, ((slots + round_up) >> shift) - len(sequence.block_table))
        return want
