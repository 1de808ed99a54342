"""The destination's end of a fetch: images of blocks come from other workers into this process's memory.

A fetcher is a thread with one connection to one source. It works on one fetch after the other, and ends when it has had
none for a while. A fetch is one request with one token. Each of its transfers ends once, whatever the source does: it
lands with an image whose checksum was verified here, or it has none and says why.

    fetch -> fetcher -> connection -> verified image -> poll (the engine's thread)
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import xxhash

from common.contracts.limits import MAX_PEER_IMAGES, MAX_PEER_ITEMS
from common.contracts.transfers import PeerSource, Transfer, TransferEnd
from common.process.priority import stand_back
from gpuworker.peers import wire
from gpuworker.peers.carriers import InlineInlet, RingInlet, inlet_for
from gpuworker.peers.channel import Channel, ChannelBroken, ChannelTimedOut, Pace, words_of
from gpuworker.peers.nixl import Carriers, NixlInlet, may_load_from
from gpuworker.peers.wire import (
    Hello,
    Item,
    NixlHead,
    NixlOffer,
    PeerIdentity,
    Refused,
    Request,
    RingOffer,
    RingReply,
    WireError,
)

log = logging.getLogger(__name__)

# So much must come within the patience of a fetch, or the rest of an image.
_PROGRESS_BYTES: Final = 64 << 10
# How far a fetcher stands back behind the threads of the steps.
_NICE: Final = 5


class EndedTransfer(NamedTuple):
    """A transfer that has ended, `seconds` after its order. With DONE it has the image, whose checksum was verified.

    STALE: the source does not have the block any more. CORRUPT: its checksum differs from what the source said.
    """

    transfer: Transfer
    image: bytearray | None
    end: TransferEnd
    seconds: float


class ConnectsTls(Protocol):
    """TLS of the client's end (`gpuworker/peers/tls.py`)."""

    def connect(self, connected: socket.socket, seconds: float) -> tuple[socket.socket, Callable[[str], bool]]:
        """Return the connection with TLS, and whether its certificate is that of a worker. Raises ChannelBroken."""
        ...


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds of a client. An unused connection closes after `idle_seconds`, before the source closes it.

    A source that timed out is not asked for `shunned_seconds`. `landed_bytes` wait for `poll`; then fetchers wait.
    """

    sources: int = 64
    idle_seconds: float = 60.0
    shunned_seconds: float = 10.0
    landed_bytes: int = 256 << 20


@dataclass(slots=True)
class _Fetch:
    """One order, and what of it is still open: the position of each transfer that has not ended."""

    source: PeerSource
    transfers: Sequence[Transfer]
    patience: float
    began: float
    open: set[int]


class PeerClient:
    """Fetches blocks. All methods are for one thread, the engine's; `wake` is called on others."""

    def __init__(
        self,
        identity: Callable[[], PeerIdentity],
        wake: Callable[[], None],
        tls: ConnectsTls | None = None,
        insecure: bool = False,
        carriers: Carriers | None = None,
        bounds: ClientLimits | None = None,
    ) -> None:
        """`identity` says what this worker is at present. `wake` is called when something has landed; it never raises.

        Without `tls` only sources on loopback are asked, unless `insecure` allows others. `carriers` are those by which
        images may come, beside the connection.
        """
        self._identity, self._wake, self._tls, self._insecure = identity, wake, tls, insecure
        self._carriers, self._bounds = carriers or Carriers(), bounds or ClientLimits()
        self._changed = threading.Condition()
        self._landed: list[EndedTransfer] = []
        self._landed_bytes = 0
        self._images = Counter[str]()
        self._fetchers = dict[_SourceKey, _Fetcher]()
        self._shunned = dict[_SourceKey, float]()
        self._failing = set[_SourceKey]()
        self._without_nixl = set[_SourceKey]()
        self._closed = False

    def fetch(self, source: PeerSource, transfers: Sequence[Transfer], patience: float) -> None:
        """Fetch what these transfers bring, at most MAX_PEER_ITEMS contents; each of them comes out of `poll` once.

        Those of several pages are given page by page, all pages of a content in their order. What is still open when
        nothing has come for `patience` seconds has FAILED.
        """
        if not transfers:
            return
        fetch = _Fetch(source, tuple(transfers), patience, time.monotonic(), set(range(len(transfers))))
        key = _key_of(source)
        with self._changed:
            why = self._why_not(key, fetch)
            if not why:
                why = self._hand_over(key, fetch)
        if why:
            self.fail(fetch, why)

    def poll(self) -> list[EndedTransfer]:
        """Return the transfers that have ended since the last call. Never raises."""
        with self._changed:
            found, self._landed, self._landed_bytes = self._landed, [], 0
            self._changed.notify_all()
        return found

    def fetched(self) -> Counter[str]:
        """Return the images that have come so far, by carrier."""
        with self._changed:
            return self._images.copy()

    def close(self, seconds: float = 5.0) -> None:
        """End all fetchers and wait for their threads for so long. Moves that are open have FAILED."""
        with self._changed:
            self._closed = True
            fetchers = list(self._fetchers.values())
            self._changed.notify_all()
        for fetcher in fetchers:
            fetcher.stop()
        until = time.monotonic() + seconds
        for fetcher in fetchers:
            fetcher.thread.join(max(0.0, until - time.monotonic()))

    def _hand_over(self, key: _SourceKey, fetch: _Fetch) -> str:
        """Give a fetch to the thread of its source; return why there is none, "" when there is."""
        fetcher = self._fetchers.get(key)
        if fetcher is None:
            fetcher = _Fetcher(self, key)
            try:
                fetcher.thread.start()
            except RuntimeError as error:
                return str(error)
            self._fetchers[key] = fetcher
        fetcher.fetches.put(fetch)
        return ""

    def _why_not(self, key: _SourceKey, fetch: _Fetch) -> str:
        now = time.monotonic()
        self._shunned = {each: until for each, until in self._shunned.items() if until > now}
        if self._closed:
            return "the worker ends"
        if key in self._shunned:
            return f"it timed out less than {self._bounds.shunned_seconds:g} s ago"
        contents, images = sum(not each.page for each in fetch.transfers), len(fetch.transfers)
        if contents > MAX_PEER_ITEMS or images > MAX_PEER_IMAGES:
            what = f"expected at most {MAX_PEER_ITEMS}, of {MAX_PEER_IMAGES} images"
            return f"{contents} contents of {images} images in one fetch; {what}"
        if key not in self._fetchers and len(self._fetchers) >= self._bounds.sources:
            return f"{self._bounds.sources} other sources are asked at present"
        return ""

    # ------------------------------------------------------------ what fetchers ask

    def land(
        self, fetch: _Fetch, item: int, end: TransferEnd, image: bytearray | None = None, carrier: str = ""
    ) -> None:
        """Note how a transfer ended."""
        fetch.open.discard(item)
        moved = EndedTransfer(fetch.transfers[item], image, end, time.monotonic() - fetch.began)
        size = 0 if image is None else len(image)
        with self._changed:
            if image is not None:
                self._images[carrier] += 1
            self._landed.append(moved)
            self._landed_bytes += size
        self._wake()

    def await_room(self) -> None:
        """Wait while too much waits for the engine; never on its own thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._landed_bytes <= self._bounds.landed_bytes)

    def fail(self, fetch: _Fetch, why: str) -> None:
        """End what is open of a fetch; the log has the reason once, until a fetch from that source succeeds again."""
        key = _key_of(fetch.source)
        with self._changed:
            said = key in self._failing
            if len(self._failing) >= 4 * self._bounds.sources:
                self._failing.clear()
            self._failing.add(key)
        if not said and fetch.open:
            log.warning(
                "%d of %d blocks did not come from %s at %s: %s",
                len(fetch.open),
                len(fetch.transfers),
                fetch.source.worker_id,
                fetch.source.address,
                why,
            )
        for item in sorted(fetch.open):
            self.land(fetch, item, TransferEnd.FAILED)

    def note_success(self, key: _SourceKey) -> None:
        with self._changed:
            self._failing.discard(key)

    def shun(self, key: _SourceKey) -> None:
        """Ask a source no more for a while."""
        with self._changed:
            self._shunned[key] = time.monotonic() + self._bounds.shunned_seconds

    def avoid_nixl(self, key: _SourceKey) -> None:
        """Let what comes from a source come by other carriers, as long as it lives."""
        with self._changed:
            if len(self._without_nixl) >= 4 * self._bounds.sources:
                self._without_nixl.clear()
            self._without_nixl.add(key)

    def is_shunned(self, key: _SourceKey) -> bool:
        with self._changed:
            return self._shunned.get(key, 0.0) > time.monotonic()

    def retire(self, fetcher: _Fetcher) -> bool:
        """Let an unused fetcher go; return False when it has something to do after all."""
        with self._changed:
            if not fetcher.fetches.empty() and not self._closed:
                return False
            if self._fetchers.get(fetcher.key) is fetcher:
                del self._fetchers[fetcher.key]
            return True

    def connect(self, source: PeerSource, patience: float) -> _Connection:
        """Open a connection, and greet. Raises ChannelBroken and WireError."""
        who = self._identity()
        until = time.monotonic() + patience
        connected = _open_socket(source.address, self._tls is not None or self._insecure, patience)
        try:
            is_worker: Callable[[str], bool] = lambda _: True  # noqa: E731
            if self._tls is not None:
                connected, is_worker = self._tls.connect(connected, max(0.001, until - time.monotonic()))
            if not is_worker(source.worker_id):
                raise ChannelBroken("its certificate is not that of this worker")
            connection = _Connection(Channel(connected), who, self._carriers_for(source, connected))
            connection.greet(source, Pace(patience))
        except BaseException:
            with suppress(OSError):
                connected.close()
            raise
        return connection

    def _carriers_for(self, source: PeerSource, connected: socket.socket) -> Carriers:
        """Return the carriers for a source: NIXL only where it has proven who it is, on a network of one's own."""
        nixl, others = self._carriers.nixl, Carriers(self._carriers.host_key)
        with self._changed:
            avoided = _key_of(source) in self._without_nixl
        if nixl is None or not nixl.works or avoided:
            return others
        try:
            host = str(connected.getpeername()[0])
        except OSError:  # the source has closed it
            return others
        return self._carriers if may_load_from(host, self._tls is not None) else others

    @property
    def bounds(self) -> ClientLimits:
        return self._bounds

    def identity(self) -> PeerIdentity:
        return self._identity()

    @property
    def closed(self) -> bool:
        return self._closed


_SourceKey = tuple[str, bytes, str]


def _key_of(source: PeerSource) -> _SourceKey:
    return source.worker_id, source.public_incarnation, source.address


class _RefusedError(WireError):
    """The source answers nothing of a request, and would not on another connection."""


class _Fetcher:
    """A thread that fetches from one source, one fetch after the other."""

    def __init__(self, client: PeerClient, key: _SourceKey) -> None:
        self.key, self.fetches = key, queue.SimpleQueue[_Fetch | None]()
        self._client = client
        self._connection: _Connection | None = None
        self.thread = threading.Thread(target=self._run, name=f"peer-fetch-{id(client):x}-{key[0]}", daemon=True)

    def stop(self) -> None:
        """End the fetcher: what it waits for breaks. For another thread."""
        self.fetches.put(None)
        connection = self._connection
        if connection is not None:
            connection.channel.break_off()

    def _run(self) -> None:
        stand_back(_NICE)
        while True:
            try:
                fetch = self.fetches.get(timeout=self._client.bounds.idle_seconds)
            except queue.Empty:
                fetch = None
            if fetch is not None:
                self._work_on(fetch)
            elif self._client.retire(self):
                break
        self._disconnect()
        self._fail_rest()

    def _fail_rest(self) -> None:
        """End what came after the end."""
        with suppress(queue.Empty):
            while True:
                if (fetch := self.fetches.get_nowait()) is not None:
                    self._client.fail(fetch, "the worker ends")

    def _work_on(self, fetch: _Fetch) -> None:
        if self._client.closed:
            self._client.fail(fetch, "the worker ends")
            return
        if self._client.is_shunned(self.key):
            self._client.fail(fetch, "it timed out a moment ago")
            return
        try:
            self._fetch(fetch)
        except ChannelTimedOut as error:
            self._client.shun(self.key)
            self._give_up(fetch, str(error))
        except (ChannelBroken, WireError) as error:
            self._give_up(fetch, str(error))
        except BaseException:  # each transfer ends, whatever the error is: memory may be short
            log.critical("a fetch from %s failed", fetch.source.worker_id, exc_info=True)
            self._give_up(fetch, "an error of this worker")
        else:
            self._client.note_success(self.key)

    def _give_up(self, fetch: _Fetch, why: str) -> None:
        self._disconnect()
        self._client.fail(fetch, why)

    def _fetch(self, fetch: _Fetch) -> None:
        """Fetch, by the open connection if the source still has it. Raises ChannelBroken and WireError."""
        kept = self._connection
        if kept is not None and kept.channel.is_idle() and kept.who == self._client.identity():
            try:
                kept.exchange(fetch, self._client)
            except (ChannelTimedOut, _RefusedError):
                raise
            except (ChannelBroken, WireError):
                if len(fetch.open) < len(fetch.transfers) or self._client.closed:
                    raise
                # The source closed it in that moment, or what came belongs to an earlier fetch.
            else:
                return
        self._disconnect()
        self._connection = self._client.connect(fetch.source, fetch.patience)
        if self._client.closed:  # `stop` came before there was a connection to break
            raise ChannelBroken("the worker ends")
        self._connection.exchange(fetch, self._client)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if connection.nixl_failed:
                self._client.avoid_nixl(self.key)
            connection.close()


class _Connection:
    """A connection to a source that has been greeted, and its carriers."""

    def __init__(self, channel: Channel, who: PeerIdentity, carriers: Carriers) -> None:
        self.channel, self.who = channel, who
        self._host_key, self._station, self._requests = carriers.host_key or wire.NO_HOST, carriers.nixl, 0
        self._inline = InlineInlet(channel)
        self._slots: RingInlet | NixlInlet | None = None
        self._offered, self._differed = set[type](), False

    def greet(self, source: PeerSource, pace: Pace) -> None:
        """Say who this is, and check who answers. Raises ChannelBroken and WireError."""
        takes_nixl = self._station is not None
        hello = Hello(self.who, source.worker_id, source.public_incarnation, self._host_key, takes_nixl)
        self.channel.send(wire.pack_hello(hello), pace)
        welcome = wire.unpack_welcome(bytes(self.channel.receive(wire.WELCOME_BYTES, pace)))
        if welcome.refusal is not wire.Refusal.NONE:
            raise WireError(f"refused: {welcome.refusal.words}")
        if (welcome.image_format, welcome.image_bytes) != (self.who.image_format, self.who.image_bytes):
            raise WireError(wire.Refusal.FORMAT.words)
        if welcome.incarnation != source.public_incarnation:
            raise WireError(wire.Refusal.INCARNATION.words)

    def exchange(self, fetch: _Fetch, client: PeerClient) -> None:
        """Ask for all blocks of a fetch, and land what comes. Raises ChannelBroken and WireError."""
        self._requests += 1
        source, keys = fetch.source, tuple(transfer.key for transfer in fetch.transfers if not transfer.page)
        request = Request(self._requests, source.token, source.expires, keys)
        pace = Pace(fetch.patience, _PROGRESS_BYTES)
        self.channel.send(wire.pack_request(request), pace)
        while fetch.open:
            answer = wire.unpack_answer(bytes(self.channel.receive(wire.ANSWER_BYTES, pace)))
            if isinstance(answer, RingOffer):
                self._take_ring(answer, pace)
            elif isinstance(answer, NixlHead):
                tail = bytes(self.channel.receive(answer.tail_bytes, pace))
                self._take_nixl(wire.unpack_nixl_offer(answer, tail), pace)
            elif answer.request != self._requests:
                raise WireError("an answer to another request")
            elif isinstance(answer, Refused):
                raise _RefusedError(f"refused: {answer.refusal.words}")
            else:
                self._land_item(fetch, answer, pace, client)

    def _land_item(self, fetch: _Fetch, item: Item, pace: Pace, client: PeerClient) -> None:
        if item.item not in fetch.open:
            raise WireError("an item that was not asked for, or that was answered before")
        if item.end is not TransferEnd.DONE:
            if item.length:
                raise WireError("an item with an image although it is not there")
            client.land(fetch, item.item, item.end)
            return
        if item.length != self.who.image_bytes:
            raise WireError(f"an image of {item.length} bytes; expected {self.who.image_bytes}")
        client.await_room()
        image = bytearray(item.length)
        inlet = inlet_for(item, self._inline, self._slots)
        inlet.fetch_image(item, memoryview(image), pace)
        if xxhash.xxh3_128_digest(image) != item.digest:
            self._differed = True
            client.land(fetch, item.item, TransferEnd.CORRUPT)
            raise WireError("the checksum of an image differs from what came")
        client.land(fetch, item.item, TransferEnd.DONE, image, inlet.name)

    def _take_ring(self, offer: RingOffer, pace: Pace) -> None:
        """Open the ring that the source offers; where that is not possible, images come in the connection."""
        self._note_offer(RingOffer, self._host_key != wire.NO_HOST)
        try:
            ring = RingInlet(self.channel, offer)
            self._use_slots(ring)
            reply = RingReply(opened=True, nonce=ring.nonce)
        except OSError as error:
            log.info("a ring in shared memory could not be opened, blocks come over TCP: %s", words_of(error))
            reply = RingReply(opened=False, nonce=b"")
        self.channel.send(wire.pack_ring_reply(reply), pace)

    def _take_nixl(self, offer: NixlOffer, pace: Pace) -> None:
        """Let the agent know that of the source; where it cannot use it, images come in the connection."""
        station = self._station
        self._note_offer(NixlOffer, station is not None)
        assert station is not None
        try:
            self._use_slots(NixlInlet(self.channel, station, offer, pace))
            opened = True
        except ChannelBroken as error:
            log.warning("blocks come over TCP: %s", error)
            opened = False
        self.channel.send(wire.pack_ring_reply(RingReply(opened, nonce=b"")), pace)

    def _note_offer(self, kind: type, asked: bool) -> None:
        """Raises WireError for an offer that was not asked for, or that comes again."""
        if kind in self._offered or not asked:
            raise WireError("a ring that was not asked for")
        self._offered.add(kind)

    def _use_slots(self, slots: RingInlet | NixlInlet) -> None:
        if self._slots is not None:
            self._slots.close()
        self._slots = slots

    @property
    def nixl_failed(self) -> bool:
        """Whether a read by NIXL did not end well, or brought what the source had not sent."""
        return isinstance(self._slots, NixlInlet) and (self._slots.failed or self._differed)

    def close(self) -> None:
        self.channel.close()
        if self._slots is not None:
            self._slots.close()


def _open_socket(address: str, beyond: bool, seconds: float) -> socket.socket:
    """Return a connection to HOST:PORT. Raises ChannelBroken, also for hosts beyond loopback unless they are allowed.

    The time for a look-up of a name counts.
    """
    host, _, port = address.rpartition(":")
    host, until = host.strip("[]"), time.monotonic() + seconds
    places = _look_up(host, port, seconds)
    error: OSError | None = None
    for family, place in places:
        if not (beyond or _is_loopback(str(place[0]))):
            raise ChannelBroken("it is beyond loopback, and this worker has no TLS")
        connected = socket.socket(family, socket.SOCK_STREAM)
        try:
            connected.settimeout(max(0.001, until - time.monotonic()))
            connected.connect(place)
        except OSError as failed:
            error = failed
            connected.close()
        else:
            return connected
    if isinstance(error, TimeoutError):
        raise ChannelTimedOut(f"no connection in {seconds:g} s")
    raise ChannelBroken("the address has no place" if error is None else words_of(error))


_Place = tuple[int, tuple[str | int, int | bytes]]


def _look_up(host: str, port: str, seconds: float) -> list[_Place]:
    """Return where a host is. A resolver that hangs costs `seconds`, and a thread until it is done."""
    answers: queue.SimpleQueue[list[_Place] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put([(int(each[0]), (each[4][0], each[4][1])) for each in found])
        except OSError as error:
            answers.put(error)
        except UnicodeError:
            answers.put(OSError("the address is not a name"))

    try:
        if socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host):
            ask()
    except OSError:
        threading.Thread(target=ask, name="peer-look-up", daemon=True).start()
    try:
        found = answers.get(timeout=seconds)
    except queue.Empty:
        raise ChannelTimedOut(f"its name was not found in {seconds:g} s") from None
    if isinstance(found, OSError):
        raise ChannelBroken(f"its address cannot be used: {words_of(found)}")
    return found


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
