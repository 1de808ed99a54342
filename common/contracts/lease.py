"""The lease protocol as data: the messages between a GPU worker (W) and a KV manager (M), and the port between them.

W touches only blocks in its block tables or its lease pool; M grants only blocks that a report freed. Every loss of the
stream is a resync: W sends an inventory, M rebuilds its ledger from that alone. These classes mirror the messages in
`protos/quire/kvmanager/v1`; both cores, the embedded mode and the executable model use them directly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, overload

from common.contracts.errors import Mismatch
from common.contracts.limits import MAX_EPOCH_LEAD, MAX_FOREIGN_EPOCH
from common.contracts.transfers import Fetched, Transfer, TransferCosts, TransferEnd
from common.contracts.types import (
    BlockHash,
    BlockId,
    FinishReason,
    FrameId,
    KvGroup,
    KvGroupKind,
    MissReason,
    PoolIdentity,
    SequenceId,
    SequencePhase,
)

# ---------------------------------------------------------------- numbers and names from outside


def highest_plausible_epoch(known: int) -> int:
    """Return the highest epoch that a peer may name where `known` is the highest one here.

    Epochs are taken one above another, so a number far above all others comes from no manager. If it were taken, it
    would soon have no successor.
    """
    return max(known, MAX_FOREIGN_EPOCH) + MAX_EPOCH_LEAD


def public_incarnation(incarnation: bytes) -> bytes:
    """Return 16 bytes that name a worker's life in public; its incarnation cannot be computed from them."""
    return hashlib.sha256(b"quire-incarnation-v1" + incarnation).digest()[:16]


# ---------------------------------------------------------------- sizes


def blocks_before_window(position: int, window: int, block_size: int) -> int:
    """Return how many leading blocks no token from `position` on reads, where every layer has a window (0: none has).

    Workers release blocks by this rule; managers and routers look for cached blocks by it; workers check block tables
    by it.
    """
    return max(0, position - window + 1) // block_size if window else 0


def window_blocks(window: int, block_size: int) -> int:
    """Return the blocks that a sequence holds at once where every layer has a window, of `window` slots at most.

    They are those before the next position that it reads, the one that a step in flight fills, and the next one.
    """
    return -(-(window - 1) // block_size) + 2


def blocks_needed(
    num_tokens: int, max_len: int, block_size: int, window: int = 0, groups: Sequence[KvGroup] = ()
) -> int:
    """Return the blocks that a sequence of `num_tokens` tokens needs at once; `max_len` bounds prompt and output.

    A router, a worker and a manager refuse a request by this number. The last token of an output is never computed, so
    it needs no slot. Where nothing is sampled, `num_tokens` is `max_len`, and every token is computed. `window` is
    above 0 where every layer has one: blocks that left it are released, and prompts get their blocks chunk by chunk.
    With `groups` the number is that of pages.
    """
    whole = -(-max(num_tokens, max_len - 1) // block_size)
    if groups:
        return sum(group.pages * held_blocks(group, whole, block_size) for group in groups)
    return min(whole, window_blocks(window, block_size)) if window else whole


def held_blocks(group: KvGroup, whole: int, block_size: int) -> int:
    """Return the blocks of a group that a sequence of `whole` blocks holds at once; of checkpoints it needs none."""
    if group.kind is KvGroupKind.STATE:
        return 0
    return min(whole, window_blocks(group.span, block_size)) if group.span else whole


def unread_blocks(group: KvGroup, position: int, block_size: int) -> int:
    """Return how many leading blocks of a group no token from `position` on reads.

    Of checkpoints the last one before it is read: a state is a window of one block.
    """
    if group.kind is KvGroupKind.STATE:
        return blocks_before_window(position, block_size + 1, block_size)
    if group.kind is KvGroupKind.CHUNK:
        return position // group.span * group.span // block_size
    return blocks_before_window(position, group.span, block_size)


RUNWAY_UNDER_PRESSURE: Final = 3
"""While a sequence waits for blocks, one in so many blocks of the runway is leased. Prompts leave those to decodes."""


# ---------------------------------------------------------------- retention

DEFAULT_RETENTION_PRIORITY: Final = 35
"""The priority of cached blocks of which no request said anything, as TensorRT-LLM has it."""
MAX_RETENTION_PRIORITY: Final = 100
RETENTION_REASON: Final = "retention of the first evicted block: "
"""Begins the reason of a grant that says what had become of the retention of a block that was missing."""
PARTIAL_REASON: Final = "partial block: "
"""Begins the reason of a grant that says how much of a cached block is copied."""
FETCH_REASON: Final = "fetched: "
"""Begins the reason of a grant that says how many of the cached blocks came from disk, and how long that took."""
AHEAD_REASON: Final = "ahead of need: "
"""Begins the reason of a grant that says how many of the loaded blocks had come before a sequence asked for them."""
HOST_REASON: Final = "host memory: "
DISK_REASON: Final = "disk: "
"""Begins the reason of a grant that says how many of the cached blocks are loaded from frames of the host tier."""
LAST_BLOCK: Final = (1 << 31) - 1
"""The end of a range without an end."""


# ---------------------------------------------------------------- W -> M


@dataclass(frozen=True, slots=True)
class Attach:
    """First message of a session. `session` counts attaches.

    `incarnation` is 16 random bytes that worker and manager alone know: they prove that an attach comes from the worker
    whose session it replaces. Everybody else gets `public_incarnation`.
    `max_num_seqs` bounds the sequences that hold block tables at once (running and draining): M admits no more.
    `reset` is the id of the last reset of the prefix cache that W carried out in this incarnation; 0: none.
    `host_frames` are the blocks that W can keep in host memory beside those of its pool, or the pages where the pool
    has groups; `disk_frames` are those on disk.
    Peers fetch blocks at `data_address`; "" serves none. Workers whose images have one `image_format` can fetch from
    each other; b"" fetches none.
    """

    worker_id: str
    incarnation: bytes
    session: int
    epoch_seen: int
    identity: PoolIdentity
    num_blocks: int
    address: str = ""
    prefix_caching: bool = True
    max_num_seqs: int = 256
    reset: int = 0
    host_frames: int = 0
    disk_frames: int = 0
    data_address: str = ""
    image_format: bytes = b""


@dataclass(frozen=True, slots=True)
class RetainedBlocks:
    """Blocks of a sequence, `first` to `end` - 1 of its block table, and how long they are to stay once released.

    `priority` is 0 to 100. Above 35, that of all other blocks, they leave the cache after them; below it, before them.
    `seconds` count from the release.
    """

    first: int
    end: int
    priority: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RetainedTokens:
    """The same of tokens; `end` None: all that follow, the output included."""

    start: int
    end: int | None
    priority: int
    seconds: float

    def blocks(self, block_size: int) -> RetainedBlocks:
        """Return the full blocks before `end`, from the one with the token `start` on."""
        end = LAST_BLOCK if self.end is None else self.end // block_size
        return RetainedBlocks(self.start // block_size, end, self.priority, self.seconds)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Queue a sequence for blocks. It has `num_tokens` tokens and may grow to `max_len`.

    `block_hashes` has the hashes of its full blocks. If it is empty although a full block exists, the sequence is not
    cached. `fork_of` names a sequence with the same tokens at submission, whose partial last block may be copied.
    Tenants share the worker by their `weight`, which is above 0. A sequence that `computes_all` its tokens takes no
    hit, and shares a block only once that is sealed: nothing else may fill its slots. `retention` has ranges of its
    blocks that the prefix cache keeps longer, or less long, than others. `partial_hashes` has three hashes for each
    full block, of its leading quarter, half and three quarters, and then those of the last block; it may be empty.
    """

    sequence: SequenceId
    num_tokens: int
    max_len: int
    priority: int = 0
    block_hashes: tuple[BlockHash, ...] = ()
    fork_of: SequenceId | None = None
    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""
    tenant: str = ""
    weight: float = 1.0
    computes_all: bool = False
    retention: tuple[RetainedBlocks, ...] = ()
    partial_hashes: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class InventorySequence:
    """One live sequence at an attach. `block_table` is empty if WAITING; `reserve.num_tokens` is the length now.

    `preemptions` says how often it has lost its blocks and waited again. `runs` are those of `Admit`.
    """

    reserve: Reserve
    phase: SequencePhase
    arrival: int
    block_table: tuple[BlockId, ...] = ()
    preemptions: int = 0
    runs: tuple[tuple[BlockId, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block with valid, sealed content. `parent` indexes the inventory's cached blocks; -1: none.

    Where every layer has a window, a block stays when those before it are gone. Then `parent` is -1, and the entry
    has its own `depth` and the hash before it (any 16 bytes at depth 0). Where the pool has groups, the parent of a
    block of a later group is the first group's block with the same hash.
    """

    block: BlockId
    hash: BlockHash
    parent: int
    last_used: int
    parent_hash: BlockHash | None = None
    depth: int = 0


class CachedBlocks(Sequence[CachedBlock]):
    """The cached blocks of an inventory, a column for each of their properties: there may be a million of them.

    `parent_hashes` and `depths` are empty unless every layer has a window.
    """

    __slots__ = ("blocks", "depths", "hashes", "last_used", "parent_hashes", "parents")

    def __init__(
        self,
        blocks: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        parents: Sequence[int],
        last_used: Sequence[int],
        parent_hashes: Sequence[BlockHash] = (),
        depths: Sequence[int] = (),
    ) -> None:
        """Take columns of one length; the last two may be empty."""
        self.blocks, self.hashes, self.parents, self.last_used = blocks, hashes, parents, last_used
        self.parent_hashes, self.depths = parent_hashes, depths

    @classmethod
    def of(cls, entries: Sequence[CachedBlock]) -> CachedBlocks:
        """Return the columns of cached blocks."""
        if isinstance(entries, CachedBlocks):
            return entries
        return cls(
            [each.block for each in entries],
            [each.hash for each in entries],
            [each.parent for each in entries],
            [each.last_used for each in entries],
            *([], []) if not entries or entries[0].parent_hash is None else _own_places(entries),
        )

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, at: int) -> CachedBlock: ...

    @overload
    def __getitem__(self, at: slice) -> CachedBlocks: ...

    def __getitem__(self, at: int | slice) -> CachedBlock | CachedBlocks:
        if isinstance(at, slice):
            own = self.parent_hashes[at], self.depths[at]
            return CachedBlocks(self.blocks[at], self.hashes[at], self.parents[at], self.last_used[at], *own)
        place = (self.parent_hashes[at], self.depths[at]) if self.depths else ()
        return CachedBlock(self.blocks[at], self.hashes[at], self.parents[at], self.last_used[at], *place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def _own_places(entries: Sequence[CachedBlock]) -> tuple[list[BlockHash], list[int]]:
    return [each.parent_hash or each.hash for each in entries], [each.depth for each in entries]


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything W holds, taken between two steps after the old session ended. `cached_blocks` has parents first.

    Where the pool has groups, `block_groups` and `block_pages` say of each block that a table or a claim names which
    group it is of, and which pages it is: as many as a block of the group has, the id first. `pool` has pages.
    `frames` has what frames of the host tier hold: a claim names a frame in place of a block, and where it stands.
    Where the pool has groups, `frame_groups` and `frame_pages` say of each which group it is of, and which frames it
    has.
    `saved` has the same of frames on disk, with `saved_groups` and `saved_pages`. Transfers of an earlier session are
    void.
    """

    sequences: tuple[InventorySequence, ...] = ()
    pool: tuple[BlockId, ...] = ()
    cached_blocks: Sequence[CachedBlock] = ()
    block_groups: Sequence[int] = ()
    block_pages: Sequence[BlockId] = ()
    frames: Sequence[CachedBlock] = ()
    saved: Sequence[CachedBlock] = ()
    frame_groups: Sequence[int] = ()
    frame_pages: Sequence[FrameId] = ()
    saved_groups: Sequence[int] = ()
    saved_pages: Sequence[FrameId] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What changed since the last report. M applies the columns in the order in which they stand here.

    `seal` lists parents first. `trim` gives (sequence, leading blocks trimmed in all). `stalled` is the complete set of
    sequences that found no block, None when unchanged. `lease_want` is a level: blocks that running sequences will bind
    within the runway. `computed` gives computed lengths with what may cause a preemption, for the record of what that
    loses. A sequence has at most one `preempted` followed by one `finished`. `reset` confirms the order of that id; 0:
    nothing to confirm. `partials` gives the partial hashes of sealed blocks by their hashes. `copied` are sequences
    whose copy of a part of a cached block has run. `ended` are transfers that have ended, by their ids.
    `transfer_costs` are levels, None when unchanged. Once `disk_closed`, no frame on disk holds anything for the rest
    of the session; once `draining`, W takes no new requests in it.

    Where the pool has groups, `bind_groups` and `trim_groups` give the group of each entry of `bind` and `trim`.
    `bind` names the first page of a block, and `bind_pages` has the others of all bound blocks, one after the other.
    `returned` are pages, and `lease_want` counts them. A seal of the first group stands before others of its hash.
    """

    step: int = 0
    reserve: tuple[Reserve, ...] = ()
    bind: tuple[tuple[SequenceId, BlockId], ...] = ()
    seal: tuple[tuple[BlockId, BlockHash], ...] = ()
    trim: tuple[tuple[SequenceId, int], ...] = ()
    returned: tuple[BlockId, ...] = ()
    preempted: tuple[tuple[SequenceId, int], ...] = ()
    finished: tuple[tuple[SequenceId, FinishReason], ...] = ()
    stalled: tuple[SequenceId, ...] | None = None
    lease_want: int = 0
    computed: tuple[tuple[SequenceId, int], ...] = ()
    reset: int = 0
    partials: tuple[tuple[BlockHash, tuple[BlockHash, ...]], ...] = ()
    copied: tuple[SequenceId, ...] = ()
    bind_groups: tuple[int, ...] = ()
    bind_pages: tuple[BlockId, ...] = ()
    trim_groups: tuple[int, ...] = ()
    ended: tuple[tuple[int, TransferEnd], ...] = ()
    transfer_costs: TransferCosts | None = None
    disk_closed: bool = False
    draining: bool = False


# ---------------------------------------------------------------- M -> W


@dataclass(frozen=True, slots=True)
class AttachOk:
    """The manager has rebuilt its ledger from the inventory; the session is live.

    With `serve_key` tokens are made with which peers fetch from W (`transfer_tokens`); b"": W serves none.
    """

    epoch: int
    lease_target: int
    serve_key: bytes = b""


@dataclass(frozen=True, slots=True)
class AttachRejected:
    """The manager refuses the worker; `retry` says whether a later attempt can succeed."""

    reason: str
    mismatches: tuple[Mismatch, ...] = ()
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a block on the compute stream; its first `length` mod block_size slots (all if 0) hold known tokens."""

    src: BlockId
    dst: BlockId
    length: int


@dataclass(frozen=True, slots=True)
class TierCopy:
    """Copy a sealed block into a frame of the host tier or, as a `load`, a frame into a block, on the compute stream.

    A block that is loaded holds the frame's content from the order on: it is full, and shared by an admission. Where
    the pool has groups, block and frame are pages. Those of one block follow each other, in the order of its pages.
    """

    block: BlockId
    frame: FrameId
    load: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """Give a waiting sequence its block table. block_table[:n_shared] keep fill and hash; the worker resets the rest,
    except the destination of a copy.

    Where every layer has a window, the first places may be TRIMMED: the tokens behind the shared blocks do not read
    them. All other shared blocks are full then, and the sequence computes from `n_shared` blocks on.

    `cached_tokens` are those of the shared blocks, and of the part of a cached block that a copy gives to the next one.
    The worker reports such a copy once it has run. `fetched` says for what the sequence waited before, if it did.

    Where the pool has groups, `block_table` has the blocks of the first one, and `runs` those of each other one. They
    share the first `n_shared` places too, of which a run has those that are still read. Blocks are named by their first
    pages. `pages` has the others of all fresh blocks, one after the other, by group. A run may be shorter than the
    block table: the worker binds the rest. In the run of a STATE group the last shared place is the checkpoint to go on
    from; fresh blocks stand where checkpoints are to be taken, and all other places are TRIMMED.
    """

    sequence: SequenceId
    block_table: tuple[BlockId, ...]
    n_shared: int
    cached_tokens: int = 0
    miss_reason: MissReason = MissReason.NEVER_SEEN
    diverged_at: int = 0
    decision_id: str = ""
    runs: tuple[tuple[BlockId, ...], ...] = ()
    pages: tuple[BlockId, ...] = ()
    fetched: Fetched | None = None


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take the blocks of a running sequence; it goes back to the queue. The decision names victim and beneficiary."""

    sequence: SequenceId
    decision_id: str = ""


@dataclass(frozen=True, slots=True)
class GrantBatch:
    """The grants and orders of M. W applies the columns in this order, at the cut-off of its next step.

    `reset` is the id of a reset of the prefix cache (0: none): W claims no more what blocks hold that no table has, nor
    what frames hold. Copies between blocks and frames, `tier`, stand before those between blocks, each in list order.
    `transfers` stand behind the reset: what they name is as the copies of this batch leave it.
    """

    lease_target: int
    copy: tuple[Copy, ...] = ()
    admit: tuple[Admit, ...] = ()
    lease: tuple[BlockId, ...] = ()
    reset: int = 0
    preempt: tuple[Preempt, ...] = ()
    cancel: tuple[SequenceId, ...] = ()
    tier: tuple[TierCopy, ...] = ()
    transfers: tuple[Transfer, ...] = ()


# ---------------------------------------------------------------- the port


@dataclass(frozen=True, slots=True)
class Connected:
    """A way to the manager is open; W must drop its old session and answer with Attach and Inventory."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The manager answered `session` with AttachOk."""

    session: int
    ok: AttachOk


@dataclass(frozen=True, slots=True)
class Granted:
    """A batch of `session`; W drops it when that session is not its current one."""

    session: int
    batch: GrantBatch


@dataclass(frozen=True, slots=True)
class Detached:
    """`session` is lost, for whatever reason; W goes on with the blocks that it has."""

    session: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The manager has applied all reports of `session` that were sent before a `confirm`; one for each."""

    session: int


LeaseEvent = Connected | Attached | Granted | Detached | Confirmed


class LeaseChannel(Protocol):
    """The engine's connection to its KV manager. Called from the engine's thread only; no method blocks.

    `gpuworker/engine/lease_client.py` implements it over gRPC, `cli/suite/embedded.py` over a
    manager core in the same process.
    """

    def poll(self) -> list[LeaseEvent]:
        """Return the events since the last call, in order."""
        ...

    def attach(self, attach: Attach, inventory: Inventory) -> None:
        """Open a session; the answer comes as Attached, or as Detached."""
        ...

    def send_report(self, session: int, report: Report) -> None:
        """Queue a report of the session; dropped silently when that session is gone."""
        ...

    def confirm(self, session: int) -> None:
        """Ask for Confirmed behind the reports so far; Detached comes instead when that session is lost."""
        ...

    def reconnect(self) -> None:
        """Give up the current session, if any, and open another: Connected comes when that is possible."""
        ...

    def away_seconds(self, begin: float, end: float) -> float:
        """Return the seconds between two readings of Clock.monotonic in which no KV manager answered."""
        ...
