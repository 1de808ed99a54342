"""Events of one sequence at a worker, in order. Their names are those of the messages in gpuworker.proto."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from common.contracts.errors import QuireError
from common.contracts.transfers import Fetched
from common.contracts.types import FinishReason, MissReason, TokenLogprobs, Usage
from router.workers.suspicion import Breakdown


class WorkerTime(NamedTuple):
    """When a worker put something out, on its own clock: differences alone say something.

    `lost` are the seconds until then in which the worker stood still, or its steps took many times their usual.
    """

    at: float
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceAdmitted:
    """The sequence has its blocks, after waiting `reserve_seconds` for them at the worker, which lost some of these.

    `recounted`: it had them before, and this is the right number of cached tokens. When its submit was read, the worker
    had stood still for `unread_seconds`. `fetched` says what it waited for, if something was fetched for it.
    """

    cached_tokens: int
    miss_reason: MissReason
    diverged_at: int
    decision_id: str
    reserve_seconds: float
    recounted: bool = False
    lost_seconds: float = 0.0
    unread_seconds: float = 0.0
    fetched: Fetched | None = None
    when: WorkerTime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SequenceStarted:
    """The first step of the sequence is over; it began `wait_seconds` after the admission.

    In that time the worker computed `ahead_tokens` positions for others, most of them for request `ahead_of`. Within
    `load_seconds`, which do not count as waiting, it copied `loaded_blocks` from its host memory. Computing these would
    have taken it `spared_seconds`; 0: not known.
    """

    wait_seconds: float
    ahead_tokens: int
    ahead_of: str
    when: WorkerTime | None = field(default=None, compare=False)
    loaded_blocks: int = 0
    load_seconds: float = 0.0
    spared_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceDelayed:
    """What held the sequence up until now, in seconds.

    Its constraint was compiled for `compile_seconds` before it asked for blocks. It had no block for its next tokens
    for `stalled_seconds`. Of the time in which it waited for blocks, its worker had no KV manager that answered for
    `manager_away_seconds`.
    """

    compile_seconds: float = 0.0
    stalled_seconds: float = 0.0
    manager_away_seconds: float = 0.0
    when: WorkerTime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """New output tokens, with one log-probability entry each when the request asked for them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    when: WorkerTime | None = field(default=None, compare=False)

    def part(self, start: int, end: int) -> TokensSampled:
        """Return some of the tokens."""
        return TokensSampled(self.token_ids[start:end], self.logprobs[start:end])


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the next tokens of the prompt, before any output token."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Preempted:
    """The sequence lost its blocks and waits again."""

    when: WorkerTime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The sequence has ended at the worker; `wrong_field` names what of the request is to blame for an error.

    `embedding` is the vector of a sequence that embeds, in little-endian float32.
    """

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    message: str = ""
    wrong_field: str = ""
    embedding: bytes = b""
    when: WorkerTime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker cannot serve the sequence."""

    error: QuireError


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker or its connection is gone; the sequence may continue at another worker.

    With a `breakdown` the sequence itself may be the cause: the worker had begun it when it broke.
    """

    reason: str
    breakdown: Breakdown | None = None


SequenceEvent = (
    SequenceAdmitted
    | SequenceStarted
    | SequenceDelayed
    | PromptScored
    | TokensSampled
    | Preempted
    | SequenceFinished
    | Refused
    | Lost
)
