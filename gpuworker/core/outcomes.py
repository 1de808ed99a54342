"""The configuration of the lease agent, and its results: effects of grant batches and steps, and counts."""

from __future__ import annotations

from dataclasses import dataclass

from common.lease import Admit, Preempt
from common.types import FinishReason, SequenceId, Usage


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Sizes and policies of one worker.

    `block_size` is a power of two. `long_prefill_cap` bounds one prompt's share of a step while others run too; 0 is no
    bound. `window` > 0 is the widest attention window of a model whose layers all have one.
    """

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int = 2048
    long_prefill_cap: int = 0
    window: int = 0
    prefix_caching: bool = True
    runway_slots: int = 32
    max_num_seqs: int = 256


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The end of a sequence: why, what it cost, the token that stopped it if one did, and a message for an error.

    A step in flight may still contain the sequence.
    """

    sequence: SequenceId
    reason: FinishReason
    usage: Usage
    stop_token: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Applied:
    """The effect of a grant batch: admissions, ordered preemptions of running sequences, and leased blocks."""

    admitted: tuple[Admit, ...] = ()
    preempting: tuple[Preempt, ...] = ()
    dropped: tuple[SequenceId, ...] = ()
    leased: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The effect of a step, or of a command between steps.

    `tokens` are newly delivered ids. `preempted` sequences wait again. No step in flight contains `forgotten`
    sequences, and their block tables are gone: the runner may drop its state. `computed` counts the positions of the
    step.
    """

    tokens: dict[SequenceId, tuple[int, ...]]
    finished: tuple[SequenceFinished, ...] = ()
    preempted: tuple[SequenceId, ...] = ()
    forgotten: tuple[SequenceId, ...] = ()
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Levels for metrics and for the engine's loop.

    `draining` sequences keep block tables for steps in flight only. `pending_prefill` counts known tokens whose
    computation has not begun. `unheld` counts blocks that are neither in a block table nor in the pool.
    """

    running: int
    waiting: int
    draining: int
    stalled: int
    deferred: int
    pool: int
    lease_target: int
    steps_in_flight: int
    pending_prefill: int
    unheld: int
