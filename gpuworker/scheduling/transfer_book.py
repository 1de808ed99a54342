"""The worker's side of transfers beside the steps: which are open, what the disk holds, and what may be copied now.

Threads of the data plane move images between files and memory of their own. Only the engine's thread copies between
that memory and blocks or frames, and it does so between steps. So an image is whole, and it is of what the worker
claims at that instant, if no copy that waits or runs touches the place:

    save     ordered -> the image is taken out of a block or frame -> written -> done: the frame on disk holds it
    fetch    ordered -> read and verified -> the image is put into a frame of host memory -> done: the frame holds it

A copy touches a place from its grant until its step has completed. A transfer waits for such copies, and for nothing
else. Once a transfer is void nothing of it is claimed, whatever its threads still do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import CachedBlock, Copy, TierCopy
from common.contracts.transfers import Medium, Place, Transfer, TransferEnd
from common.contracts.types import FrameId
from gpuworker.scheduling.block_states import BlockStates, Content
from gpuworker.scheduling.frame_claims import FrameClaims


class TransferBook:
    """Transfers of the present session, and the contents of frames on disk, which outlive sessions."""

    def __init__(self, disk_frames: int, has_peers: bool = False) -> None:
        self.disk_frames, self.has_peers = disk_frames, has_peers
        # Whether the disk is given up: the manager may order something before it hears of that.
        self.closed = False
        self.saved: dict[FrameId, Content] = {}
        self.open: dict[int, Transfer] = {}
        # Fetches that are to be read, and saves whose image is to be taken, in the order in which they were ordered.
        self._to_read: list[Transfer] = []
        self._to_take: deque[Transfer] = deque()

    # ------------------------------------------------------------ orders

    def check(self, transfers: Items[Transfer], num_blocks: int, host_frames: int, anew: bool = False) -> None:
        """Raise ProtocolViolation when a transfer names a place that there is not, or one that another one fills.

        With `anew` the batch has voided all earlier ones.
        """
        sizes = {Medium.BLOCK: num_blocks, Medium.HOST: host_frames, Medium.DISK: self.disk_frames}
        filled = set() if anew else {each.target for each in self.open.values()}
        for each in transfers:
            if each.peer is not None and not self.has_peers:
                raise ProtocolViolation(f"transfer {each.id} comes from a peer; this worker asks none")
            for place in (each.target,) if each.peer is not None else (each.source, each.target):
                if not 0 <= place.index < sizes[place.medium]:
                    what = f"{place.medium.name.lower()} {place.index}; there are {sizes[place.medium]}"
                    raise ProtocolViolation(f"transfer {each.id} names {what}")
            if each.target in filled:
                raise ProtocolViolation(f"transfer {each.id} goes where another one goes that has not ended")
            filled.add(each.target)

    def apply(self, transfers: Items[Transfer], frames: FrameClaims) -> None:
        """Take over transfers that were checked; their targets hold nothing from now on."""
        for each in transfers:
            self.open[each.id] = each
            if each.saves:
                self.saved.pop(each.target.index, None)
                self._to_take.append(each)
            else:
                frames.held.pop(each.target.index, None)
                self._to_read.append(each)

    # ------------------------------------------------------------ the engine's turn

    def take_reads(self) -> list[Transfer]:
        """Return the fetches that are to be read, from disk or from peers."""
        taken, self._to_read = self._to_read, []
        return taken

    def take_saves(
        self, blocks: BlockStates, frames: FrameClaims, copies: Iterable[Copy | TierCopy], most: int
    ) -> tuple[list[Transfer], list[Transfer]]:
        """Return saves whose image can be taken now, `most` at once, and those whose source holds something else.

        `copies` are those that wait or run. A save whose source one of them fills waits, and so do all behind it.
        """
        ready, stale = list[Transfer](), list[Transfer]()
        filled = filled_by(copies) if self._to_take else frozenset()
        while self._to_take and len(ready) < most and self._to_take[0].source not in filled:
            transfer = self._to_take.popleft()
            content = _content_at(transfer.source, blocks, frames)
            whole = content is not None and (content.hash, content.depth) == (transfer.hash, transfer.depth)
            (ready if whole else stale).append(transfer)
        return ready, stale

    @property
    def waits_to_take(self) -> bool:
        return bool(self._to_take)

    def may_land(self, transfer: Transfer, copies: Iterable[Copy | TierCopy]) -> bool:
        """Return whether no copy that waits or runs touches the frame that a fetch is to fill."""
        return all(transfer.target not in ends for ends in map(_ends, copies))

    def is_open(self, transfer: Transfer) -> bool:
        """Return whether a transfer counts: it has not ended, and is not void."""
        return self.open.get(transfer.id) is transfer

    def end(self, transfer: Transfer, end: TransferEnd, frames: FrameClaims, step: int) -> bool:
        """Account for a transfer that has ended; return whether it was open.

        What could not be read is on disk no more, even if the transfer was void.
        """
        if end in (TransferEnd.CORRUPT, TransferEnd.FAILED) and transfer.source.medium is Medium.DISK:
            held = self.saved.get(transfer.source.index)
            if held is not None and held.hash == transfer.hash:
                del self.saved[transfer.source.index]
        if not self.is_open(transfer):
            return False
        del self.open[transfer.id]
        if end is TransferEnd.DONE:
            content = Content(transfer.hash, transfer.parent or None, transfer.depth, step)
            (self.saved if transfer.saves else frames.held)[transfer.target.index] = content
        return True

    # ------------------------------------------------------------ sessions

    def void(self) -> None:
        """Forget all transfers: a session ended, or the cache was reset."""
        self.open.clear()
        self._to_read.clear()
        self._to_take.clear()

    def forget_saved(self) -> None:
        """Forget what is on disk: the cache was reset, or the disk is given up."""
        self.saved.clear()

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

    def restore(self, claims: Iterable[CachedBlock]) -> None:
        """Take over what frames on disk hold from an earlier process."""
        for each in claims:
            parent = each.parent_hash if each.depth else None
            self.saved[each.block] = Content(each.hash, parent, each.depth, each.last_used)

    def claims(self) -> tuple[CachedBlock, ...]:
        """Return what frames on disk hold for an inventory; each claim says where it stands."""
        return tuple(
            CachedBlock(frame, each.hash, -1, each.last_used, each.parent or each.hash, each.depth)
            for frame, each in sorted(self.saved.items())
        )


def filled_by(copies: Iterable[Copy | TierCopy]) -> frozenset[Place]:
    """Return the places that copies write."""
    return frozenset(target for _, target in map(_ends, copies))


def _content_at(place: Place, blocks: BlockStates, frames: FrameClaims) -> Content | None:
    if place.medium is Medium.BLOCK:
        return blocks.content.get(place.index)
    return frames.held.get(place.index)


def _ends(copy: Copy | TierCopy) -> tuple[Place, Place]:
    """Return where a copy reads and where it writes."""
    if isinstance(copy, Copy):
        return Place(Medium.BLOCK, copy.src), Place(Medium.BLOCK, copy.dst)
    ends = Place(Medium.HOST, copy.frame), Place(Medium.BLOCK, copy.block)
    return ends if copy.load else ends[::-1]
