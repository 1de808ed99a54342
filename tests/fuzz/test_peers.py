"""Bytes of every kind on the port where workers fetch blocks: a connection is answered or closed, others go on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.attack import wire as garbage
from common.contracts.transfer_tokens import TokenScope, make_token
from common.contracts.transfers import TransferEnd
from common.contracts.types import BlockHash
from gpuworker.peers import wire
from gpuworker.peers.carriers import host_key
from gpuworker.peers.channel import Channel, ChannelBroken, Pace
from gpuworker.peers.client import EndedTransfer
from gpuworker.peers.nixl import NixlStation
from gpuworker.peers.server import PeerServer, ServerLimits
from gpuworker.peers.wire import Hello, Item, NixlOffer, Refusal, Refused, Request, RingOffer, RingReply, Welcome
from tests.fuzz.harness import ANY, PATIENCE, again_and_again
from tests.support.gpuworker.nixl import station, use_double
from tests.support.gpuworker.peers import (
    DESTINATION,
    IMAGE_BYTES,
    MISSING,
    SERVE_KEY,
    SOURCE,
    Destination,
    ends_of,
    hashes_of,
    serving,
)
from tests.support.gpuworker.raw_peers import calling, lying
from tests.support.waiting import wait_until

PACE: Final = Pace(PATIENCE)
# A peer that does not end what it began is put out after this, so that an example ends.
BOUNDS: Final = ServerLimits(hello_seconds=0.3, message_seconds=0.3, send_seconds=0.3, idle_seconds=0.3)
HOST: Final = host_key()


def request_of(hashes: tuple[BlockHash, ...]) -> bytes:
    expires = int(time.time()) + 600
    scope = TokenScope(DESTINATION.worker_id, DESTINATION.incarnation, SOURCE.incarnation, expires, hashes)
    return wire.pack_request(Request(1, make_token(SERVE_KEY, scope), expires, hashes))


def session(draw: random.Random) -> bytes:
    """Return the bytes of a destination: right ones in any order and number, or with some of them changed."""
    right = [
        wire.pack_hello(
            Hello(
                DESTINATION,
                SOURCE.worker_id,
                SOURCE.incarnation,
                draw.choice((wire.NO_HOST, HOST)),
                takes_nixl=draw.random() < 0.5,
            )
        ),
        request_of(hashes_of(draw.choice((1, 3, 512)), draw.choice((b"", MISSING)))),
    ]
    further = [
        *right,
        wire.pack_taken(draw.choice((0, 1, 2**32 - 1))),
        wire.pack_ring_reply(RingReply(draw.random() < 0.5, draw.randbytes(32))),
        draw.randbytes(draw.randrange(200)),
    ]
    content = bytearray(b"".join((*right[: draw.randrange(3)], *draw.choices(further, k=draw.randrange(5)))))
    for _ in range(draw.choice((0, 0, 1, 1, 2, 8))):
        if content:
            at = draw.randrange(len(content))
            cut, more = draw.choice((0, 0, 1, 4, 64)), draw.randbytes(draw.choice((0, 1, 2, 8, 64)))
            content[at : at + cut] = more
    return bytes(content)


def noise(draw: random.Random) -> bytes:
    return draw.choice((garbage.garbage, garbage.http1_garbage, garbage.http2_garbage))(draw)


def send(server: PeerServer, content: bytes, draw: random.Random) -> None:
    """Send bytes in parts, read some of what comes, and leave or wait for the end."""
    with calling(server) as channel, suppress(ChannelBroken):
        while content:
            size = draw.choice((1, 7, 100, 1 << 20))
            channel.send(content[:size], PACE)
            content = content[size:]
            if draw.random() < 0.2:
                channel.receive(draw.choice((1, wire.WELCOME_BYTES, 1000)), Pace(0.05))
        while draw.random() < 0.7:
            channel.receive(1, PACE)


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlStation]:
    use_double(monkeypatch)
    with station() as made:
        yield made
        assert made.works


def test_whatever_comes_costs_its_connection_alone(nixl: NixlStation) -> None:
    with serving(bounds=BOUNDS, shared=HOST, nixl=nixl) as server, Destination() as honest:

        @ANY
        @given(seed=st.integers(0, 2**64))
        def send_any(seed: int) -> None:
            draw = random.Random(seed)
            send(server, draw.choice((session, session, session, noise))(draw), draw)

        def send_and_check() -> None:
            send_any()
            assert honest.fetched(server.port, hashes_of(3)) == [TransferEnd.DONE] * 3
            wait_until(server.connections, lambda found: found in {(1, 0), (0, 0)})

        again_and_again(send_and_check, 0.05)


def answers(draw: random.Random, request: Request) -> bytes:
    """Return what a source may say: right items, other messages, and changed bytes."""
    image = bytes(IMAGE_BYTES)
    some = [
        wire.pack_item(Item(request.number, draw.randrange(6), draw.choice(list(TransferEnd)), IMAGE_BYTES)) + image,
        wire.pack_item(Item(request.number, draw.randrange(6), TransferEnd.STALE)),
        wire.pack_item(Item(draw.randrange(4), draw.randrange(6), TransferEnd.DONE, draw.randrange(2**32))),
        wire.pack_item(Item(request.number, 0, TransferEnd.DONE, IMAGE_BYTES, bytes(16), draw.randrange(99))),
        wire.pack_refused(Refused(request.number, draw.choice(list(Refusal)))),
        wire.pack_ring_offer(RingOffer(draw.randrange(99), draw.randrange(2**32), draw.randbytes(16))),
        wire.pack_nixl_offer(
            NixlOffer(
                draw.randrange(99),
                draw.randrange(2**32),
                draw.randbytes(16),
                draw.randrange(2**64),
                draw.randbytes(draw.randrange(1, 300)),
            )
        ),
        draw.randbytes(draw.randrange(100)),
    ]
    content = bytearray(b"".join(draw.choices(some, k=draw.randrange(8))))
    if content and draw.random() < 0.5:
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def test_whatever_a_source_says_each_move_ends_once_and_nothing_false_lands(nixl: NixlStation) -> None:
    @ANY
    @given(seed=st.integers(0, 2**64))
    def fetch_any(seed: int) -> None:
        draw = random.Random(seed)

        def lie(channel: Channel, request: Request) -> None:
            channel.send(answers(draw, request), PACE)
            channel.break_off()

        welcome = bytearray(
            wire.pack_welcome(Welcome(Refusal.NONE, SOURCE.incarnation, SOURCE.image_format, SOURCE.image_bytes))
        )
        if draw.random() < 0.1:
            welcome[draw.randrange(len(welcome))] = draw.randrange(256)
        with lying(lie, bytes(welcome)) as liar, Destination(host_key=HOST, nixl=nixl) as destination:
            destination.fetch(liar.port, hashes_of(4))
            found: list[EndedTransfer] = destination.landed(4)
            assert [moved.transfer.id for moved in found] == [0, 1, 2, 3]
            assert TransferEnd.DONE not in ends_of(found)
            assert destination.client.poll() == []

    again_and_again(fetch_any, 0.03)
