"""One sequence at the worker: its tokens, block hashes and block table, and how many tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass

from common.hashing import block_hash_of, next_digest
from common.lease import Reserve
from common.types import BlockHash, BlockId, FinishReason, SequenceId, SequencePhase, Usage
from gpuworker.core.stopping import FinishCause, StopRule


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence as the engine submits it.

    `sequence` rises from one submission to the next. `block_hashes` are those of the prompt's full blocks;
    `parent_digest` is the 32-byte digest of the last of them, or the root. `max_len` bounds prompt and output together,
    in tokens.
    """

    sequence: SequenceId
    request_id: str
    tokens: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    parent_digest: bytes
    max_len: int
    stop: StopRule
    priority: int = 0
    fork_of: SequenceId | None = None
    no_cache: bool = False
    traceparent: str = ""


class Sequence:
    """State of a live sequence. Positions count from 0; position p holds token p.

    `num_computed_tokens` is the next position to compute; it includes steps in flight. `sampling` counts the tokens
    that steps in flight will sample, so `len(tokens) + sampling` tokens are known when the next step starts.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "cached_tokens",
        "hashed",
        "in_flight",
        "limit",
        "new",
        "num_computed_tokens",
        "parent_digest",
        "phase",
        "preemptions",
        "prompt_tokens",
        "reason",
        "recompute_below",
        "recomputed",
        "sampling",
        "seniority",
        "snapshot",
        "tokens",
        "trimmed",
    )

    def __init__(self, new: NewSequence, arrival: int, hashed: bool) -> None:
        self.new = new
        self.arrival = arrival
        self.seniority = (-new.priority, arrival)
        self.tokens = list(new.tokens)
        self.prompt_tokens = len(new.tokens)
        self.limit = new.stop.limit(self.prompt_tokens, new.max_len)
        self.hashed = hashed
        self.block_hashes = list(new.block_hashes) if hashed else []
        self.parent_digest = new.parent_digest
        self.phase = SequencePhase.WAITING
        self.block_table: list[BlockId] = []
        self.snapshot: tuple[BlockId, ...] | None = None
        self.num_computed_tokens = 0
        self.in_flight = 0
        self.sampling = 0
        self.trimmed = 0
        self.cached_tokens: int | None = None
        self.reason = FinishReason.CANCELLED
        self.recomputed = 0
        self.recompute_below = 0
        self.preemptions = 0

    @property
    def id(self) -> SequenceId:
        """The sequence's id, unique within the worker's incarnation."""
        return self.new.sequence

    @property
    def draining(self) -> bool:
        """Whether the sequence is out of all later plans and keeps its block table only for steps in flight."""
        return self.phase in (SequencePhase.DRAINING_FINISH, SequencePhase.DRAINING_PREEMPT)

    def start(self, block_table: tuple[BlockId, ...], cached_tokens: int) -> None:
        """Run on `block_table`. Only the first admission counts cached tokens: later ones repeat its work."""
        self.phase = SequencePhase.RUNNING
        self.block_table = list(block_table)
        self.snapshot = block_table
        self.num_computed_tokens = 0
        self.trimmed = 0
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens

    def requeue(self) -> None:
        """Wait again, after a preemption, with all tokens so far."""
        self.phase = SequencePhase.WAITING
        self.recompute_below = max(self.recompute_below, self.num_computed_tokens)
        self.block_table, self.snapshot, self.num_computed_tokens = [], None, 0
        self.preemptions += 1

    def blocks(self) -> tuple[BlockId, ...]:
        """Return the block table as a tuple, rebuilt only after a change."""
        if self.snapshot is None:
            self.snapshot = tuple(self.block_table)
        return self.snapshot

    def append_block(self, block: BlockId) -> None:
        self.block_table.append(block)
        self.snapshot = None

    def accept(self, token: int, block_size: int) -> FinishCause | None:
        """Add a sampled token, and a block hash when it fills a block; return how it ends the sequence, or None."""
        tokens = self.tokens
        tokens.append(token)
        length = len(tokens)
        if self.hashed and length % block_size == 0:
            self.parent_digest = next_digest(self.parent_digest, tokens[-block_size:])
            self.block_hashes.append(block_hash_of(self.parent_digest))
        new = self.new
        return new.stop.ending(token, length - self.prompt_tokens, length, self.limit)

    def reserve(self) -> Reserve:
        """Return the reservation that queues this sequence at the manager, at its present length."""
        new = self.new
        return Reserve(
            sequence=new.sequence,
            num_tokens=len(self.tokens),
            max_len=self.limit,
            priority=new.priority,
            block_hashes=tuple(self.block_hashes),
            fork_of=new.fork_of if len(self.tokens) == self.prompt_tokens else None,
            request_id=new.request_id,
            traceparent=new.traceparent,
        )

    def usage(self) -> Usage:
        """Return what the sequence has cost so far, in tokens."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            output_tokens=len(self.tokens) - self.prompt_tokens,
            recomputed_tokens=self.recomputed,
            preemptions=self.preemptions,
        )
