"""Transfers of a world's worker: a disk that outlives the process, and threads that read and write it, one thing each.

A thread begins when the engine hands it a transfer, and ends whenever the search likes. What it brings is dropped if
the transfer is void by then. A write that is void is on the disk all the same, unless a reset came between.
"""

from __future__ import annotations

from typing import NamedTuple

from common.contracts.hashing import group_in, hash_in
from common.contracts.lease import CachedBlock, Copy, TierCopy
from common.contracts.transfers import ImageName, Medium, Place, Transfer, TransferEnd
from common.contracts.types import BlockHash, BlockId, FrameId
from gpuworker.scheduling.claims_by_hash import ClaimsByHash
from gpuworker.scheduling.frame_claims import Claims
from kvmanager.contracts.block import ROOT
from tests.suites.protocol import content
from tests.suites.protocol.invariants import Violation
from tests.suites.protocol.scenario import Layers
from tests.suites.protocol.state import State

Image = tuple[int, ...]
TRANSFERS = ("begin", "read", "come", "write", "land")
"""The events of transfers."""


class Entry(NamedTuple):
    """What a frame on disk holds: a page of a content of a group; None: it has rotted."""

    hash: BlockHash
    parent: BlockHash
    depth: int
    image: Image | None
    group: int = 0
    page: int = 0


class Disk(NamedTuple):
    """Frames on disk by number, and the last reset that was carried out."""

    entries: tuple[tuple[FrameId, Entry], ...] = ()
    reset: int = 0

    def get(self, frame: FrameId) -> Entry | None:
        return dict(self.entries).get(frame)

    def put(self, frame: FrameId, entry: Entry | None) -> Disk:
        kept = [each for each in self.entries if each[0] != frame]
        return self._replace(entries=tuple(sorted([*kept, *([(frame, entry)] if entry else [])])))

    def claims(self, sizes: tuple[int, ...]) -> Claims:
        """Return the contents that are there with all their pages, of which a group has `sizes`; () without groups."""
        parts = dict[tuple[int, BlockHash, int], dict[int, FrameId]]()
        for frame, each in self.entries:
            parts.setdefault((each.depth, each.hash, each.group), {})[each.page] = frame
        whole = [(key, pages) for key, pages in sorted(parts.items()) if len(pages) == (sizes or (1,))[key[-1]]]
        contents, groups, pages = list[CachedBlock](), list[int](), list[FrameId]()
        for (depth, block_hash, group), frames in whole:
            entry = self.get(frames[0])
            assert entry is not None
            contents.append(CachedBlock(frames[0], block_hash, -1, 0, entry.parent or entry.hash, depth))
            groups.append(group)
            pages += [frames[page] for page in sorted(frames)]
        return Claims(tuple(contents), tuple(groups), tuple(pages)) if sizes else Claims(tuple(contents))


def disk_with(tokens: tuple[int, ...], block_size: int, layers: tuple[Layers, ...]) -> Disk:
    """Return a disk that has the full blocks of some tokens in every group, the last one in frame 0."""
    nodes, entries, parent = content.path(tokens), list[Entry](), ROOT
    for depth in range(len(tokens) // block_size):
        key = content.key(nodes[(depth + 1) * block_size - 1], block_size)
        for group, each in enumerate(layers):
            for page in range(each.pages):
                held = content.image_of(key, block_size, each.first_part + page, each.keeps_states)
                entries.append(Entry(key, key if group else parent, depth, held, group, page))
        parent = key
    return Disk(tuple([(FrameId(frame), entry) for frame, entry in enumerate(reversed(entries))]))


class Write(NamedTuple):
    """A write of a page under way, and the reset after which it was ordered."""

    transfer: Transfer
    image: Image
    reset: int


class TransferSide(State):
    """Events of the threads that move images, and of the engine that takes and lands them."""

    def restart_transfers(self) -> None:
        """A worker process starts: what threads of an earlier one had in hand is lost, what is on disk is not."""
        self.reading, self.coming, self.writing, self.landing = (), (), (), ()
        sizes = tuple([group.pages for group in self.scenario.groups])
        self.agent.restore_saved(self.disk.claims(sizes), self.disk.reset)

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
        asked = transfer.hash, transfer.parent, transfer.depth, transfer.group, transfer.page
        right = entry is not None and (*entry[:3], entry.group, entry.page) == asked
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
            layers = self.layers[transfer.group]
            part = layers.first_part + transfer.page
            image = content.image_of(transfer.hash, self.scenario.block_size, part, layers.keeps_states)
            self.landing = (*self.landing, (transfer, image))
        else:
            self.agent.end_transfer(transfer, TransferEnd(end))
        return True

    def write(self, _: int) -> bool:
        """A thread has written the oldest save."""
        write, *rest = self.writing
        self.writing = tuple(rest)
        transfer = write.transfer
        if write.reset == self.disk.reset:
            named = transfer.hash, transfer.parent, transfer.depth
            entry = Entry(*named, write.image, transfer.group, transfer.page)
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
                self.void -= {transfer.key}  # ordered after the reset, so the peer has carried it out
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
        names = [ImageName(key, page) for key in keys for page in range(self.layers[group_in(key)].pages)]
        for (key, page), place in zip(names, self.agent.find_images(names), strict=True):
            if place is None:
                continue
            at = BlockId(self.device.frame(place.index)) if place.medium is Medium.HOST else place.index
            if not self._is_page(at, key, page):
                raise Violation("I24", f"a peer would get {place} for a content that it does not hold")
            if any(place == _places(copy)[1] for copy in self._open_copies()):
                raise Violation("I24", f"a peer would get {place}, which a copy writes that has not run")

    def _is_page(self, page: BlockId, key: BlockHash, number: int) -> bool:
        """Return whether a page holds its part of a content."""
        layers, size = self.layers[group_in(key)], self.scenario.block_size
        held = content.image_of(hash_in(key), size, layers.first_part + number, layers.keeps_states)
        return tuple(self.device.slots[page]) == held

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
