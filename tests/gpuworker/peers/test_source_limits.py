"""Callers that send garbage, nothing, or too slowly, or read too slowly: bounded, and without effect on others."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from common.contracts.transfers import TransferEnd
from gpuworker.peers import wire
from gpuworker.peers.channel import Channel, ChannelBroken
from gpuworker.peers.server import PeerServer, ServerLimits, _Staging
from gpuworker.peers.wire import Hello, PeerIdentity, Refusal
from tests.support.gpuworker.peers import (
    DESTINATION,
    HELD,
    IMAGE_BYTES,
    PATIENCE,
    SOURCE,
    Destination,
    Holding,
    hashes_of,
    image_of,
    serving,
)
from tests.support.gpuworker.raw_peers import HELLO, PACE, calling, ended, refusal_of, request_of
from tests.support.waiting import wait_until

DONE, FAILED = TransferEnd.DONE, TransferEnd.FAILED


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n".ljust(200),
        b"\x16\x03\x01\x02\x00\x01".ljust(200, b"\1"),
        HELLO[:80] + b"\xff\xff" + HELLO[82:],
        HELLO + b"\0" * 8,
        HELLO + b"\1\0\0\0" + bytes(4),
        HELLO + b"\1\0\xff\xff" + bytes(4),
        HELLO + wire.pack_taken(0),
        HELLO + wire.pack_ring_reply(wire.RingReply(opened=True, nonce=bytes(32))),
        HELLO + request_of(1) + wire.pack_taken(0),
        HELLO + HELLO,
    ],
    ids=range(10),
)
def test_garbage_ends_its_connection_and_no_other(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(2)) == [DONE, DONE]
        with calling(server, content) as channel:
            ended(channel)
        assert destination.fetched(server.port, hashes_of(2)) == [DONE, DONE]
        wait_until(server.connections, lambda found: found == (1, 0))
        assert server.served().refused["malformed"] == 1
    assert "a peer is refused; 127.0.0.1: " in caplog.text


def test_another_version_is_told_so() -> None:
    with serving() as server, calling(server, HELLO[:8] + b"\2\0" + HELLO[10:]) as channel:
        assert refusal_of(ended(channel)) is Refusal.VERSION


def test_noise_of_any_kind_leaves_no_connection() -> None:
    draw = random.Random(1)
    with serving(bounds=ServerLimits(hello_seconds=0.2, message_seconds=0.2)) as server, Destination() as destination:
        for _ in range(60):
            whole = HELLO + request_of(3)
            at = draw.randrange(len(whole))
            content = whole[:at] + draw.randbytes(draw.randrange(1, 64)) + whole[at + draw.randrange(64) :]
            with calling(server) as channel, suppress(ChannelBroken):
                channel.send(content, PACE)
        assert destination.fetched(server.port, hashes_of(2)) == [DONE, DONE]
        wait_until(server.connections, lambda found: found == (1, 0))


@pytest.mark.parametrize("content", [b"", HELLO[:50], HELLO, HELLO + b"\1", HELLO + request_of(2)[:60]], ids=range(5))
def test_a_stranger_that_says_too_little_is_put_out(content: bytes) -> None:
    bounds = ServerLimits(hello_seconds=0.05, message_seconds=1000.0, idle_seconds=1000.0)
    with serving(bounds=bounds) as server, calling(server, content) as channel:
        ended(channel)


def dribble(channel: Channel) -> None:
    """Send a byte at a time; all of a hello would take 5 s."""
    while True:
        channel.send(b"q", PACE)
        threading.Event().wait(0.05)


def test_a_stranger_that_says_a_byte_at_a_time_is_put_out() -> None:
    with serving(bounds=ServerLimits(hello_seconds=0.3)) as server, calling(server) as channel:
        with pytest.raises(ChannelBroken, match=r"reset|pipe"):
            dribble(channel)
        assert server.served().refused["malformed"] == 0


@pytest.mark.parametrize("rest", [b"\1", request_of(2)[:-1]], ids=["head", "body"])
def test_a_worker_that_does_not_end_a_message_is_put_out(rest: bytes) -> None:
    bounds = ServerLimits(message_seconds=0.05)
    with serving(bounds=bounds) as server, calling(server, HELLO + request_of(1)) as channel:
        channel.receive(wire.WELCOME_BYTES + wire.ANSWER_BYTES + IMAGE_BYTES, PACE)
        channel.send(rest, PACE)
        ended(channel)


def test_strangers_take_no_place_of_workers() -> None:
    bounds = ServerLimits(strangers=4, strangers_an_address=3, hello_seconds=PATIENCE)
    with serving(bounds=bounds) as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(1)) == [DONE]
        with calling(server) as one, calling(server), calling(server):
            wait_until(server.connections, lambda found: found == (1, 3))
            with calling(server) as further:
                assert ended(further) == b""
            assert server.served().refused["strangers"] == 1
            assert destination.fetched(server.port, hashes_of(1)) == [DONE]
            one.break_off()
            wait_until(server.connections, lambda found: found == (1, 2))
            with calling(server, HELLO + request_of(1)) as served:
                served.receive(wire.WELCOME_BYTES + wire.ANSWER_BYTES + IMAGE_BYTES, PACE)
                wait_until(server.connections, lambda found: found == (2, 2))


def test_connections_of_one_worker_and_of_all_are_bounded() -> None:
    bounds = ServerLimits(connections=3, connections_a_worker=2)
    others = [replace(DESTINATION, worker_id=f"worker-{number}") for number in range(2)]
    with serving(bounds=bounds) as server, calling(server) as a, calling(server) as b, calling(server) as c:
        for channel, count in ((a, 1), (b, 2)):
            channel.send(HELLO + request_of(1), PACE)
            channel.receive(wire.WELCOME_BYTES + wire.ANSWER_BYTES + IMAGE_BYTES, PACE)
            wait_until(server.connections, lambda found, count=count: found == (count, 1 + 2 - count))  # type: ignore[misc]
        c.send(HELLO + request_of(1), PACE)
        c.receive(wire.WELCOME_BYTES, PACE)
        assert wire.unpack_answer(bytes(c.receive(wire.ANSWER_BYTES, PACE))) == wire.Refused(1, Refusal.FULL)
        assert ended(c) == b""
        with Destination(others[0]) as one, Destination(others[1]) as other:
            assert one.fetched(server.port, hashes_of(1)) == [DONE]
            assert other.fetched(server.port, hashes_of(1)) == [FAILED]


@contextmanager
def not_reading(server: PeerServer, who: PeerIdentity = DESTINATION, count: int = 512) -> Iterator[socket.socket]:
    """Ask for much, and read nothing of it."""
    with socket.socket() as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connected.connect(("127.0.0.1", server.port))
        connected.sendall(wire.pack_hello(Hello(who, SOURCE.worker_id, SOURCE.incarnation)) + request_of(count, who))
        yield connected


LARGE = 1 << 20
LARGE_SOURCE, LARGE_DESTINATION = replace(SOURCE, image_bytes=LARGE), replace(DESTINATION, image_bytes=LARGE)


def test_who_reads_nothing_holds_bounded_memory_and_is_put_out() -> None:
    taken = [0]

    def take_images(hashes: object, deliver: object) -> None:
        taken[0] += len(hashes)  # type: ignore[arg-type]
        deliver([bytes(LARGE) for _ in hashes])  # type: ignore[operator, attr-defined]

    bounds = ServerLimits(asked_bytes=4 * LARGE, send_seconds=0.3)
    with serving(take_images, LARGE_SOURCE, bounds) as server, not_reading(server, LARGE_DESTINATION):
        wait_until(lambda: taken[0] and server.connections(), lambda found: found == (0, 0))
        # What fits the buffers of two sockets was asked for besides.
        assert taken[0] < 64


def test_who_reads_a_little_at_a_time_is_put_out(caplog: pytest.LogCaptureFixture) -> None:
    def take_images(hashes: object, deliver: object) -> None:
        deliver([bytes(LARGE) for _ in hashes])  # type: ignore[operator, attr-defined]

    # Each of 64 images comes within its time, and all of them together do not.
    bounds = ServerLimits(send_seconds=0.5, send_bytes=1 << 40)
    hello = wire.pack_hello(Hello(LARGE_DESTINATION, SOURCE.worker_id, SOURCE.incarnation))
    with serving(take_images, LARGE_SOURCE, bounds) as server, calling(server, hello + request_of(64)) as channel:
        wait_until(server.connections, lambda found: found == (1, 0))
        part, read = memoryview(bytearray(64 << 10)), 0
        with suppress(ChannelBroken):
            while read < 64 * LARGE:
                channel.receive_into(part, PACE)
                read += len(part)
                time.sleep(0.005)
        assert read < 64 * LARGE
        wait_until(server.connections, lambda found: found == (0, 0))
    assert "the connection of worker-d ended: " in caplog.text


def test_images_that_wait_are_bounded_in_all_and_for_each_worker() -> None:
    staging = _Staging(most=10, most_a_worker=6)
    assert staging.reserve("a", 2, 9, seconds=0.0) == 3
    with pytest.raises(ChannelBroken, match="others have all of the memory"):
        staging.reserve("a", 1, 1, seconds=0.0)
    assert staging.reserve("b", 3, 1, seconds=0.0) == 1
    assert staging.reserve("b", 1, 9, seconds=0.0) == 1
    with pytest.raises(ChannelBroken, match="others have all of the memory"):
        staging.reserve("c", 1, 1, seconds=0.0)
    staging.give_back("a", 6)
    assert staging.reserve("c", 1, 9, seconds=0.0) == 6


def test_who_reads_nothing_holds_up_no_other_worker() -> None:
    images = {each: image_of(each, LARGE) for each in hashes_of(4)}

    def take_images(hashes: object, deliver: object) -> None:
        deliver([images.get(each.key, bytes(LARGE)) for each in hashes])  # type: ignore[operator, attr-defined]

    bounds = ServerLimits(
        asked_bytes=4 * LARGE, staged_bytes=8 * LARGE, staged_bytes_a_worker=4 * LARGE, send_seconds=PATIENCE
    )
    slow, other = LARGE_DESTINATION, replace(LARGE_DESTINATION, worker_id="worker-e")
    with serving(take_images, LARGE_SOURCE, bounds) as server, not_reading(server, slow), not_reading(server, slow):
        wait_until(server.connections, lambda found: found[0] == 2)
        with Destination(other) as destination:
            destination.fetch(server.port, hashes_of(4))
            found = destination.landed(4)
        assert [bytes(moved.image or b"") for moved in found] == list(images.values())
        assert server.connections()[0] >= 2


def test_no_request_is_read_before_the_answers_to_the_one_before_are_sent() -> None:
    holding = Holding()
    with serving(holding.take_images) as server, calling(server, HELLO + request_of(2, mark=HELD)) as channel:
        channel.send(request_of(3), PACE)
        channel.receive(wire.WELCOME_BYTES, PACE)
        wait_until(lambda: len(holding.asked) == 2)
        holding.released.set()
        channel.receive(5 * (wire.ANSWER_BYTES + IMAGE_BYTES), PACE)
        assert holding.asked == [*hashes_of(2, HELD), *hashes_of(3)]


def test_an_end_of_the_source_ends_all_connections() -> None:
    bounds = ServerLimits(hello_seconds=PATIENCE)
    with serving(bounds=bounds) as server, Destination() as destination, calling(server), calling(server, HELLO):
        assert destination.fetched(server.port, hashes_of(2)) == [DONE, DONE]
        server.close(PATIENCE)
        assert server.connections() == (0, 0)
        assert destination.fetched(server.port, hashes_of(2)) == [FAILED, FAILED]
