"""The plan of one step, its result, and the port through which the engine runs it.

The pure core makes a plan from block tables alone; a runner turns the plan into kernels. The runner keeps the tokens of
every running sequence on the device. So a step can be planned while the token that it starts from is still being
sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from common.contracts.errors import EngineFailure
from common.contracts.lease import Copy, TierCopy
from common.contracts.types import BlockId, SamplingParams, SequenceId, TokenLogprobs
from gpuworker.scheduling.stopping import FinishCause


class ScheduledRow(NamedTuple):
    """One sequence's part of a step: positions start .. start+length-1 are computed and their K/V written.

    `blocks` is a snapshot of the block table and covers position start+length-1; TRIMMED stands for blocks that no
    layer reads any more. When `samples`, the last position holds the last token so far and the next one is sampled.
    The `drafts` are guesses for the tokens from there on. Each is computed, too, at the next position, and samples.
    Where the pool has groups, `tables` has a table of pages for each group: those of its blocks, one after the other.
    That of checkpoints names blocks by their first pages.
    """

    sequence: SequenceId
    start: int
    length: int
    blocks: tuple[BlockId, ...]
    samples: bool
    drafts: tuple[int, ...] = ()
    tables: tuple[tuple[BlockId, ...], ...] = ()


class Checkpoint(NamedTuple):
    """The pages of a block that holds a sequence's states; a step loads it before it runs, or saves it behind."""

    sequence: SequenceId
    pages: tuple[BlockId, ...]


class ScoredPart(NamedTuple):
    """The positions start .. end-1 of a row, by its index, whose logits score the next token of the prompt."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: block copies first, in order, then every row. Rows of decodes stand before rows of prefills.

    `scored` has at most one part of a row; a position of it samples nothing. `drafts` counts those of all rows.
    A draft model has guessed them, `guessing` seconds before the step. The states of the sequences of `loads` are read
    from checkpoints before the rows are computed, those of the sequences of `saves` are written to some after that.
    `loaded` counts the blocks that its copies load from host memory, and these copies, by the sequence that they are
    for.
    """

    step: int
    rows: tuple[ScheduledRow, ...]
    copies: tuple[Copy | TierCopy, ...] = ()
    scored: tuple[ScoredPart, ...] = ()
    drafts: int = 0
    guessing: float = 0.0
    loads: tuple[Checkpoint, ...] = ()
    saves: tuple[Checkpoint, ...] = ()
    loaded: tuple[tuple[SequenceId, int, int], ...] = ()
    prefilled: int = field(init=False, repr=False)
    """Positions beyond one for each row that samples a token, and beyond drafts."""

    def __post_init__(self) -> None:
        # Counted once: each step is priced and learnt from several times.
        object.__setattr__(self, "prefilled", sum([row.length - row.samples for row in self.rows]))

    @property
    def scheduled_tokens(self) -> int:
        """Positions that the step computes; at most the token budget."""
        return sum([row.length for row in self.rows]) + self.drafts


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: the tokens of each sequence that sampled, and log-probabilities where requested.

    A sequence samples one token a step, and one more for each of its drafts that was right. `ended` are sequences whose
    constraint was complete before the step; their samples are discarded.
    `prompt_logprobs` are those of the plan's scored parts, an entry a position. `forced` are tokens that a constraint
    forces to follow those sampled, where that was found out with this step. Its copies between blocks and host memory
    took `copy_seconds`, which `seconds` do not contain.
    """

    step: int
    sampled: Mapping[SequenceId, tuple[int, ...]]
    logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    ended: Mapping[SequenceId, FinishCause] = field(default_factory=dict)
    prompt_logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    forced: Mapping[SequenceId, tuple[int, ...]] = field(default_factory=dict)
    copy_seconds: float = 0.0


def laid_out(plan: StepPlan) -> StepPlan:
    """Return the plan in which each draft has a row of its own, behind that of its sequence.

    So a draft's position is computed and sampled as it is without drafts: as a row of one position.
    """
    if not plan.drafts:
        return plan
    rows: list[ScheduledRow] = []
    places = []
    for row in plan.rows:
        places.append(len(rows))
        rows.append(row._replace(drafts=()))
        end = row.start + row.length
        rows += [row._replace(start=end + n, length=1, samples=True, drafts=()) for n in range(len(row.drafts))]
    scored = tuple([part._replace(row=places[part.row]) for part in plan.scored])
    return replace(plan, rows=tuple(rows), scored=scored, drafts=0)


class StepNotBuilt(EngineFailure):
    """A step could not be laid out, so nothing of it runs. Each of the `culprits` cannot be laid out alone either."""

    def __init__(self, culprits: Sequence[SequenceId], why: str) -> None:
        super().__init__(why)
        self.culprits = frozenset(culprits)


class StepRunner(Protocol):
    """Runs plans in the order of `submit_step`, on a device; called from the engine's thread.

    At most two steps are unfinished at a time. The future of a failed step fails with EngineFailure; the content of the
    KV cache is then unknown.
    """

    def add_sequence(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        sampling: SamplingParams,
        prompt_tokens: int,
        adapter: object | None = None,
    ) -> None:
        """Take over an admitted sequence with all its tokens, of which the first `prompt_tokens` are prompt.

        `adapter` is what the runner's model made of the sequence's adapter; None: the base computes it.
        """
        ...

    def remove(self, sequence: SequenceId) -> None:
        """Forget a sequence; no unfinished step contains it. An unknown one is ignored."""
        ...

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step, or queue it behind the running one. Raises StepNotBuilt, and then runs nothing of it."""
        ...

    def close(self) -> None:
        """Finish the submitted steps and free the device."""
        ...
