"""The manager's counts: totals over a ledger's life, and the state of its pool at an instant."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from common.contracts.types import KvGroup


@dataclass(slots=True)
class Totals:
    """Rising counters. Prefix statistics count once a request, in blocks; recompute is counted apart.

    A hit counts at admission, or when the block is sealed if another sequence was still to fill it. Partial hits are
    admissions with a copy of a part of a cached block; their tokens are in no block that counts as a hit. Chunked
    grants are admissions with a part of the prompt's blocks, again after each preemption. Host stores and loads are
    blocks that were copied into frames of the host tier, and out of them. Host drops are contents that left their frame
    for others while nothing else had them, `host_declined` blocks that were evicted without a copy because stores did
    not pay, `host_drops_saved` those that the disk alone had then. Disk stores and loads
    are blocks that transfers brought to disk and back, peer loads those that came from peers, `disk_lost` contents that
    could not be read, with what was behind them, and `unsaved` those for which no frame could be had. `fetches` counts
    sequences that waited for transfers, `transfer_ends` transfers by how they ended. `broken_stalls` counts preemptions
    that were ordered because work stood still. `ahead_loads` counts the blocks that came ahead of need, by the kind of
    the wish: "prefetch" or "replica".
    """

    preemptions: int = 0
    evictions: int = 0
    host_stores: int = 0
    host_loads: int = 0
    host_drops: int = 0
    host_declined: int = 0
    host_drops_saved: int = 0
    disk_stores: int = 0
    disk_loads: int = 0
    peer_loads: int = 0
    disk_lost: int = 0
    unsaved: int = 0
    fetches: int = 0
    admissions: int = 0
    chunked_grants: int = 0
    rejections: int = 0
    broken_stalls: int = 0
    ignored_seals: int = 0
    reset_blocks: int = 0
    retained_evictions: int = 0
    pinned_evictions: int = 0
    prefix_query_blocks: int = 0
    prefix_hit_blocks: int = 0
    partial_hits: int = 0
    partial_hit_tokens: int = 0
    recompute_query_blocks: int = 0
    recompute_hit_blocks: int = 0
    misses_by_reason: dict[str, int] = field(default_factory=dict)
    transfer_ends: dict[str, int] = field(default_factory=dict)
    ahead_loads: dict[str, int] = field(default_factory=dict)

    def count_admission(self, queried: int, hits: int, reason: str, recompute: bool) -> None:
        """Count one admission. A prompt below a block makes no query, which differs from a query without hits."""
        self.admissions += 1
        if recompute:
            self.recompute_query_blocks += queried
            self.recompute_hit_blocks += hits
            return
        self.prefix_query_blocks += queried
        self.prefix_hit_blocks += hits
        self.misses_by_reason[reason] = self.misses_by_reason.get(reason, 0) + 1

    def clone(self) -> Totals:
        by_key = {name: getattr(self, name).copy() for name in ("misses_by_reason", "transfer_ends", "ahead_loads")}
        return replace(self, **by_key)


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """The blocks of a group that sequences hold, and those that are cached."""

    group: KvGroup
    in_use: int
    cached: int


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """One worker's pool now. Of the waiting sequences, `capacity` lack blocks and `deferred` were not tried yet.

    `pinned` counts blocks under a transfer beside the compute stream; nothing makes such transfers yet. `retained` are
    those of the cached blocks that leave last, and `kept_pinned` those that an operator's pins keep even longer.
    `lacking` are those of the running sequences that can compute nothing before they get a block. Where the pool has
    groups, free, leased, used and cached blocks are counted in pages. Of the `host_frames` of the worker's host memory,
    `host_held` hold a block's content; so do `disk_held` of the `disk_frames`. `fetching` of the waiting sequences wait
    for transfers. A disk that the worker has given up (`disk_closed`) has no frames. `ahead` prefixes are to come that
    nobody waits for.
    """

    num_blocks: int
    free: int
    leased: int
    in_use: int
    cached: int
    pinned: int
    running: int
    waiting: int
    preempting: int
    lease_target: int
    deferred: int
    capacity: int
    totals: Totals
    retained: int = 0
    kept_pinned: int = 0
    lacking: int = 0
    groups: tuple[GroupCounts, ...] = ()
    host_frames: int = 0
    host_held: int = 0
    disk_frames: int = 0
    disk_held: int = 0
    fetching: int = 0
    disk_closed: bool = False
    ahead: int = 0
