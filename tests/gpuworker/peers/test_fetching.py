"""A worker fetches blocks from another over loopback: what lands, what is a miss, and who is refused."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from common.contracts.errors import InvalidConfig
from common.contracts.transfer_tokens import TokenScope, make_token, serve_key_of
from common.contracts.transfers import ImageName, Medium, Place, Transfer, TransferEnd
from common.contracts.types import BlockHash, FrameId
from gpuworker.peers import client
from gpuworker.peers.client import ClientLimits
from gpuworker.peers.server import Deliver, PeerServer, ServerLimits, listen
from gpuworker.peers.wire import PeerIdentity
from tests.support.gpuworker.peers import (
    DESTINATION,
    IMAGE_BYTES,
    MISSING,
    PATIENCE,
    SERVE_KEY,
    SOURCE,
    Destination,
    Holding,
    answer_images,
    hashes_of,
    image_of,
    serving,
)
from tests.support.waiting import wait_until

DONE, STALE, FAILED = TransferEnd.DONE, TransferEnd.STALE, TransferEnd.FAILED


def test_every_block_lands_once_with_its_image() -> None:
    with serving() as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(40)) == [DONE] * 40
        assert destination.client.poll() == []
        assert destination.client.fetched() == {"tcp": 40}
        served = wait_until(server.served, lambda found: found.images["tcp"] == 40)
        assert (served.bytes, served.stale) == ({"tcp": 40 * IMAGE_BYTES}, 0)


def test_what_the_source_does_not_have_is_stale() -> None:
    wanted = hashes_of(2) + hashes_of(2, MISSING) + hashes_of(1)
    with serving() as server, Destination() as destination:
        assert destination.fetched(server.port, wanted) == [DONE, DONE, STALE, STALE, DONE]
        wait_until(lambda: server.served().stale, lambda count: count == 2)


def test_a_fetch_of_nothing_asks_nobody() -> None:
    with Destination() as destination:
        destination.fetch(1, ())
        assert destination.client._fetchers == {}
        assert destination.client.poll() == []


def test_the_most_blocks_of_a_request_come_and_one_more_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(512)) == [DONE] * 512
        assert destination.fetched(server.port, hashes_of(513)) == [FAILED] * 513
    assert "513 contents of 513 images in one fetch; expected at most 512, of 8192 images" in caplog.text


def test_one_connection_serves_one_fetch_after_the_other() -> None:
    with serving() as server, Destination() as destination:
        for _ in range(3):
            destination.fetch(server.port, hashes_of(5))
        assert [moved.end for moved in destination.landed(15)] == [DONE] * 15
        assert server.connections() == (1, 0)


def test_an_unused_connection_closes_and_the_next_fetch_opens_another() -> None:
    with serving() as server, Destination(bounds=ClientLimits(idle_seconds=0.01)) as destination:
        assert destination.fetched(server.port, hashes_of(1)) == [DONE]
        wait_until(server.connections, lambda found: found == (0, 0))
        assert destination.fetched(server.port, hashes_of(1)) == [DONE]


def test_a_connection_that_the_source_closed_is_opened_anew() -> None:
    with serving(bounds=ServerLimits(idle_seconds=0.01)) as server, Destination() as destination:
        for _ in range(3):
            assert destination.fetched(server.port, hashes_of(2)) == [DONE, DONE]
            wait_until(server.connections, lambda found: found == (0, 0))


def test_the_engine_may_answer_in_any_parts_and_on_any_thread() -> None:
    def take_images(hashes: Sequence[ImageName], deliver: Deliver) -> None:
        def answer() -> None:
            rest = list(hashes)
            for size in (1, 0, 3, 2, len(rest)):
                part, rest = rest[:size], rest[size:]
                deliver([memoryview(bytearray(image_of(each.key))) for each in part])

        threading.Thread(target=answer).start()

    with serving(take_images) as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(30)) == [DONE] * 30


def test_the_engine_is_asked_for_no_more_at_once_than_may_be_staged() -> None:
    asked = list[int]()

    def take_images(hashes: Sequence[ImageName], deliver: Deliver) -> None:
        asked.append(len(hashes))
        answer_images(hashes, deliver)

    bounds = ServerLimits(asked_bytes=4 * IMAGE_BYTES + 1, staged_bytes=6 * IMAGE_BYTES)
    with serving(take_images, bounds=bounds) as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(10)) == [DONE] * 10
    assert asked == [4, 4, 2]


def test_an_image_larger_than_the_memory_for_images_is_served_alone() -> None:
    bounds = ServerLimits(asked_bytes=1, staged_bytes=1, staged_bytes_a_worker=1)
    with serving(bounds=bounds) as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(3)) == [DONE] * 3


def test_an_engine_that_gives_a_wrong_length_serves_nothing_of_it() -> None:
    def take_images(hashes: Sequence[ImageName], deliver: Deliver) -> None:
        deliver([b"short" if at == 1 else image_of(each.key) for at, each in enumerate(hashes)])

    with serving(take_images) as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(3)) == [DONE, FAILED, DONE]


def test_an_engine_that_answers_nothing_ends_the_connection_and_the_moves() -> None:
    bounds = ServerLimits(take_seconds=0.05)
    with serving(lambda _, __: None, bounds=bounds) as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(3)) == [FAILED] * 3
        wait_until(server.connections, lambda found: found == (0, 0))


# ---------------------------------------------------------------- who is refused


@pytest.mark.parametrize(
    ("who", "changed", "reason"),
    [
        (replace(DESTINATION, image_format=b"another format.."), {}, "its blocks have another format"),
        (replace(DESTINATION, image_bytes=IMAGE_BYTES + 1), {}, "its blocks have another format"),
        (DESTINATION, {"worker_id": "worker-t"}, "another worker listens at the address"),
        (DESTINATION, {"public_incarnation": b"an earlier one.."}, "the source has begun anew"),
        (DESTINATION, {"token": bytes(16)}, "the token does not hold"),
        (DESTINATION, {"expires": 5}, "the token does not hold"),
        (DESTINATION, {"key": serve_key_of(b"another pool", SOURCE.incarnation)}, "the token does not hold"),
    ],
)
def test_a_fetch_that_is_not_for_this_source_is_refused_with_the_reason(
    who: PeerIdentity, changed: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[BlockHash]()

    def take_images(hashes: Sequence[ImageName], deliver: Deliver) -> None:
        asked.extend([each.key for each in hashes])
        answer_images(hashes, deliver)

    with serving(take_images) as server, Destination(who) as destination:
        assert destination.fetched(server.port, hashes_of(2), **changed) == [FAILED] * 2
        wait_until(server.connections, lambda found: found == (0, 0))
        assert server.served().refused.total() == 1
    assert reason in caplog.text
    assert asked == []


def test_a_token_of_another_worker_does_not_hold() -> None:
    other = replace(DESTINATION, worker_id="worker-e")
    with serving() as server, Destination() as robbed, Destination(other) as thief:
        stolen = robbed.source(server.port, hashes_of(2))
        assert thief.fetched(server.port, hashes_of(2), token=stolen.token, expires=stolen.expires) == [FAILED] * 2
        assert robbed.fetched(server.port, hashes_of(2)) == [DONE] * 2
        # It holds for its list of blocks alone.
        assert robbed.fetched(server.port, hashes_of(3), token=stolen.token, expires=stolen.expires) == [FAILED] * 3


def test_a_token_that_has_expired_is_refused_in_words(caplog: pytest.LogCaptureFixture) -> None:
    wanted, expires = hashes_of(1), int(time.time()) - 301
    scope = TokenScope(DESTINATION.worker_id, DESTINATION.incarnation, SOURCE.incarnation, expires, wanted)
    with serving() as server, Destination() as destination:
        found = destination.fetched(server.port, wanted, token=make_token(SERVE_KEY, scope), expires=expires)
        assert found == [FAILED]
    assert "the token has expired" in caplog.text


def test_a_source_that_begins_anew_refuses_what_was_made_for_it_before() -> None:
    now = [SOURCE]
    listener = listen("127.0.0.1", 0, secure=False)
    server = PeerServer(listener, lambda: now[0], answer_images, lambda: [SERVE_KEY])
    with Destination() as destination:
        assert destination.fetched(server.port, hashes_of(1)) == [DONE]
        now[0] = replace(SOURCE, incarnation=b"the next life ..")
        assert destination.fetched(server.port, hashes_of(1)) == [FAILED]
    server.close()


def test_a_destination_that_begins_anew_says_hello_again() -> None:
    with serving() as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(1)) == [DONE]
        destination.who = replace(DESTINATION, incarnation=b"the next life ..")
        assert destination.fetched(server.port, hashes_of(1)) == [DONE]


def test_a_reason_stands_in_the_log_once_until_a_fetch_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> int:
        return sum("blocks did not come from worker-s" in record.getMessage() for record in caplog.records)

    with serving() as server, Destination() as destination, caplog.at_level(logging.WARNING):
        for _ in range(3):
            destination.fetched(server.port, hashes_of(2), token=bytes(16))
        assert lines() == 1
        destination.fetched(server.port, hashes_of(2))
        destination.fetched(server.port, hashes_of(2), token=bytes(16))
        assert lines() == 2


# ---------------------------------------------------------------- where nobody is


def test_nobody_at_the_address_is_a_failure() -> None:
    with serving() as server:
        port = server.port
    with Destination() as destination:
        assert destination.fetched(port, hashes_of(2)) == [FAILED] * 2


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "127.0.0.1:none", "[::1", "a.b.invalid:1", "\u00fc" * 70 + ".x:1"]
)
def test_an_address_that_is_none_is_a_failure(address: str) -> None:
    with Destination() as destination:
        assert destination.fetched(0, hashes_of(1), address=address) == [FAILED]


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "worker.example", "::"])
def test_beyond_loopback_a_port_needs_tls(host: str) -> None:
    with pytest.raises(InvalidConfig, match="beyond loopback"):
        listen(host, 0, secure=False)


def test_beyond_loopback_no_source_is_asked_without_tls(caplog: pytest.LogCaptureFixture) -> None:
    with Destination() as destination:
        assert destination.fetched(0, hashes_of(1), address="192.0.2.1:9") == [FAILED]
    assert "it is beyond loopback, and this worker has no TLS" in caplog.text


def test_who_must_listen_in_plain_text_says_so() -> None:
    with listen("0.0.0.0", 0, secure=False, insecure=True) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_port_that_is_taken_is_named() -> None:
    with serving() as server, pytest.raises(InvalidConfig, match=f"127.0.0.1:{server.port}"):
        listen("127.0.0.1", server.port, secure=False)


# ---------------------------------------------------------------- the end of a destination


def functions_of(prefix: str) -> set[str]:
    """Return the functions in which the thread is whose name begins so."""
    frames = sys._current_frames()
    found = [frames.get(each.ident or 0) for each in threading.enumerate() if each.name.startswith(prefix)]
    return {frame.f_code.co_name for first in found if first is not None for frame, _ in traceback.walk_stack(first)}


def test_the_end_fails_what_is_open_and_what_comes_later() -> None:
    holding = Holding()
    with serving(holding.take_images) as server:
        destination = Destination()
        destination.fetch(server.port, hashes_of(2) + hashes_of(2, b"+"))
        assert [moved.end for moved in destination.landed(2)] == [DONE, DONE]
        destination.client.close()
        assert [moved.end for moved in destination.landed(2)] == [FAILED, FAILED]
        assert destination.fetched(server.port, hashes_of(2)) == [FAILED, FAILED]
        holding.released.set()


def test_images_that_nobody_takes_are_bounded() -> None:
    bounds = ClientLimits(landed_bytes=3 * IMAGE_BYTES)
    with serving() as server, Destination(bounds=bounds) as destination:
        destination.fetch(server.port, hashes_of(40))
        wait_until(lambda: "await_room" in functions_of("peer-fetch-"))
        assert destination.client.fetched() == {"tcp": 4}
        # What fails at once fails without a wait: this thread is the one that takes images.
        destination.fetch(server.port, hashes_of(513))
        assert len(destination.landed(40 + 513)) == 40 + 513
        assert destination.client.fetched() == {"tcp": 40}


def test_sources_beyond_the_bound_are_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as one, serving() as other, Destination(bounds=ClientLimits(sources=1)) as destination:
        assert destination.fetched(one.port, hashes_of(1)) == [DONE]
        assert destination.fetched(other.port, hashes_of(1)) == [FAILED]
    assert "1 other sources are asked at present" in caplog.text


def test_whatever_fails_here_each_move_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    with serving() as server, Destination() as destination:
        monkeypatch.setattr(client, "inlet_for", no_memory)
        assert destination.fetched(server.port, hashes_of(3)) == [FAILED] * 3
        monkeypatch.undo()
        assert destination.fetched(server.port, hashes_of(3)) == [DONE] * 3
    assert "a fetch from worker-s failed" in caplog.text


def test_an_engine_that_raises_ends_its_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    def take_images(hashes: Sequence[ImageName], deliver: Deliver) -> None:
        if hashes[0].key.startswith(MISSING):
            raise ValueError("a mistake of the engine")
        answer_images(hashes, deliver)

    with serving(take_images) as server, Destination() as destination:
        assert destination.fetched(server.port, hashes_of(3, MISSING)) == [FAILED] * 3
        assert destination.fetched(server.port, hashes_of(3)) == [DONE] * 3
    assert "a mistake of the engine" in caplog.text


def test_without_a_thread_the_moves_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving() as server, Destination() as destination:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            assert destination.fetched(server.port, hashes_of(3)) == [FAILED] * 3
        assert destination.fetched(server.port, hashes_of(3)) == [DONE] * 3


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost", "127.0.0.1"])
def test_a_port_is_found_under_each_way_to_write_its_host(host: str) -> None:
    server = PeerServer(listen(host, 0, secure=False), lambda: SOURCE, answer_images, lambda: [SERVE_KEY])
    shown = f"[{host}]" if host == "::1" else host
    with Destination() as destination:
        found = destination.fetched(server.port, hashes_of(2), address=f"{shown}:{server.port}")
    server.close()
    assert found == [DONE, DONE]


def of_pages(*pages: int) -> list[Transfer]:
    """Return transfers of contents of group 1 that have so many pages, page by page."""
    found, frame = list[Transfer](), 0
    for number, (count, each) in enumerate(zip(pages, hashes_of(len(pages)), strict=True)):
        others = tuple([(FrameId(0), FrameId(frame + page)) for page in range(1, count)])
        target, source = Place(Medium.HOST, FrameId(frame)), Place(Medium.PEER, FrameId(0))
        found += Transfer(number, each, each, 0, source, target, group=1, others=others).pages()
        frame += count
    return found


def test_each_page_of_a_content_is_an_image() -> None:
    source = replace(SOURCE, block_pages=(1, 3))
    with serving(identity=source) as server, Destination() as destination:
        moves = of_pages(3, 3)
        keys = [each.key for each in moves if not each.page]
        destination.client.fetch(destination.source(server.port, keys), moves, PATIENCE)
        landed = destination.landed(6)
        assert [each.end for each in landed] == [DONE] * 6
        found = {(each.transfer.key, each.transfer.page): bytes(each.image or b"") for each in landed}
        assert found == {(key, page): image_of(key, page=page) for key in keys for page in range(3)}


@pytest.mark.parametrize("sizes", [(1,), (1, 9000)], ids=str)
def test_who_asks_for_a_group_or_for_images_that_there_are_not_is_put_out(sizes: tuple[int, ...]) -> None:
    with serving(identity=replace(SOURCE, block_pages=sizes)) as server, Destination() as destination:
        moves = of_pages(3)
        destination.client.fetch(destination.source(server.port, [moves[0].key]), moves, PATIENCE)
        assert [each.end for each in destination.landed(3)] == [FAILED] * 3
        wait_until(lambda: server.served().refused["malformed"], lambda count: count == 1)
        assert destination.fetched(server.port, hashes_of(2)) == [DONE] * 2
