"""The worker's side of transfers beside the steps: which are open, what the disk holds, and what may be copied now.

Threads of the data plane move images between files and memory of their own. Only the engine's thread copies between
that memory and blocks or frames, and it does so between steps. So an image is whole, and it is of what the worker
claims at that instant, if no copy that waits or runs touches the place:

    save     ordered -> the image is taken out of a block or frame -> written -> done: the frame on disk holds it
    fetch    ordered -> read and verified -> the image is put into a frame of host memory -> done: the frame holds it

A copy touches a place from its grant until its step has completed. A transfer waits for such copies, and for nothing
else. Once a transfer is void nothing of it is claimed, whatever its threads still do.

Where the pool has groups, a content may have several pages, and an image is that of a page. The pages of a transfer
move one by one, and may come in any order. It has ended when all of them have, and is DONE if each one is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Final

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Copy, TierCopy
from common.contracts.transfers import Medium, Place, Transfer, TransferEnd
from gpuworker.scheduling.block_states import BlockStates, Content
from gpuworker.scheduling.frame_claims import Claims, FrameClaims


class TransferBook:
    """Transfers of the present session, and the contents of frames on disk, which outlive sessions."""

    def __init__(self, disk_frames: int, has_peers: bool = False, block_pages: tuple[int, ...] = ()) -> None:
        """`block_pages` are those of a content, by its group, where the pool has groups."""
        self.disk_frames, self.has_peers = disk_frames, has_peers
        self._block_pages = block_pages or (1,)
        # Whether the disk is given up: the manager may order something before it hears of that.
        self.closed = False
        self.saved = FrameClaims(disk_frames, block_pages)
        self.open: dict[int, Transfer] = {}
        # Of open transfers of several pages: how many have not ended, and how the others did, at the worst.
        self._left: dict[int, tuple[int, TransferEnd]] = {}
        # Fetches that are to be read, and saves whose image is to be taken, in the order in which they were ordered.
        self._to_read: list[Transfer] = []
        self._to_take: deque[Transfer] = deque()

    # ------------------------------------------------------------ orders

    def check(self, transfers: Items[Transfer], num_blocks: int, host_frames: int, anew: bool = False) -> None:
        """Raise ProtocolViolation when a transfer names a place that there is not, or one that another one fills.

        With `anew` the batch has voided all earlier ones.
        """
        sizes = {Medium.BLOCK: num_blocks, Medium.HOST: host_frames, Medium.DISK: self.disk_frames}
        filled = set[Place]() if anew else {place for each in self.open.values() for place in _targets(each)}
        for each in transfers:
            if each.peer is not None and not self.has_peers:
                raise ProtocolViolation(f"transfer {each.id} comes from a peer; this worker asks none")
            if each.group >= len(self._block_pages) or each.num_pages != self._block_pages[each.group]:
                what = f"{each.num_pages} pages in group {each.group}; a block has {self._block_pages}, by group"
                raise ProtocolViolation(f"transfer {each.id} has {what}")
            for place in _targets(each) if each.peer is not None else (*_sources(each), *_targets(each)):
                if not 0 <= place.index < sizes[place.medium]:
                    what = f"{place.medium.name.lower()} {place.index}; there are {sizes[place.medium]}"
                    raise ProtocolViolation(f"transfer {each.id} names {what}")
            for place in _targets(each):
                if place in filled:
                    raise ProtocolViolation(f"transfer {each.id} goes where another one goes that has not ended")
                filled.add(place)

    def apply(self, transfers: Items[Transfer], frames: FrameClaims) -> None:
        """Take over transfers that were checked; their targets hold nothing from now on."""
        for each in transfers:
            self.open[each.id], pages = each, each.pages()
            if each.others:
                self._left[each.id] = len(pages), TransferEnd.DONE
            (self.saved if each.saves else frames).void([page.target.index for page in pages])
            if each.saves:
                self._to_take += pages
            else:
                self._to_read += pages

    # ------------------------------------------------------------ the engine's turn

    def take_reads(self) -> list[Transfer]:
        """Return the fetches that are to be read, from disk or from peers; of several pages, each page."""
        taken, self._to_read = self._to_read, []
        return taken

    def take_saves(
        self, blocks: BlockStates, frames: FrameClaims, copies: Iterable[Copy | TierCopy], most: int
    ) -> tuple[list[Transfer], list[Transfer]]:
        """Return saves whose image can be taken now, `most` at once, and those whose source holds something else.

        Those of several pages are returned page by page. `copies` are those that wait or run. A save whose source one
        of them fills waits, and so do all behind it.
        """
        ready, stale = list[Transfer](), list[Transfer]()
        filled = filled_by(copies) if self._to_take else frozenset()
        while self._to_take and len(ready) < most and self._to_take[0].source not in filled:
            transfer = self._to_take.popleft()
            (ready if _is_there(transfer, blocks, frames) else stale).append(transfer)
        return ready, stale

    @property
    def waits_to_take(self) -> bool:
        return bool(self._to_take)

    def may_land(self, transfer: Transfer, copies: Iterable[Copy | TierCopy]) -> bool:
        """Return whether no copy that waits or runs touches the frame that a fetch is to fill."""
        return all(transfer.target not in ends for ends in map(_ends, copies))

    def is_open(self, transfer: Transfer) -> bool:
        """Return whether a transfer counts, or a page of one: it has not ended, and is not void."""
        return self.open.get(transfer.id) is (transfer.whole or transfer)

    def end(self, transfer: Transfer, end: TransferEnd, frames: FrameClaims, step: int) -> TransferEnd | None:
        """Account for a transfer that has ended, or a page of one; return how all of it did, None if it is not over.

        What could not be read is on disk no more, even if the transfer was void.
        """
        whole = transfer.whole or transfer
        if end in (TransferEnd.CORRUPT, TransferEnd.FAILED) and whole.source.medium is Medium.DISK:
            held = self.saved.held.get(whole.source.index)
            if held is not None and held.key == whole.key:
                self.saved.void([whole.source.index])
        if not self.is_open(transfer):
            return None
        if whole.others:
            left, worst = self._left.pop(whole.id)
            end = max(worst, end, key=_WEIGHTS.__getitem__)
            if left > 1 and transfer is not whole:
                self._left[whole.id] = left - 1, end
                return None
        del self.open[whole.id]
        if end is TransferEnd.DONE:
            parent = None if whole.group else whole.parent or None
            content = Content(whole.hash, parent, whole.depth, step, whole.group)
            targets = tuple([place.index for place in _targets(whole)])
            (self.saved if whole.saves else frames).claim(targets, content)
        return end

    # ------------------------------------------------------------ sessions

    def void(self) -> None:
        """Forget all transfers: a session ended, or the cache was reset."""
        self.open.clear()
        self._left.clear()
        self._to_read.clear()
        self._to_take.clear()

    def forget_saved(self) -> None:
        """Forget what is on disk: the cache was reset, or the disk is given up."""
        self.saved.forget_all()

    def close_disk(self) -> None:
        """Give up the disk. What is ordered of it from now on is to fail."""
        self.closed = True
        self.forget_saved()

    def take_failed(self) -> list[Transfer]:
        """Return what is open of a disk that was given up; nothing of it is begun any more."""
        if not self.closed:
            return []
        self._to_read = [transfer for transfer in self._to_read if transfer.peer is not None]
        self._to_take.clear()
        return [transfer for transfer in self.open.values() if transfer.peer is None]

    def restore(self, saved: Claims) -> None:
        """Take over what frames on disk hold from an earlier process."""
        at = 0
        for number, each in enumerate(saved.contents):
            group = saved.groups[number] if saved.groups else 0
            frames = saved.pages[at : at + self._block_pages[group]] if saved.groups else (each.block,)
            at += len(frames)
            parent = each.parent_hash if each.depth and not group else None
            self.saved.claim(frames, Content(each.hash, parent, each.depth, each.last_used, group))


_WEIGHTS: Final = {
    TransferEnd.DONE: 0,
    TransferEnd.STALE: 1,
    TransferEnd.LATE: 1,
    TransferEnd.FAILED: 2,
    TransferEnd.CORRUPT: 2,
}
"""Of the ends of several pages the heaviest counts. After FAILED and CORRUPT the source holds nothing any more."""


def filled_by(copies: Iterable[Copy | TierCopy]) -> frozenset[Place]:
    """Return the places that copies write."""
    return frozenset(target for _, target in map(_ends, copies))


def _is_there(page: Transfer, blocks: BlockStates, frames: FrameClaims) -> bool:
    """Return whether the source of a save, or of a page of one, holds what is to be saved."""
    whole = page.whole or page
    in_block, first = whole.source.medium is Medium.BLOCK, whole.source.index
    content = blocks.content.get(first) if in_block else frames.held.get(first)
    if content is None or (content.hash, content.depth, content.group) != (whole.hash, whole.depth, whole.group):
        return False
    made = blocks.made if in_block else frames.made
    return made is None or made.pages[first][page.page] == page.source.index


def _sources(transfer: Transfer) -> tuple[Place, ...]:
    """Return the places of all pages of a source."""
    return (transfer.source, *(Place(transfer.source.medium, read) for read, _ in transfer.others))


def _targets(transfer: Transfer) -> tuple[Place, ...]:
    """Return the places of all pages of a target."""
    return (transfer.target, *(Place(transfer.target.medium, write) for _, write in transfer.others))


def _ends(copy: Copy | TierCopy) -> tuple[Place, Place]:
    """Return where a copy reads and where it writes."""
    if isinstance(copy, Copy):
        return Place(Medium.BLOCK, copy.src), Place(Medium.BLOCK, copy.dst)
    ends = Place(Medium.HOST, copy.frame), Place(Medium.BLOCK, copy.block)
    return ends if copy.load else ends[::-1]
