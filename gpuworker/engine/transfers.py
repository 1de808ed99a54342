"""The engine's part of transfers beside the steps: it takes images for saves, hands them over, and lands what was read.

The lease agent decides what may be taken and landed now; the mover's threads do the rest. A turn takes and lands few
bytes, and while steps run it has a small share of the time (`ImagePace`), so that no step and no token is late.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from common.contracts.clock import Clock
from common.contracts.transfers import PeerSource, Transfer, TransferCosts, TransferEnd
from common.contracts.types import KvGroup, KvGroupKind
from gpuworker.engine.fetch_costs import FetchCosts
from gpuworker.engine.image_pace import ImagePace
from gpuworker.scheduling.images import Image, ImageMover, Images
from gpuworker.scheduling.lease_agent import LeaseAgent

_BYTES_A_TURN: Final = 4 << 20
"""Bytes of images that one turn takes, and that it lands, while no step runs."""
_LEAST_PATIENCE: Final = 0.5
_PATIENCE: Final = 4.0
"""A fetch that is this many times later than forecast counts as lost; so does one that is late by half a second."""
_WORTH_WAITING: Final = 0.25
"""A fetch from a peer may be silent for this share of the time that computing takes: it may have to connect first."""
_FEW: Final = 16
"""A fetch of so many blocks from a peer is to be a clear gain."""
_MOST_MET: Final = 256
_COPIES_REMEMBERED: Final = 600.0
"""Seconds: memory changes its speed less than a disk or a network does, and a trial lengthens the steps of all."""
_CHANGE: Final = 0.25
"""The share by which costs change before the manager is told."""

log = logging.getLogger(__name__)


class Fetches(Protocol):
    """Fetches blocks from other workers (`gpuworker/peers/client.py`). Called from the engine's thread; never waits."""

    def fetch(self, source: PeerSource, transfers: Sequence[Transfer], patience: float) -> None:
        """Fetch these blocks; each comes out of `poll` once. What nothing has come of for `patience` seconds fails."""
        ...

    def poll(self) -> Sequence[Ended]: ...

    def close(self) -> None: ...


class Ended(Protocol):
    """A transfer that has ended; a fetch that is DONE has its verified image."""

    @property
    def transfer(self) -> Transfer: ...

    @property
    def image(self) -> Image | None: ...

    @property
    def end(self) -> TransferEnd: ...


@dataclass(slots=True)
class _Fetch:
    """What one turn has asked of a peer, or of the disk: `left` of its images are open, `came` of them have landed."""

    transfers: Sequence[Transfer]
    began: float
    left: int
    came: int = 0


class Transfers:
    """Used by the engine's thread alone. `mover` is that of the disk, `peers` fetches from other workers.

    Without both it says what copies to and from host memory cost.
    """

    def __init__(
        self,
        images: Images,
        image_bytes: int,
        clock: Clock,
        mover: ImageMover | None = None,
        peers: Fetches | None = None,
        reset: int = 0,
        groups: Sequence[KvGroup] = (),
    ) -> None:
        """`reset` is the id of the last reset that the disk has carried out; `groups` are those of the pool."""
        self._groups = groups
        # The images of K and V of a block of tokens: where the pool has groups, one of each page.
        self._a_block = sum(each.pages for each in groups if each.kind is not KvGroupKind.STATE) or 1
        self._mover, self._images, self._clock, self._peers = mover, images, clock, peers
        self._save_pace, self._land_pace = (ImagePace(image_bytes, _BYTES_A_TURN) for _ in range(2))
        self._reading: dict[int, Transfer] = {}
        self._late: dict[int, Transfer] = {}  # reads that were given up and have not ended: until then the disk hangs
        # Fetches by their transfers, and the peers from which one has ended: the first one has connected.
        self._fetching: dict[int, _Fetch] = {}
        self._met: set[tuple[str, bytes]] = set()
        self._landing: deque[tuple[Transfer, Image]] = deque()
        self._heard = 0.0  # when a read of the disk has ended or begun last
        self._peer_costs, self._disk_costs, self._copy_costs = FetchCosts(), FetchCosts(), FetchCosts()
        self._disk_over = 0.0  # when a fetch from disk has ended last: the next one waited for it
        self._paced = False  # whether something may land now but for the pace
        self._costs = (0.0, 0.0, 0.0, 0.0, 0.0)  # as told: `TransferCosts`
        self._reset, self._closed = reset, False

    def note_copies(self, images: int, seconds: float) -> None:
        """Learn what a step took to copy so many blocks into host memory and back."""
        self._copy_costs.learn(images, seconds, self._clock.monotonic())

    def turn(self, agent: LeaseAgent, compute_seconds: float, steps_run: bool = False) -> bool:
        """Do what can be done now; return whether anything was. Computing a block takes `compute_seconds`; 0: unknown.

        Call it between steps, before the next one is planned and before a report is sent.
        """
        if agent.reset != self._reset:
            self._reset = agent.reset
            if self._mover is not None:
                self._mover.clear(agent.reset)
        worked = self._begin(agent, compute_seconds, steps_run)
        worked = self._gather(agent) or worked
        worked = self._land(agent, steps_run) or worked
        self._note_costs(agent, compute_seconds)
        if self._mover is not None and not self._mover.usable and not self._closed:
            self._closed = True
            self._reading.clear()
            agent.close_disk()
        return worked

    @property
    def patience(self) -> float | None:
        """Seconds after which `turn` is to be called although nothing has ended; None: it need not be."""
        now = self._clock.monotonic()
        waits = [self._land_pace.wait(now)] if self._paced else []
        if self._reading:
            waits.append(max(0.0, self._heard + self._most_patience - now))
        return min(waits, default=None)

    @property
    def fetch_seconds(self) -> float:
        """Seconds that fetching a block from another worker takes, as learnt; 0: none was fetched yet."""
        return self._peer_costs.per_block * self._a_block

    @property
    def fetch_setup_seconds(self) -> float:
        """Seconds that each fetch from another worker takes beside those of its blocks, as learnt."""
        return self._peer_costs.setup

    @property
    def read_seconds(self) -> float:
        """Seconds that fetching an image from disk takes, as learnt, its landing included; 0: not known."""
        return self._disk_costs.mean

    @property
    def _most_patience(self) -> float:
        return max(_LEAST_PATIENCE, _PATIENCE * self.read_seconds * len(self._reading))

    def close(self) -> None:
        for each in (self._mover, self._peers):
            if each is not None:
                each.close()

    # ------------------------------------------------------------ a turn

    def _begin(self, agent: LeaseAgent, compute: float, steps_run: bool) -> bool:
        reads, now = agent.take_reads(), self._clock.monotonic()
        saves = agent.take_saves(self._save_pace.allowed(now, steps_run))
        for peer in dict.fromkeys(transfer.peer for transfer in reads):
            transfers = [transfer for transfer in reads if transfer.peer == peer]
            fetch = _Fetch(transfers, now, len(transfers))
            if peer is not None and self._peers is not None:
                self._fetching |= {id(transfer): fetch for transfer in transfers}
                self._fetch(peer, transfers, compute)
            elif peer is None and self._mover is not None:
                if not self._late:
                    self._fetching |= {id(transfer): fetch for transfer in transfers}
                self._read(self._mover, agent, transfers, now)
        if saves and self._mover is not None:
            began = self._clock.monotonic()
            for transfer in saves:
                self._mover.start(transfer, self._images.take(transfer.source))
            self._save_pace.note(len(saves), began, self._clock.monotonic())
        return bool(reads or saves)

    def _read(self, mover: ImageMover, agent: LeaseAgent, transfers: list[Transfer], now: float) -> None:
        """Ask the disk for blocks. One that hangs is not asked, so its queue does not grow; they are misses at once."""
        if self._late:
            for transfer in transfers:
                agent.end_transfer(transfer, TransferEnd.LATE)
            return
        if not self._reading:
            self._heard = now
        for transfer in transfers:
            self._reading[id(transfer)] = transfer
            mover.start(transfer)

    def _fetch(self, peer: PeerSource, transfers: list[Transfer], compute: float) -> None:
        assert self._peers is not None
        forecast = self._peer_costs.setup + self._peer_costs.per_block * len(transfers)
        blocks = len({transfer.depth for transfer in transfers}) if self._groups else len(transfers)
        self._peers.fetch(
            peer, transfers, max(_LEAST_PATIENCE, _PATIENCE * forecast, _WORTH_WAITING * compute * blocks)
        )

    def _gather(self, agent: LeaseAgent) -> bool:
        ended = [*(self._mover.poll() if self._mover is not None else ())]
        ended += self._peers.poll() if self._peers is not None else ()
        for each in ended:
            if each.transfer.peer is None and not each.transfer.saves:
                self._heard = self._clock.monotonic()
                self._reading.pop(id(each.transfer), None)
                self._note_returned(each.transfer)
            if each.end is TransferEnd.DONE and each.image is not None:
                self._landing.append((each.transfer, each.image))
            else:
                self._note_fetched(each.transfer, each.end)
                agent.end_transfer(each.transfer, each.end)
        if self._reading and self._clock.monotonic() > self._heard + self._most_patience:
            self._give_up(agent)
            return True
        return bool(ended)

    def _note_fetched(self, transfer: Transfer, end: TransferEnd) -> None:
        """Count a block that has landed or failed. The last one of a fetch that came whole ends it."""
        fetch = self._fetching.pop(id(transfer), None)
        if fetch is None:
            return
        fetch.left, fetch.came = fetch.left - 1, fetch.came + (end is TransferEnd.DONE)
        if not fetch.left:
            self._note_end(fetch, transfer.peer, self._clock.monotonic())

    def _note_end(self, fetch: _Fetch, peer: PeerSource | None, now: float) -> None:
        """Learn what a fetch took that has ended, if all of it came."""
        began = max(fetch.began, self._disk_over) if peer is None else fetch.began
        if peer is None:
            self._disk_over = now
        if fetch.came < len(fetch.transfers):
            return
        if peer is None:
            self._disk_costs.learn(fetch.came, now - began, now)
            return
        source = peer.worker_id, peer.public_incarnation
        if source in self._met:
            self._peer_costs.learn(fetch.came, now - began, now)
        else:
            self._met = {*self._met, source} if len(self._met) < _MOST_MET else {source}

    def _give_up(self, agent: LeaseAgent) -> None:
        """End the fetches that are late: who waits for them computes. What still comes of them is dropped.

        The disk is not asked again before all of them have come, in the time of which it learns what a read takes.
        """
        waited = self._clock.monotonic() - self._heard
        log.warning("the disk gave nothing for %.1f s; %d blocks are computed instead", waited, len(self._reading))
        for transfer in self._reading.values():
            agent.end_transfer(transfer, TransferEnd.LATE)
        self._late |= self._reading
        self._reading.clear()

    def _note_returned(self, transfer: Transfer) -> None:
        if self._late.pop(id(transfer), None) is not None and not self._late:
            log.warning("all that the disk was late with has come; it is asked again")

    def _land(self, agent: LeaseAgent, steps_run: bool) -> bool:
        landed, began = 0, self._clock.monotonic()
        most = self._land_pace.allowed(began, steps_run)
        self._paced = False
        while self._landing:
            transfer, image = self._landing[0]
            if agent.is_open(transfer):
                self._paced = landed >= most
                if self._paced or not agent.may_land(transfer):
                    break
                self._images.land(transfer.target.index, image, self._is_of_states(transfer))
                agent.end_transfer(transfer, TransferEnd.DONE)
                landed += 1
            self._landing.popleft()
            self._note_fetched(transfer, TransferEnd.DONE)
        if landed:
            self._land_pace.note(landed, began, self._clock.monotonic())
        return landed > 0

    def _is_of_states(self, transfer: Transfer) -> bool:
        return bool(self._groups) and self._groups[transfer.group].kind is KvGroupKind.STATE

    def _note_costs(self, agent: LeaseAgent, compute: float) -> None:
        # What is no clear gain is not moved, so nothing new would be learnt: one slow minute would end all moves.
        now, peer = self._clock.monotonic(), self._peer_costs
        if peer.per_block * self._a_block + peer.setup / _FEW > compute / 2:
            peer.forget_old(now)
        if self._disk_costs.mean * self._a_block > compute / 2:
            self._disk_costs.forget_old(now)
        if self._copy_costs.mean * self._a_block > compute / 2:
            self._copy_costs.forget_old(now, _COPIES_REMEMBERED)
        new = compute, self._disk_costs.mean, peer.per_block, peer.setup, self._copy_costs.mean
        if any(map(_differs, new, self._costs)):
            self._costs = new
            agent.note_costs(TransferCosts(*new))


def _differs(new: float, old: float) -> bool:
    return abs(new - old) > _CHANGE * old
