"""A queue that takes turns: who has put many things into it does not delay who has put one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class PeerQueue(Generic[ItemT]):
    """Items by peer: in the order of arrival for one peer, one of each peer in turn."""

    def __init__(self) -> None:
        # The first peer is the next one in turn; peers without items are not here.
        self._waiting: OrderedDict[str, deque[ItemT]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, peer: str) -> int:
        """Return the number of a peer's items."""
        return len(self._waiting.get(peer, ()))

    def put(self, peer: str, item: ItemT) -> None:
        self._waiting.setdefault(peer, deque()).append(item)

    def take(self, busy: Container[str] = ()) -> ItemT | None:
        """Return the next item, of a peer that is not `busy`; None when there is none."""
        peer = next((each for each in self._waiting if each not in busy), None)
        if peer is None:
            return None
        item = self._waiting[peer].popleft()
        self._waiting.move_to_end(peer)
        self._drop_if_empty(peer)
        return item

    def remove(self, peer: str, item: ItemT) -> None:
        """Take back an item; nothing happens when it is not here."""
        if peer in self._waiting and item in self._waiting[peer]:
            self._waiting[peer].remove(item)
            self._drop_if_empty(peer)

    def _drop_if_empty(self, peer: str) -> None:
        if not self._waiting[peer]:
            del self._waiting[peer]
