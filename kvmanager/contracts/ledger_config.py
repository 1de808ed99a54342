"""The configuration of a manager and of its ledgers: each option and its default stand here once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final, Literal

from common.contracts.lease import Attach, blocks_before_window, blocks_needed, held_blocks
from common.contracts.limits import MAX_WORKER_BLOCKS
from common.contracts.turns import DEFAULT_MAX_WAIT, IN_TURN
from common.contracts.types import KvGroup, KvGroupKind, PoolIdentity

Runway = Literal["auto", "max"]
EvictionName = Literal["lru", "frequency", "utility"]
VictimOrder = Literal["work", "arrival"]

MOST_RETAINED: Final = 0.5
"""The share of the blocks that all tenants together may retain."""


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Bounds of a worker's ledger: retained blocks of one tenant, seconds of a duration, and the blocks of all."""

    most_blocks: int
    longest_seconds: float
    most_of_all: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """What an operator chooses for all ledgers of a manager, with the defaults.

    `runway` "auto" keeps a pool of leased blocks ahead of need: for `runway_slots` slots of each sequence also by
    evicting, up to `runway_reach` slots from free blocks alone. "max" gives each sequence all blocks of its max_len at
    admission. `watermark` is the part of the pool that an admission leaves free for the growth of those that run;
    `ghosts` bounds the memory of evicted hashes (0: four for each block).
    `eviction` names the policy of `eviction/choice.py`, `preemption` that of `preemption.py`: `bench.eviction` and
    `bench.preemption` found the defaults to be best. A sequence that was preempted `max_preemptions` times is preempted
    again for higher priorities alone (0: there is no bound).
    With `chunked_grants`, the next sequence may begin with half of its prompt's blocks, of `first_part` slots at least.
    A sequence waits for another one's checkpoint if that saves it more than `least_saved` tokens. The tails of all that
    run take `tail_share` of the pool at most.
    With `backfill`, sequences pass one that lacks blocks, for a bounded time. After `in_turn` admissions by priority,
    one that has waited for `max_wait` seconds is next (0: priority alone decides).
    Of one tenant, at most `retention_share` of the blocks are retained, of all tenants together at most half, each for
    at most `max_retention` seconds.
    """

    runway: Runway = "auto"
    runway_slots: int = 32
    runway_reach: int = 128
    watermark: float = 0.01
    ghosts: int = 0
    eviction: EvictionName = "utility"
    preemption: VictimOrder = "work"
    max_preemptions: int = 4
    chunked_grants: bool = True
    first_part: int = 256
    least_saved: int = 64
    tail_share: float = 0.125
    backfill: bool = True
    max_wait: float = DEFAULT_MAX_WAIT
    in_turn: int = IN_TURN
    retention_share: float = 0.25
    max_retention: float = 3600.0


@dataclass(frozen=True, slots=True)
class LedgerConfig(LedgerOptions):
    """One worker's pool, with the operator's options. `block_size` and `window` are in slots.

    With `prefix_caching`, sealed blocks are kept and published. `window` is above 0 when every layer is windowed: a
    cached block then stays when those before it go. Where the model has `groups` of layers, blocks consist of pages:
    `num_blocks` counts these, and so does every number of blocks that is free, needed, leased or granted. `host_frames`
    are those of the worker's host memory, `disk_frames` those on its disk.
    """

    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    window: int = 0
    max_num_seqs: int = 256
    groups: tuple[KvGroup, ...] = ()
    host_frames: int = 0
    disk_frames: int = 0
    slides: bool = field(init=False, default=False)
    """Whether sequences release blocks as they go on: every layer has a window, or a group of them has."""
    stall_pages: int = field(init=False, default=1)
    """The most pages that a sequence lacks that finds no block: a block in each group of K and V."""

    def __post_init__(self) -> None:
        # Counted once: every report asks.
        object.__setattr__(self, "slides", bool(self.window or self.groups))
        if self.groups:
            bound = [group.pages for group in self.groups if group.kind is not KvGroupKind.STATE]
            object.__setattr__(self, "stall_pages", sum(bound))

    @classmethod
    def of_worker(cls, attach: Attach, options: LedgerOptions) -> LedgerConfig:
        """Return the configuration of the ledger of a worker that attaches."""
        chosen = {each.name: getattr(options, each.name) for each in fields(LedgerOptions)}
        return cls(
            attach.num_blocks,
            attach.identity.block_size,
            prefix_caching=attach.prefix_caching,
            window=attach.identity.kv_geometry.window,
            groups=attach.identity.kv_geometry.groups,
            max_num_seqs=attach.max_num_seqs,
            host_frames=attach.host_frames,
            disk_frames=attach.disk_frames,
            **chosen,
        )

    @property
    def keeps_states(self) -> bool:
        """Whether the last group has checkpoints of states."""
        return any(group.kind is KvGroupKind.STATE for group in self.groups)

    @property
    def block_pages(self) -> tuple[int, ...]:
        """The pages of a block of each group."""
        return tuple([group.pages for group in self.groups]) or (1,)

    def admission_blocks(self, num_tokens: int) -> int:
        """Return the blocks with which a sequence of so many tokens is admitted.

        Where every layer has a window, they are those of the first positions: the sequence binds the others as it goes
        on, and releases those that left the window.
        """
        return blocks_needed(num_tokens, num_tokens, self.block_size, self.window, self.groups)

    def held_run(self, number: int, whole: int) -> int:
        """Return the blocks that a sequence of `whole` blocks holds at once in run `number`, group `number` + 1."""
        return held_blocks(self.groups[number + 1], whole, self.block_size)

    def pages_of(self, whole: int) -> int:
        """Return the pages that a sequence of `whole` blocks holds at once."""
        return sum(group.pages * held_blocks(group, whole, self.block_size) for group in self.groups)

    def holds_whole(self, preemptions: int) -> bool:
        """Return whether a sequence that was preempted so often is admitted with all blocks that it may ever need.

        Not where layers have windows: it would hold blocks that it needs only when others have left the window.
        """
        return not self.slides and (self.runway == "max" or preemptions >= self.max_preemptions > 0)

    @property
    def grants_parts(self) -> bool:
        """Whether a prompt may begin before all its blocks are free. With windows alone, each one does anyway."""
        return self.chunked_grants and not self.window and self.runway != "max"

    def hits_of(self, num_tokens: int) -> int:
        """Return how many leading full blocks of a sequence may be shared: not the one that holds its last token."""
        return (num_tokens - 1) // self.block_size

    @property
    def spare_places(self) -> int:
        """Places that tenants over their share leave free: about one in sixteen, none of very few."""
        return (self.max_num_seqs + 8) // 16

    @property
    def frames(self) -> int:
        """Frames that keep what is evicted: none where nothing is cached, or every layer has a window.

        Where the pool has groups, a frame has room for a page.
        """
        return self.host_frames if self.prefix_caching and not self.window else 0

    @property
    def saved_frames(self) -> int:
        """Frames on disk: none without frames of host memory, by way of which blocks come back."""
        return self.disk_frames if self.frames else 0

    @property
    def copies_parts(self) -> bool:
        """Whether a part of a cached block is copied for a prompt that diverges inside that block.

        Not where the pool has groups: each of them would need a copy, of several pages. Nor where every layer has a
        window: a block is little beside what a prompt computes behind its hits there. Behind a checkpoint of states no
        part of a block could be continued.
        """
        return self.prefix_caching and not self.slides

    def unread_blocks(self, hits: int) -> int:
        """Return how many of the first `hits` blocks a sequence never reads that computes from there on."""
        return blocks_before_window(hits * self.block_size, self.window, self.block_size)

    @property
    def retention_limits(self) -> RetentionLimits:
        share, everybody = int(self.retention_share * self.num_blocks), int(MOST_RETAINED * self.num_blocks)
        return RetentionLimits(share, self.max_retention, everybody)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission beside running sequences leaves free."""
        return int(self.watermark * self.num_blocks)


@dataclass(frozen=True, slots=True)
class ManagerConfig(LedgerOptions):
    """The configuration of a manager and of all its ledgers. `identity` None: the first attach fixes it.

    Pins of one tenant keep at most `pin_share` of a worker's blocks. `max_blocks` bounds the blocks of all workers
    together: a ledger has a record for each block. With `replicate`, hot prefixes are copied to further workers.
    """

    identity: PoolIdentity | None = None
    pin_share: float = 0.25
    max_workers: int = 512
    max_blocks_per_worker: int = MAX_WORKER_BLOCKS
    max_blocks: int = 1 << 23
    replicate: bool = False


DEFAULTS: Final = ManagerConfig()
