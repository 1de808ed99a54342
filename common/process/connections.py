"""Counts the connections of a listening port, so that neither all clients together nor one of them has too many."""

from __future__ import annotations

from collections import Counter


class Connections:
    """Counts open connections, all and by the address of the peer. `to` says in refusals what they lead to."""

    def __init__(self, most: int, most_a_peer: int, to: str = "this port") -> None:
        self._most, self._most_a_peer, self._to = most, most_a_peer, to
        self._total, self._by_peer = 0, Counter[str]()

    def __len__(self) -> int:
        return self._total

    def enter(self, peer: str) -> str:
        """Count a connection. Return why it is refused; it is not counted then."""
        if self._total >= self._most:
            return f"{self._to} has {self._most} connections, which is its limit"
        if self._by_peer[peer] >= self._most_a_peer:
            return f"{peer} has {self._most_a_peer} connections, which is the limit of one address"
        self._total += 1
        self._by_peer[peer] += 1
        return ""

    def leave(self, peer: str) -> None:
        self._total -= 1
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]
