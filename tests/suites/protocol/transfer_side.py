"""Transfers of a world's worker: a disk that outlives the process, and threads that read and write it, one thing each.

A thread begins when the engine hands it a transfer, and ends whenever the search likes. What it brings is dropped if
the transfer is void by then. A write that is void is on the disk all the same, unless a reset came between.
"""

from __future__ import annotations

from typing import NamedTuple

from common.contracts.lease import CachedBlock, Copy, TierCopy
from common.contracts.transfers import Medium, Place, Transfer, TransferEnd
from common.contracts.types import BlockHash, FrameId
from gpuworker.scheduling.claims_by_hash import ClaimsByHash
from kvmanager.contracts.block import ROOT
from tests.suites.protocol import content
from tests.suites.protocol.invariants import Violation
from tests.suites.protocol.state import State

Image = tuple[int, ...]
TRANSFERS = ("begin", "read", "come", "write", "land")
"""The events of transfers."""


class Entry(NamedTuple):
    """What a frame on disk holds; None: it has rotted."""

    hash: BlockHash
    parent: BlockHash
    depth: int
    image: Image | None


class Disk(NamedTuple):
    """Frames on disk by number, and the last reset that was carried out."""

    entries: tuple[tuple[FrameId, Entry], ...] = ()
    reset: int = 0

    def get(self, frame: FrameId) -> Entry | None:
        return dict(self.entries).get(frame)

    def put(self, frame: FrameId, entry: Entry | None) -> Disk:
        kept = [each for each in self.entries if each[0] != frame]
        return self._replace(entries=tuple(sorted([*kept, *([(frame, entry)] if entry else [])])))

    def claims(self) -> tuple[CachedBlock, ...]:
        return tuple([CachedBlock(f, e.hash, -1, 0, e.parent or e.hash, e.depth) for f, e in self.entries])


def disk_with(tokens: tuple[int, ...], block_size: int) -> Disk:
    """Return a disk that has the full blocks of some tokens, the last one in frame 0."""
    nodes, entries, parent = content.path(tokens), list[Entry](), ROOT
    for depth in range(len(tokens) // block_size):
        held = tuple(nodes[depth * block_size : (depth + 1) * block_size])
        key = content.key(held[-1], block_size)
        entries.append(Entry(key, parent, depth, held))
        parent = key
    return Disk(tuple([(FrameId(frame), entry) for frame, entry in enumerate(reversed(entries))]))


class Write(NamedTuple):
    """A write under way, and the reset after which it was ordered."""

    transfer: Transfer
    image: Image
    reset: int


class TransferSide(State):
    """Events of the threads that move images, and of the engine that takes and lands them."""

    def restart_transfers(self) -> None:
        """A worker process starts: what threads of an earlier one had in hand is lost, what is on disk is not."""
        self.reading, self.coming, self.writing, self.landing = (), (), (), ()
        self.agent.restore_saved(self.disk.claims(), self.disk.reset)

    def begin(self, _: int) -> bool:
        """The engine hands what was ordered to threads; it takes images of what it saves."""
        reads, saves = tuple(self.agent.take_reads()), self.agent.take_saves(1)
        for transfer in saves:
            self._check_free(transfer.source, written=True)
            at = (
                self.device.frame(transfer.source.index)
                if transfer.source.medium is Medium.HOST
                else transfer.source.index
            )
            self.writing = (*self.writing, Write(transfer, tuple(self.device.slots[at]), self.disk.reset))
        self.reading = (*self.reading, *(transfer for transfer in reads if transfer.peer is None))
        self.coming = (*self.coming, *(transfer for transfer in reads if transfer.peer is not None))
        return bool(reads or saves)

    def read(self, _: int) -> bool:
        """A thread has read the oldest fetch."""
        transfer, *rest = self.reading
        self.reading = tuple(rest)
        entry = self.disk.get(transfer.source.index)
        right = entry is not None and (entry.hash, entry.parent, entry.depth) == (
            transfer.hash,
            transfer.parent,
            transfer.depth,
        )
        if entry is not None and right and entry.image is not None:
            self.landing = (*self.landing, (transfer, entry.image))
            return True
        if entry is not None and right:
            self.disk = self.disk.put(transfer.source.index, None)
        self.agent.end_transfer(transfer, TransferEnd.CORRUPT)
        return True

    def come(self, end: int) -> bool:
        """The oldest fetch from a peer ends: its content is here, or the peer, or the way to it, fails."""
        transfer, *rest = self.coming
        self.coming = tuple(rest)
        assert transfer.peer is not None
        if end is TransferEnd.DONE:
            self.landing = (*self.landing, (transfer, content.image_of(transfer.hash, self.scenario.block_size)))
        else:
            self.agent.end_transfer(transfer, TransferEnd(end))
        return True

    def write(self, _: int) -> bool:
        """A thread has written the oldest save."""
        write, *rest = self.writing
        self.writing = tuple(rest)
        transfer = write.transfer
        if write.reset == self.disk.reset:
            entry = Entry(transfer.hash, transfer.parent, transfer.depth, write.image)
            self.disk = self.disk.put(transfer.target.index, entry)
        self.agent.end_transfer(transfer, TransferEnd.DONE)
        return True

    def land(self, _: int) -> bool:
        """The engine puts the oldest image that was read into its frame, if that may be done now."""
        (transfer, image), *rest = self.landing
        if self.agent.is_open(transfer):
            if not self.agent.may_land(transfer):
                return False
            self._check_free(transfer.target)
            self.device.slots[self.device.frame(transfer.target.index)] = list(image)
            self.agent.end_transfer(transfer, TransferEnd.DONE)
            if transfer.peer is not None and self.agent.reset == self.resets:
                self.void -= {transfer.hash}  # ordered after the reset, so the peer has carried it out
        self.landing = tuple(rest)
        return True

    def rot(self, frame: int) -> bool:
        """A frame on disk rots."""
        entry = self.disk.get(FrameId(frame))
        if entry is not None:
            self.disk = self.disk.put(FrameId(frame), entry._replace(image=None))
        return entry is not None

    def close_disk(self, _: int) -> bool:
        """The worker gives up its disk: it has failed too often. What threads have in hand fails."""
        self.reading, self.writing = (), ()
        self.landing = tuple([each for each in self.landing if each[0].peer is not None])
        self.agent.close_disk()
        return True

    def check_images(self) -> None:
        """I24: what the worker would serve to a peer now is there, and no copy that waits or runs writes it."""
        blocks, frames = self.agent._blocks.content, self.agent._frames.held
        assert isinstance(blocks, ClaimsByHash)
        assert isinstance(frames, ClaimsByHash)
        keys = [*blocks._places, *(key for key in frames._places if key not in blocks._places)]
        for key, place in zip(keys, self.agent.find_images(keys), strict=True):
            if place is None:
                continue
            host = place.medium is Medium.HOST
            if self.device.block_key(self.device.frame(place.index) if host else place.index) != key:
                raise Violation("I24", f"a peer would get {place} for a content that it does not hold")
            if any(place == _places(copy)[1] for copy in self._open_copies()):
                raise Violation("I24", f"a peer would get {place}, which a copy writes that has not run")

    def _open_copies(self) -> list[Copy | TierCopy]:
        """Return the copies that were granted and have not run."""
        return [*self.agent._copies, *(copy for plan, _ in self.flights for copy in plan.copies)]

    def _check_free(self, place: Place, written: bool = False) -> None:
        """I25: the engine touches no place that a copy touches which was granted before and has not run.

        What is only read (`written`: by copies) may be read by copies too.
        """
        for copy in self._open_copies():
            reads, writes = _places(copy)
            if place == writes or (place == reads and not written):
                raise Violation("I25", f"{place} is taken or filled while {copy} has not run")


def _places(copy: Copy | TierCopy) -> tuple[Place, Place]:
    if isinstance(copy, Copy):
        return Place(Medium.BLOCK, copy.src), Place(Medium.BLOCK, copy.dst)
    frame, block = Place(Medium.HOST, copy.frame), Place(Medium.BLOCK, copy.block)
    return (frame, block) if copy.load else (block, frame)
