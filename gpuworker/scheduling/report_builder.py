"""Collects the content of the next report. Content is recorded only within a session; an inventory precedes it.

Levels (stalled set, lease want) are compared with the last values of this session; columns grow until they are sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from common.contracts.hashing import KEY_BYTES
from common.contracts.lease import Report, Reserve
from common.contracts.transfers import TransferCosts, TransferEnd
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan

RESERVE_BYTES = 8 << 20
"""Of the reserves of one report, which must stay below the 16 MiB of a message; one alone may be larger."""
_FIELDS_BYTES = 1024
"""Of a reserve beside its hashes: ids, tenant, retention."""
COMPUTED_EVERY = 4
"""Least steps between two reports of computed lengths: they show what a preemption would lose, and decide nothing."""


class SessionState(Enum):
    """DETACHED: nothing is recorded. OPENING: the inventory is taken, content is recorded. OPEN: reports are sent."""

    DETACHED = 0
    OPENING = 1
    OPEN = 2


class ReportBuilder:
    """Pending content of the next report of one session."""

    def __init__(self) -> None:
        self.state = SessionState.DETACHED
        self.stalled: tuple[SequenceId, ...] = ()
        self.costs: TransferCosts | None = None
        self.draining = False
        self._step = 0
        self._completed: StepPlan | None = None
        self.discard()

    @property
    def recording(self) -> bool:
        return self.state is not SessionState.DETACHED

    def discard(self) -> None:
        """Forget all pending content and all levels of the last session."""
        self._clear_columns()
        self._told_stalled: tuple[SequenceId, ...] | None = None
        self._told_want: int | None = None
        self._told_computed = -COMPUTED_EVERY
        self._told_costs: TransferCosts | None = None
        self._applied = self._disk_closed = self._told_draining = False

    def _clear_columns(self) -> None:
        self._reserve: list[Reserve] = []
        self._bind: list[tuple[SequenceId, BlockId]] = []
        self._bind_groups: list[int] = []
        self._bind_pages: list[BlockId] = []
        self._run_trim: dict[tuple[SequenceId, int], int] = {}
        self._seal: list[tuple[BlockId, BlockHash]] = []
        self._trim: dict[SequenceId, int] = {}
        self._returned: list[BlockId] = []
        self._preempted: list[tuple[SequenceId, int]] = []
        self._finished: list[tuple[SequenceId, FinishReason]] = []
        self._reset = 0
        self._partials: list[tuple[BlockHash, tuple[BlockHash, ...]]] = []
        self._copied: list[SequenceId] = []
        self._ended: list[tuple[int, TransferEnd]] = []
        self._awaited = False

    def reserve(self, reserve: Reserve) -> None:
        if self.recording:
            self._reserve.append(reserve)

    def bind(self, bound: Iterable[tuple[SequenceId, BlockId]]) -> None:
        """Record blocks that block tables took from the pool, in this order."""
        if self.recording:
            self._bind.extend(bound)

    def bind_pages(self, groups: Iterable[int], others: Iterable[BlockId]) -> None:
        """Record the groups of blocks that tables took, in the order of `bind`, and all further pages of them."""
        if self.recording:
            self._bind_groups.extend(groups)
            self._bind_pages.extend(others)

    def seal(self, block: BlockId, key: BlockHash, parts: tuple[BlockHash, ...] = ()) -> None:
        """Record a block that is full and computed, and its partial hashes if it has any."""
        if self.recording:
            self._seal.append((block, key))
            if parts:
                self._partials.append((key, parts))

    def copied(self, sequences: Iterable[SequenceId]) -> None:
        """Record sequences whose copy of a part of a cached block has run."""
        if self.recording:
            self._copied.extend(sequences)

    def trim(self, sequence: SequenceId, blocks: int) -> None:
        """Record that the first `blocks` blocks of a sequence are outside every window."""
        if self.recording:
            self._trim[sequence] = blocks

    def trim_run(self, sequence: SequenceId, group: int, blocks: int) -> None:
        """Record that no token reads the first `blocks` blocks of a sequence in a group any more."""
        if self.recording:
            self._run_trim[sequence, group] = blocks

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        """Record blocks of the pool that are given back unbound."""
        if self.recording:
            self._returned.extend(blocks)

    def preempted(self, sequence: SequenceId, num_tokens: int) -> None:
        """Record that a sequence lost its block table and waits again with `num_tokens` tokens."""
        if self.recording:
            self._preempted.append((sequence, num_tokens))

    def finished(self, sequence: SequenceId, reason: FinishReason) -> None:
        """Record the end of a sequence, whether or not it had a block table."""
        if self.recording:
            self._finished.append((sequence, reason))

    def reset(self, number: int) -> None:
        """Record that a reset of the prefix cache was carried out."""
        if self.recording:
            self._reset = number

    def ended(self, transfer: int, end: TransferEnd, urgent: bool) -> None:
        """Record that a transfer has ended; with `urgent`, sequences may wait for it."""
        if self.recording:
            self._ended.append((transfer, end))
            self._awaited |= urgent

    def disk_closed(self) -> None:
        """Record that no frame on disk holds anything any more."""
        self._disk_closed = self.recording

    def applied(self) -> None:
        """Record that a batch took effect: a worker that is still stalled must report it again.

        Without that report the manager would wait for the worker.
        """
        self._applied = True

    def computed(self, plan: StepPlan) -> None:
        """Count a completed step: its rows say how far their sequences have come."""
        self._step, self._completed = plan.step, plan

    @property
    def urgent(self) -> bool:
        """Whether others wait for the content: not so for blocks that were bound, sealed or trimmed."""
        return bool(
            self._reserve
            or self._finished
            or self._preempted
            or self._returned
            or self._reset
            or self._awaited
            or self._told_want is None
            or self.stalled != self._told_stalled
            or (self.stalled and self._applied)
            or self.draining is not self._told_draining
        )

    def take_report(self, lease_want: int) -> Report | None:
        """Return the next report, with the level `lease_want`; None without content or without a session.

        Reserves beyond `RESERVE_BYTES` are left for further reports, and all other columns come with the last reserve:
        in another order, a sequence could end before it is reserved.
        """
        if self.state is not SessionState.OPEN or not self._worth_sending(lease_want):
            return None
        count = self._reserves_of_a_report()
        if count < len(self._reserve):
            first, self._reserve = tuple(self._reserve[:count]), self._reserve[count:]
            self._told_want = lease_want
            return Report(step=self._step, reserve=first, lease_want=lease_want)
        stalled = self.stalled if self.stalled != self._told_stalled else None
        report = Report(
            step=self._step,
            reserve=tuple(self._reserve),
            bind=tuple(self._bind),
            seal=tuple(self._seal),
            trim=tuple(self._trim.items()) or self._trimmed_runs(),
            returned=tuple(self._returned),
            preempted=tuple(self._preempted),
            finished=tuple(self._finished),
            stalled=stalled,
            lease_want=lease_want,
            computed=self._take_computed(),
            reset=self._reset,
            partials=tuple(self._partials),
            copied=tuple(self._copied),
            bind_groups=tuple(self._bind_groups),
            bind_pages=tuple(self._bind_pages),
            trim_groups=tuple([group for _, group in self._run_trim]) if self._run_trim else (),
            ended=tuple(self._ended),
            transfer_costs=self.costs if self.costs != self._told_costs else None,
            disk_closed=self._disk_closed,
            draining=self.draining is not self._told_draining,
        )
        self._clear_columns()
        self._told_costs, self._disk_closed, self._told_draining = self.costs, False, self.draining
        self._told_stalled, self._told_want, self._applied = self.stalled, lease_want, False
        return report

    def _trimmed_runs(self) -> tuple[tuple[SequenceId, int], ...]:
        return tuple([(each, count) for (each, _), count in self._run_trim.items()]) if self._run_trim else ()

    def _reserves_of_a_report(self) -> int:
        """Return how many of the pending reserves fit into one report; at least one."""
        size = 0
        for count, each in enumerate(self._reserve):
            size += _FIELDS_BYTES + KEY_BYTES * (len(each.block_hashes) + len(each.partial_hashes))
            if size > RESERVE_BYTES and count:
                return count
        return len(self._reserve)

    def _take_computed(self) -> tuple[tuple[SequenceId, int], ...]:
        """Return the computed lengths of the last step's rows where the report may cause a preemption, else nothing."""
        causes = self.stalled or self._reserve
        if not causes or self._completed is None or self._step - self._told_computed < COMPUTED_EVERY:
            return ()
        self._told_computed = self._step
        return tuple([(row.sequence, row.start + row.length) for row in self._completed.rows])

    def _worth_sending(self, lease_want: int) -> bool:
        return bool(
            self._has_columns()
            or lease_want != self._told_want
            or self.stalled != self._told_stalled
            or (self.stalled and self._applied)
            or self.draining is not self._told_draining
        )

    def _has_columns(self) -> bool:
        return bool(
            self._bind
            or self._seal
            or self._reserve
            or self._finished
            or self._preempted
            or self._returned
            or self._trim
            or self._run_trim
            or self._reset
            or self._copied
            or self._ended
            or self._disk_closed
        )
