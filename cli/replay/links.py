"""What moves the blocks of a replay, in virtual time: host memory, a disk of each worker, and links between workers.

    host memory   its copies are part of steps (`StepCosts.frame`), as they are at a worker
    disk          reads one after the other, and writes one after the other
    peers         a setup, then one image behind the other: what S sends and what D receives has one bandwidth each

The engines, the KV manager and the routers decide as they do anywhere. An image is a name for bytes that nobody moves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from common.contracts.clock import Clock
from common.contracts.transfers import ImageName, PeerSource, Place, Transfer, TransferEnd
from common.contracts.types import FrameId, KvGroup
from gpuworker.engine.image_requests import ImageRequests
from gpuworker.engine.transfers import Ended, Transfers
from gpuworker.scheduling.images import EndedTransfer, Image

_IMAGE: Final = b"image"
DEFAULT_LINKS: Final = "host=8GB/s,disk=1GB/s,peer=1GB/s,setup=1ms,token=128KiB"
_RATE: Final = re.compile(r"(host|disk|peer)=(\d+(?:\.\d+)?)(MB|GB)/s")
_SETUP: Final = re.compile(r"(setup)=(\d+(?:\.\d+)?)(us|ms|s)")
_TOKEN: Final = re.compile(r"(token)=(\d+(?:\.\d+)?)(KiB|MiB)")
_UNITS: Final = {"MB": 1e6, "GB": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "KiB": 1024.0, "MiB": 1048576.0}


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes a second, the seconds before the first image of a fetch from a peer, and the K/V bytes of a token."""

    host: float
    disk: float
    peer: float
    setup: float
    token: float


def parse_links(text: str) -> LinkRates:
    """Return the rates that `text` gives, in the form of DEFAULT_LINKS, whose terms count where it has none.

    Raises ValueError for any other form, and for a rate or a size of 0.
    """
    return LinkRates(**(_terms(DEFAULT_LINKS) | _terms(text)))


def _terms(text: str) -> dict[str, float]:
    words = [each.strip() for each in text.split(",")]
    terms = [_RATE.fullmatch(each) or _SETUP.fullmatch(each) or _TOKEN.fullmatch(each) for each in words]
    found = {term[1]: float(term[2]) * _UNITS[term[3]] for term in terms if term is not None}
    if None in terms or len(found) < len(terms):
        raise ValueError(f"is {text!r}; expected terms of {DEFAULT_LINKS}, each at most once")
    for name, value in found.items():
        if not value and name != "setup":
            raise ValueError(f"has {name}=0; expected more than nothing")
    return found


USUAL: Final = parse_links(DEFAULT_LINKS)


@dataclass(frozen=True, slots=True)
class Moves:
    """What each worker of a replay has beside its pool: blocks of host memory and of disk, and whether it has peers.

    What comes from disk or from a peer lands in host memory. Where the pool has groups, these blocks are pages too.
    """

    host_blocks: int
    disk_blocks: int = 0
    peers: bool = False
    rates: LinkRates = USUAL

    def image_bytes(self, block_size: int, groups: Sequence[KvGroup] = ()) -> int:
        """Return the bytes of a block or, where the pool has groups, of a page: a block of each has the K/V of all."""
        pages = sum(each.pages for each in groups) or 1
        return max(1, round(self.rates.token * block_size / pages))


class Timers(Protocol):
    """The event loop of a replay."""

    def call_at(self, when: float, callback: Callable[[], object]) -> Any: ...


class _Images:
    """Implements `Images` without bytes."""

    def take(self, place: Place) -> Image:
        return _IMAGE

    def land(self, frame: FrameId, image: Image, of_states: bool = False) -> None:
        """What a frame holds is known to the lease agent."""


class _Line:
    """Moves one image after the other."""

    __slots__ = ("_image_s", "free_at")

    def __init__(self, image_s: float) -> None:
        self._image_s, self.free_at = image_s, 0.0

    def after(self, begin: float) -> float:
        """Return when an image is over that begins at `begin`, or once the line is free."""
        return max(begin, self.free_at) + self._image_s


class _Disk:
    """Implements `ImageMover`: everything that is read comes, and as fast as the disk is."""

    usable = True

    def __init__(self, image_s: float, clock: Clock, timers: Timers, wake: Callable[[], None]) -> None:
        self._clock, self._timers, self._wake = clock, timers, wake
        self._reads, self._writes, self._ended = _Line(image_s), _Line(image_s), list[EndedTransfer]()

    def start(self, transfer: Transfer, image: Image | None = None) -> None:
        line = self._writes if transfer.saves else self._reads
        line.free_at = line.after(self._clock.monotonic())
        ended = EndedTransfer(transfer, None if transfer.saves else _IMAGE, TransferEnd.DONE)
        self._timers.call_at(line.free_at, lambda: self._end(ended))

    def _end(self, ended: EndedTransfer) -> None:
        self._ended.append(ended)
        self._wake()

    def poll(self) -> list[EndedTransfer]:
        ended, self._ended = self._ended, []
        return ended

    def clear(self, reset: int) -> None:
        raise AssertionError("nothing resets the cache of a replay")

    def close(self) -> None:
        """A replay ends with its loop."""


class _Port:
    """A worker's end of the links: what it sends, what it receives, and what its peers ask for."""

    def __init__(self, image_s: float, requests: ImageRequests) -> None:
        self.sends, self.receives, self.requests = _Line(image_s), _Line(image_s), requests


class LinkFetches:
    """Implements `Fetches` of one worker. What nothing has come of for too long is late, as at a worker."""

    def __init__(self, links: Links, port: _Port, wake: Callable[[], None]) -> None:
        self._links, self._port, self._wake, self._ended = links, port, wake, list[Ended]()

    def fetch(self, source: PeerSource, transfers: Sequence[Transfer], patience: float) -> None:
        links = self._links
        fetch = _Fetch(list(transfers), links.clock.monotonic() + links.moves.rates.setup, patience)
        ask = links.ports[source.worker_id].requests.ask
        names = [ImageName(each.key, each.page) for each in transfers]
        links.timers.call_at(
            fetch.heard_at, lambda: ask(names, lambda images: self._send(source.worker_id, fetch, images))
        )

    def _send(self, source: str, fetch: _Fetch, images: Sequence[Image | None]) -> None:
        """Take the next images of a fetch onto the links."""
        now, sends, receives = self._links.clock.monotonic(), self._links.ports[source].sends, self._port.receives
        for image in images:
            transfer = fetch.left.pop(0)
            if image is None:
                self._end(EndedTransfer(transfer, None, TransferEnd.STALE))
                continue
            due = max(sends.after(now), receives.after(now))
            if due > fetch.heard_at + fetch.patience:
                late = EndedTransfer(transfer, None, TransferEnd.LATE)
                self._links.timers.call_at(fetch.heard_at + fetch.patience, self._ending(late))
                continue
            sends.free_at = receives.free_at = fetch.heard_at = due
            self._links.timers.call_at(due, self._ending(EndedTransfer(transfer, image, TransferEnd.DONE)))

    def _ending(self, ended: EndedTransfer) -> Callable[[], None]:
        return lambda: self._end(ended)

    def _end(self, ended: EndedTransfer) -> None:
        self._ended.append(ended)
        self._wake()

    def poll(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """A replay ends with its loop."""


@dataclass(slots=True)
class _Fetch:
    """Blocks that a peer has not sent yet, and when the last one came."""

    left: list[Transfer]
    heard_at: float
    patience: float


class Links:
    """All links of a replay, by worker."""

    def __init__(
        self, moves: Moves, block_size: int, clock: Clock, timers: Timers, groups: Sequence[KvGroup] = ()
    ) -> None:
        self.moves, self.clock, self.timers = moves, clock, timers
        self.ports: dict[str, _Port] = {}
        self._bytes = moves.image_bytes(block_size, groups)

    @property
    def frame_seconds(self) -> float:
        """Seconds in which a step copies a block or a page to host memory, or back."""
        return self._bytes / self.moves.rates.host

    def connect(self, worker_id: str, wake: Callable[[], None]) -> tuple[Transfers, ImageRequests]:
        """Return what moves the blocks of a worker, and what answers its peers; `wake` lets its engine turn."""
        moves, rates, images = self.moves, self.moves.rates, _Images()
        requests = ImageRequests(images, self._bytes, self.clock, wake)
        self.ports[worker_id] = _Port(self._bytes / rates.peer, requests)
        disk = _Disk(self._bytes / rates.disk, self.clock, self.timers, wake) if moves.disk_blocks else None
        peers = self.fetches(worker_id, wake) if moves.peers else None
        return Transfers(images, self._bytes, self.clock, disk, peers), requests

    def fetches(self, worker_id: str, wake: Callable[[], None]) -> LinkFetches:
        """Return what fetches for a worker that is connected."""
        return LinkFetches(self, self.ports[worker_id], wake)
