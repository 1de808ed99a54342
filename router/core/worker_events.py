"""Events of one sequence at a worker, in order. Their names are those of the messages in gpuworker.proto."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import QuireError
from common.types import FinishReason, MissReason, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class SequenceAdmitted:
    """The sequence has its blocks, after waiting `reserve_seconds` for them at the worker."""

    cached_tokens: int
    miss_reason: MissReason
    diverged_at: int
    decision_id: str
    reserve_seconds: float


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """New output tokens, with one log-probability entry each when the request asked for them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Preempted:
    """The sequence lost its blocks and waits again."""


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The sequence has ended at the worker."""

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker cannot serve the sequence."""

    error: QuireError


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker or its connection is gone; the sequence may continue at another worker."""

    reason: str


SequenceEvent = SequenceAdmitted | TokensSampled | Preempted | SequenceFinished | Refused | Lost
