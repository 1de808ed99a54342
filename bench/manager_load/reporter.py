"""What a worker reports, step by step, without a model: binds, seals, ends and new sequences in their usual rates.

Every running sequence gets one token a step. A sequence has a prompt of 520 tokens, half of which it shares with one
in eight others, and an output of 192 to 384. The blocks of a prompt are sealed one step after its admission.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from common.contracts.lease import GrantBatch, Report, Reserve
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId

BLOCK_SIZE: Final = 16
_PROMPT: Final = 520
_OUTPUT: Final = 384
_SHARED_BLOCKS: Final = 16
_PREFIXES: Final = 8
_RUNWAY: Final = 32
_BLOCKS: Final = -(-(_PROMPT + _OUTPUT) // BLOCK_SIZE)


@dataclass(slots=True)
class _Running:
    tokens: int
    end: int
    table: list[BlockId]
    to_seal: list[tuple[BlockId, BlockHash]] = field(default_factory=list)


class Reporter:
    """One simulated worker. Its pool holds its sequences and as much again for the cache."""

    def __init__(self, worker: int, num_sequences: int) -> None:
        self._rng = random.Random(f"worker {worker}")
        self._prefixes = [self._hashes(_SHARED_BLOCKS) for _ in range(_PREFIXES)]
        self.num_blocks = 2 * _BLOCKS * num_sequences
        self._missing, self._next = num_sequences, 1
        self._asked: dict[SequenceId, Reserve] = {}
        self._running: dict[SequenceId, _Running] = {}
        self._pool: list[BlockId] = []
        self._target = self._step = 0
        # The first sequences end at any length, so that the later ones do not all end together.
        self._mixed = False
        self.tokens = self.admitted = 0

    def _hashes(self, count: int) -> tuple[BlockHash, ...]:
        return tuple(BlockHash(self._rng.randbytes(16)) for _ in range(count))

    def apply(self, batch: GrantBatch) -> None:
        """Take what the manager grants."""
        self._target = batch.lease_target
        for admit in batch.admit:
            reserve = self._asked.pop(admit.sequence)
            new = zip(admit.block_table, reserve.block_hashes, strict=False)
            to_seal = list(new)[admit.n_shared :]
            end = reserve.max_len - 1 - self._rng.randrange(_OUTPUT // 2 if self._mixed else _OUTPUT - 1)
            self._mixed = self._mixed or (not self._missing and not self._asked)
            self._running[admit.sequence] = _Running(reserve.num_tokens, end, list(admit.block_table), to_seal)
            self.admitted += 1
        self._pool += batch.lease

    def step(self) -> Report:
        """Run one step, and return its report."""
        self._step += 1
        bind: list[tuple[SequenceId, BlockId]] = []
        seal: list[tuple[BlockId, BlockHash]] = []
        ended: list[tuple[SequenceId, FinishReason]] = []
        stalled: list[SequenceId] = []
        for number, sequence in self._running.items():
            seal += sequence.to_seal
            sequence.to_seal = []
            if len(sequence.table) * BLOCK_SIZE == sequence.tokens and not self._bind(number, sequence, bind):
                stalled.append(number)
                continue
            sequence.tokens += 1
            self.tokens += 1
            if sequence.tokens % BLOCK_SIZE == 0:
                seal.append((sequence.table[-1], self._hashes(1)[0]))
            if sequence.tokens == sequence.end:
                ended.append((number, FinishReason.STOP))
        for number, _ in ended:
            del self._running[number]
        returned, self._pool = self._pool[self._target :], self._pool[: self._target]
        return Report(
            step=self._step,
            reserve=self._new(len(ended)),
            bind=tuple(bind),
            seal=tuple(seal),
            returned=tuple(returned),
            finished=tuple(ended),
            stalled=tuple(stalled),
            lease_want=self._want(),
        )

    def _bind(self, number: SequenceId, sequence: _Running, bind: list[tuple[SequenceId, BlockId]]) -> bool:
        if not self._pool:
            return False
        sequence.table.append(self._pool.pop(0))
        bind.append((number, sequence.table[-1]))
        return True

    def _new(self, ended: int) -> tuple[Reserve, ...]:
        """Ask for blocks for as many sequences as ended; at the beginning for a few more each step."""
        joining = min(self._missing, 2)
        self._missing -= joining
        found = []
        for _ in range(ended + joining):
            hashes = self._rng.choice(self._prefixes) + self._hashes(_PROMPT // BLOCK_SIZE - _SHARED_BLOCKS)
            number, self._next = SequenceId(self._next), self._next + 1
            name = f"request-{number}"
            found.append(Reserve(number, _PROMPT, _PROMPT + _OUTPUT, block_hashes=hashes, request_id=name))
        self._asked.update((each.sequence, each) for each in found)
        return tuple(found)

    def _want(self) -> int:
        return sum(
            max(0, -(-min(each.tokens + _RUNWAY, each.end) // BLOCK_SIZE) - len(each.table))
            for each in self._running.values()
        )
