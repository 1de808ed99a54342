"""The plan of one step, its result, and the port through which the engine runs it.

The pure core makes a plan from block tables alone; a runner turns the plan into kernels. The runner keeps the tokens of
every running sequence on the device, so a step can be planned while the token that it starts from is still being
sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.lease import Copy
from common.types import BlockId, SamplingParams, SequenceId, TokenLogprobs
from gpuworker.core.stopping import FinishCause


class ScheduledRow(NamedTuple):
    """One sequence's part of a step: positions start .. start+length-1 are computed and their K/V written.

    `blocks` is a snapshot of the block table and covers position start+length-1; TRIMMED stands for blocks that no
    layer reads any more. When `samples`, the last position holds the last token so far and the next one is sampled.
    """

    sequence: SequenceId
    start: int
    length: int
    blocks: tuple[BlockId, ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: block copies first, in order, then every row. Rows of decodes stand before rows of prefills."""

    step: int
    rows: tuple[ScheduledRow, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def scheduled_tokens(self) -> int:
        """Positions that the step computes; at most the token budget."""
        return sum(row.length for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: the tokens of each sequence that sampled, and log-probabilities where requested.

    A sequence samples one token a step. `ended` are sequences whose constraint was complete before the step; their
    samples are discarded.
    """

    step: int
    sampled: Mapping[SequenceId, tuple[int, ...]]
    logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    ended: Mapping[SequenceId, FinishCause] = field(default_factory=dict)


class StepRunner(Protocol):
    """Runs plans in the order of `submit`, on a device; called from the engine's thread.

    At most two steps are unfinished at a time. The future of a failed step fails with EngineFailure; the content of the
    KV cache is then unknown.
    """

    def add(self, sequence: SequenceId, tokens: Sequence[int], sampling: SamplingParams, prompt_tokens: int) -> None:
        """Take over an admitted sequence with all its tokens, of which the first `prompt_tokens` are prompt."""
        ...

    def remove(self, sequence: SequenceId) -> None:
        """Forget a sequence; no unfinished step contains it."""
        ...

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step, or queue it behind the running one."""
        ...

    def close(self) -> None:
        """Finish the submitted steps and free the device."""
        ...
