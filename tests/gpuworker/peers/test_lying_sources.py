"""Sources that lie, hang or end: each transfer ends once, nothing false lands, and the destination goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash

from common.contracts.transfers import TransferEnd
from gpuworker.peers import wire
from gpuworker.peers.channel import Channel
from gpuworker.peers.client import ClientLimits
from gpuworker.peers.wire import Refusal, Refused, Request, RingOffer
from tests.support.gpuworker.peers import (
    IMAGE_BYTES,
    Destination,
    ends_of,
    hashes_of,
    image_of,
    serving,
)
from tests.support.gpuworker.raw_peers import PACE, WELCOME, Lie, item_of, lying

DONE, STALE, CORRUPT, FAILED = TransferEnd.DONE, TransferEnd.STALE, TransferEnd.CORRUPT, TransferEnd.FAILED


def first_two(channel: Channel, request: Request) -> None:
    for item in (0, 1):
        channel.send(item_of(request, item), PACE)


def then(content: Callable[[Request], bytes]) -> Lie:
    """Answer two items, and then, if there are more, say something else and no more."""

    def lie(channel: Channel, request: Request) -> None:
        first_two(channel, request)
        if len(request.keys) > 2:
            channel.send(content(request), PACE)

    return lie


def flipped(request: Request) -> bytes:
    content = bytearray(item_of(request, 2))
    content[-1] ^= 1
    return bytes(content)


LIES: dict[str, tuple[Lie, TransferEnd, str]] = {
    "a flipped bit": (then(flipped), CORRUPT, "the checksum of an image differs"),
    "the checksum of another image": (
        then(lambda request: item_of(request, 2, digest=xxhash.xxh3_128_digest(image_of(request.keys[3])))),
        CORRUPT,
        "the checksum of an image differs",
    ),
    "the image of another block": (
        then(lambda request: item_of(request, 2)[: wire.ANSWER_BYTES] + image_of(request.keys[3])),
        CORRUPT,
        "the checksum of an image differs",
    ),
    "a short image": (then(lambda request: item_of(request, 2, length=IMAGE_BYTES - 1)), FAILED, "of 5999 bytes"),
    "a long image": (then(lambda request: item_of(request, 2, length=64 << 20)), FAILED, "of 67108864 bytes"),
    "an endless image": (then(lambda request: item_of(request, 2, length=2**32 - 1)), FAILED, "of 4294967295 bytes"),
    "an item twice": (then(lambda request: item_of(request, 1)), FAILED, "answered before"),
    "an item beyond the request": (
        then(lambda request: item_of(request, 2, item=4)),
        FAILED,
        "an item that was not asked for",
    ),
    "an answer to another request": (
        then(lambda request: item_of(request, 2, request=request.number + 1)),
        FAILED,
        "an answer to another request",
    ),
    "an image of what is missing": (
        then(lambda request: item_of(request, 2, end=STALE)),
        FAILED,
        "an item with an image although it is not there",
    ),
    "a slot of no ring": (then(lambda request: item_of(request, 2, slot=0)), FAILED, "a ring that was never opened"),
    "a ring that nobody wants": (
        then(lambda _: wire.pack_ring_offer(RingOffer(4, 8192, bytes(16)))),
        FAILED,
        "a ring that was not asked for",
    ),
    "an end that is none": (then(lambda _: b"\1\7" + bytes(30)), FAILED, "an item with the end 7"),
    "garbage": (then(lambda _: b"\xff" * 64), FAILED, "an answer of kind 255"),
    "a late refusal": (
        then(lambda request: wire.pack_refused(Refused(request.number, Refusal.FULL))),
        FAILED,
        "refused: the source has as many connections as it takes",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_fails_what_is_open_and_nothing_else(name: str, caplog: pytest.LogCaptureFixture) -> None:
    lie, end, reason = LIES[name]
    with lying(lie) as liar, serving() as honest, Destination() as destination:
        assert destination.fetched(liar.port, hashes_of(4)) == [DONE, DONE, end, FAILED]
        assert destination.fetched(liar.port, hashes_of(2)) == [DONE, DONE]
        assert destination.fetched(honest.port, hashes_of(4)) == [DONE] * 4
    assert sum(reason in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("welcome", "reason"),
    [
        (wire.pack_welcome(replace(WELCOME, image_format=b"another format..")), "its blocks have another format"),
        (wire.pack_welcome(replace(WELCOME, image_bytes=IMAGE_BYTES + 1)), "its blocks have another format"),
        (wire.pack_welcome(replace(WELCOME, incarnation=b"the next life ..")), "the source has begun anew"),
        (wire.pack_welcome(replace(WELCOME, refusal=Refusal.FULL)), "as many connections as it takes"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(wire.WELCOME_BYTES), "of another protocol"),
    ],
)
def test_a_source_that_is_another_gets_no_request(
    welcome: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with lying(first_two, welcome) as liar, Destination() as destination:
        assert destination.fetched(liar.port, hashes_of(2)) == [FAILED] * 2
        assert liar.requests == []
    assert reason in caplog.text


@pytest.mark.parametrize("late", [False, True], ids=["with the last answer", "after the next request"])
def test_items_that_nobody_asked_for_cost_the_connection_and_no_later_fetch(late: bool) -> None:
    def lie(channel: Channel, request: Request) -> None:
        if late and request.number > 1:
            channel.send(item_of(request, 0, request=request.number - 1), PACE)
        first_two(channel, request)
        if not late:
            channel.send(item_of(request, 0), PACE)

    with lying(lie) as liar, Destination() as destination:
        for _ in range(3):
            assert destination.fetched(liar.port, hashes_of(2)) == [DONE, DONE]


@pytest.mark.parametrize("after", [b"", b"\1", b"\1" + bytes(40)], ids=["between answers", "in a head", "in an image"])
def test_a_source_that_closes_the_connection_fails_what_is_open(after: bytes) -> None:
    def lie(channel: Channel, request: Request) -> None:
        first_two(channel, request)
        channel.send(item_of(request, 2)[: len(after)], PACE)
        channel.break_off()

    with lying(lie) as liar, Destination() as destination:
        assert destination.fetched(liar.port, hashes_of(4)) == [DONE, DONE, FAILED, FAILED]


@pytest.mark.parametrize("sent", [0, 16, wire.ANSWER_BYTES, wire.ANSWER_BYTES + 100])
def test_a_source_that_hangs_fails_what_is_open_and_is_not_asked_for_a_while(
    sent: int, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(channel: Channel, request: Request) -> None:
        channel.send(item_of(request, 0)[:sent], PACE)
        liar.released.wait()

    bounds = ClientLimits(shunned_seconds=1000.0)
    with lying(lie) as liar, serving() as honest, Destination(bounds=bounds) as destination:
        assert destination.fetched(liar.port, hashes_of(4), patience=0.05) == [FAILED] * 4
        assert destination.fetched(liar.port, hashes_of(4)) == [FAILED] * 4
        assert len(liar.requests) <= 1, "none, where connecting took that long"
        assert destination.fetched(honest.port, hashes_of(4)) == [DONE] * 4
    assert "in 0.05 s" in caplog.text


def test_what_waits_behind_a_fetch_that_timed_out_fails_with_it() -> None:
    def lie(_: Channel, __: Request) -> None:
        liar.released.wait()

    bounds = ClientLimits(shunned_seconds=1000.0)
    with lying(lie) as liar, Destination(bounds=bounds) as destination:
        destination.fetch(liar.port, hashes_of(2), patience=0.2)
        destination.fetch(liar.port, hashes_of(3))
        assert ends_of(destination.landed(5)) == [FAILED] * 5
        assert len(liar.requests) <= 1


def test_a_source_that_timed_out_is_asked_again_later() -> None:
    def lie(channel: Channel, request: Request) -> None:
        if len(liar.requests) > 1:
            first_two(channel, request)
        else:
            liar.released.wait()

    bounds = ClientLimits(shunned_seconds=0.01)
    with lying(lie) as liar, Destination(bounds=bounds) as destination:
        assert destination.fetched(liar.port, hashes_of(2), patience=0.05) == [FAILED] * 2
        while (found := destination.fetched(liar.port, hashes_of(2))) != [DONE, DONE]:
            assert found == [FAILED] * 2


def test_a_byte_at_a_time_is_no_progress() -> None:
    def lie(channel: Channel, request: Request) -> None:
        for byte in item_of(request, 0):
            channel.send(bytes([byte]), PACE)
            if liar.released.wait(0.01):
                return

    with lying(lie) as liar, Destination() as destination:
        # At this pace the image takes 60 s, and each byte comes well within the patience.
        assert destination.fetched(liar.port, hashes_of(1), patience=0.5) == [FAILED]


def test_nobody_answers_the_hello() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Destination() as destination:
        port = listener.getsockname()[1]
        assert destination.fetched(port, hashes_of(2), patience=0.05) == [FAILED] * 2


def test_a_name_that_is_not_found_in_time_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        released.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with Destination() as destination:
        found = destination.fetched(0, hashes_of(1), patience=0.05, address="worker.example:1")
        released.set()
        assert found == [FAILED]
