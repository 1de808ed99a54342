"""Workers that fetch blocks from each other: which one has the most of a prompt, and what lets another one ask it.

A fetch takes no reference on what it reads. The source answers with what it has by then; what has left it is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final, Protocol

from common.contracts.clock import Clock
from common.contracts.lease import Attach, public_incarnation
from common.contracts.transfer_tokens import TokenScope, make_token, serve_key_of
from common.contracts.transfers import PeerSource
from common.contracts.types import BlockHash
from kvmanager.contracts.ports import HasContents, Reach

TOKEN_SECONDS: Final = 600
"""How long a token may be used: a bound on theft. Nothing else depends on it."""


class ServesPeers(HasContents, Protocol):
    @property
    def asked_of_peers(self) -> Mapping[str, int]:
        """The images that it has asked of each other worker, and that have not come yet."""
        ...


@dataclass(frozen=True, slots=True)
class ServingPeer:
    """A worker that another one may ask for blocks; `ahead` of their images it is to serve before."""

    attach: Attach
    asking: Attach
    pool_key: bytes
    clock: Clock
    ahead: int = 0

    @property
    def worker_id(self) -> str:
        return self.attach.worker_id

    def serve(self, keys: Items[BlockHash]) -> PeerSource:
        """Return what lets the other worker ask for what has these keys, in this order."""
        source = public_incarnation(self.attach.incarnation)
        expires = self.clock.time_ns() // 1_000_000_000 + TOKEN_SECONDS
        scope = TokenScope(
            self.asking.worker_id, public_incarnation(self.asking.incarnation), source, expires, tuple(keys)
        )
        token = make_token(serve_key_of(self.pool_key, source), scope)
        return PeerSource(self.worker_id, source, self.attach.data_address, token, expires)


def count_asked(ledgers: Iterable[ServesPeers]) -> Mapping[str, int]:
    """Return how many images each worker is to serve to others."""
    asked = Counter[str]()
    for each in ledgers:
        if each.asked_of_peers:
            asked.update(each.asked_of_peers)
    return asked


def find_peer(
    asking: Attach, workers: Collection[tuple[Attach, ServesPeers]], pool_key: bytes, clock: Clock, reach: Reach
) -> tuple[ServingPeer, int] | None:
    """Return the worker by which another one gets furthest, and how far; None: none helps.

    Of equals it is the one that has to serve the least by now.
    """
    found, most = list[Attach](), 0
    for attach, ledger in workers:
        if attach is asking or not attach.data_address or attach.image_format != asking.image_format:
            continue
        count = reach(ledger)
        if count > most:
            found, most = [attach], count
        elif count and count == most:
            found.append(attach)
    if not found:
        return None
    ahead = count_asked(ledger for _, ledger in workers)
    best = min(found, key=lambda each: ahead.get(each.worker_id, 0))
    return ServingPeer(best, asking, pool_key, clock, ahead.get(best.worker_id, 0)), most
