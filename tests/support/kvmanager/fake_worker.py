"""A small worker that keeps the lease protocol, one step at a time, with content that shows every wrong read.

A slot holds the digest of all tokens up to its own; a sequence that reads it compares that with its own tokens. Nothing
overlaps here (no step is in flight when a report is made): the executable model of the protocol has that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.contracts.hashing import (
    PARTIAL_HASHES,
    PARTIAL_PARTS,
    all_partial_hashes,
    block_digests,
    block_hash_of,
    little_endian_int32,
    next_digest,
)
from common.contracts.lease import RUNWAY_UNDER_PRESSURE as PART_OF_RUNWAY
from common.contracts.lease import Admit, CachedBlock, Copy, GrantBatch, Inventory, InventorySequence, Report, Reserve
from common.contracts.transfers import Medium, Place, Transfer, TransferCosts, TransferEnd
from common.contracts.types import TRIMMED, BlockHash, BlockId, FinishReason, FrameId, SequenceId, SequencePhase
from tests.support.kvmanager.ledgers import ROOT

WAITING, RUNNING = SequencePhase.WAITING, SequencePhase.RUNNING
DRAINING_FINISH, DRAINING_PREEMPT = SequencePhase.DRAINING_FINISH, SequencePhase.DRAINING_PREEMPT


@dataclass
class Live:
    """One sequence at the worker."""

    reserve: Reserve
    arrival: int
    tokens: list[int]
    phase: SequencePhase = WAITING
    block_table: list[BlockId] = field(default_factory=list)
    pos: int = 0
    trimmed: int = 0
    reason: FinishReason = FinishReason.STOP
    preemptions: int = 0

    contents: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def content_at(self, position: int) -> int:
        """Return what the slot of a position must hold."""
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else 0
            self.contents.append(hash((before, self.tokens[len(self.contents)])))
        return self.contents[position]

    def parts(self, block_size: int) -> tuple[BlockHash, ...]:
        """Return the partial hashes of all blocks, as far as the tokens are there."""
        full = len(self.tokens) // block_size
        keys = tuple(block_hash_of(self.block_digest(index, block_size)) for index in range(full))
        return partial_hashes_of(self.tokens, keys, block_size)

    def block_digest(self, index: int, block_size: int) -> bytes:
        """Return the digest of a full block."""
        while len(self.digests) <= index:
            start = len(self.digests) * block_size
            parent = self.digests[-1] if self.digests else ROOT
            self.digests.append(next_digest(parent, self.tokens[start : start + block_size]))
        return self.digests[index]


@dataclass(frozen=True)
class Frame:
    """What a frame holds: slots, the hash and its parent's if it is claimed, depth and last use."""

    content: list[int]
    claim: tuple[BlockHash, BlockHash | None] | None
    depth: int
    used: int


class FakeWorker:
    """The block tables, lease pool and content of one worker. Every method leaves the worker between two steps.

    `partly`: the worker reports partial hashes, so the manager may have it copy parts of blocks. `greedy`: prompts that
    lack blocks leave none in the pool to decodes, as in older workers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocabulary: int = 2,
        window: int = 0,
        runway: int = 32,
        partly: bool = False,
        greedy: bool = False,
    ) -> None:
        self.greedy = greedy
        self.partly = partly and not window and block_size % PARTIAL_PARTS == 0
        self.block_size, self.vocabulary, self.window, self.runway = block_size, vocabulary, window, runway
        self.content: list[list[int]] = [[] for _ in range(num_blocks)]
        self.hash: dict[BlockId, tuple[BlockHash, BlockHash | None]] = {}
        self.depth = [0] * num_blocks  # of what a block with a hash holds
        self.frames: dict[FrameId, Frame] = {}
        self.saved: dict[FrameId, Frame] = {}  # on disk
        self.saved_reset = 0  # the last one that the disk has carried out
        self.transfers: dict[int, Transfer] = {}  # those that have not ended
        self.has_disk = True
        self.costs: TransferCosts | None = None
        self.used = [0] * num_blocks
        self.live: dict[SequenceId, Live] = {}
        self.pool: list[BlockId] = []
        self.target = 0
        self.steps = 0
        self.next_id = self.reset = 0
        self.drop_report()

    def drop_report(self) -> None:
        """Forget what was not reported yet; the next inventory contains it."""
        self.reserved: list[Reserve] = []
        self.bound: list[tuple[SequenceId, BlockId]] = []
        self.sealed: list[tuple[BlockId, BlockHash]] = []
        self.trimmed: list[tuple[SequenceId, int]] = []
        self.confirms = 0
        self.partials: list[tuple[BlockHash, tuple[BlockHash, ...]]] = []
        self.copied: list[SequenceId] = []
        self.ended: list[tuple[SequenceId, FinishReason]] = []
        self.stalled: set[SequenceId] = set()
        self.moved: list[tuple[int, TransferEnd]] = []
        self.closes = False

    # ------------------------------------------------------------ requests

    def submit(
        self,
        tokens: Sequence[int],
        max_len: int,
        priority: int = 0,
        fork_of: SequenceId | None = None,
        cached: bool = True,
    ) -> SequenceId:
        """Take a request and return its sequence."""
        number = SequenceId(self.next_id)
        self.next_id += 1
        keys = tuple(map(block_hash_of, block_digests(ROOT, tokens, self.block_size))) if cached else ()
        parts = partial_hashes_of(tokens, keys, self.block_size) if self.partly and cached else ()
        reserve = Reserve(number, len(tokens), max_len, priority, keys, fork_of, f"r{number}", partial_hashes=parts)
        self.live[number] = Live(reserve, number, list(tokens))
        self.reserved.append(reserve)
        return number

    def cancel(self, number: SequenceId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence; ending it twice, or one that is gone, does nothing."""
        live = self.live.get(number)
        if live is None or live.phase is DRAINING_FINISH:
            return
        live.reason = reason
        if live.phase is WAITING:
            self.ended.append((number, reason))
            del self.live[number]
        else:
            live.phase = DRAINING_FINISH

    # ------------------------------------------------------------ M -> W

    def deliver(self, batch: GrantBatch | None) -> None:
        """Apply a batch in the order of its columns."""
        if batch is None:
            return
        self.target = batch.lease_target
        for each in batch.tier:
            if each.load:
                self._load(each.block, self.frames[each.frame])
            else:
                held = self.content[each.block]
                assert len(held) == self.block_size, f"block {each.block} is stored and not full"
                self.frames[each.frame] = Frame(
                    held.copy(), self.hash.get(each.block), self.depth[each.block], self.used[each.block]
                )
        copied = {copy.dst: self._copied(copy) for copy in batch.copy}
        for admit in batch.admit:
            self._admit(admit, copied)
        for block in batch.lease:
            self._reset(block)
            self.pool.append(block)
        self._reset_cache(batch.reset)
        for move in batch.transfers:
            self._order(move)
        for order in batch.preempt:
            live = self.live.get(order.sequence)
            if live is not None and live.phase is RUNNING:
                live.phase = DRAINING_PREEMPT
        for number in batch.cancel:
            self.cancel(number)

    def _order(self, move: Transfer) -> None:
        """Take over a transfer. Its target holds nothing from now on, and no other one fills it."""
        assert move.target not in [each.target for each in self.transfers.values()], f"two transfers fill {move.target}"
        (self.saved if move.saves else self.frames).pop(move.target.index, None)
        self.transfers[move.id] = move
        if not self.has_disk:
            self.end_transfer(move.id, TransferEnd.FAILED)

    def _load(self, block: BlockId, frame: Frame) -> None:
        held = {each for live in self.live.values() for each in live.block_table}
        assert block not in held, f"block {block} is loaded, and a sequence has it"
        assert block not in self.pool, f"block {block} is loaded, and the pool has it"
        self._reset(block)
        self.content[block], self.depth[block], self.used[block] = frame.content.copy(), frame.depth, frame.used
        if frame.claim is not None:
            self.hash[block] = frame.claim

    def _reset_cache(self, number: int) -> None:
        """Forget what is cached, and confirm that; 0: nobody asked."""
        if not number:
            return
        self.frames.clear()
        self.saved.clear()
        self.transfers.clear()
        self.reset = self.confirms = self.saved_reset = number
        held = {block for live in self.live.values() for block in live.block_table}
        self.hash = {block: claim for block, claim in self.hash.items() if block in held}

    def _copied(self, copy: Copy) -> list[int]:
        return self.content[copy.src][: copy.length % self.block_size or self.block_size]

    def _admit(self, admit: Admit, copied: dict[BlockId, list[int]]) -> None:
        for block in admit.block_table[admit.n_shared :]:
            self._reset(block)
            self.content[block] = copied.get(block, [])
        live = self.live.get(admit.sequence)
        if live is not None and live.phase is WAITING:
            empty = sum(block == TRIMMED for block in admit.block_table)
            assert TRIMMED not in admit.block_table[empty:], "empty places stand before all blocks"
            live.block_table, live.phase, live.trimmed = list(admit.block_table), RUNNING, empty
            live.pos = empty * self.block_size
            for block in admit.block_table[empty : admit.n_shared] if empty else ():
                assert len(self.content[block]) == self.block_size, f"block {block} behind empty places is not full"
            if admit.cached_tokens > admit.n_shared * self.block_size:
                slots = admit.cached_tokens - admit.n_shared * self.block_size
                assert len(copied[admit.block_table[admit.n_shared]]) == slots < self.block_size
                self.copied.append(admit.sequence)

    def _reset(self, block: BlockId) -> None:
        self.content[block] = []
        self.hash.pop(block, None)

    # ------------------------------------------------------------ transfers

    def end_transfer(self, number: int, end: TransferEnd) -> None:
        """End a transfer; one that is to be DONE is STALE or CORRUPT if its source holds something else by now."""
        move = self.transfers.pop(number)
        held = self._frame_at(move.source)
        fits = held is not None and held.claim == (move.hash, move.parent or None) and held.depth == move.depth
        if end is TransferEnd.DONE and not fits:
            end = TransferEnd.STALE if move.saves else TransferEnd.CORRUPT
        if end is TransferEnd.DONE and held is not None:
            (self.saved if move.saves else self.frames)[move.target.index] = held
        if end in (TransferEnd.CORRUPT, TransferEnd.FAILED) and not move.saves and fits:
            del self.saved[move.source.index]
        self.moved.append((number, end))

    def _frame_at(self, place: Place) -> Frame | None:
        if place.medium is not Medium.BLOCK:
            return (self.saved if place.medium is Medium.DISK else self.frames).get(place.index)
        block = place.index
        return Frame(self.content[block].copy(), self.hash.get(block), self.depth[block], self.used[block])

    def save(self, tokens: Sequence[int], frames: int) -> None:
        """Let the disk have the full blocks of a prompt from an earlier life, as far as there are frames."""
        live = Live(Reserve(SequenceId(0), len(tokens), len(tokens)), 0, list(tokens))
        known, parent, size = {each.claim for each in self.saved.values()}, None, self.block_size
        for depth in range(len(tokens) // size):
            key = block_hash_of(live.block_digest(depth, size))
            held = [live.content_at(position) for position in range(depth * size, (depth + 1) * size)]
            if (key, parent) not in known and len(self.saved) < frames:
                self.saved[FrameId(len(self.saved))] = Frame(held, (key, parent), depth, 0)
            parent = key

    def close_disk(self) -> None:
        """Give up the disk: every transfer fails, and no frame on it holds anything."""
        for number in list(self.transfers):
            self.end_transfer(number, TransferEnd.FAILED)
        self.saved.clear()
        self.has_disk, self.closes = False, True

    def restart(self) -> None:
        """Go on as another process: what is on disk is all that is left. The router asks nothing again."""
        self.drop_report()
        for table in (self.live, self.hash, self.frames, self.transfers, self.pool):
            table.clear()
        self.content = [[] for _ in self.content]
        self.has_disk, self.reset, self.target, self.costs = True, self.saved_reset, 0, None

    # ------------------------------------------------------------ steps

    def step(self, budget: int = 64) -> None:
        """Run one step over all running sequences, most senior first."""
        self.steps += 1
        self.stalled.clear()
        for live in sorted(self.live.values(), key=lambda each: (-each.reserve.priority, each.arrival)):
            if live.phase is RUNNING:
                budget -= self._run(live, budget)
        if self.window:
            self._trim()

    def _run(self, live: Live, budget: int) -> int:
        start = self._advance(live)
        kept = self._kept_for_decodes() if live.pos < len(live.tokens) - 1 else 0
        while live.pos < len(live.tokens) and live.pos - start < budget:
            index, slot = divmod(live.pos, self.block_size)
            if index == len(live.block_table) and not self._bind(live, kept):
                self.stalled.add(live.reserve.sequence)
                break
            if self.window:
                self._check_window(live)
            content = self.content[live.block_table[index]]
            if len(content) > slot and live.pos < len(live.tokens) - 1:
                break
            assert len(content) == slot, "a slot is written once between two resets"
            content.append(live.content_at(live.pos))
            live.pos += 1
            if slot + 1 == self.block_size:
                self._seal(live, index)
        self._check(live)
        if live.pos == len(live.tokens):
            self._draw(live)
        return live.pos - start

    def _advance(self, live: Live) -> int:
        while live.pos < len(live.tokens) - 1:
            index, slot = divmod(live.pos, self.block_size)
            if index >= len(live.block_table) or len(self.content[live.block_table[index]]) <= slot:
                break
            live.pos += 1
        return live.pos

    def _kept_for_decodes(self) -> int:
        """Return how many blocks of the pool a prompt leaves to decodes: a part of their runway."""
        if self.greedy or self.window:
            return 0
        wanted = 0
        for live in self.live.values():
            if live.phase is RUNNING and live.pos >= len(live.tokens) - 1:
                reach = min(live.pos + self.runway, live.reserve.max_len - 1)
                wanted += max(0, -(-reach // self.block_size) - len(live.block_table))
        return -(-wanted // PART_OF_RUNWAY)

    def _bind(self, live: Live, kept: int) -> bool:
        if len(self.pool) <= kept:
            return False
        block = self.pool.pop(0)
        self._reset(block)
        live.block_table.append(block)
        self.bound.append((live.reserve.sequence, block))
        return True

    def _check(self, live: Live) -> None:
        """Compare every slot that the sequence has read with its own tokens."""
        for index, block in enumerate(live.block_table):
            start, end = index * self.block_size, min((index + 1) * self.block_size, live.pos)
            if block == TRIMMED or start >= end:
                continue
            live.content_at(end - 1)
            held = self.content[block][: end - start]
            assert held == live.contents[start:end], f"block {block} holds another prompt's content"
            self.used[block] = self.steps

    def _check_window(self, live: Live) -> None:
        """Check that every position that the next one sees has its block, and its own content."""
        for position in range(max(0, live.pos + 1 - self.window), live.pos):
            index, slot = divmod(position, self.block_size)
            assert live.block_table[index] != TRIMMED, f"position {live.pos} reads {position}, whose block is gone"
            held = self.content[live.block_table[index]][slot]
            assert held == live.content_at(position), f"position {live.pos} reads another prompt's {position}"

    def _seal(self, live: Live, index: int) -> None:
        uncached = len(live.reserve.block_hashes) == 0 and live.reserve.num_tokens >= self.block_size
        if uncached:
            return
        block, key = live.block_table[index], block_hash_of(live.block_digest(index, self.block_size))
        self.hash[block] = (key, block_hash_of(live.block_digest(index - 1, self.block_size)) if index else None)
        self.depth[block] = index
        self.sealed.append((block, key))
        if self.partly:
            first = PARTIAL_HASHES * index
            self.partials.append((key, live.parts(self.block_size)[first : first + PARTIAL_HASHES]))

    def _draw(self, live: Live) -> None:
        if len(live.tokens) >= live.reserve.max_len - 1:  # the last token is never computed
            live.reason, live.phase = FinishReason.LENGTH, DRAINING_FINISH
        else:
            live.tokens.append((live.reserve.sequence * 7 + len(live.tokens)) % self.vocabulary)

    def _trim(self) -> None:
        for live in self.live.values():
            out = max(0, live.pos + 1 - self.window) // self.block_size
            if live.phase is RUNNING and out > live.trimmed:
                live.block_table[live.trimmed : out] = [TRIMMED] * (out - live.trimmed)
                live.trimmed = out
                self.trimmed.append((live.reserve.sequence, out))

    # ------------------------------------------------------------ W -> M

    def report(self) -> Report:
        """Return what changed; draining sequences leave, and what the pool holds beyond its target is returned."""
        preempted = []
        for number, live in list(self.live.items()):
            if live.phase is DRAINING_FINISH:
                self.ended.append((number, live.reason))
                del self.live[number]
            elif live.phase is DRAINING_PREEMPT:
                live.preemptions += 1
                preempted.append((number, len(live.tokens)))
                live.phase, live.block_table, live.pos, live.trimmed = WAITING, [], 0, 0
        returned, self.pool = self.pool[self.target :], self.pool[: self.target]
        report = Report(
            step=self.steps,
            reserve=tuple(self.reserved),
            bind=tuple(self.bound),
            seal=tuple(self.sealed),
            trim=tuple(self.trimmed),
            returned=tuple(returned),
            preempted=tuple(preempted),
            finished=tuple(self.ended),
            stalled=tuple(sorted(self.stalled)),
            lease_want=self._lease_want(),
            reset=self.confirms,
            partials=tuple(self.partials),
            copied=tuple(self.copied),
            ended=tuple(self.moved),
            transfer_costs=self.costs,
            disk_closed=self.closes,
        )
        stalled = self.stalled
        self.drop_report()
        self.stalled = stalled
        return report

    def _lease_want(self) -> int:
        want = 0
        for live in self.live.values():
            if live.phase is RUNNING:
                reach = min(len(live.tokens) + self.runway, max(len(live.tokens), live.reserve.max_len - 1))
                if self.window:  # prompts get their blocks chunk by chunk
                    reach = min(reach, live.pos + self.runway)
                want += max(0, -(-reach // self.block_size) - len(live.block_table))
        return want

    def inventory(self) -> Inventory:
        """Return everything held, for a new session; nothing that was not reported counts any more."""
        self.drop_report()
        self.transfers.clear()
        index = {block: number for number, block in enumerate(self._by_depth())}
        first = {self.hash[block][0]: number for block, number in reversed(index.items())}
        cached_blocks = []
        for block in index:
            key, parent = self.hash[block]
            if self.window:
                depth = self.depth[block]
                cached_blocks.append(CachedBlock(block, key, -1, self.used[block], parent or key, depth))
                continue
            # -2: no block holds its parent any more, so the manager must not register it.
            cached_blocks.append(
                CachedBlock(block, key, -1 if parent is None else first.get(parent, -2), self.used[block])
            )
        sequences = tuple(self._described(live) for live in self.live.values())
        frames, saved = _claims(self.frames), _claims(self.saved)
        return Inventory(sequences, tuple(self.pool), tuple(cached_blocks), frames=frames, saved=saved)

    def _by_depth(self) -> list[BlockId]:
        parents = dict(self.hash.values())

        def depth(key: BlockHash) -> int:
            parent = parents.get(key)
            return 0 if parent is None else 1 + depth(parent)

        return sorted(self.hash, key=lambda block: depth(self.hash[block][0]))

    def _described(self, live: Live) -> InventorySequence:
        old, size = live.reserve, self.block_size
        cacheable = bool(old.block_hashes) or old.num_tokens < size
        full = range(len(live.tokens) // size if cacheable else 0)
        keys = tuple(block_hash_of(live.block_digest(index, size)) for index in full)
        now = Reserve(
            old.sequence,
            len(live.tokens),
            old.max_len,
            old.priority,
            keys,
            old.fork_of,
            old.request_id,
            partial_hashes=live.parts(size) if self.partly and cacheable else (),
        )
        return InventorySequence(now, live.phase, live.arrival, tuple(live.block_table), live.preemptions)


def _claims(frames: dict[FrameId, Frame]) -> list[CachedBlock]:
    return [
        CachedBlock(number, frame.claim[0], -1, frame.used, frame.claim[1] or frame.claim[0], frame.depth)
        for number, frame in sorted(frames.items())
        if frame.claim is not None
    ]


def partial_hashes_of(tokens: Sequence[int], keys: tuple[BlockHash, ...], block_size: int) -> tuple[BlockHash, ...]:
    """Return the partial hashes of all blocks of a prompt."""
    return all_partial_hashes(ROOT, keys, little_endian_int32(tokens), block_size)
