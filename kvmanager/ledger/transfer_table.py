"""Transfers of one worker that are ordered and have not ended, and what is still to be saved."""

from __future__ import annotations

from common.contracts.transfers import Transfer
from common.contracts.types import BlockHash, SequenceId


class TransferTable:
    """Open transfers by id, who waits for which, and the hashes that are to be saved, the first first.

    `orders` are for the next batch. `fetching` gives the transfer that brings a hash to host memory. `saves` counts
    those that go to disk, and `asked` the images that each peer is to serve. Once the disk is `closed`, nothing more is
    ordered.
    """

    __slots__ = ("_last", "asked", "closed", "fetching", "open", "orders", "saves", "to_save", "waiting")

    def __init__(self, after: TransferTable | None = None) -> None:
        """Ids go on behind those of the table `after`, in whose session nothing of it is known any more."""
        self._last: int = after._last if after is not None else 0
        self.closed: bool = after is not None and after.closed
        self.orders: list[Transfer] = []
        self.open: dict[int, Transfer] = {}
        self.fetching: dict[BlockHash, int] = {}
        self.waiting: dict[int, list[SequenceId]] = {}
        self.to_save: dict[BlockHash, None] = {}
        self.saves = 0
        self.asked: dict[str, int] = {}

    def next_id(self) -> int:
        self._last += 1
        return self._last

    def order(self, transfer: Transfer) -> int:
        """Put a transfer into the next batch; return its id."""
        self.orders.append(transfer)
        self.open[transfer.id] = transfer
        if transfer.saves:
            self.saves += 1
        else:
            self.fetching[transfer.key] = transfer.id
        if (peer := transfer.peer) is not None:
            self.asked[peer.worker_id] = self.asked.get(peer.worker_id, 0) + transfer.num_pages
        return transfer.id

    def take_ended(self, number: int) -> Transfer | None:
        """Return a transfer that has ended, which is not open any more; None: nothing is known of it."""
        transfer = self.open.pop(number, None)
        if transfer is not None and (peer := transfer.peer) is not None:
            self.asked[peer.worker_id] -= transfer.num_pages
            if not self.asked[peer.worker_id]:
                del self.asked[peer.worker_id]
        return transfer

    def take_orders(self) -> tuple[Transfer, ...]:
        """Return the transfers for the next batch, in their order."""
        taken, self.orders = tuple(self.orders), []
        return taken

    def forget_saves(self) -> None:
        """Forget all saves: nothing is on disk any more."""
        self.open = {number: transfer for number, transfer in self.open.items() if not transfer.saves}
        self.orders = [transfer for transfer in self.orders if not transfer.saves]
        self.to_save.clear()
        self.saves = 0

    def copy(self) -> TransferTable:
        twin = TransferTable(self)
        twin.orders, twin.open, twin.fetching = self.orders.copy(), self.open.copy(), self.fetching.copy()
        twin.waiting = {number: waiting.copy() for number, waiting in self.waiting.items()}
        twin.to_save, twin.saves, twin.asked = self.to_save.copy(), self.saves, self.asked.copy()
        return twin

    def key(self) -> tuple[object, ...]:
        """Return what is open and who waits, hashable."""
        waiting = tuple((number, tuple(each)) for number, each in sorted(self.waiting.items()) if each)
        return tuple(self.open.values()), tuple(self.orders), waiting, tuple(self.to_save), self.closed
