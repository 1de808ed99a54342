"""One live sequence in the manager: lengths, place in the order, and its block table."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from common.contracts.lease import Reserve, blocks_needed, held_blocks
from common.contracts.transfers import TransferEnd
from common.contracts.types import TRIMMED, BlockHash, BlockId, KvGroup, KvGroupKind, SequenceId, SequencePhase
from kvmanager.contracts.block import Blocks


@dataclass(slots=True)
class Fetch:
    """What a sequence waited for in its stay in the queue: transfers that are `open`, and how many `blocks` in all.

    They are those of its prompt from place `first` on. `landed` of them came from `source`, the others `failed`: how
    many in which way. It began at `began`, a reading of Clock.monotonic, and took `seconds`, where `forecast` was
    expected (0: nothing was known).
    """

    open: set[int]
    blocks: int
    began: float
    source: str
    first: int
    forecast: float = 0.0
    landed: int = 0
    seconds: float = 0.0
    failed: dict[TransferEnd, int] = field(default_factory=dict)

    def note_end(self, number: int, end: TransferEnd) -> None:
        """Note that a transfer has ended."""
        self.open.remove(number)
        if end is TransferEnd.DONE:
            self.landed += 1
        else:
            self.failed[end] = self.failed.get(end, 0) + 1

    def key(self) -> tuple[object, ...]:
        return tuple(sorted(self.open)), self.blocks, self.landed


class Run:
    """The blocks of a sequence in a group behind the first one, `group` by its number; `trimmed` places have none.

    Once the sequence has computed what it holds here, it goes on with `most` blocks at once.
    A run of checkpoints has no block at most places: the sequence binds none, and the manager says where it takes some.
    Those at `asked` places are never superseded. The last block may be the tail, whose place its seal tells.
    """

    __slots__ = ("asked", "checkpoints", "group", "most", "pages", "table", "trimmed")

    def __init__(self, group: int, pages: int, checkpoints: bool = False, most: int = 0) -> None:
        self.group, self.pages, self.checkpoints, self.most = group, pages, checkpoints, most
        self.table: list[BlockId] = []
        self.trimmed = 0
        self.asked: frozenset[int] = frozenset()

    def own_pages(self, n_shared: int) -> int:
        """Return the pages that the sequence holds here beside those that it shares or has released."""
        if self.checkpoints:
            return self.pages * sum([block != TRIMMED for block in self.table[max(n_shared, self.trimmed) :]])
        return self.pages * max(0, len(self.table) - max(n_shared, self.trimmed))

    def growth(self, max_blocks: int) -> int:
        """Return the pages that the sequence may still bind here."""
        return 0 if self.checkpoints else self.pages * (max_blocks - len(self.table))

    @property
    def held(self) -> int:
        """Return how many places are not trimmed."""
        return len(self.table) - self.trimmed

    def net_growth(self, max_blocks: int) -> int:
        """Return how many blocks more than now the sequence may come to hold here at once."""
        return 0 if self.checkpoints else max(0, min(max_blocks - len(self.table), self.most - self.held))

    def move_tail(self, place: int) -> None:
        """Transfer the last block to a place behind its own."""
        self.table[-1:] = [*[TRIMMED] * (place + 1 - len(self.table)), self.table[-1]]

    def empty(self) -> None:
        self.table, self.trimmed, self.asked = [], 0, frozenset()


class Sequence:
    """A sequence of `num_tokens` tokens whose block table may grow to `max_blocks` places, trimmed ones included.

    It never needs more than `most_held` blocks, or pages, at once. Where no layer has a window, that is `max_blocks`.
    `block_hashes` has the hashes of the full blocks and grows as blocks are sealed. `cacheable` is False when the
    client asked that nothing of the sequence be cached; `computes_all` is that of `Reserve`. `computed` is the length
    that the worker reported last, for records and traces. `recompute` is set by a preemption: the next admission is
    then not a new query of the prefix cache. `started_at` is the worker's step of its admission (`WorkerView.steps`),
    `waited` its seconds in the queue before that. A sequence that was admitted `by_age` is not preempted for a higher
    priority. One that `gave_up` a part of its prompt's blocks, because work stood still, gets all of them at once.
    `partial_hashes` are those of its reserve. `copy_source` is the block that it holds beside its block table
    until the worker has reported the copy. `own_from` is the first block that other requests had not computed before
    its first admission: blocks of the sequence that it was forked from are its own. `forks` names those that were
    forked from it and wait for their admission. `outranked` counts the admissions of higher priorities before it joined
    the queue. Where the pool has groups, `block_table` is that of the first one, whose blocks have `block_pages` pages,
    and `runs` has those of the others. A sequence has `awaited` a checkpoint if it waits or has waited for one since it
    joined the queue, and has a `fetch` if it so waits for transfers; `asked_peers` says whether peers were looked at.
    One that `has_tail` was given one with its block table.
    """

    __slots__ = (
        "arrival",
        "asked_peers",
        "awaited",
        "block_hashes",
        "block_pages",
        "block_table",
        "by_age",
        "cacheable",
        "computed",
        "computes_all",
        "copy_source",
        "fetch",
        "fork_of",
        "forks",
        "gave_up",
        "has_tail",
        "id",
        "max_blocks",
        "max_len",
        "most_held",
        "n_shared",
        "num_tokens",
        "outranked",
        "own_from",
        "partial_hashes",
        "phase",
        "preemptions",
        "priority",
        "queued_at",
        "recompute",
        "request_id",
        "retention",
        "runs",
        "started_at",
        "tenant",
        "traceparent",
        "trimmed",
        "waited",
        "weight",
    )  # fmt: skip

    def __init__(
        self,
        reserve: Reserve,
        arrival: int,
        block_size: int,
        queued_at: float,
        groups: Items[KvGroup] = (),
        window: int = 0,
    ) -> None:
        """`groups` and `window` are those of the pool."""
        self.id: SequenceId = reserve.sequence
        self.num_tokens = reserve.num_tokens
        self.max_len = reserve.max_len
        self.max_blocks = blocks_needed(reserve.num_tokens, reserve.max_len, block_size)
        self.most_held = self.max_blocks
        if groups or window:
            self.most_held = blocks_needed(reserve.num_tokens, reserve.max_len, block_size, window, groups)
        self.priority = reserve.priority
        self.block_hashes: list[BlockHash] = list(reserve.block_hashes)
        self.cacheable = bool(reserve.block_hashes) or reserve.num_tokens < block_size
        self.computes_all = reserve.computes_all
        self.fork_of = reserve.fork_of
        self.tenant, self.weight = reserve.tenant, reserve.weight
        self.request_id = reserve.request_id
        self.retention = reserve.retention
        self.traceparent = reserve.traceparent
        self.arrival = arrival
        self.queued_at, self.waited = queued_at, 0.0
        self.phase = SequencePhase.WAITING
        self.block_table: list[BlockId] = []
        self.partial_hashes = reserve.partial_hashes
        self.copy_source: BlockId | None = None
        self.fetch: Fetch | None = None
        self.own_from = self.max_blocks
        self.forks: set[SequenceId] = set()
        self.block_pages = groups[0].pages if groups else 1
        self.runs = tuple(
            [
                Run(
                    number,
                    group.pages,
                    group.kind is KvGroupKind.STATE,
                    held_blocks(group, self.max_blocks, block_size),
                )
                for number, group in enumerate(groups)
                if number
            ]
        )
        self.n_shared = 0
        self.trimmed = 0
        self.computed = self.started_at = 0
        self.preemptions = self.outranked = 0
        self.recompute = self.by_age = self.gave_up = self.awaited = self.asked_peers = self.has_tail = False

    @property
    def name(self) -> str:
        """The name in records: the request's id if it is known."""
        return self.request_id or f"sequence {self.id}"

    @property
    def takes_hits(self) -> bool:
        return self.cacheable and not self.computes_all

    def lacking(self, block_size: int) -> int:
        """Return how many blocks its known tokens still need, without the last one, whose block a decode binds."""
        return max(0, -(-(self.num_tokens - 1) // block_size) - len(self.block_table))

    @property
    def growth(self) -> int:
        """Blocks, or pages, that the sequence may still bind."""
        growth = self.max_blocks - len(self.block_table)
        if self.runs:
            runs = sum([run.growth(self.max_blocks) for run in self.runs])
            return self.block_pages * growth + runs
        return growth

    @property
    def net_growth(self) -> int:
        """Blocks more than now that the sequence may come to hold in its block table at once."""
        growth = self.max_blocks - len(self.block_table)
        if self.runs or self.most_held == self.max_blocks:
            return growth
        return max(0, min(growth, self.most_held - len(self.block_table) + self.trimmed))

    @property
    def own_blocks(self) -> int:
        """Blocks, or pages, that the sequence holds beside those that it shares or has released."""
        own = len(self.block_table) - max(self.n_shared, self.trimmed)
        if self.runs:
            runs = sum([run.own_pages(self.n_shared) for run in self.runs])
            return self.block_pages * own + runs
        return own

    def held_blocks(self) -> list[BlockId]:
        """Return every block of its tables: those of runs first, each table from its end."""
        held = [block for block in reversed(self.block_table) if block != TRIMMED]
        if self.runs:
            return [*(block for run in self.runs for block in reversed(run.table) if block != TRIMMED), *held]
        return held

    def holds(self, block: BlockId, group: int, index: int) -> bool:
        """Return whether it has a block at this place of its table of a group."""
        table = self.runs[group - 1].table if group else self.block_table
        return index < len(table) and table[index] == block


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks of a sequence in order; the first `n_shared` were hits at admission, `sealed_blocks` are registered."""

    sequence: SequenceId
    request_id: str
    phase: SequencePhase
    block_ids: tuple[BlockId, ...]
    n_shared: int
    sealed_blocks: int


def table_of(sequence: Sequence, blocks: Blocks) -> BlockTable:
    sealed = sum(blocks.hash[block] is not None for block in sequence.block_table if block != TRIMMED)
    block_table = tuple(sequence.block_table)
    return BlockTable(sequence.id, sequence.request_id, sequence.phase, block_table, sequence.n_shared, sealed)
