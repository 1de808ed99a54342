"""Ends of a fetch that say what a test says: callers of a source, and sources without a server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest
import xxhash

from common.contracts.transfer_tokens import TokenScope, make_token
from common.contracts.transfers import TransferEnd
from gpuworker.peers import wire
from gpuworker.peers.channel import Channel, ChannelBroken, Pace
from gpuworker.peers.server import PeerServer
from gpuworker.peers.wire import Hello, Item, PeerIdentity, Refusal, Request, Welcome
from tests.support.gpuworker.peers import (
    DESTINATION,
    PATIENCE,
    SERVE_KEY,
    SOURCE,
    hashes_of,
    image_of,
)

PACE = Pace(PATIENCE)
Lie = Callable[[Channel, Request], None]


@dataclass
class Liar:
    """A source without a server: it says what a test says."""

    lie: Lie
    welcome: bytes
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[Request] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def run(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(connected,), daemon=True).start()

    def serve(self, connected: socket.socket) -> None:
        channel = Channel(connected)
        with connected, suppress(ChannelBroken):
            head = bytes(channel.receive(wire.HELLO_BYTES, PACE))
            channel.receive(wire.hello_tail_bytes(head), PACE)
            channel.send(self.welcome, PACE)
            while True:
                head = bytes(channel.receive(wire.HEAD_BYTES, PACE))
                request = wire.unpack_client_message(head, bytes(channel.receive(wire.client_body_bytes(head), PACE)))
                if isinstance(request, Request):
                    self.requests.append(request)
                    self.lie(channel, request)


WELCOME = Welcome(Refusal.NONE, SOURCE.incarnation, SOURCE.image_format, SOURCE.image_bytes)


@contextmanager
def lying(lie: Lie, welcome: bytes | None = None) -> Iterator[Liar]:
    liar = Liar(lie, wire.pack_welcome(WELCOME) if welcome is None else welcome)
    threading.Thread(target=liar.run, daemon=True).start()
    try:
        yield liar
    finally:
        liar.released.set()
        liar.listener.close()


def item_of(request: Request, item: int, /, **changed: object) -> bytes:
    """Return a right answer, or one with other fields."""
    image = image_of(request.keys[item])
    right = Item(request.number, item, TransferEnd.DONE, len(image), xxhash.xxh3_128_digest(image))
    return wire.pack_item(replace(right, **changed)) + image  # type: ignore[arg-type]


HELLO = wire.pack_hello(Hello(DESTINATION, SOURCE.worker_id, SOURCE.incarnation))


def request_of(count: int, who: PeerIdentity = DESTINATION, mark: bytes = b"") -> bytes:
    hashes, expires = hashes_of(count, mark), int(time.time()) + 600
    scope = TokenScope(who.worker_id, who.incarnation, SOURCE.incarnation, expires, hashes)
    return wire.pack_request(Request(1, make_token(SERVE_KEY, scope), expires, hashes))


@contextmanager
def calling(server: PeerServer, content: bytes = b"") -> Iterator[Channel]:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connected:
        channel = Channel(connected)
        channel.send(content, PACE)
        yield channel


def ended(channel: Channel) -> bytes:
    """Return what the source sends until it closes the connection. Fails if it does not."""
    found = bytearray()

    def read_all() -> None:
        nonlocal found
        while True:
            found += channel.receive(1, PACE)

    with pytest.raises(ChannelBroken, match=r"closed|reset"):
        read_all()
    return bytes(found)


def refusal_of(content: bytes) -> Refusal:
    return wire.unpack_welcome(content[: wire.WELCOME_BYTES]).refusal
