"""Images by a ring in shared memory: agreed on by a proof, bounded, gone at the end; TCP wherever that fails."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from common.contracts.transfers import TransferEnd
from gpuworker.peers import carriers, server, wire
from gpuworker.peers.carriers import Ring, RingInlet, host_key, ring_path
from gpuworker.peers.channel import Channel, ChannelBroken
from gpuworker.peers.server import ServerLimits
from gpuworker.peers.wire import Hello, Item, Request, RingOffer, RingReply
from tests.support.gpuworker.peers import (
    DESTINATION,
    IMAGE_BYTES,
    SOURCE,
    Destination,
    SourceProcess,
    hashes_of,
    image_of,
    serving,
)
from tests.support.gpuworker.raw_peers import PACE, Lie, calling, ended, lying, request_of
from tests.support.waiting import wait_until

DONE, CORRUPT, FAILED = TransferEnd.DONE, TransferEnd.CORRUPT, TransferEnd.FAILED
HOST = host_key()
HELLO = wire.pack_hello(Hello(DESTINATION, SOURCE.worker_id, SOURCE.incarnation, HOST))


def left_behind() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("quire-ring-")}


def wait_until_gone(before: set[str]) -> None:
    """Fail if a ring stays that is there now and was not before. Tests beside this one have rings for a moment."""
    for name in left_behind() - before:
        wait_until(lambda name=name: name not in left_behind())  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = left_behind()
    yield
    wait_until_gone(before)


def test_images_come_by_shared_memory_where_both_see_it() -> None:
    with serving(shared=HOST) as source, Destination(host_key=HOST) as destination:
        for _ in range(3):
            assert destination.fetched(source.port, hashes_of(200)) == [DONE] * 200
        assert destination.client.fetched() == {"shm": 600}
        assert wait_until(source.served, lambda found: found.images["shm"] == 600).images == {"shm": 600}


@pytest.mark.parametrize(("ours", "theirs"), [(b"", HOST), (HOST, b""), (HOST, b"another host key")])
def test_without_equal_keys_they_come_over_tcp(ours: bytes, theirs: bytes) -> None:
    with serving(shared=theirs) as source, Destination(host_key=ours) as destination:
        assert destination.fetched(source.port, hashes_of(3)) == [DONE] * 3
        assert destination.client.fetched() == {"tcp": 3}


def test_a_ring_of_few_slots_is_used_again_and_again() -> None:
    bounds = ServerLimits(ring_bytes=2 * 8192)
    with serving(shared=HOST, bounds=bounds) as source, Destination(host_key=HOST) as destination:
        assert destination.fetched(source.port, hashes_of(100)) == [DONE] * 100
        assert destination.client.fetched() == {"shm": 100}


def test_equal_keys_that_see_another_folder_use_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "Ring", lambda image, ring: Ring(image, ring, tmp_path))
    with serving(shared=HOST) as source, Destination(host_key=HOST) as destination:
        assert destination.fetched(source.port, hashes_of(3)) == [DONE] * 3
        assert destination.client.fetched() == {"tcp": 3}
    assert list(tmp_path.iterdir()) == []


def test_too_little_shared_memory_is_said_once_with_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = os.statvfs("/dev/shm")
    small = os.statvfs_result((4096, 4096, 100, 100, 100, *tuple(found)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with serving(shared=HOST) as source:
        for _ in range(2):
            with Destination(host_key=HOST) as destination:
                assert destination.fetched(source.port, hashes_of(20)) == [DONE] * 20
                assert destination.client.fetched() == {"tcp": 20}
    monkeypatch.undo()
    [line] = [record.getMessage() for record in caplog.records if "not through shared memory" in record.getMessage()]
    assert line.endswith("/dev/shm has 0.4 MiB free, and twice the 0.5 MiB of a ring are needed")


def test_a_system_that_gives_no_room_is_said_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with serving(shared=HOST) as source, Destination(host_key=HOST) as destination:
        assert destination.fetched(source.port, hashes_of(3)) == [DONE] * 3
        assert destination.client.fetched() == {"tcp": 3}
    assert "No space left on device" in caplog.text


def test_all_rings_together_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    room = Ring(IMAGE_BYTES, 1 << 20)
    room.close()
    bounds = ServerLimits(ring_bytes=1 << 20, rings_bytes=room.room + 1)
    with serving(shared=HOST, bounds=bounds) as source, Destination(host_key=HOST) as one:
        assert one.fetched(source.port, hashes_of(3)) == [DONE] * 3
        with Destination(replace(one.who, worker_id="worker-e"), host_key=HOST) as other:
            assert other.fetched(source.port, hashes_of(3)) == [DONE] * 3
            assert (one.client.fetched(), other.client.fetched()) == ({"shm": 3}, {"tcp": 3})
    assert "MiB for all rings are in use" in caplog.text


def test_the_file_is_of_its_user_alone_and_has_no_name_once_it_is_used() -> None:
    ring = Ring(IMAGE_BYTES, 1 << 20)
    path = ring_path(ring.offer.name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Whoever is killed now leaves a page behind.
    assert path.stat().st_size == 4096
    ring.give_room()
    assert path.stat().st_size == ring.room == 4096 + 64 * 8192
    ring.remove_name()
    assert not path.exists()
    ring.close()


def test_the_host_key_is_of_this_host_and_of_its_shared_memory(tmp_path: Path) -> None:
    assert len(HOST) == 16
    assert host_key() == HOST
    assert host_key(tmp_path) not in {HOST, b""}
    assert host_key(tmp_path / "nothing") == b""


# ---------------------------------------------------------------- rings that lie


Prepare = Callable[[Ring], RingOffer]
Answer = Callable[[Request, Ring], bytes]


def ring_lie(prepare: Prepare, answer: Answer) -> Lie:
    """Offer a ring that `prepare` made, and answer item 0 by it."""

    def lie(channel: Channel, request: Request) -> None:
        ring = Ring(IMAGE_BYTES, 4 * 8192)
        try:
            channel.send(wire.pack_ring_offer(prepare(ring)), PACE)
            channel.receive(wire.HEAD_BYTES + wire.NONCE_BYTES, PACE)
            channel.send(answer(request, ring), PACE)
            channel.receive(1, PACE)
        except ChannelBroken:
            pass
        finally:
            ring.close()

    return lie


def ready(ring: Ring) -> RingOffer:
    ring.give_room()
    return ring.offer


def cut(ring: Ring) -> RingOffer:
    os.truncate(ring_path(ring.offer.name), 4096)
    return ring.offer


def as_pipe(ring: Ring) -> RingOffer:
    ring.remove_name()
    os.mkfifo(ring_path(ring.offer.name), 0o600)
    ring._path = ring_path(ring.offer.name)
    return ring.offer


def as_link(ring: Ring) -> RingOffer:
    ring.remove_name()
    ring_path(ring.offer.name).symlink_to("/etc/hostname")
    ring._path = ring_path(ring.offer.name)
    return ring.offer


def for_all(ring: Ring) -> RingOffer:
    ring_path(ring.offer.name).chmod(0o644)
    return ring.offer


def by_slot(slot: int) -> Answer:
    def answer(request: Request, _: Ring) -> bytes:
        image = image_of(request.keys[0])
        return wire.pack_item(Item(request.number, 0, DONE, len(image), xxhash.xxh3_128_digest(image), slot))

    return answer


@pytest.mark.parametrize(
    ("prepare", "answer", "end", "reason"),
    [
        (ready, by_slot(0), CORRUPT, "the checksum of an image differs"),
        (ready, by_slot(4), FAILED, "a slot that its ring does not have"),
        (cut, by_slot(0), FAILED, "the source's ring is shorter than it said"),
        (as_pipe, by_slot(0), FAILED, "a ring that was never opened"),
        (as_link, by_slot(0), FAILED, "a ring that was never opened"),
        (for_all, by_slot(0), FAILED, "a ring that was never opened"),
        (lambda ring: replace(ready(ring), slot_bytes=4096), by_slot(0), FAILED, "does not have"),
    ],
)
def test_a_ring_that_is_not_what_it_said_fails_what_is_open(
    prepare: Prepare, answer: Answer, end: TransferEnd, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with lying(ring_lie(prepare, answer)) as liar, Destination(host_key=HOST) as destination:
        assert destination.fetched(liar.port, hashes_of(2)) == [end, FAILED]
    assert reason in caplog.text


def test_an_offered_name_is_looked_for_in_shared_memory_alone(tmp_path: Path) -> None:
    name = b"/../etc/hostname"
    with socket.socket() as unused, pytest.raises(FileNotFoundError):
        RingInlet(Channel(unused), RingOffer(1, 4096, name), tmp_path)
    assert ring_path(name) == carriers.SHARED_MEMORY / f"quire-ring-{name.hex()}"


# ---------------------------------------------------------------- destinations that lie


@pytest.mark.parametrize(
    "reply",
    [
        RingReply(opened=True, nonce=bytes(32)),
        RingReply(opened=False, nonce=bytes(32)),
    ],
)
def test_who_cannot_say_what_stands_in_the_ring_gets_images_over_tcp(reply: RingReply) -> None:
    with serving(shared=HOST) as source, calling(source, HELLO + request_of(1)) as channel:
        channel.receive(wire.WELCOME_BYTES, PACE)
        assert isinstance(wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE))), RingOffer)
        channel.send(wire.pack_ring_reply(reply), PACE)
        item = wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE)))
        assert isinstance(item, Item)
        assert item.slot == wire.NO_SLOT
        assert bytes(channel.receive(IMAGE_BYTES, PACE)) == image_of(hashes_of(1)[0])
        assert source.served().refused.total() == 0


def test_strangers_are_offered_no_ring() -> None:
    request = wire.pack_request(Request(1, bytes(16), 1 << 40, hashes_of(1)))
    with serving(shared=HOST) as source, calling(source, HELLO + request) as channel:
        channel.receive(wire.WELCOME_BYTES, PACE)
        answer = wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE)))
        assert answer == wire.Refused(1, wire.Refusal.TOKEN)


def test_a_slot_that_is_given_back_twice_ends_the_connection() -> None:
    with serving(shared=HOST) as source, calling(source, HELLO + request_of(1)) as channel:
        channel.receive(wire.WELCOME_BYTES, PACE)
        offer = wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE)))
        assert isinstance(offer, RingOffer)
        inlet = RingInlet(channel, offer)
        channel.send(wire.pack_ring_reply(RingReply(opened=True, nonce=inlet.nonce)), PACE)
        item = wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE)))
        assert isinstance(item, Item)
        inlet.fetch_image(item, memoryview(bytearray(IMAGE_BYTES)), PACE)
        inlet.close()
        channel.send(wire.pack_taken(item.slot), PACE)
        assert ended(channel) == b""


def test_a_destination_that_takes_nothing_out_of_the_ring_is_put_out() -> None:
    bounds = ServerLimits(ring_bytes=2 * 8192, message_seconds=0.3)
    with serving(shared=HOST, bounds=bounds) as source, calling(source, HELLO + request_of(5)) as channel:
        channel.receive(wire.WELCOME_BYTES, PACE)
        offer = wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE)))
        assert isinstance(offer, RingOffer)
        inlet = RingInlet(channel, offer)
        channel.send(wire.pack_ring_reply(RingReply(opened=True, nonce=inlet.nonce)), PACE)
        inlet.close()
        assert len(ended(channel)) == 2 * wire.ANSWER_BYTES


def test_a_process_that_is_killed_leaves_no_ring_behind() -> None:
    before = left_behind()
    with SourceProcess() as process, Destination(host_key=HOST) as destination:
        assert destination.fetched(process.port, hashes_of(3)) == [DONE] * 3
        assert destination.client.fetched() == {"shm": 3}
        process.signal(signal.SIGKILL)
        process.wait()
        wait_until_gone(before)
