"""The data of one worker's ledger: its parts, and the elementary changes that concern several of them.

    LedgerState
      config, clock
      store       BlockStore      columns of all blocks, pool, prefix cache, order of eviction, retention
      sequences   SequenceTable   live sequences, the queue, tenants, running totals
      admission   Admission       why nobody more was admitted, what the next sequence was promised
      worker      WorkerView      what the worker said last, and what it was told
      tier_copies                 copies between blocks and host memory that the next batch orders
      totals, decisions           counters, and records until they are drained

Rules decide which change happens when: `report_applier`, `block_granter`, `evicting`, `preemption` and `rebuild`. A
rule takes the part that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

from common.contracts.clock import Clock
from common.contracts.hashing import PARTIAL_HASHES
from common.contracts.lease import TierCopy, blocks_needed
from common.contracts.transfers import TransferCosts
from common.contracts.types import BlockHash, BlockId, Candidate, Decision, DecisionKind, FrameId, SequenceId
from kvmanager.cache.frame_tier import NO_FRAME, Taken
from kvmanager.cache.store_gate import StoreGate
from kvmanager.contracts.block import ROOT
from kvmanager.contracts.counts import Totals
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.ports import FindPeer
from kvmanager.contracts.sequence import Run, Sequence
from kvmanager.ledger.ahead_table import AheadTable
from kvmanager.ledger.backfill import Reservation
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.sequence_table import SequenceTable
from kvmanager.ledger.transfer_table import TransferTable


class LedgerState:
    """The parts of one worker's ledger. Parts do not know each other."""

    __slots__ = (
        "admission", "ahead", "clock", "config", "decisions", "gate", "peers", "sequences", "store", "tier_copies",
        "totals", "transfers", "worker",
    )  # fmt: skip

    def __init__(self, config: LedgerConfig, clock: Clock, decision_ids: Callable[[], str], worker: str = "") -> None:
        self.config, self.clock = config, clock
        self.decisions = DecisionLog(clock, decision_ids, worker)
        self.totals = Totals()
        # Finds the worker that has the most of some blocks; None: this worker fetches from no other one.
        self.peers: FindPeer | None = None
        self.store, self.gate = BlockStore(config, clock), StoreGate(config.frames)
        self._begin()

    def empty(self) -> None:
        """Forget sequences and levels and free every block; event numbers, ghosts and totals go on."""
        self.store.empty()
        self._begin()

    def _begin(self) -> None:
        self.sequences = SequenceTable(self.config.block_size, self.config.groups, self.config.window)
        self.admission = Admission()
        self.worker = WorkerView()
        self.tier_copies: list[TierCopy] = []
        self.transfers = TransferTable()
        self.ahead = AheadTable()

    def queue_or_refuse(self, sequence: Sequence) -> None:
        """Queue a sequence. Refuse it for good when the whole pool could not hold it; those behind it proceed."""
        config = self.config
        needed = blocks_needed(sequence.num_tokens, sequence.max_len, config.block_size, config.window, config.groups)
        there = config.num_blocks
        if needed <= there:
            self.sequences.queue.add_sequence(sequence)
            return
        self.sequences.forget_sequence(sequence)
        self.worker.refused.append(sequence.id)
        self.totals.rejections += 1
        what = "pages" if config.groups else "blocks"
        reason = f"{sequence.max_len} tokens need {needed} {what}; the pool has {there}"
        figures = {"needed_blocks": float(needed), "num_blocks": float(there), "max_len": float(sequence.max_len)}
        self.decisions.record(DecisionKind.REJECTION, "refused", sequence, (reason,), figures)

    # ------------------------------------------------------------ the host tier

    def keep_below(self, block: BlockId, others: Items[BlockId] = (), worthless: bool = False) -> None:
        """Order that frames get what an evicted block holds, unless some have it already, or it is worth nothing.

        `others` are its further pages. What is behind it in frames is kept even where stores do not pay.
        """
        store, key, pages = self.store, self.store.blocks.hash[block], 1 + len(others)
        if not (self.gate.open and store.loads) and not worthless and store.cache.may_leave_out(block):
            self.gate.note_declined(pages)
            self.totals.host_declined += 1
            if key is not None:
                self.ahead.came.pop(key, None)
            return
        taken = store.cache.store_below(block, worthless)
        if taken is None:
            if key is not None and key not in store.cache.below:
                self.ahead.came.pop(key, None)
            return
        self.count_drop(taken)
        if taken.frame == NO_FRAME or store.tier is None:
            self.ahead.forget_absent(store.cache.below)  # all that is behind the block may have gone
            return
        self.tier_copies.append(TierCopy(block, taken.frame))
        if others:
            frames = store.tier.frames.others[taken.frame]
            self.tier_copies += [TierCopy(page, frame) for page, frame in zip(others, frames, strict=True)]
        self.totals.host_stores += 1
        self.gate.note_stored(pages, self.worker.costs)

    def count_drop(self, taken: Taken) -> None:
        """Count contents that have left host memory, unless a block has them: they are lost, or on disk alone."""
        cache = self.store.cache
        for dropped, _ in taken.dropped:
            self.ahead.came.pop(dropped, None)
            if dropped not in cache.entries:
                self.totals.host_drops += dropped not in cache.saved
                self.totals.host_drops_saved += dropped in cache.saved

    def load_frames(self, sequence: Sequence, frames: Items[FrameId]) -> None:
        """Extend a block table by the next free blocks, and order that they get what a run of frames holds."""
        store, hashes, table = self.store, sequence.block_hashes, sequence.block_table
        for frame in frames:
            block, index = self._load(frame, 0), len(table)
            store.describe_block(block, sequence, index)
            table.append(block)
            store.publish_block(block, hashes[index], hashes[index - 1] if index else ROOT)
            if sequence.partial_hashes and self.config.copies_parts:
                parts = sequence.partial_hashes[PARTIAL_HASHES * index : PARTIAL_HASHES * (index + 1)]
                store.cache.partials.add(hashes[index], parts)
        self.totals.host_loads += len(frames)

    def load_into_run(self, sequence: Sequence, run: Run, place: int, frame: FrameId) -> BlockId:
        """Take free pages for a place of a run, and order that they get what frames hold. The caller publishes it."""
        block = self._load(frame, run.group)
        self.store.describe_block(block, sequence, place)
        self.totals.host_loads += 1
        return block

    def _load(self, frame: FrameId, group: int) -> BlockId:
        """Take a block of a group, and order that it gets what frames hold."""
        store, pages = self.store, self.config.block_pages[group]
        assert store.tier is not None
        block = store.pool.take_pages(group, pages) if self.config.groups else store.pool.take_block()
        self.tier_copies.append(TierCopy(block, frame, load=True))
        self.gate.note_loaded(pages)
        if pages > 1:
            others = zip(store.blocks.others[block], store.tier.frames.others[frame], strict=True)
            self.tier_copies += [TierCopy(page, each, load=True) for page, each in others]
        return block

    def take_tier_copies(self) -> tuple[TierCopy, ...]:
        """Return the copies for the next batch, in their order."""
        taken, self.tier_copies = tuple(self.tier_copies), []
        return taken

    # ------------------------------------------------------------ seals

    def may_publish(self, block: BlockId, block_hash: BlockHash, parent: BlockHash) -> bool:
        """Return whether a block in use may be registered: after its parent, at its own depth, under a hash of its own.

        A block whose hash another content has, or had, is not shared, and nothing after it. With a window, the parent
        may be gone.
        """
        store, cache = self.store, self.store.cache
        if not self.config.prefix_caching or parent in cache.ambiguous or not self.follows_parent(block, parent):
            return False
        known = block_hash in cache.entries or cache.ambiguous or block_hash in cache.below
        if known and cache.is_ambiguous(block_hash, parent, store.blocks.index[block]):
            cache.forget_pending(block)
            return False
        return True

    def follows_parent(self, block: BlockId, parent: BlockHash) -> bool:
        """Return whether a block of a block table is its first, or the block before it there holds `parent`.

        A block of another sequence with that hash does not count: it may be evicted while this one is in use. With a
        window a parent may be evicted before its child, and a child is registered without it.
        """
        blocks, live = self.store.blocks, self.sequences.live
        index, owner = blocks.index[block], live.get(blocks.owner[block])
        if blocks.group[block]:
            return self._stands_beside(block, parent)
        if not parent or not index:
            return not parent and not index
        if self.config.window:
            return True
        table = owner.block_table if owner is not None else []
        if index >= len(table) or table[index] != block:
            # The sequence that was to fill it has left; one of those that shared it has filled it.
            tables = (each.block_table for each in live.values())
            table = next((each for each in tables if index < len(each) and each[index] == block), [])
        return bool(table) and blocks.hash[table[index - 1]] == parent

    def _stands_beside(self, block: BlockId, block_hash: BlockHash) -> bool:
        """Return whether a sequence that holds a block of a run holds the first group's block of that content too.

        A checkpoint may stand behind the last block of a table that lacks some: then it was not left yet.
        """
        blocks, live = self.store.blocks, self.sequences.live
        group, index = blocks.group[block], blocks.index[block]
        owner = live.get(blocks.owner[block])
        holder = owner if owner is not None and owner.holds(block, group, index) else None
        if holder is None:
            holder = next((each for each in live.values() if each.holds(block, group, index)), None)
        beside = holder.block_table[index : index + 1] if holder is not None else []
        return bool(beside) and blocks.hash[beside[0]] == block_hash

    def parent_of(self, block: BlockId) -> BlockHash | None:
        """Return the hash of the block before this one (ROOT for a first block); None while it is not known.

        Of a block of a run, it is that of its own content.
        """
        blocks = self.store.blocks
        parent, index = blocks.parent[block], blocks.index[block]
        if parent is not None:
            return parent
        owner = self.sequences.live.get(blocks.owner[block])
        place = index if blocks.group[block] else index - 1
        if owner is None or place >= len(owner.block_hashes):
            return None
        return owner.block_hashes[place]

    def count_awaited(self, block: BlockId) -> None:
        """Count hits on a block that was not sealed when they were granted.

        Where the sequence that was to fill it has left, one of those that shared the block has filled it.
        """
        blocks = self.store.blocks
        owner, index = self.sequences.live.get(blocks.owner[block]), blocks.index[block]
        table = owner.block_table if owner is not None else ()
        filled = index < len(table) and table[index] == block
        self.totals.prefix_hit_blocks += blocks.awaited.pop(block) - (not filled)

    # ------------------------------------------------------------ sources of copies

    def hold_copy_source(self, sequence: Sequence, block: BlockId) -> None:
        """Hold the source of a sequence's copy."""
        self.store.pool.hold_block(block)
        sequence.copy_source = block
        self.sequences.copying[sequence.id] = True

    def release_copy_source(self, sequence: Sequence) -> None:
        """Stop holding the source of a sequence's copy, if it holds one."""
        source, sequence.copy_source = sequence.copy_source, None
        self.sequences.copying.pop(sequence.id, None)
        if source is not None:
            self.store.release_blocks((source,))

    def give_up_copy_sources(self) -> bool:
        """Stop holding the sources of all copies, because blocks are short; return whether there were any.

        The copies stay right: the worker has their orders, and every later write of a source stands behind them.
        """
        copying = self.sequences.copying
        given_up = [each for each, held in copying.items() if held]
        for each in given_up:
            self.release_copy_source(self.sequences.live[each])
        copying.update(dict.fromkeys(given_up, False))
        return bool(given_up)


BlockedBy = Literal["", "capacity", "places", "prompt", "deferred", "batch"]
"""Why the next sequence was not admitted: too few blocks, no place, a prompt that lacks blocks comes first, a stall or
a preemption does, or the batch has enough admissions."""


@dataclass(slots=True)
class Admission:
    """Where admission stands. `admitted_in_turn` counts admissions since the last one by age."""

    blocked_by: BlockedBy = ""
    reservation: Reservation | None = None
    admitted_in_turn: int = 0

    def reservation_of(self, sequence: Sequence) -> Reservation | None:
        """Return what a sequence was promised; None where the last promise was another one's."""
        kept = self.reservation
        return kept if kept and kept.sequence == sequence.id else None


# The reset of a prefix cache as the worker is to carry it out: ordered, sent, confirmed.
# The manager forgets at once. The worker still claims the content, and an inventory would bring it back. So the id
# of a reset is a level: the worker confirms it, keeps it and names it at each attach. A worker that names another
# id than the manager's latest is reset again.
@dataclass(slots=True)
class ResetOrder:
    """Ids of resets in one session; 0 is none."""

    wanted: int = 0
    sent: int = 0
    confirmed: int = 0

    @property
    def pending(self) -> bool:
        """Whether the worker has still to confirm the latest reset."""
        return self.wanted != self.confirmed

    def take_reset(self) -> int:
        """Return the id for the next batch; 0 when it was sent already."""
        if self.sent == self.wanted:
            return 0
        self.sent = self.wanted
        return self.sent

    def key(self) -> tuple[int, int, int]:
        return self.wanted, self.sent, self.confirmed


NEVER_SENT = None
"""Last sent lease target of a worker that has received none since its attach: the next batch is always sent."""


@dataclass(slots=True)
class WorkerView:
    """What the worker said last, and what it was told.

    `steps` counts the worker's steps since the session began; `last_step` is the number that its last report named.
    `lease_want` is how many blocks it asked for, `costs` what a block costs it (None: it has not said). Once it is
    `draining`, it gets no new requests.
    `last_sent_target` is the lease target that it received last, and `refused` names sequences of whose refusal it has
    still to hear.
    """

    lease_want: int = 0
    steps: int = 0
    last_step: int | None = None
    last_sent_target: int | None = NEVER_SENT
    refused: list[SequenceId] = field(default_factory=list)
    resets: ResetOrder = field(default_factory=ResetOrder)
    costs: TransferCosts | None = None
    draining: bool = False

    def count_steps(self, step: int) -> None:
        """Count the worker's steps up to the one that a report names."""
        if self.last_step is not None:
            self.steps += max(0, step - self.last_step)
        self.last_step = step


Figures = dict[str, float]


class DecisionLog:
    """Makes records about one worker and keeps them until they are drained."""

    __slots__ = ("_clock", "_ids", "_records", "_worker")

    def __init__(self, clock: Clock, ids: Callable[[], str], worker: str = "") -> None:
        self._clock = clock
        self._ids = ids
        self._worker = worker
        self._records: list[Decision] = []

    def record(
        self,
        kind: DecisionKind,
        chosen: str,
        subject: Sequence | None,
        reasons: tuple[str, ...],
        figures: Figures,
        candidates: tuple[Candidate, ...] = (),
        beneficiary: str = "",
    ) -> str:
        """Add a record about `subject` (None: the worker as a whole) and return its id.

        The beneficiary of an eviction is its subject.
        """
        return self._add(
            Decision(
                self._ids(), kind, self._clock.time_ns(), chosen, subject.request_id if subject else "", candidates,
                reasons, figures=tuple(figures.items()), traceparent=subject.traceparent if subject else "",
                beneficiary=subject.name if subject and kind is DecisionKind.EVICTION else beneficiary,
                worker=self._worker,
            )
        )  # fmt: skip

    def record_preemption(
        self,
        victim: Sequence,
        beneficiary: Sequence | None,
        reasons: tuple[str, ...],
        figures: Figures,
        candidates: tuple[Candidate, ...],
    ) -> str:
        return self._add(
            Decision(
                self._ids(), DecisionKind.PREEMPTION, self._clock.time_ns(), victim.name, victim.request_id, candidates,
                reasons, victim=victim.name, beneficiary=beneficiary.name if beneficiary else "",
                figures=tuple(figures.items()), traceparent=victim.traceparent, worker=self._worker,
            )
        )  # fmt: skip

    def _add(self, decision: Decision) -> str:
        self._records.append(decision)
        return decision.decision_id

    def drain(self) -> tuple[Decision, ...]:
        """Return the records since the last call."""
        records, self._records = tuple(self._records), []
        return records
