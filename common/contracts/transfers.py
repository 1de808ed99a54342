"""Transfers of contents between a worker's tiers, beside its steps: what M orders and how W says that they ended.

Copies between blocks and frames of the host tier (`TierCopy`) are no transfers: they run in the order of the steps.
What takes longer, or may fail, comes to a frame of the host tier by a transfer, and from there to a block by a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, NamedTuple

from common.contracts.hashing import key_of
from common.contracts.types import BlockHash, FrameId


class Medium(IntEnum):
    """Where a block's content lies."""

    BLOCK = 1
    HOST = 2
    DISK = 4
    PEER = 8
    """Another worker, which knows a block by its hash alone."""


@dataclass(frozen=True, slots=True)
class Place:
    """A block of the pool, a frame of the host tier, or a frame on disk. Where the pool has groups, each has a page."""

    medium: Medium
    index: FrameId


FROM_PEER: Final = Place(Medium.PEER, FrameId(0))
"""The place of a block at a peer."""


class ImageName(NamedTuple):
    """What names an image for peers: the key of a content (`key_of`), and the number of a page of it."""

    key: BlockHash
    page: int = 0


@dataclass(frozen=True, slots=True)
class PeerSource:
    """Who serves a fetch. The incarnation is the public one; `expires` in unix seconds.

    The token allows the keys of the transfers that name this source, in their order.
    """

    worker_id: str
    public_incarnation: bytes
    address: str
    token: bytes
    expires: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy what a sealed block holds from one place to another, beside the steps; the end of it is reported.

    A save goes from a block or a host frame to disk, a fetch from disk, or from the worker `peer`, to a host frame.
    `parent` is the hash before it, ROOT at depth 0. The target is void from the order on; it holds the content once W
    has said that the transfer is DONE. W answers each one of its session once. `id`s rise within one.

    Where the pool has groups, the content is that of a `group`, whose parent behind the first one is its own hash.
    Source and target are its first pages, and `others` has the further ones of both, in their order. W copies page by
    page: `page` is the number of one, and `whole` the transfer of which it is a part.
    """

    id: int
    hash: BlockHash
    parent: BlockHash
    depth: int
    source: Place
    target: Place
    peer: PeerSource | None = None
    group: int = 0
    others: tuple[tuple[FrameId, FrameId], ...] = ()
    page: int = 0
    whole: Transfer | None = field(default=None, compare=False, repr=False)

    @property
    def saves(self) -> bool:
        return self.target.medium is Medium.DISK

    @property
    def key(self) -> BlockHash:
        """What the manager knows the content by."""
        return key_of(self.hash, self.group) if self.group else self.hash

    @property
    def num_pages(self) -> int:
        return 1 + len(self.others)

    def pages(self) -> tuple[Transfer, ...]:
        """Return the transfers of single pages, in their order; of one page it is this one."""
        if not self.others:
            return (self,)
        source, target = self.source.medium, self.target.medium
        ends = ((self.source.index, self.target.index), *self.others)
        made = list[Transfer]()
        for page, (read, write) in enumerate(ends):
            places = Place(source, read), Place(target, write)
            made.append(replace(self, source=places[0], target=places[1], others=(), page=page, whole=self))
        return tuple(made)


class TransferEnd(IntEnum):
    """How a transfer ended. Only a transfer that is DONE has changed what its target holds."""

    DONE = 0
    STALE = 1
    """The source holds something else by now."""
    CORRUPT = 2
    """What was read is not what was written; the source holds nothing any more."""
    FAILED = 3
    """The disk could not be read or written; the frame on disk holds nothing any more."""
    LATE = 4
    """It did not come in time; the source may hold it all the same."""


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """What a block costs W at present, in seconds: to compute it in a prompt, to read it from disk, from a peer.

    A fetch from a peer takes `peer_setup` more. A step takes `copy` for each block that it copies into host memory or
    back. 0: not known. Where the pool has groups, a page is read or copied, and a block of tokens is computed.
    """

    compute: float
    read: float
    peer: float = 0.0
    peer_setup: float = 0.0
    copy: float = 0.0


FETCH_MARGIN: Final = 0.9
"""A fetch must take less than this share of the time that computing would take."""


def pays_to_fetch(fetch_s: float, compute_s: float) -> bool:
    """Return whether a fetch or a load is expected to beat computing; yes while the seconds of either are unknown (0).

    The KV manager decides by it at an admission. Routers price workers by it, so that both expect the same.
    """
    return not compute_s or not fetch_s or fetch_s < FETCH_MARGIN * compute_s


FROM_DISK: Final = "disk"
"""The source of what came from the worker's own disk."""


class Fetched(NamedTuple):
    """What a sequence waited for before it was admitted: `blocks` of its cached ones came from `source` meanwhile.

    It had asked for `asked` blocks, and waited `seconds`.
    """

    blocks: int
    asked: int
    seconds: float
    source: str = FROM_DISK
