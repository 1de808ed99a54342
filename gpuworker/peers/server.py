"""The source's end of a fetch: a port on which other workers ask for contents by their keys.

A thread a connection, with blocking reads and bounds on their time. The thread asks the engine for images, and sends
what the engine hands it; it knows neither blocks nor frames. What the engine has not got is answered STALE.

    accept -> stranger -> (TLS) hello, welcome -> request with a valid token -> known: answers, further requests

A stranger has seconds to show a valid token, and few of them are let in. So they cannot take what known workers use.
A connection reads no request while it answers one. Images that wait to be sent are bounded, in all and for one worker:
one that reads slowly holds up no other, and is disconnected when it is too slow.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import xxhash

from common.contracts import limits
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.transfer_tokens import TokenScope, verify_token
from common.contracts.transfers import ImageName, TransferEnd
from common.process.priority import stand_back
from common.untrusted.rare_lines import RareLines
from gpuworker.peers import wire
from gpuworker.peers.carriers import (
    SHARED_MEMORY,
    Image,
    InlineOutlet,
    Outlet,
    Ring,
    SlotOutlet,
    lacks_room,
)
from gpuworker.peers.channel import Channel, ChannelBroken, ChannelEnded, ChannelTimedOut, Pace, words_of
from gpuworker.peers.nixl import Carriers, NixlSlots, is_private
from gpuworker.peers.wire import Hello, PeerIdentity, Refusal, Request, RingReply, Taken, WireError

log = logging.getLogger(__name__)

# How far the thread of a connection stands back behind the threads of the steps.
_NICE: Final = 5

Deliver = Callable[[Sequence[Image | None]], None]
"""Hands over the next images in their order, None for one that is not there; any thread may call it."""
TakeImages = Callable[[Sequence[ImageName], Deliver], None]
"""Asks for images; `Deliver` is called until each of them was answered. It neither blocks nor raises.

What is delivered must not change any more. After an end of the connection it is dropped.
"""


IsWorker = Callable[[str], bool]
"""Whether the certificate of a connection is that of the worker with this id."""


class ServesTls(Protocol):
    """TLS of the server's end (`gpuworker/peers/tls.py`)."""

    def accept(self, connected: socket.socket, seconds: float) -> tuple[socket.socket, IsWorker]:
        """Return the connection with TLS, and what its certificate says. Raises ChannelBroken."""
        ...


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of a server. Those that a protocol names stand in `common/contracts/limits.py`."""

    connections: int = limits.MAX_PEER_CONNECTIONS
    connections_a_worker: int = limits.MAX_PEER_CONNECTIONS_A_WORKER
    strangers: int = limits.MAX_PEER_STRANGERS
    strangers_an_address: int = limits.MAX_PEER_STRANGERS_AN_ADDRESS
    hello_seconds: float = limits.PEER_HELLO_SECONDS
    # From the first byte of a message to its last.
    message_seconds: float = 10.0
    idle_seconds: float = 120.0
    # A worker that reads must take this much in this time.
    send_seconds: float = 10.0
    send_bytes: int = 8 << 20
    # The engine answers between two steps.
    take_seconds: float = 60.0
    # Images that are taken and not sent yet: in all, of one worker, and those that the engine is asked for at once.
    staged_bytes: int = 256 << 20
    staged_bytes_a_worker: int = 64 << 20
    asked_bytes: int = 16 << 20
    # Shared memory of one connection, and of all.
    ring_bytes: int = 32 << 20
    rings_bytes: int = 256 << 20


@dataclass(slots=True)
class Served:
    """What a server did, in all; images and bytes by carrier, refusals by their reason."""

    images: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    stale: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class PeerServer:
    """Listens until it is closed. Methods are for any thread."""

    def __init__(
        self,
        listener: socket.socket,
        identity: Callable[[], PeerIdentity],
        take_images: TakeImages,
        serve_keys: Callable[[], Sequence[bytes]],
        tls: ServesTls | None = None,
        carriers: Carriers | None = None,
        bounds: ServerLimits | None = None,
    ) -> None:
        """Serve on a socket of `listen`, which is the server's from here on.

        `identity` says what the worker is at present; a new incarnation refuses tokens of the one before. `serve_keys`
        are the keys that tokens are made with (`ServeKeys.accepted_keys`). `carriers` are those that peers are offered.
        """
        self._listener, self._identity, self._take_images = listener, identity, take_images
        self.port = int(listener.getsockname()[1])
        self._serve_keys, self._tls, self._carriers = serve_keys, tls, carriers or Carriers()
        self.bounds = bounds or ServerLimits()
        self._doors = _Doors(self.bounds)
        self._staging = _Staging(self.bounds.staged_bytes, self.bounds.staged_bytes_a_worker)
        self._rings = _Rings(self.bounds)
        self._served, self._lock = Served(), threading.Lock()
        self._lines: dict[str, RareLines] = {}
        self._open = dict[threading.Thread, socket.socket]()
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name=f"peer-{self.port}-accept", daemon=True)
        self._acceptor.start()

    def served(self) -> Served:
        """Return a copy of the counts."""
        with self._lock:
            counts = self._served
            return Served(counts.images.copy(), counts.bytes.copy(), counts.stale, counts.refused.copy())

    def connections(self) -> tuple[int, int]:
        """Return the known connections and the strangers."""
        return self._doors.counts()

    def close(self, seconds: float = 5.0) -> None:
        """Take no more connections, end those that are open, and wait for their threads for so long."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(seconds)
        with self._lock:
            found = list(self._open.items())
        for _, connected in found:
            with suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)
        until = time.monotonic() + seconds
        for thread, _ in found:
            thread.join(max(0.0, until - time.monotonic()))

    # ------------------------------------------------------------ connections

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connected, address = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                self._say("accept", f"no connection could be taken: {words_of(error)}")
                self._closing.wait(0.1)  # no descriptors are left, as a rule: others end meanwhile
                continue
            try:
                self._let_in(connected, str(address[0]))
            except BaseException:  # others are let in later: memory may be short
                log.critical("a connection could not be taken", exc_info=True)
                connected.close()

    def _let_in(self, connected: socket.socket, address: str) -> None:
        if not self._doors.admit_stranger(address):
            self._count_refused("strangers", f"{address}: too many connections that have shown no token")
            connected.close()
            return
        thread = threading.Thread(
            target=self._run, args=(connected, address), name=f"peer-{self.port}-serve", daemon=True
        )
        with self._lock:
            self._open[thread] = connected
        try:
            thread.start()
        except RuntimeError:  # no thread can be had
            self._leave(thread, address, None, connected)

    def _run(self, connected: socket.socket, address: str) -> None:
        stand_back(_NICE)
        session = _Session(self, self._doors, self._staging, self._rings, address)
        try:
            session.serve(connected)
        except WireError as error:
            self._count_refused("malformed", f"{address}: {error}")
        except ChannelEnded:
            pass
        except ChannelBroken as error:
            if session.worker is not None:
                self._say("broken", f"the connection of {session.worker} ended: {error}")
        except BaseException:  # no connection ends the others, whatever the error is: memory may be short
            log.critical("a connection of %s ended", session.worker or address, exc_info=True)
        finally:
            session.end()
            self._leave(threading.current_thread(), address, session.worker, session.socket or connected)

    def _leave(self, thread: threading.Thread, address: str, worker: str | None, connected: socket.socket) -> None:
        with suppress(OSError):
            connected.close()
        self._doors.leave(address, worker)
        with self._lock:
            self._open.pop(thread, None)

    # ------------------------------------------------------------ what a session asks

    def secure(self, connected: socket.socket) -> tuple[socket.socket, IsWorker]:
        """Return the connection with TLS where there is TLS, and what its certificate says. Raises ChannelBroken."""
        if self._tls is None:
            return connected, lambda _: True
        wrapped, is_worker = self._tls.accept(connected, self.bounds.hello_seconds)
        with self._lock:
            self._open[threading.current_thread()] = wrapped
        return wrapped, is_worker

    def refusal_of(self, hello: Hello, is_worker: IsWorker) -> Refusal:
        """Return why a hello is refused; NONE when it is not."""
        own = self._identity()
        if (hello.who.image_format, hello.who.image_bytes) != (own.image_format, own.image_bytes):
            return Refusal.FORMAT
        if hello.source_id != own.worker_id:
            return Refusal.SOURCE
        if not hmac.compare_digest(hello.source_incarnation, own.incarnation):
            return Refusal.INCARNATION
        if not is_worker(hello.who.worker_id):
            return Refusal.CERTIFICATE
        return Refusal.NONE

    def identity(self) -> PeerIdentity:
        return self._identity()

    def verify_request(self, hello: Hello, request: Request) -> str:
        """Return in words why the token of a request does not hold; "" when it does."""
        scope = TokenScope(
            hello.who.worker_id, hello.who.incarnation, self._identity().incarnation, request.expires, request.keys
        )
        found = verify_token(self._serve_keys(), scope, request.token, time.time())
        return "" if found is None else found.value

    def take(self, names: Sequence[ImageName]) -> Iterator[Image | None]:
        """Yield images as the engine hands them over. Raises ChannelBroken when it does not."""
        delivered: queue.SimpleQueue[Sequence[Image | None]] = queue.SimpleQueue()
        self._take_images(names, delivered.put)
        left = len(names)
        while left:
            try:
                images = delivered.get(timeout=self.bounds.take_seconds)
            except queue.Empty:
                raise ChannelBroken("the engine did not answer") from None
            yield from images[:left]
            left -= min(left, len(images))

    def takes_ring(self, hello: Hello) -> bool:
        own = self._carriers.host_key
        return bool(own) and hmac.compare_digest(hello.host_key, own)

    def nixl_slots_for(self, hello: Hello, address: str) -> NixlSlots | None:
        """Return slots that are read by NIXL; None where the peer cannot, or there are none."""
        nixl = self._carriers.nixl
        if nixl is None or not hello.takes_nixl or not is_private(address):
            return None
        return nixl.open_slots(hello.who.image_bytes)

    def count_images(self, carrier: str, images: int, stale: int) -> None:
        size = self._identity().image_bytes
        with self._lock:
            self._served.images[carrier] += images
            self._served.bytes[carrier] += images * size
            self._served.stale += stale

    def count_refused(self, refusal: Refusal, address: str, why: str = "") -> None:
        self._count_refused(refusal.name.lower(), f"{address}: {why or refusal.words}")

    def _count_refused(self, reason: str, text: str) -> None:
        with self._lock:
            self._served.refused[reason] += 1
        self._say(reason, f"a peer is refused; {text}")

    def _say(self, kind: str, text: str) -> None:
        with self._lock:
            held_back = self._lines.setdefault(kind, RareLines(limits.PEER_LINE_SECONDS)).next()
        if held_back is not None:
            log.warning("%s%s", text, f" ({held_back} more before)" if held_back else "")


def listen(host: str, port: int, secure: bool, insecure: bool = False) -> socket.socket:
    """Return a socket that listens. Raises InvalidConfig beyond loopback without TLS, unless `insecure` allows it."""
    from common.settings.options import is_loopback

    if not (secure or insecure or is_loopback(host)):
        what = f"{host} is beyond loopback, where blocks would travel in plain text; expected TLS, or --insecure"
        raise InvalidConfig(FieldViolation("--data-port", what))
    try:
        family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host.strip("[]"), port), family=family, backlog=limits.MAX_PEER_STRANGERS)
    except OSError as error:
        raise InvalidConfig(FieldViolation("--data-port", f"{host}:{port}: {words_of(error)}")) from None


class _Session:
    """One connection, from its first byte to its end."""

    def __init__(self, server: PeerServer, doors: _Doors, staging: _Staging, rings: _Rings, address: str) -> None:
        self._server, self._doors, self._staging, self._rings = server, doors, staging, rings
        self._bounds, self._address = server.bounds, address
        self._until = time.monotonic() + self._bounds.hello_seconds
        self._message = Pace(self._bounds.message_seconds)
        self._sending = Pace(self._bounds.send_seconds, self._bounds.send_bytes)
        self._sent, self._spent = 0, 0.0
        self._ring: Ring | None = None
        self._nixl: NixlSlots | None = None
        self._slots: SlotOutlet | None = None
        self.worker: str | None = None
        self.socket: socket.socket | None = None

    def serve(self, connected: socket.socket) -> None:
        """Answer until the other end has had enough. Raises WireError and ChannelBroken."""
        self.socket, is_worker = self._server.secure(connected)
        self._channel = Channel(self.socket)
        hello = self._read_hello(is_worker)
        while hello is not None:
            message = self._read_message()
            if isinstance(message, Taken):
                self._free_slot(message)
            elif isinstance(message, RingReply):
                raise WireError("an answer to no ring")
            elif not self._answer(hello, message):
                return

    def end(self) -> None:
        """Give back what the connection holds."""
        if self._ring is not None:
            self._rings.close_ring(self._ring)
            self._ring = None
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None

    def _read_hello(self, is_worker: IsWorker) -> Hello | None:
        """Return the hello; None when it was refused."""
        head = bytes(self._channel.receive(wire.HELLO_BYTES, self._pace_of_stranger()))
        try:
            tail = bytes(self._channel.receive(wire.hello_tail_bytes(head), self._pace_of_stranger()))
            hello = wire.unpack_hello(head, tail)
        except wire.OtherVersion:
            self._refuse(Refusal.VERSION)
            return None
        refusal = self._server.refusal_of(hello, is_worker)
        if refusal is not Refusal.NONE:
            self._refuse(refusal)
            return None
        self._welcome(Refusal.NONE)
        return hello

    def _refuse(self, refusal: Refusal) -> None:
        self._server.count_refused(refusal, self._address)
        self._welcome(refusal)

    def _welcome(self, refusal: Refusal) -> None:
        own = self._server.identity()
        welcome = wire.Welcome(refusal, own.incarnation, own.image_format, own.image_bytes)
        self._channel.send(wire.pack_welcome(welcome), self._message)

    def _read_message(self) -> Request | Taken | RingReply:
        """Return the next message; a stranger's must be there before its time is over."""
        idle = Pace(self._bounds.idle_seconds) if self.worker is not None else self._pace_of_stranger()
        first = self._channel.receive(1, idle)
        pace = self._message if self.worker is not None else self._pace_of_stranger()
        head = bytes(first + self._channel.receive(wire.HEAD_BYTES - 1, pace))
        body = bytes(self._channel.receive(wire.client_body_bytes(head), pace))
        return wire.unpack_client_message(head, body)

    def _pace_of_stranger(self) -> Pace:
        return Pace(max(0.001, self._until - time.monotonic()))

    # ------------------------------------------------------------ a request

    def _answer(self, hello: Hello, request: Request) -> bool:
        """Answer each item of a request; return False when the connection is to end.

        Raises WireError for a request of more than there can be.
        """
        why = self._server.verify_request(hello, request)
        if why:
            return self._refuse_request(request, Refusal.TOKEN, why)
        names = request.images(self._server.identity().block_pages)
        if self.worker is None:
            if not self._doors.make_known(self._address, hello.who.worker_id):
                return self._refuse_request(request, Refusal.FULL)
            self.worker = hello.who.worker_id
            self._offer_ring(hello)
            if self._slots is None:
                self._offer_nixl(hello)
        outlet = self._slots or InlineOutlet(self._channel, self._sending)
        size, at = hello.who.image_bytes, 0
        while at < len(names):
            most = min(len(names) - at, max(1, self._bounds.asked_bytes // size))
            staged = self._staging.reserve(self.worker, size, most, self._bounds.send_seconds)
            try:
                self._send_items(outlet, request.number, at, names[at : at + staged], size)
            finally:
                self._staging.give_back(self.worker, staged * size)
            at += staged
        return True

    def _refuse_request(self, request: Request, refusal: Refusal, why: str = "") -> bool:
        self._server.count_refused(refusal, self._address, why)
        self._channel.send(wire.pack_refused(wire.Refused(request.number, refusal)), self._message)
        return False

    def _send_items(self, outlet: Outlet, request: int, first: int, names: Sequence[ImageName], size: int) -> None:
        sent = stale = 0
        for item, image in enumerate(self._server.take(names), first):
            content = None if image is None else memoryview(image).cast("B")
            if content is not None and len(content) == size:
                digest = xxhash.xxh3_128_digest(content)
                began = time.monotonic()
                outlet.send_image(wire.Item(request, item, TransferEnd.DONE, size, digest), content)
                self._pay(size, time.monotonic() - began)
                sent += 1
                continue
            end = TransferEnd.STALE if content is None else TransferEnd.FAILED
            self._channel.send(wire.pack_item(wire.Item(request, item, end)), self._sending)
            stale += 1
        self._server.count_images(outlet.name, sent, stale)

    def _pay(self, size: int, seconds: float) -> None:
        """Bound the time of many images as that of one is. Raises ChannelTimedOut for a worker that reads slowly."""
        self._sent, self._spent = self._sent + size, self._spent + seconds
        if self._sent >= self._bounds.send_bytes:
            self._sent, self._spent = 0, 0.0
        elif self._spent > self._bounds.send_seconds:
            raise ChannelTimedOut(f"it read {self._sent} bytes in {self._spent:.1f} s")

    # ------------------------------------------------------------ images beside the connection

    def _offer_ring(self, hello: Hello) -> None:
        """Agree on a ring where both ends are on one host; without one, images follow their heads."""
        if not self._server.takes_ring(hello):
            return
        ring = self._rings.open_ring(hello.who.image_bytes)
        if ring is None:
            return
        self._ring = ring
        self._channel.send(wire.pack_ring_offer(ring.offer), self._message)
        try:
            reply = self._read_reply()
        finally:
            ring.remove_name()
        proven = reply.opened and hmac.compare_digest(reply.nonce, ring.nonce)
        if proven and self._rings.give_room(ring):
            self._slots = SlotOutlet("shm", self._channel, self._sending, ring, self._await_taken)
        else:
            self.end()

    def _offer_nixl(self, hello: Hello) -> None:
        """Agree on slots that the peer's agent reads; without them, images follow their heads."""
        self._nixl = self._server.nixl_slots_for(hello, self._address)
        if self._nixl is None:
            return
        self._channel.send(wire.pack_nixl_offer(self._nixl.offer), self._message)
        if self._read_reply().opened:
            self._slots = SlotOutlet("nixl", self._channel, self._sending, self._nixl, self._await_taken)
        else:
            self.end()

    def _read_reply(self) -> RingReply:
        reply = self._read_message()
        if not isinstance(reply, RingReply):
            raise WireError("the offer of a ring was not answered")
        return reply

    def _await_taken(self) -> None:
        message = self._read_message_in_time()
        if not isinstance(message, Taken):
            raise WireError("a request while one is answered and the ring is full")
        self._free_slot(message)

    def _read_message_in_time(self) -> Request | Taken | RingReply:
        head = bytes(self._channel.receive(wire.HEAD_BYTES, self._message))
        return wire.unpack_client_message(
            head, bytes(self._channel.receive(wire.client_body_bytes(head), self._message))
        )

    def _free_slot(self, taken: Taken) -> None:
        if self._slots is None:
            raise WireError("a slot was given back, and there is no ring")
        self._slots.free_slot(taken.slot)


class _Doors:
    """Who is connected: known workers by their ids, and strangers by their addresses. Threads share it."""

    def __init__(self, bounds: ServerLimits) -> None:
        self._bounds, self._lock = bounds, threading.Lock()
        self._strangers, self._known = Counter[str](), Counter[str]()

    def admit_stranger(self, address: str) -> bool:
        with self._lock:
            if self._strangers.total() >= self._bounds.strangers:
                return False
            if self._strangers[address] >= self._bounds.strangers_an_address:
                return False
            self._strangers[address] += 1
            return True

    def make_known(self, address: str, worker: str) -> bool:
        """Count a stranger among the workers; return False when there is no place for it."""
        with self._lock:
            if self._known.total() >= self._bounds.connections:
                return False
            if self._known[worker] >= self._bounds.connections_a_worker:
                return False
            _drop_one(self._strangers, address)
            self._known[worker] += 1
            return True

    def leave(self, address: str, worker: str | None) -> None:
        with self._lock:
            if worker is None:
                _drop_one(self._strangers, address)
            else:
                _drop_one(self._known, worker)

    def counts(self) -> tuple[int, int]:
        with self._lock:
            return self._known.total(), self._strangers.total()


class _Staging:
    """Bytes of images that are taken and not sent yet, in all and by worker. Threads share it."""

    def __init__(self, most: int, most_a_worker: int) -> None:
        self._most, self._most_a_worker = most, most_a_worker
        self._changed = threading.Condition()
        self._held = Counter[str]()

    def reserve(self, worker: str, size: int, most: int, seconds: float) -> int:
        """Return how many images, 1 to `most`, may be taken now; wait for room. Raises ChannelBroken without any."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._room(worker, size) > 0, seconds):
                raise ChannelBroken("others have all of the memory for images")
            images = min(most, self._room(worker, size))
            self._held[worker] += images * size
            return images

    def give_back(self, worker: str, held: int) -> None:
        with self._changed:
            self._held[worker] -= held
            if not self._held[worker]:
                del self._held[worker]
            self._changed.notify_all()

    def _room(self, worker: str, size: int) -> int:
        """Return the images for which there is room; an image larger than the bounds has room while nothing is held."""
        held, own = self._held.total(), self._held[worker]
        room = min(self._most - held, self._most_a_worker - own) // size
        return max(room, 1 if not held else 0)


class _Rings:
    """Shared memory of all connections. Threads share it."""

    def __init__(self, bounds: ServerLimits) -> None:
        self._bounds, self._lock = bounds, threading.Lock()
        self._held = dict[int, int]()
        self._said = False

    def open_ring(self, image_bytes: int) -> Ring | None:
        """Return a ring with its first page; None when there is too little room, with a line in the log once."""
        try:
            ring = Ring(image_bytes, self._bounds.ring_bytes)
        except OSError as error:
            self._say(words_of(error))
            return None
        with self._lock:
            lacks = sum(self._held.values()) + ring.room > self._bounds.rings_bytes or not ring.slots
            if not lacks:
                self._held[id(ring)] = ring.room
        if lacks:
            ring.close()
            self._say(
                f"{self._bounds.rings_bytes >> 20} MiB for all rings are in use, or an image is too large for one"
            )
            return None
        return ring

    def give_room(self, ring: Ring) -> bool:
        """Return whether the ring has its slots now."""
        try:
            lacks = lacks_room(ring)
            if not lacks:
                ring.give_room()
                return True
        except OSError as error:
            lacks = f"{SHARED_MEMORY}: {ring.room >> 20} MiB: {words_of(error)}"
        self._say(lacks)
        return False

    def close_ring(self, ring: Ring) -> None:
        with self._lock:
            self._held.pop(id(ring), None)
        ring.close()

    def _say(self, why: str) -> None:
        with self._lock:
            said, self._said = self._said, True
        if not said:
            log.warning("blocks for workers on this host go over TCP, not through shared memory: %s", why)


def _drop_one(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
