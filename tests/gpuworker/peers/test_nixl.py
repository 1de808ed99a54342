"""Images by NIXL: the double of the library in real agent processes, and the library itself where it is installed.

No environment of tests has the library. To run all of these: pip install --target DIR --no-deps nixl-cu12==1.5.1, with
DIR on PYTHONPATH.
"""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import xxhash

from common.contracts.errors import InvalidConfig
from common.contracts.transfers import TransferEnd
from gpuworker.peers import carriers, nixl, wire
from gpuworker.peers.carriers import host_key
from gpuworker.peers.channel import Channel, ChannelBroken, ChannelTimedOut
from gpuworker.peers.client import ClientLimits
from gpuworker.peers.nixl import (
    Extents,
    NixlStation,
    agent_environment,
    is_private,
    may_load_from,
    places_in_words,
    slots_for,
)
from gpuworker.peers.server import ServerLimits
from gpuworker.peers.wire import Hello, Item, NixlHead, NixlOffer, Request, RingReply
from tests.support.gpuworker.nixl import IS_INSTALLED, station, use_double
from tests.support.gpuworker.peers import (
    DESTINATION,
    HELD,
    IMAGE_BYTES,
    MISSING,
    SOURCE,
    STAGING_BYTES,
    Destination,
    SourceProcess,
    ends_of,
    hashes_of,
    image_of,
    serving,
)
from tests.support.gpuworker.raw_peers import PACE, Lie, calling, ended, lying, request_of
from tests.support.waiting import wait_until

DONE, CORRUPT, FAILED, STALE = TransferEnd.DONE, TransferEnd.CORRUPT, TransferEnd.FAILED, TransferEnd.STALE
HELLO = wire.pack_hello(Hello(DESTINATION, SOURCE.worker_id, SOURCE.incarnation, takes_nixl=True))
SLOT = 8192
NAME = b"agent of a peer."
FAR = replace(DESTINATION, worker_id="worker-e")


def children_of(process: SourceProcess) -> list[int]:
    return [each.pid for each in psutil.Process(process.pid).children()]


# ---------------------------------------------------------------- what decides


def test_the_first_extent_that_is_large_enough_is_taken_and_neighbours_become_one() -> None:
    extents = Extents(100, 50)
    assert [extents.take(size) for size in (20, 20, 20, 10, 1)] == [100, 120, None, 140, None]
    extents.give_back(100, 20)
    extents.give_back(140, 10)
    assert (extents.take(30), extents.take(15), extents.take(5)) == (None, 100, 115)
    for place in ((120, 20), (100, 15), (115, 5)):
        extents.give_back(*place)
    assert (extents.take(51), extents.take(50)) == (None, 100)


@pytest.mark.parametrize(
    ("image_bytes", "slots"),
    [(1, (16, 4096)), (4097, (16, 8192)), (2 << 20, (4, 2 << 20)), (64 << 20, (2, 64 << 20))],
)
def test_slots_of_a_connection_are_bounded(image_bytes: int, slots: tuple[int, int]) -> None:
    assert slots_for(image_bytes) == slots


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "10.1.2.3", "172.31.0.1", "192.168.0.9", "fd00::1", "fe80::1%eth0", "100.64.0.1",
             "::ffff:10.0.0.1"]
)  # fmt: skip
def test_private_places(host: str) -> None:
    assert is_private(host)


@pytest.mark.parametrize(
    "host", ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2600::1", "0.0.0.0", "::", "::ffff:8.8.8.8", "224.0.0.1",
             "worker-1", ""]
)  # fmt: skip
def test_places_that_are_not_private(host: str) -> None:
    assert not is_private(host)


@pytest.mark.parametrize(
    ("host", "secure", "may"),
    [
        ("127.0.0.1", False, True),
        ("::ffff:127.0.0.1", False, True),
        ("10.0.0.1", False, False),
        ("10.0.0.1", True, True),
        ("8.8.8.8", True, False),
        ("", True, False),
    ],
)
def test_agents_are_loaded_of_those_alone_who_have_proven_who_they_are(host: str, secure: bool, may: bool) -> None:
    assert may_load_from(host, secure) == may


def test_who_listens_at_any_address_listens_at_those_of_all_interfaces() -> None:
    with socket.create_server(("0.0.0.0", 0)):
        found = set(nixl.listening_places(os.getpid()))
    assert "127.0.0.1" in found
    assert "0.0.0.0" not in found


def test_public_places_are_named_with_what_to_do() -> None:
    assert places_in_words(["127.0.0.1", "10.0.0.1"]) == ""
    assert places_in_words(["8.8.8.8", "10.0.0.1", "2600::1", "8.8.8.8"]) == (
        "NIXL listens at 2600::1, 8.8.8.8, and who reaches it can write what peers read; expected loopback and private "
        "networks alone: name their interfaces in UCX_NET_DEVICES, such as UCX_NET_DEVICES=eth1"
    )


def test_an_agent_gets_no_secret_and_no_gpu() -> None:
    given = {"PATH": "p", "UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "1", "QUIRE_POOL_KEY": "s", "AWS_SECRET_ACCESS_KEY": "s"}
    assert agent_environment(given) == {
        "PATH": "p", "UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "1", "CUDA_VISIBLE_DEVICES": ""
    }  # fmt: skip


# ---------------------------------------------------------------- agents in processes of their own


@pytest.fixture(
    params=["double", pytest.param("library", marks=pytest.mark.skipif(not IS_INSTALLED, reason="not installed"))]
)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "double":
        use_double(monkeypatch)
    return str(request.param)


@pytest.fixture
def pair(library: str) -> Iterator[tuple[NixlStation, NixlStation]]:
    with station() as source, station() as destination:
        yield source, destination


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    use_double(monkeypatch)


def test_images_come_by_nixl(pair: tuple[NixlStation, NixlStation]) -> None:
    with serving(nixl=pair[0]) as source, Destination(nixl=pair[1]) as destination:
        wanted = hashes_of(100) + hashes_of(3, MISSING)
        for _ in range(2):
            assert destination.fetched(source.port, wanted) == [DONE] * 100 + [STALE] * 3
        assert destination.client.fetched() == {"nixl": 200}
        served = wait_until(source.served, lambda found: found.images["nixl"] == 200)
        assert served.bytes == {"nixl": 200 * IMAGE_BYTES}
    # All of the staging memory is free again.
    half = STAGING_BYTES // 2
    wait_until(lambda: pair[0]._serving._free == [(0, half)])
    assert pair[1]._fetching._free == [(half, half)]


def test_shared_memory_comes_before_nixl(pair: tuple[NixlStation, NixlStation]) -> None:
    with serving(nixl=pair[0], shared=host_key()) as source:
        with Destination(nixl=pair[1], host_key=host_key()) as near:
            assert near.fetched(source.port, hashes_of(3)) == [DONE] * 3
            assert near.client.fetched() == {"shm": 3}
        with Destination(FAR, nixl=pair[1], host_key=b"another host key") as far:
            assert far.fetched(source.port, hashes_of(3)) == [DONE] * 3
            assert far.client.fetched() == {"nixl": 3}


def test_an_agent_is_known_until_the_last_connection_to_it_ends(pair: tuple[NixlStation, NixlStation]) -> None:
    with serving(nixl=pair[0]) as source, Destination(nixl=pair[1]) as one:
        assert one.fetched(source.port, hashes_of(1)) == [DONE]
        with Destination(FAR, nixl=pair[1]) as other:
            assert other.fetched(source.port, hashes_of(1)) == [DONE]
        assert one.fetched(source.port, hashes_of(3)) == [DONE] * 3
        assert one.client.fetched() == {"nixl": 4}


@pytest.mark.parametrize("has", [(True, False), (False, True)], ids=["source", "destination"])
def test_a_peer_without_it_gets_and_gives_images_over_tcp(has: tuple[bool, bool], double: None) -> None:
    with station() as own:
        ours, theirs = (own if each else None for each in has)
        with serving(nixl=ours) as source, Destination(nixl=theirs) as destination:
            assert destination.fetched(source.port, hashes_of(3)) == [DONE] * 3
            assert destination.client.fetched() == {"tcp": 3}


def test_an_agent_that_is_killed_ends_no_worker_and_stays_ended(
    pair: tuple[NixlStation, NixlStation], caplog: pytest.LogCaptureFixture
) -> None:
    for killed in (1, 0):
        with serving(nixl=pair[0]) as source, Destination(nixl=pair[1]) as destination:
            if killed == 1:
                assert destination.fetched(source.port, hashes_of(3)) == [DONE] * 3
            os.kill(pair[killed].process_id, signal.SIGKILL)
            wait_until(lambda: not pair[killed].works)  # noqa: B023
            assert destination.fetched(source.port, hashes_of(5)) == [DONE] * 5
            assert destination.client.fetched()["tcp"] == 5
    lines = [record.getMessage() for record in caplog.records if "the process of NIXL ended" in record.getMessage()]
    assert lines == ["the process of NIXL ended (Killed): blocks go over TCP until this worker is started again"] * 2


def test_the_agent_ends_with_its_worker(library: str) -> None:
    with SourceProcess(nixl=True) as process:
        [agent] = children_of(process)
        process.signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not Path(f"/proc/{agent}").exists())


# ---------------------------------------------------------------- starts that fail


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        ("plugin", "is nixl, and its plugin for UCX is missing; without RDMA leave the option out"),
        ("backend", r"cannot make an agent with UCX \(BackendError: NIXL_ERR_BACKEND\); what UCX logged says why"),
    ],
)
def test_what_the_library_lacks_is_said(lacks: str, why: str, double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_DOUBLE_LACKS", lacks)
    with pytest.raises(InvalidConfig, match=why):
        NixlStation(STAGING_BYTES)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("raise ImportError('libucp.so.0')", r"cannot be imported \(libucp.so.0\); pip install 'quire-llm\[nixl\]'"),
        ("import os; os.abort()", r"its process ended at once \(Aborted\)"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_said(
    module: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(InvalidConfig, match=why):
        NixlStation(STAGING_BYTES)


def test_an_agent_that_listens_on_a_public_network_is_ended(double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[int]()

    def places(process_id: int) -> list[str]:
        found.append(process_id)
        return ["10.0.0.1", "8.8.8.8"]

    monkeypatch.setattr(nixl, "listening_places", places)
    with pytest.raises(InvalidConfig, match=r"NIXL listens at 8\.8\.8\.8, and who reaches it"):
        NixlStation(STAGING_BYTES)
    assert not Path(f"/proc/{found[0]}").exists()


def test_where_the_library_listens(library: str) -> None:
    with station() as own:
        found = set(nixl.listening_places(own.process_id))
        assert all(map(is_private, found))
        assert (library == "double") == (not found)


# ---------------------------------------------------------------- reads that do not end


def test_a_read_that_takes_too_long_keeps_its_place_until_it_is_over(
    double: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    monkeypatch.setenv("NIXL_DOUBLE_HOLD", str(held))
    with station() as ours, station(6 * SLOT) as theirs:
        slots = ours.open_slots(IMAGE_BYTES)
        assert slots is not None
        slots.write_image(0, memoryview(b"first").cast("B"))
        theirs.load(slots.offer, 60.0)
        target = memoryview(bytearray(5))
        held.touch()
        for _ in range(3):
            with pytest.raises(ChannelTimedOut, match=r"NIXL brought nothing in 0\.05 s"):
                theirs.read_into(target, slots.offer.name, slots.offer.address, 0.05)
        assert theirs._fetching._free == [(3 * SLOT + 3 * 4096, 3 * 4096)]
        for _ in range(3):
            with pytest.raises(ChannelTimedOut):
                theirs.read_into(target, slots.offer.name, slots.offer.address, 0.05)
        with pytest.raises(ChannelBroken, match="all staging memory for reads by NIXL is in use"):
            theirs.read_into(target, slots.offer.name, slots.offer.address, 60.0)
        # What the reads write when they go on lies where nobody else reads: their places are theirs until then.
        theirs.forget(slots.offer.name)
        held.unlink()
        wait_until(lambda: theirs._fetching._free == [(3 * SLOT, 3 * SLOT)])
        with pytest.raises(ChannelBroken, match="NIXL could not read"):
            theirs.read_into(target, slots.offer.name, slots.offer.address, 60.0)
        assert bytes(target) == bytes(5)


def test_an_agent_that_is_known_too_late_is_forgotten(pair: tuple[NixlStation, NixlStation]) -> None:
    ours, theirs = pair
    slots = ours.open_slots(IMAGE_BYTES)
    assert slots is not None
    os.kill(theirs.process_id, signal.SIGSTOP)
    with pytest.raises(ChannelTimedOut):
        theirs.load(slots.offer, 0.05)
    os.kill(theirs.process_id, signal.SIGCONT)

    def is_known() -> bool:
        try:
            theirs.read_into(memoryview(bytearray(5)), slots.offer.name, slots.offer.address, 60.0)
        except ChannelBroken:
            return False
        return True

    wait_until(lambda: not theirs._asked)
    wait_until(lambda: not is_known())


def test_what_an_agent_says_of_its_end_is_one_line() -> None:
    assert nixl._text_of(b"\2no\nERROR forged\x1b[0m\xff") == "no ERROR forged [0m\N{REPLACEMENT CHARACTER}"


def test_a_source_that_nixl_does_not_reach_is_asked_over_tcp_from_then_on(
    double: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    monkeypatch.setenv("NIXL_DOUBLE_HOLD", str(held))
    bounds = ClientLimits(shunned_seconds=0.01)
    with station() as ours, station() as theirs:
        with serving(nixl=ours) as source, Destination(bounds=bounds, nixl=theirs) as destination:
            held.touch()
            assert destination.fetched(source.port, hashes_of(3), patience=0.3) == [FAILED] * 3
            while (again := destination.fetched(source.port, hashes_of(3))) != [DONE] * 3:
                assert again == [FAILED] * 3  # not asked yet
            assert destination.client.fetched() == {"tcp": 3}
            held.unlink()
            assert destination.fetched(source.port, hashes_of(3)) == [DONE] * 3
            assert destination.client.fetched() == {"tcp": 6}
        wait_until(lambda: theirs._fetching._free == [(STAGING_BYTES // 2, STAGING_BYTES // 2)])


def test_a_source_that_is_killed_amid_reads(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = tmp_path / "held"
    monkeypatch.setenv("NIXL_DOUBLE_HOLD", str(held))
    # Of the library's ways between processes of one host, only TCP needs the other one, which is stopped.
    monkeypatch.setenv("UCX_TLS", "tcp")
    with SourceProcess(nixl=True) as process, station() as theirs, serving() as other, Destination(nixl=theirs) as d:
        assert d.fetched(process.port, hashes_of(3)) == [DONE] * 3
        assert d.client.fetched() == {"nixl": 3}
        held.touch()
        [agent] = children_of(process)
        os.kill(agent, signal.SIGSTOP)
        d.fetch(process.port, hashes_of(3))
        wait_until(lambda: bool(theirs._asked))
        process.signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not Path(f"/proc/{agent}").exists())
        held.unlink()
        assert ends_of(d.landed(3)) == [FAILED] * 3
        wait_until(lambda: theirs._fetching._free == [(STAGING_BYTES // 2, STAGING_BYTES // 2)])
        assert theirs.works
        assert d.fetched(other.port, hashes_of(3)) == [DONE] * 3


def test_a_source_that_stands_still_ends_by_patience(library: str) -> None:
    bounds = ClientLimits(shunned_seconds=0.01)
    with SourceProcess(nixl=True) as process, station() as theirs, Destination(bounds=bounds, nixl=theirs) as d:
        assert d.fetched(process.port, hashes_of(3)) == [DONE] * 3
        wanted = hashes_of(3) + hashes_of(2, HELD)
        d.fetch(process.port, wanted, patience=1.0)
        process.signal(signal.SIGSTOP)
        assert ends_of(d.landed(5))[3:] == [FAILED] * 2
        process.signal(signal.SIGCONT)
        process.release()
        while (again := d.fetched(process.port, wanted)) != [DONE] * 5:
            assert again == [FAILED] * 5  # not asked yet
        assert set(d.client.fetched()) == {"nixl"}


def test_all_staging_memory_for_peers_is_bounded(double: None, caplog: pytest.LogCaptureFixture) -> None:
    with station(2 * 20 * SLOT) as ours, station() as theirs, serving(nixl=ours) as source, ExitStack() as stack:
        one, other = (stack.enter_context(Destination(who, nixl=theirs)) for who in (DESTINATION, FAR))
        assert one.fetched(source.port, hashes_of(3)) == [DONE] * 3
        assert other.fetched(source.port, hashes_of(3)) == [DONE] * 3
        assert (one.client.fetched(), other.client.fetched()) == ({"nixl": 3}, {"tcp": 3})
    assert "all staging memory of NIXL is in use: blocks for further workers go over TCP" in caplog.text


# ---------------------------------------------------------------- bytes that are not what they should be


def test_staging_that_changes_before_the_copy_is_never_served(
    pair: tuple[NixlStation, NixlStation], monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(file: int, target: memoryview, at: int) -> None:
        os.pwrite(file, b"torn", at + IMAGE_BYTES - 4)
        carriers.read_whole(file, target, at)

    monkeypatch.setattr(nixl, "read_whole", torn)
    with serving(nixl=pair[0]) as source, Destination(nixl=pair[1]) as destination:
        assert destination.fetched(source.port, hashes_of(3)) == [CORRUPT, FAILED, FAILED]
        # Whoever can write there may go on with it, so the source is asked over TCP.
        assert destination.fetched(source.port, hashes_of(3)) == [DONE] * 3
        assert destination.client.fetched() == {"tcp": 3}


def test_staging_that_changes_behind_the_copy_changes_nothing(
    pair: tuple[NixlStation, NixlStation], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(file: int, target: memoryview, at: int) -> None:
        carriers.read_whole(file, target, at)
        os.pwrite(file, bytes(IMAGE_BYTES), at)

    monkeypatch.setattr(nixl, "read_whole", copied)
    with serving(nixl=pair[0]) as source, Destination(nixl=pair[1]) as destination:
        # `fetched` compares every image.
        assert destination.fetched(source.port, hashes_of(3)) == [DONE] * 3
        assert destination.client.fetched() == {"nixl": 3}


def offering(offer: Callable[[], NixlOffer], slot: int = 0) -> tuple[Lie, list[bytes]]:
    """Return a source that offers this, and answers item 0 by a slot, or in the connection; and the replies to it."""
    replies = list[bytes]()

    def lie(channel: Channel, request: Request) -> None:
        channel.send(wire.pack_nixl_offer(offer()), PACE)
        reply = bytes(channel.receive(wire.HEAD_BYTES + wire.NONCE_BYTES, PACE))
        replies.append(reply)
        image = image_of(request.keys[0])
        item = Item(request.number, 0, DONE, len(image), xxhash.xxh3_128_digest(image))
        opened = reply[1]
        channel.send(wire.pack_item(replace(item, slot=slot) if opened else item) + (b"" if opened else image), PACE)
        channel.receive(1, PACE)

    return lie, replies


def test_metadata_that_the_library_cannot_read_bring_images_over_tcp(
    library: str, caplog: pytest.LogCaptureFixture
) -> None:
    lie, replies = offering(lambda: NixlOffer(4, SLOT, NAME, 1 << 40, b"no metadata"))
    with station() as theirs, lying(lie) as liar, Destination(nixl=theirs) as destination:
        assert destination.fetched(liar.port, hashes_of(1)) == [DONE]
        assert destination.client.fetched() == {"tcp": 1}
        assert theirs.works
    assert [reply[1] for reply in replies] == [0]
    assert "NIXL cannot use what the source says of its agent" in caplog.text


def test_metadata_that_abort_the_library_end_the_agent_alone(double: None, caplog: pytest.LogCaptureFixture) -> None:
    lie, _ = offering(lambda: NixlOffer(4, SLOT, NAME, 1 << 40, b"abort"))
    with station() as theirs, lying(lie) as liar, serving() as other, Destination(nixl=theirs) as destination:
        assert destination.fetched(liar.port, hashes_of(1)) == [DONE]
        assert destination.fetched(other.port, hashes_of(2)) == [DONE] * 2
        assert destination.client.fetched() == {"tcp": 3}
        assert not theirs.works
    assert "the process of NIXL ended (Aborted)" in caplog.text


@pytest.mark.parametrize("seed", range(6))
def test_changed_metadata_of_a_real_agent_end_no_worker(seed: int, library: str) -> None:
    draw = random.Random(seed)
    with station() as ours, station() as theirs:

        def changed() -> NixlOffer:
            metadata = bytearray(ours.metadata)
            for _ in range(draw.randrange(1, 6)):
                metadata[draw.randrange(len(metadata))] = draw.randrange(256)
            return NixlOffer(4, SLOT, ours.name, ours.address, bytes(metadata))

        lie, _ = offering(changed)
        with serving(nixl=ours) as other:
            for _ in range(20):
                with lying(lie) as liar, Destination(nixl=theirs) as destination:
                    destination.fetch(liar.port, hashes_of(1), patience=2.0)
                    # Zeros of the staging memory are not the image.
                    assert ends_of(destination.landed(1)) in ([DONE], [CORRUPT], [FAILED])
            with Destination(nixl=theirs) as destination:
                assert destination.fetched(other.port, hashes_of(2)) in ([DONE] * 2, [FAILED] * 2)


def test_metadata_of_another_agent_than_is_named_end_the_carrier(
    double: None, caplog: pytest.LogCaptureFixture
) -> None:
    with station() as ours, station() as theirs:
        lie, _ = offering(lambda: NixlOffer(4, SLOT, NAME, ours.address, ours.metadata))
        with lying(lie) as liar, Destination(nixl=theirs) as destination:
            assert destination.fetched(liar.port, hashes_of(1)) == [DONE]
            assert destination.client.fetched() == {"tcp": 1}
    assert "(a peer sent metadata of another agent than it named): blocks go over TCP" in caplog.text


@pytest.mark.parametrize(
    ("slot", "changed", "end", "why"),
    [
        (0, {}, CORRUPT, "the checksum of an image differs"),
        (4, {}, FAILED, "a slot that it does not have"),
        (0, {"slot_bytes": 4096}, FAILED, "a slot that it does not have"),
        (0, {"address": 1 << 40}, FAILED, "NIXL could not read the source's staging memory"),
        (0, {"address": (1 << 64) - 1}, FAILED, "4 slots of 8192 bytes behind the end of all memory"),
    ],
)
def test_slots_that_are_not_what_the_source_said(
    slot: int, changed: dict[str, int], end: TransferEnd, why: str, library: str, caplog: pytest.LogCaptureFixture
) -> None:
    with station() as ours, station() as theirs:
        right = NixlOffer(4, SLOT, ours.name, ours.address, ours.metadata)
        lie, _ = offering(lambda: replace(right, **changed), slot)  # type: ignore[arg-type]
        with lying(lie) as liar, Destination(nixl=theirs) as destination:
            assert destination.fetched(liar.port, hashes_of(2)) == [end, FAILED]
    assert why in caplog.text


def test_an_offer_that_was_not_asked_for_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    lie, _ = offering(lambda: NixlOffer(4, SLOT, NAME, 1 << 40, b"metadata"))
    with lying(lie) as liar, Destination() as destination:
        assert destination.fetched(liar.port, hashes_of(1)) == [FAILED]
    assert "a ring that was not asked for" in caplog.text


# ---------------------------------------------------------------- destinations that lie


def test_strangers_are_offered_nothing(double: None) -> None:
    request = wire.pack_request(Request(1, bytes(16), 1 << 40, hashes_of(1)))
    with station() as ours, serving(nixl=ours) as source, calling(source, HELLO + request) as channel:
        channel.receive(wire.WELCOME_BYTES, PACE)
        answer = wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE)))
        assert answer == wire.Refused(1, wire.Refusal.TOKEN)


def test_who_cannot_use_the_offer_gets_images_over_tcp(double: None) -> None:
    with station() as ours, serving(nixl=ours) as source, calling(source, HELLO + request_of(1)) as channel:
        channel.receive(wire.WELCOME_BYTES, PACE)
        head = wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE)))
        assert isinstance(head, NixlHead)
        offer = wire.unpack_nixl_offer(head, bytes(channel.receive(head.tail_bytes, PACE)))
        assert offer == NixlOffer(16, SLOT, ours.name, ours.address, ours.metadata)
        channel.send(wire.pack_ring_reply(RingReply(opened=False, nonce=b"")), PACE)
        item = wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE)))
        assert isinstance(item, Item)
        assert item.slot == wire.NO_SLOT
        assert bytes(channel.receive(IMAGE_BYTES, PACE)) == image_of(hashes_of(1)[0])
        assert ours._serving._free == [(0, STAGING_BYTES // 2)]


def test_a_destination_that_gives_no_slot_back_is_put_out(double: None) -> None:
    bounds = ServerLimits(message_seconds=0.3)
    with station() as ours, serving(nixl=ours, bounds=bounds) as source:
        with calling(source, HELLO + request_of(20)) as channel:
            channel.receive(wire.WELCOME_BYTES, PACE)
            head = wire.unpack_answer(bytes(channel.receive(wire.ANSWER_BYTES, PACE)))
            assert isinstance(head, NixlHead)
            channel.receive(head.tail_bytes, PACE)
            channel.send(wire.pack_ring_reply(RingReply(opened=True, nonce=b"")), PACE)
            assert len(ended(channel)) == 16 * wire.ANSWER_BYTES
        wait_until(lambda: ours._serving._free == [(0, STAGING_BYTES // 2)])
