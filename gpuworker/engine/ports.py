"""What passes between the engine's thread and a worker's I/O loop: requests one way, outputs the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.contracts.lease import Admit
from common.contracts.types import SamplingParams, SequenceId, TokenLogprobs
from gpuworker.engine.step_rates import NO_STEPS, StepTimes
from gpuworker.scheduling.draft_tally import DraftTallies, total
from gpuworker.scheduling.kv_events import Change
from gpuworker.scheduling.outcomes import NOTHING_LOADED, Loaded, SequenceFinished
from gpuworker.scheduling.sequence import NewSequence


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to run. `prompt_tokens` of its tokens are prompt, the rest is output of an earlier run of it."""

    new: NewSequence
    sampling: SamplingParams
    prompt_tokens: int
    traced: bool = False
    adapter: object | None = None
    """What the runner's model made of the sequence's adapter. Whoever holds it keeps its memory."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A traced sequence's part of a step: `length` positions from `start`; wall-clock begin and end in ns.

    `decode`: all its steps that computed a sampled token, to sample the next one; otherwise one step over its prompt,
    or over work that a preemption lost. `drafts` were verified besides.
    """

    sequence: SequenceId
    start: int
    length: int
    begin_ns: int
    end_ns: int
    decode: bool = False
    drafts: int = 0
    steps: int = 1


class Started(NamedTuple):
    """The first step of an admitted sequence is over; it began `wait_seconds` after the admission.

    In that time `ahead_tokens` positions were computed for other sequences, most of them for request `ahead_of`.
    Until now `loaded` blocks were copied from host memory for this admission. If these copies ran before the step
    began, their seconds do not count as waiting. Computing what they hold would have taken `spared_seconds`; 0: not
    known.
    """

    sequence: SequenceId
    wait_seconds: float
    ahead_tokens: int
    ahead_of: str
    loaded: Loaded = NOTHING_LOADED
    spared_seconds: float = 0.0


class Delayed(NamedTuple):
    """A sequence had no block for its next tokens for `stalled` seconds.

    Of those, or of its wait to be admitted, no KV manager answered for `away` seconds.
    """

    sequence: SequenceId
    stalled: float
    away: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that a span is made of: wall-clock begin and end in ns, what was computed, and its seconds by part.

    The parts follow one another and fill the time from begin to end: the engine planned the step, and a draft model
    guessed meanwhile; the step waited for the one before it; blocks were copied to host memory and back; model and
    sampler ran; the engine took the result.
    `traced` are the sequences in it that have spans.
    """

    step: int
    begin_ns: int
    end_ns: int
    decodes: int
    prefill_tokens: int
    drafts: int
    predicted: float
    planning: float
    guessing: float
    waiting: float
    running: float
    finishing: float
    traced: tuple[SequenceId, ...]
    copying: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """The outputs of one turn of the engine's loop; at most one of these a step.

    `recounted` has the cached tokens of sequences whose grants said other numbers; it comes with their first tokens.
    `at` is when the turn was over, and `lost` the seconds until then in which the worker stood still or its steps took
    many times their usual. Both are readings of clocks that only rise; 0: not known.
    """

    step: int
    admitted: tuple[Admit, ...] = ()
    tokens: tuple[tuple[SequenceId, tuple[int, ...]], ...] = ()
    logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    finished: tuple[SequenceFinished, ...] = ()
    preempted: tuple[SequenceId, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    recounted: dict[SequenceId, int] = field(default_factory=dict)
    started: tuple[Started, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    delayed: tuple[Delayed, ...] = ()
    at: float = 0.0
    lost: float = 0.0


OutputSink = Callable[[EngineOutputs], None]
"""Called on the engine's thread; it must only hand over, never block or raise."""


class KvEventCounts(NamedTuple):
    """What became of KV events: batches that were published, changes in them, and answers to requests for a replay.

    `overruns` counts how often the queue of a subscriber was full, so that it began to miss batches. Once the thread
    has `failed`, nothing is published.
    """

    batches: int = 0
    changes: int = 0
    replays: int = 0
    overruns: int = 0
    failed: int = 0

    def more(self, **counts: int) -> KvEventCounts:
        """Return these counts and others together."""
        return self._replace(**{name: getattr(self, name) + count for name, count in counts.items()})


class KvEventSink(Protocol):
    """Takes changes of the cache for subscribers, on the engine's thread; it never waits."""

    def has_room(self) -> bool:
        """Return whether `publish` may be called now. If not, the engine is woken once it may."""
        ...

    def publish(self, changes: Sequence[Change]) -> None:
        """Take the changes of a turn; there is one at least."""
        ...


class RankLoad(NamedTuple):
    """How many ranks run a worker's steps; plans that rank 0 has sent, and the seconds of that; why the worker ends."""

    ranks: int = 1
    plans: int = 0
    plan_seconds: float = 0.0
    lost: str = ""


class MaskLateness(NamedTuple):
    """Steps with constrained rows: how many sampled, how many waited for masks, and the seconds of waiting in all."""

    steps: int = 0
    late: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for heartbeats and metrics. Seconds; `step_age_seconds` is 0 when no step runs."""

    running: int = 0
    waiting: int = 0
    num_blocks: int = 0
    unheld_blocks: int = 0
    pending_prefill_tokens: int = 0
    decode_step_seconds: float = 0.0
    prefill_seconds_per_token: float = 0.0
    step_age_seconds: float = 0.0
    step_predicted_seconds: float = 0.0
    steps: int = 0
    tokens_sampled: int = 0
    tokens_scheduled: int = 0
    # Pending prefill tokens that are in steps in flight.
    prefill_tokens_in_flight: int = 0
    manager_attached: bool = False
    # Of a block that another worker had; 0 before the first one.
    fetch_seconds_per_block: float = 0.0
    # Of each fetch beside its blocks.
    fetch_setup_seconds: float = 0.0
    decode_times: StepTimes = NO_STEPS
    mixed_times: StepTimes = NO_STEPS
    drafts: DraftTallies = field(default_factory=dict)

    @property
    def drafted_tokens(self) -> int:
        """Drafts that steps verified."""
        return total(self.drafts).drafted

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were right."""
        return total(self.drafts).accepted
