"""The configuration of the lease agent, and its results: effects of grant batches and steps, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from common.contracts.hashing import MIN_PARTIAL_BLOCK
from common.contracts.lease import Admit, Preempt
from common.contracts.types import FinishReason, KvGroup, SequenceId, Usage
from gpuworker.scheduling.draft_tally import DraftTallies, total
from gpuworker.scheduling.drafting import DraftModel, DraftPrices, NewDrafter
from gpuworker.scheduling.kv_events import CacheWatch


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Sizes and policies of one worker.

    `block_size` is a power of two. `max_scored_tokens` bounds the positions of a step that score prompts: each takes a
    row of logits. `long_prefill_cap` bounds one prompt's share of a step while others run too; 0 means no
    bound. `window` > 0 is the widest attention window of a model whose layers all have one. Where layers keep a state
    (`keeps_states`), each sequence computes all its tokens, a fork too. Parts of blocks are reused where a block has
    `min_partial_block` slots or more. `groups` are those of the pool; empty: all layers keep K/V equally long.
    """

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int = 2048
    long_prefill_cap: int = 0
    window: int = 0
    prefix_caching: bool = True
    keeps_states: bool = False
    runway_slots: int = 32
    max_num_seqs: int = 256
    max_scored_tokens: int = 256
    min_partial_block: int = MIN_PARTIAL_BLOCK
    groups: tuple[KvGroup, ...] = ()
    host_frames: int = 0
    """Blocks, or pages where the pool has groups, that host memory keeps beside those of the pool."""
    disk_frames: int = 0
    """Blocks that the disk cache keeps beside both."""
    serves_peers: bool = False
    """Whether other workers fetch blocks from this one, and it from them."""
    new_drafter: NewDrafter | None = None
    """Makes the drafters of sequences that may draft; None: no step has drafts."""
    draft_prices: DraftPrices | None = None
    """Prices to decide by in place of measured ones."""
    draft_model: DraftModel | None = None
    """What guesses for drafters that it made itself."""
    watch: CacheWatch | None = None
    """What follows the cached contents for subscribers of KV events; None: nobody does."""

    @property
    def slides(self) -> bool:
        """Whether sequences release blocks as they go on: every layer has a window, or a group of them has."""
        return bool(self.window or self.groups)

    @property
    def block_pages(self) -> tuple[int, ...]:
        """The pages of a block in each group."""
        return tuple([group.pages for group in self.groups])


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The end of a sequence: why, what it cost, the token that stopped it if one did, and a message for an error.

    `wrong_field` and `embedding` are those of the cause.
    A step in flight may still contain the sequence.
    """

    sequence: SequenceId
    reason: FinishReason
    usage: Usage
    stop_token: int | None = None
    message: str = ""
    wrong_field: str = ""
    embedding: bytes = b""


@dataclass(frozen=True, slots=True)
class Applied:
    """The effect of a grant batch: admissions, ordered preemptions of running sequences, and leased blocks."""

    admitted: tuple[Admit, ...] = ()
    preempting: tuple[Preempt, ...] = ()
    dropped: tuple[SequenceId, ...] = ()
    leased: int = 0


class Loaded(NamedTuple):
    """Blocks that were copied from host memory for a sequence, and the seconds of these copies."""

    blocks: int = 0
    seconds: float = 0.0

    def and_then(self, later: Loaded) -> Loaded:
        return Loaded(self.blocks + later.blocks, self.seconds + later.seconds)


NOTHING_LOADED: Final = Loaded()


@dataclass(frozen=True, slots=True)
class Completion:
    """The effect of a step, or of a command between steps.

    `tokens` are newly delivered ids. `preempted` sequences wait again. No step in flight contains `forgotten`
    sequences, and their block tables are gone: the runner may drop its state. `computed` counts the positions of the
    step. The log-probabilities of the prompts of `scored` sequences are to be delivered. `drafts` counts those of the
    step by kind. `recounted` has the cached tokens of sequences whose last part of the prompt was planned, where the
    grants said other numbers. `loaded` says what the step copied from host memory, by sequence.
    """

    tokens: dict[SequenceId, tuple[int, ...]]
    finished: tuple[SequenceFinished, ...] = ()
    preempted: tuple[SequenceId, ...] = ()
    forgotten: tuple[SequenceId, ...] = ()
    computed: int = 0
    scored: tuple[SequenceId, ...] = ()
    drafts: DraftTallies = field(default_factory=dict)
    recounted: dict[SequenceId, int] = field(default_factory=dict)
    loaded: dict[SequenceId, Loaded] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        """Drafts of the step."""
        return total(self.drafts).drafted

    @property
    def accepted(self) -> int:
        """Drafts of the step that were right."""
        return total(self.drafts).accepted


@dataclass(frozen=True, slots=True)
class Counts:
    """Levels for metrics and for the engine's loop.

    `draining` sequences keep block tables for steps in flight only. `pending_prefill` counts known tokens that are not
    computed yet; of these, `prefill_in_flight` are in steps in flight. `unheld` counts blocks that are neither in a
    block table nor in the pool.
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
    prefill_in_flight: int
    unheld: int
