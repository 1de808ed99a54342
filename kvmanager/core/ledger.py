"""One worker's ledger: applies its reports in the fixed order of columns, and decides what to grant it next.

Each rule of the lease protocol is a small method, so that a test can replace it by a simpler one and show that this
fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from common.errors import ProtocolViolation
from common.lease import GrantBatch, Inventory, Preempt, Report, Reserve
from common.types import TRIMMED, BlockHash, BlockId, Decision, FinishReason, SequenceId, SequencePhase
from kvmanager.core import preemption, runway
from kvmanager.core.admission import Admission
from kvmanager.core.audit import audit
from kvmanager.core.block import BlockState
from kvmanager.core.block_table import BlockTable, table_of
from kvmanager.core.counts import PoolCounts
from kvmanager.core.index_events import IndexEvent, IndexSnapshot
from kvmanager.core.prefix_cache import PrefixMatch
from kvmanager.core.rebuild import rebuild
from kvmanager.core.sequence import Sequence


class Ledger(Admission):
    """Block tables, prefix cache, queue and lease of one worker. Not thread-safe; no method blocks."""

    __slots__ = ()

    columns: tuple[str, ...] = ("reserve", "bind", "seal", "trim", "returned", "preempted", "finished", "stalled")
    """The order in which a report is applied. In another one, what a sequence did last would not be what counts: one
    that was reserved and cancelled within a report would wait for ever."""

    # ------------------------------------------------------------ W -> M

    def rebuild(self, inventory: Inventory) -> None:
        """Replace everything by what the worker holds. Raises ProtocolViolation if that contradicts itself."""
        rebuild(self, inventory)

    def apply(self, report: Report) -> None:
        """Apply a report. Raises ProtocolViolation; the ledger is then void until the next rebuild."""
        for column in self.columns:
            entries = getattr(report, column)
            if entries or column == "stalled":
                getattr(self, "apply_" + column)(entries)
        self.lease_want = report.lease_want
        for sequence_id, length in report.computed:
            if sequence_id in self.sequences:
                self.sequences[sequence_id].computed = length

    def apply_reserve(self, reserves: Iterable[Reserve]) -> None:
        """Queue sequences in the order of their arrival."""
        for reserve in reserves:
            self.queue_or_refuse(self.enrol(reserve, self.next_arrival))

    def apply_bind(self, bindings: Iterable[tuple[SequenceId, BlockId]]) -> None:
        """Append leased blocks to rows."""
        for sequence_id, block_id in bindings:
            sequence = self.sequences.get(sequence_id)
            if sequence is None or sequence.phase is SequencePhase.WAITING:
                raise ProtocolViolation(f"block {block_id} was bound to sequence {sequence_id}, which has no row")
            if not sequence.growth:
                raise ProtocolViolation(f"sequence {sequence_id} grew beyond {sequence.max_blocks} blocks")
            self.place(self.block_pool.bind(block_id), sequence)
            if sequence.phase is SequencePhase.RUNNING:
                self.growth -= 1

    def apply_seal(self, seals: Iterable[tuple[BlockId, BlockHash]]) -> None:
        """Register full, computed blocks whose parent is registered; count and ignore the others."""
        for block_id, key in seals:
            block = self.block_pool.get(block_id)
            parent = self.parent_of(block) if block.state is BlockState.IN_USE and block.hash is None else None
            if parent is None or not self.config.caches or not self.cache.has_parent(parent):
                self.totals.ignored_seals += 1
                continue
            if block.pending not in (None, key):
                raise ProtocolViolation(f"block {block_id} was sealed with another hash than its prompt's")
            self.cache.register(block, key, parent)
            owner = self.sequences.get(block.owner)
            if owner is not None and block.index == len(owner.block_hashes):
                owner.block_hashes.append(key)

    def apply_trim(self, trims: Iterable[tuple[SequenceId, int]]) -> None:
        """Release leading blocks that left every layer's window; the row keeps their places."""
        for sequence_id, count in trims:
            sequence = self.sequences.get(sequence_id)
            if sequence is None:
                continue
            if count > len(sequence.block_table):
                raise ProtocolViolation(f"{count} blocks of a row of {len(sequence.block_table)} were trimmed")
            for index in range(sequence.trimmed, count):
                self.release(sequence.block_table[index])
                sequence.block_table[index] = TRIMMED
            sequence.trimmed = max(sequence.trimmed, count)

    def apply_returned(self, blocks: Iterable[BlockId]) -> None:
        """Free leased blocks that the worker gave back."""
        for block_id in blocks:
            self.block_pool.give_back(block_id)

    def apply_preempted(self, preempted: Iterable[tuple[SequenceId, int]]) -> None:
        """Release the row of a victim and queue it again at its old place."""
        for sequence_id, num_tokens in preempted:
            sequence = self.sequences.get(sequence_id)
            if sequence is None or sequence.phase is SequencePhase.WAITING:
                continue
            if not 0 < num_tokens <= sequence.max_len:
                raise ProtocolViolation(f"sequence {sequence_id} was preempted with {num_tokens} tokens")
            self.release_row(sequence)
            sequence.num_tokens = num_tokens
            sequence.fork_of = None  # from its first own token on, its tokens are no longer its parent's
            sequence.recompute = True
            sequence.preemptions += 1
            sequence.queued_at = self.clock.monotonic()
            self.totals.preemptions += 1
            self.queue.add(sequence)

    def apply_finished(self, finished: Iterable[tuple[SequenceId, FinishReason]]) -> None:
        """Forget sequences and release their rows; an id that is not known was forgotten before."""
        for sequence_id, _ in finished:
            sequence = self.sequences.pop(sequence_id, None)
            if sequence is None:
                continue
            if sequence.phase is SequencePhase.WAITING:
                self.queue.remove(sequence)
            else:
                self.release_row(sequence)

    def apply_stalled(self, stalled: tuple[SequenceId, ...] | None) -> None:
        """Take over the complete set of stalled sequences; None means that it did not change."""
        if stalled is not None:
            self.stalled = stalled

    # ------------------------------------------------------------ M -> W

    def schedule(self) -> GrantBatch | None:
        """Decide what to grant and order; None when there is nothing to say. Call it after each report and rebuild."""
        terms = self.runway_terms()
        refill = self.block_pool.leased < terms.want
        lease = self.lease(terms.want - self.block_pool.leased) if refill else []
        preempt = self.preempt()
        copies, admits = self.admit()
        target = self.lease_target(refill)
        if refill:
            lease += self.lease_further(target)
        cancel, self.refused = tuple(self.refused), []
        if target == self.told and not (lease or preempt or admits or cancel):
            return None
        self.told = target
        return GrantBatch(target, tuple(copies), tuple(admits), tuple(lease), preempt, cancel)

    def runway_terms(self) -> runway.RunwayTerms:
        """Return the bounds of the lease pool now."""
        return runway.runway_terms(self.config, self.lease_want, len(self.live_stalled()), self.growth, self.running)

    def lease_target(self, refill: bool) -> int:
        """Return the level that the worker is told: blocks that its pool may hold."""
        return runway.next_target(self.runway_terms(), self.told, refill, pressed=self.held == "capacity")

    def lease(self, count: int) -> list[BlockId]:
        """Lease up to `count` blocks, also by evicting cached ones."""
        count = min(count, self.block_pool.available)
        self.make_free(count, None)
        return [self.block_pool.lease() for _ in range(count)]

    def lease_further(self, target: int) -> list[BlockId]:
        """Lease up to the target from free blocks alone, without touching the watermark."""
        spare = len(self.block_pool.free) - self.config.watermark_blocks
        return [self.block_pool.lease() for _ in range(min(target - self.block_pool.leased, spare))]

    def preempt(self) -> tuple[Preempt, ...]:
        """Order one preemption when a sequence stalls and no block is left anywhere; one at a time."""
        pool = self.block_pool
        if not self.stalled or self.running < 2 or self.preempting or pool.leased or pool.available:
            return ()
        stalled = self.live_stalled()
        if not stalled:
            return ()
        running = [each for each in self.sequences.values() if each.phase is SequencePhase.RUNNING]
        victim = preemption.choose_victim(running)
        decision = self._record_preemption(victim, running, stalled)
        self.order_preemption(victim)
        return (Preempt(victim.id, decision),)

    def order_preemption(self, victim: Sequence) -> None:
        """Mark the victim; its blocks are coming, and not free before its report."""
        self.halt(victim, SequencePhase.DRAINING_PREEMPT)

    def _record_preemption(self, victim: Sequence, running: list[Sequence], stalled: list[SequenceId]) -> str:
        beneficiary = min((self.sequences[each] for each in stalled), key=preemption.seniority)
        blocks = self.block_pool.blocks
        figures = {
            "tokens_lost": float(preemption.tokens_lost(victim, blocks, self.config.block_size)),
            "blocks_freed": float(preemption.private_blocks(victim, blocks)),
            "stalled": float(len(stalled)),
            "running": float(self.running),
        }
        return self.decisions.preempted(victim, beneficiary, figures, preemption.candidates(running, blocks))

    # ------------------------------------------------------------ operators

    def reset(self) -> bool:
        """Forget all cached content and publish that; refused (False) while a row holds a block.

        Only this ledger forgets. The worker keeps its claims, so its next inventory brings back what it still holds.
        """
        if self.block_pool.in_rows:
            return False
        self.cache.clear()
        while self.block_pool.cached:
            self.block_pool.uncache()
        return True

    def lookup(self, block_hashes: Items[BlockHash], num_tokens: int) -> PrefixMatch:
        """Return the hits that a prompt of `num_tokens` tokens would have now, and why there are no more."""
        return self.match(block_hashes, num_tokens, bool(block_hashes) or num_tokens < self.config.block_size)[1]

    def block_table(self, sequence_id: SequenceId) -> BlockTable | None:
        """Return a sequence's row; None when it is not known."""
        sequence = self.sequences.get(sequence_id)
        return table_of(sequence, self.block_pool.blocks) if sequence else None

    def block_tables(self) -> tuple[BlockTable, ...]:
        """Return the row of every live sequence, by arrival."""
        ordered = sorted(self.sequences.values(), key=lambda sequence: sequence.arrival)
        return tuple(table_of(sequence, self.block_pool.blocks) for sequence in ordered)

    def pool(self) -> PoolCounts:
        """Return the state of the pool and the totals so far."""
        waiting, pool = len(self.queue), self.block_pool
        capacity = 1 if self.held == "capacity" and waiting else 0
        return PoolCounts(
            self.config.num_blocks, len(pool.free), pool.leased, pool.in_rows, len(pool.cached), 0, self.running,
            waiting, len(self.preempting), self.told or 0, waiting - capacity, capacity, self.totals.clone(),
        )  # fmt: skip

    def drain_index_events(self) -> tuple[IndexEvent, ...]:
        """Return the changes of membership since the last call, in their order."""
        return self.cache.drain_events()

    def index_snapshot(self) -> IndexSnapshot:
        """Return the whole membership, parents first, and the number of the last event that it contains."""
        return self.cache.snapshot()

    def drain_decisions(self) -> tuple[Decision, ...]:
        """Return the decision records since the last call."""
        return self.decisions.drain()

    def check_invariants(self) -> None:
        """Compare every running total and index with a count from scratch. Raises InvariantBroken with words."""
        audit(self)
