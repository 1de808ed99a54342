"""One sequence at the worker: its tokens, block hashes and block table, and how many tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.contracts.hashing import PARTIAL_HASHES, block_hash_of, little_endian_int32, next_digest, partial_hashes
from common.contracts.lease import Reserve, RetainedBlocks
from common.contracts.transfers import FROM_DISK
from common.contracts.types import (
    TRIMMED,
    BlockHash,
    BlockId,
    FinishReason,
    KvGroup,
    KvGroupKind,
    SequenceId,
    SequencePhase,
    Usage,
)
from gpuworker.scheduling.draft_tally import DraftKind, DraftTallies, DraftTally, added, total
from gpuworker.scheduling.drafting import Drafter, NewDrafter, Outlook, Speculation
from gpuworker.scheduling.group_table import GroupTable, Tail
from gpuworker.scheduling.kv_events import NO_LABEL, CacheLabel, Origin
from gpuworker.scheduling.stopping import FinishCause, StopRule

Ranges = tuple[tuple[int, int], ...]
"""Ranges of positions: the first one, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence as the engine submits it.

    `sequence` rises from one submission to the next. `block_hashes` are those of the prompt's full blocks;
    `parent_digest` is the 32-byte digest of the last of them, or the root. `max_len` bounds prompt and output together,
    in tokens. The logits at positions `score_from` to `score_until` - 1 give the log-probabilities of the next token.
    `partial_hashes` are those of the prompt's blocks, three a full block; without them no part of a block is reused.
    """

    sequence: SequenceId
    request_id: str
    tokens: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    parent_digest: bytes
    max_len: int
    stop: StopRule
    priority: int = 0
    fork_of: SequenceId | None = None
    no_cache: bool = False
    traceparent: str = ""
    tracestate: str = ""
    tenant: str = ""
    weight: float = 1.0
    score_from: int = 0
    score_until: int = 0
    retention: tuple[RetainedBlocks, ...] = ()
    partial_hashes: tuple[BlockHash, ...] = ()
    speculation: Speculation | None = None
    """What the sequence drafts from; None where it may not draft."""
    label: CacheLabel = NO_LABEL
    """What subscribers of KV events are told of the root of its hashes."""


class Sequence:
    """State of a live sequence. Positions count from 0; position p holds token p.

    `num_computed_tokens` is the next position to compute; it includes steps in flight. `sampling` counts the tokens
    that steps in flight will sample, so `len(tokens) + sampling` tokens are known when the next step starts. Positions
    before `scored` need no log-probabilities any more; this run gives those from `score_from` on. `hits` are ranges of
    the prompt's positions, in full blocks and in a copied part of a block, that the sequence has not computed before
    its first output token, because others did. Positions before `recompute_below` were computed or were hits in earlier
    runs. The blocks of those in `from_host` were copied from host memory for the sequence; those in `from_disk` and
    `from_peers` came from there while it waited. `announced_hits` are what was said of the hits, until all is planned,
    and -1 where that may be lost; `granted_until` are those of the last grant.
    `partial_hashes` has three for each full block, then those of the prompt's last block; it is empty where no part of
    a block is reused (`partly`). `forced`
    are tokens that a constraint forces to follow `tokens`. `draft_kind` is that of the last guesses. A sequence that
    `leaves` is in no later plan, and takes the tokens of steps in flight until it ends. Where the pool has groups,
    `tables` has the pages of each group's blocks, and `block_table` the first group's blocks; `checkpoints` is the
    table of states, if there is one. The next row begins with the states in the pages of `loads`. The `tail` keeps
    those behind the last full block, if the grant had pages for it.
    """

    __slots__ = (
        "announced_hits",
        "arrival",
        "block_hashes",
        "block_table",
        "checkpoints",
        "draft_kind",
        "drafter",
        "drafts",
        "forced",
        "from_disk",
        "from_host",
        "from_peers",
        "granted_until",
        "hashed",
        "hits",
        "id",
        "in_flight",
        "leaves",
        "limit",
        "loads",
        "new",
        "num_computed_tokens",
        "parent_digest",
        "partial_hashes",
        "partly",
        "phase",
        "preemptions",
        "prompt_tokens",
        "reason",
        "recompute_below",
        "recomputed",
        "sampling",
        "score_from",
        "score_until",
        "scored",
        "seniority",
        "snapshot",
        "stopping",
        "tables",
        "tail",
        "tokens",
        "trimmed",
        "whole",
    )

    def __init__(
        self,
        new: NewSequence,
        arrival: int,
        hashed: bool,
        partly: bool = False,
        whole: bool = False,
        groups: tuple[KvGroup, ...] = (),
    ) -> None:
        """`groups` are those of the pool."""
        self.new = new
        self.tables = tuple([GroupTable(each.pages, each.kind is KvGroupKind.STATE) for each in groups])
        self.checkpoints = next((table for table in self.tables if table.checkpoints), None)
        self.loads: tuple[BlockId, ...] | None = None
        self.tail: Tail | None = None
        # Begins at its first token, whatever blocks hold: layers keep a state.
        self.whole = whole
        # Unique within the worker's incarnation.
        self.id = new.sequence
        self.stopping = new.stop.stopping
        self.arrival = arrival
        self.seniority = (-new.priority, arrival)
        self.tokens = list(new.tokens)
        self.prompt_tokens = len(new.tokens)
        self.limit = new.stop.limit(self.prompt_tokens, new.max_len)
        self.hashed = hashed
        self.block_hashes = list(new.block_hashes) if hashed else []
        self.parent_digest = new.parent_digest
        # A prompt below a quarter of a block has no partial hash, and the blocks that it fills have some.
        self.partly = hashed and partly and len(new.partial_hashes) >= PARTIAL_HASHES * len(self.block_hashes)
        self.partial_hashes = list(new.partial_hashes) if self.partly else []
        self.phase = SequencePhase.WAITING
        self.block_table: list[BlockId] = []
        self.snapshot: tuple[BlockId, ...] | None = None
        self.num_computed_tokens = 0
        self.in_flight = 0
        self.leaves = False
        self.sampling = 0
        self.trimmed = 0
        self.hits: Ranges = ()
        self.from_host: Ranges = ()
        self.from_disk: Ranges = ()
        self.from_peers: Ranges = ()
        self.announced_hits: int | None = None
        self.granted_until = 0
        self.reason = FinishReason.CANCELLED
        self.recomputed = 0
        self.recompute_below = 0
        self.preemptions = 0
        self.scored = self.score_from = new.score_from
        self.score_until = new.score_until
        self.drafter: Drafter | None = None
        self.forced: tuple[int, ...] = ()
        self.draft_kind = DraftKind.NGRAM
        self.drafts: DraftTallies = {}

    @property
    def computes_all(self) -> bool:
        """Whether every position must be computed: for a state, or for log-probabilities of the prompt that lack."""
        return self.whole or self.scored < self.score_until

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the sequence has not computed before its first output token."""
        return sum(end - first for first, end in self.hits)

    def count_cached(self, ranges: Ranges) -> int:
        """Return how many of the cached tokens are in some ranges of positions, which do not overlap."""
        pairs = ((hit, part) for hit in self.hits for part in ranges)
        return sum(max(0, min(end, until) - max(first, begin)) for (first, end), (begin, until) in pairs)

    @property
    def draining(self) -> bool:
        """Whether the sequence is out of all later plans and keeps its block table only for steps in flight."""
        return self.phase in (SequencePhase.DRAINING_FINISH, SequencePhase.DRAINING_PREEMPT)

    @property
    def ended(self) -> bool:
        """Whether the sequence takes no more tokens: its end is said."""
        return self.phase is SequencePhase.DRAINING_FINISH and not self.leaves

    def start(self, block_table: tuple[BlockId, ...], cached_tokens: int) -> None:
        """Run on `block_table`; `cached_tokens` are those of the grant."""
        if not self.preemptions:
            self.announced_hits = cached_tokens
        self.phase = SequencePhase.RUNNING
        self.block_table = list(block_table)
        self.snapshot = block_table
        self.num_computed_tokens = 0
        self.trimmed = 0
        self.score_from = self.scored
        self.granted_until = cached_tokens

    def note_loaded(self, first: int, end: int) -> None:
        """Note positions whose blocks are copied from host memory, but for those that earlier runs had."""
        if (first := max(first, self.recompute_below)) < end:
            self.from_host += ((first, end),)

    def note_fetched(self, first: int, end: int, source: str) -> None:
        """Note positions whose blocks came from a source while the sequence waited, but for those of earlier runs."""
        if (first := max(first, self.recompute_below)) >= end:
            return
        if source == FROM_DISK:
            self.from_disk += ((first, end),)
        else:
            self.from_peers += ((first, end),)

    def skip(self, position: int, block_size: int) -> None:
        """Go on from `position`, because other sequences computed those before it."""
        full_blocks = (self.prompt_tokens - 1) // block_size * block_size
        countable = max(full_blocks, min(self.granted_until, self.prompt_tokens))
        first, end = max(self.num_computed_tokens, self.recompute_below), min(position, countable)
        if first < end:
            if self.hits and self.hits[-1][1] == first:
                first, self.hits = self.hits[-1][0], self.hits[:-1]
            self.hits += ((first, end),)
        self.num_computed_tokens = position

    def count_row(self, start: int, end: int) -> None:
        """Count what a row computes of positions that an earlier run had: again, or a hit for the first time.

        A hit that is lost after the first output token stays one, and is computed again.
        """
        end = min(end, self.recompute_below)
        if start >= end:
            return
        before = self.cached_tokens
        if len(self.tokens) == self.prompt_tokens:
            self._lose_hits(start, end)
        self.recomputed += end - start - (before - self.cached_tokens)

    def _lose_hits(self, start: int, end: int) -> None:
        parts = [part for first, last in self.hits for part in ((first, min(last, start)), (max(first, end), last))]
        self.hits = tuple([(first, last) for first, last in parts if first < last])

    def settle_hits(self) -> int | None:
        """Return the cached tokens, once all the prompt is planned, if another number was announced; else None."""
        announced, self.announced_hits = self.announced_hits, None
        return None if announced in (None, self.cached_tokens) else self.cached_tokens

    def requeue(self) -> None:
        """Wait again, after a preemption, with all tokens so far."""
        self.phase = SequencePhase.WAITING
        self.recompute_below = max(self.recompute_below, self.num_computed_tokens)
        self.block_table, self.snapshot, self.num_computed_tokens = [], None, 0
        self.loads = self.tail = None
        for table in self.tables:
            table.empty()
        self.preemptions += 1

    def restart(self) -> None:
        """Wait again, without steps in flight, after the worker's K/V became void."""
        if self.phase is not SequencePhase.WAITING:
            self.requeue()
        if self.preemptions and len(self.tokens) == self.prompt_tokens:
            self.announced_hits = -1
        self.in_flight = self.sampling = 0

    def blocks(self) -> tuple[BlockId, ...]:
        """Return the block table as a tuple, rebuilt only after a change."""
        if self.snapshot is None:
            self.snapshot = tuple(self.block_table)
        return self.snapshot

    def append_block(self, block: BlockId) -> None:
        self.block_table.append(block)
        self.snapshot = None

    def append_pages(self, group: int, pages: tuple[BlockId, ...]) -> None:
        """Append a block to the table of its group."""
        self.tables[group].append(pages)
        if not group:
            self.append_block(pages[0])

    def page_tables(self) -> tuple[tuple[BlockId, ...], ...]:
        """Return the pages of each group's table; each tuple is another one only after a change."""
        return tuple([table.snapshot() for table in self.tables])

    @property
    def covered(self) -> int:
        """The leading places at which every table that the sequence fills has a block, or had one."""
        if not self.tables:
            return len(self.block_table)
        return min([len(table) for table in self.tables if not table.checkpoints])

    def held_blocks(self) -> list[BlockId]:
        """Return the places of all tables, trimmed ones included, and the tail."""
        runs = [block for table in self.tables[1:] for block in table.blocks()]
        if self.tail is not None:
            runs.append(self.tail.block)
        return [*self.block_table, *runs] if runs else self.block_table

    def runs(self) -> tuple[tuple[BlockId, ...], ...]:
        """Return the blocks of all tables behind the first one; the tail stands at its place in that of checkpoints."""
        found = []
        for table in self.tables[1:]:
            blocks = table.blocks()
            if table.checkpoints and self.tail is not None:
                blocks = [*blocks, *[TRIMMED] * (self.tail.place - len(blocks)), self.tail.block]
            found.append(tuple(blocks))
        return tuple(found)

    def accept(self, token: int, block_size: int) -> FinishCause | None:
        """Add a sampled token, and a block hash when it fills a block; return how it ends the sequence, or None."""
        tokens = self.tokens
        tokens.append(token)
        length = len(tokens)
        if self.hashed and length % block_size == 0:
            self._close_hash(tokens[-block_size:])
        if length < self.limit and token not in self.stopping:
            return None  # by far most tokens
        return self.new.stop.ending(token, length - self.prompt_tokens, length, self.limit)

    def _close_hash(self, block: list[int]) -> None:
        """Add the hashes of a block that the last token has filled."""
        if self.partly:
            before, packed = block_hash_of(self.parent_digest), little_endian_int32(block)
            self.partial_hashes[PARTIAL_HASHES * len(self.block_hashes) :] = partial_hashes(before, packed, len(block))
        self.parent_digest = next_digest(self.parent_digest, block)
        self.block_hashes.append(block_hash_of(self.parent_digest))

    def parts_of(self, index: int) -> tuple[BlockHash, ...]:
        """Return the partial hashes of a full block; empty where no part of a block is reused."""
        return tuple(self.partial_hashes[PARTIAL_HASHES * index : PARTIAL_HASHES * (index + 1)])

    def origin_of(self, index: int, block_size: int) -> Origin:
        """Return what the hash of a full block stands for."""
        tokens = tuple(self.tokens[index * block_size : (index + 1) * block_size])
        return Origin(self.block_hashes[index - 1] if index else None, tokens, self.new.label)

    def follow(self, sampled: tuple[int, ...], new_drafter: NewDrafter) -> None:
        """Let the drafter see new tokens, which are accepted already; it is made with the first of them."""
        if self.drafter is not None:
            self.drafter.take(sampled)
        elif (speculation := self.new.speculation) is not None:
            before = speculation.output_before + len(self.tokens) - self.prompt_tokens
            self.drafter = new_drafter(self.tokens, replace(speculation, output_before=before))

    def expect(self, sampled: tuple[int, ...], forced: tuple[int, ...]) -> None:
        """Note what a constraint forces to follow new tokens; without news, what it forced before goes on."""
        known = self.forced
        self.forced = forced or (known[len(sampled) :] if known[: len(sampled)] == sampled else ())

    def outlook(self, sampling: int) -> Outlook:
        """Return how the sequence may go on behind tokens that steps in flight sample, so many."""
        if len(self.forced) > sampling:
            return Outlook(1.0, len(self.forced) - sampling)
        if self.drafter is None:
            return Outlook(0.0)
        return Outlook(self.drafter.chance, behind=self.drafter.behind, left=self.limit - len(self.tokens))

    def propose(self, most: int) -> tuple[int, ...]:
        """Return up to `most` guesses, and note what kind they are; no step is in flight."""
        if self.forced:
            self.draft_kind = DraftKind.FORCED
            return self.forced[:most]
        if self.drafter is None:
            return ()
        self.draft_kind = DraftKind.NGRAM if self.drafter.behind is None else DraftKind.MODEL
        return self.drafter.propose(most)

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count the drafts of a step, and those that became output."""
        self.drafts = added(self.drafts, {self.draft_kind: DraftTally(drafted, accepted)})

    def advance(self, end: int, right: int) -> int:
        """Count positions from `end` on as computed, as many as drafts were right and are tokens; return how many."""
        right = min(right, len(self.tokens) - end)
        self.num_computed_tokens += right
        return right

    def reserve(self) -> Reserve:
        """Return the reservation that queues this sequence at the manager, at its present length."""
        new = self.new
        fork_of = new.fork_of if len(self.tokens) == self.prompt_tokens else None
        return Reserve(
            sequence=new.sequence,
            num_tokens=len(self.tokens),
            max_len=self.limit,
            priority=new.priority,
            block_hashes=tuple(self.block_hashes),
            fork_of=fork_of,
            request_id=new.request_id,
            traceparent=new.traceparent,
            tracestate=new.tracestate,
            tenant=new.tenant,
            weight=new.weight,
            computes_all=self.computes_all,
            retention=new.retention,
            partial_hashes=tuple(self.partial_hashes) if fork_of is None else (),
        )

    def usage(self) -> Usage:
        """Return what the sequence has cost so far, in tokens."""
        drafts, of_model = total(self.drafts), self.drafts.get(DraftKind.MODEL, DraftTally())
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.tokens) - self.prompt_tokens,
            recomputed_tokens=self.recomputed,
            preemptions=self.preemptions,
            drafted_tokens=drafts.drafted,
            accepted_draft_tokens=drafts.accepted,
            model_drafted_tokens=of_model.drafted,
            accepted_model_draft_tokens=of_model.accepted,
            host_cached_tokens=self.count_cached(self.from_host),
            disk_cached_tokens=self.count_cached(self.from_disk),
            peer_cached_tokens=self.count_cached(self.from_peers),
        )
