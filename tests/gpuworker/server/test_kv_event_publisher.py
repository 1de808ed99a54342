"""KV events on the wire: their form, replays, and subscribers that are slow, late or strange."""

from __future__ import annotations

import hashlib
import resource
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from common.contracts.errors import InvalidConfig
from common.contracts.transfers import Medium
from common.contracts.types import BlockHash
from gpuworker.config import GpuWorkerSettings
from gpuworker.engine.ports import KvEventCounts
from gpuworker.main import open_kv_events
from gpuworker.scheduling.kv_events import CacheLabel, Change, Cleared, EventForm, Origin, Removed, Stored
from gpuworker.server import kv_event_publisher
from gpuworker.server.kv_event_publisher import END_SEQ, MAX_QUEUE, KvEventPublisher, pack_batch
from tests.support.kv_subscriber import PATIENCE_MS, KvSubscriber
from tests.support.waiting import wait_until

FORM = EventForm(2, (("full_attention", None), ("sliding_window", 6)))
FREE = "tcp://127.0.0.1:0"


def hash_of(number: int) -> BlockHash:
    """Return a hash whose first half does not count."""
    return BlockHash(b"\xff" * 8 + number.to_bytes(8, "big"))


def stored(number: int, parent: int | None = None, label: CacheLabel = CacheLabel(), **other: int) -> Stored:  # noqa: B008
    origin = Origin(None if parent is None else hash_of(parent), (number, number + 100), label)
    return Stored(Medium(other.get("medium", Medium.BLOCK)), other.get("group", 0), hash_of(number), origin)


def removed(number: int) -> Removed:
    return Removed(Medium.BLOCK, 0, hash_of(number))


def unpacked(*changes: Change) -> list[dict[str, object]]:
    now, events, rank = msgpack.unpackb(pack_batch(changes, FORM, 1.5))
    assert (now, rank) == (1.5, 0)
    return events  # type: ignore[no-any-return]


@contextmanager
def publishing(topic: str = "", **limits: int) -> Iterator[tuple[KvEventPublisher, KvSubscriber]]:
    """Yield a publisher, and a subscriber that has the first batch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(kv_event_publisher, name, value)
        publisher = KvEventPublisher(FREE, FREE, topic)
        try:
            publisher.start(FORM, lambda: None)
            with KvSubscriber(publisher.endpoint, publisher.replay_endpoint, topic) as subscriber:
                until_subscribed(publisher, subscriber)
                yield publisher, subscriber
        finally:
            publisher.close()


def until_subscribed(publisher: KvEventPublisher, subscriber: KvSubscriber) -> None:
    """Publish until the subscriber reads: its connection comes when it comes."""
    for _ in range(PATIENCE_MS // 20):
        publisher.publish([Cleared()])
        if subscriber.sub.poll(20):
            break
    subscriber.read()
    published = wait_until(publisher.counts, lambda counts: not publisher._queue).batches
    while subscriber.last < published - 1:
        subscriber.read()
    subscriber.events.clear()


# ---------------------------------------------------------------- the form


def test_a_stored_run_has_the_names_and_types_of_vllm() -> None:
    label = CacheLabel(b"\x0a\x0b", "sql", "0123456789abcdef" * 2)
    events = unpacked(stored(1, label=label), stored(2, 1, label))
    domain = hashlib.sha256(b"quire-kv-event-domain-v1" + b"\x0a\x0b").hexdigest()[:32]
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [1, 2],
            "parent_block_hash": None,
            "token_ids": [1, 101, 2, 102],
            "block_size": 2,
            "lora_id": 0x0123456 + 1,
            "medium": "GPU",
            "lora_name": "sql",
            "extra_keys": [["sql", f"domain:{domain}"], ["sql"]],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]
    assert list(events[0])[:8] == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    ]  # fmt: skip


def test_fields_without_a_value_are_left_out_or_nil_as_with_vllm() -> None:
    (event,) = unpacked(stored(7, 3, group=1, medium=Medium.DISK))
    assert event == {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": 3,
        "token_ids": [7, 107],
        "block_size": 2,
        "lora_id": None,
        "medium": "STORAGE",
        "lora_name": None,
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 6,
    }


def test_a_run_ends_where_prompt_tier_group_or_kind_change() -> None:
    changes: list[Change] = [
        *(stored(1), stored(2, 1), stored(3, 1), stored(4, 3, medium=Medium.HOST), stored(4, 3, group=1)),
        *(removed(1), removed(2), Cleared(), removed(3)),
    ]
    assert [(each["type"], each.get("block_hashes")) for each in unpacked(*changes)] == [
        ("BlockStored", [1, 2]),
        ("BlockStored", [3]),
        ("BlockStored", [4]),
        ("BlockStored", [4]),
        ("BlockRemoved", [1, 2]),
        ("AllBlocksCleared", None),
        ("BlockRemoved", [3]),
    ]
    assert unpacked(removed(9)) == [{"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU", "group_idx": 0}]


def test_a_run_is_bounded() -> None:
    sizes = [
        len(each["block_hashes"])  # type: ignore[arg-type]
        for each in unpacked(stored(0), *(stored(number, number - 1) for number in range(1, 1000)))
    ]
    assert sizes == [512, 488]


def test_a_batch_is_what_a_decoder_of_vllms_structs_takes() -> None:
    """Of [ts, events, rank] each event is a map, whose first key is its type; other words would be other structs."""
    head = pack_batch([Cleared()], FORM, 1.5)
    assert head == b"\x93" + msgpack.packb(1.5) + b"\x91" + b"\x81\xa4type\xb0AllBlocksCleared" + b"\x00"


# ---------------------------------------------------------------- subscribers


def test_a_subscriber_reads_batches_with_rising_numbers_under_its_topic() -> None:
    with publishing("kv@here@model") as (publisher, subscriber):
        first = subscriber.last
        publisher.publish([stored(1), stored(2, 1)])
        publisher.publish([removed(2)])
        assert [each["type"] for each in subscriber.read()] == ["BlockStored"]
        assert [each["type"] for each in subscriber.read()] == ["BlockRemoved"]
        assert subscriber.last == first + 2
        assert subscriber.known == {("GPU", 0, 1): (1, 101)}
        assert subscriber.topics == {"kv@here@model"}


def test_what_is_missing_is_replayed_in_order() -> None:
    with publishing() as (publisher, subscriber):
        for number in range(5):
            publisher.publish([stored(number)])
        for _ in range(3):
            subscriber.sub.recv_multipart()  # they are lost
        subscriber.read()
        assert [each["block_hashes"] for each in subscriber.events] == [[0], [1], [2], [3]]
        subscriber.read()
        assert len(subscriber.known) == 5


def test_a_replay_from_before_the_buffer_has_everything_that_is_cached() -> None:
    with publishing(BUFFER_STEPS=2) as (publisher, subscriber):
        for change in (stored(1), stored(2, 1), stored(3, 2), removed(3), stored(4, 2)):
            publisher.publish([change])
            subscriber.read()
        number = subscriber.last
        ((replayed, batch),) = subscriber.replay(0)
        assert replayed == number
        _, events, _ = msgpack.unpackb(batch)
        assert [(each["type"], each.get("block_hashes")) for each in events] == [
            ("AllBlocksCleared", None),
            ("BlockStored", [1, 2, 4]),
        ]
        assert [found for found, _ in subscriber.replay(number - 1)] == [number - 1, number]


def test_the_buffer_is_bounded_in_bytes_too() -> None:
    with publishing(BUFFER_BYTES=1000) as (publisher, subscriber):
        for number in range(50):
            publisher.publish([stored(number)])
            subscriber.read()
        assert publisher._buffer_bytes <= 1000
        assert 1 < len(publisher._buffer) < 20
        assert sum(len(batch) for _, batch in publisher._buffer) == publisher._buffer_bytes


def test_a_late_subscriber_gets_all_by_a_replay_from_the_beginning() -> None:
    with publishing() as (publisher, subscriber):
        publisher.publish([stored(1), stored(2, 1)])
        subscriber.read()
        with KvSubscriber(publisher.endpoint, publisher.replay_endpoint) as late:
            late.catch_up()
            assert late.known == subscriber.known == {("GPU", 0, 1): (1, 101), ("GPU", 0, 2): (2, 102)}
            assert late.events[0] == {"type": "AllBlocksCleared"}, "of the process before this one"


@pytest.mark.parametrize("request_bytes", [b"", b"\0" * 7, b"\0" * 9, b"from the beginning"])
def test_a_request_that_is_no_number_is_answered_by_the_end_alone(request_bytes: bytes) -> None:
    with publishing() as (publisher, subscriber):
        publisher.publish([stored(1)])
        subscriber.read()
        assert subscriber.replay(request_bytes) == []
        assert subscriber.replay(subscriber.last + 1) == []
        assert len(subscriber.replay(subscriber.last)) == 1


def test_a_message_beyond_any_request_ends_its_connection_alone() -> None:
    with publishing() as (publisher, subscriber):
        context = zmq.Context()
        asking = context.socket(zmq.DEALER)
        asking.connect(publisher.replay_endpoint)
        asking.send_multipart([b"", b"x" * 2000])
        assert not asking.poll(200)
        context.destroy(0)
        assert subscriber.replay(1 << 40) == []


def test_who_asks_again_without_reading_gets_a_bounded_answer() -> None:
    with publishing(BUFFER_STEPS=8) as (publisher, subscriber):
        for number in range(20):
            publisher.publish([stored(number, 0), *(stored(each, 0) for each in range(100, 1100))])
            publisher.publish([removed(number), *(removed(each) for each in range(100, 1100))])
            subscriber.read(), subscriber.read()
        context = zmq.Context()
        greedy = context.socket(zmq.DEALER)
        greedy.setsockopt(zmq.RCVHWM, 1)
        greedy.setsockopt(zmq.RCVBUF, 4096)
        greedy.connect(publisher.replay_endpoint)
        for _ in range(200):
            greedy.send_multipart([b"", (subscriber.last - 7).to_bytes(8, "big")])
            if publisher.counts().overruns:
                break
        wait_until(publisher.counts, lambda counts: counts.overruns > 0)
        context.destroy(0)
        assert len(subscriber.replay(subscriber.last)) == 1


def test_what_is_cached_is_packed_once_for_all_who_come_late() -> None:
    packed = list[tuple[Change, ...]]()

    def pack(changes: Iterable[Change], form: EventForm, now: float) -> bytes:
        packed.append(tuple(changes))
        return pack_batch(packed[-1], form, now)

    with publishing(BUFFER_STEPS=2) as (publisher, subscriber), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_event_publisher, "pack_batch", pack)

        def publish(*changes: Change) -> int:
            for change in changes:
                publisher.publish([change])
                subscriber.read()
            return subscriber.last

        number = publish(stored(1), stored(2, 1), removed(2))
        assert [each for each, _ in subscriber.replay(0)] == [number]
        publish(stored(3, 1), stored(4, 3))
        assert [each for each, _ in subscriber.replay(0)] == [number, number + 1, number + 2]
        with KvSubscriber(publisher.endpoint, publisher.replay_endpoint) as late:
            late.catch_up()
            assert (
                late.known
                == subscriber.known
                == {("GPU", 0, 1): (1, 101), ("GPU", 0, 3): (3, 103)} | {("GPU", 0, 4): (4, 104)}
            )
        publish(removed(4))  # the buffer does not go on behind the first one any more
        assert [each for each, _ in subscriber.replay(0)] == [number + 3]
        assert sum(each[0] == Cleared() for each in packed) == 2


def _has_answered(before: int, counts: KvEventCounts) -> bool:
    return counts.replays > before


def test_subscribers_that_ask_and_never_read_share_the_memory_of_what_they_are_sent() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def pack(changes: Iterable[Change], form: EventForm, now: float) -> bytes:
        return bytes(megabyte - 1) + b"x"

    megabyte, askers = 1 << 20, 8
    with publishing() as (publisher, subscriber), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_event_publisher, "pack_batch", pack)
        for _ in range(32):
            publisher.publish([Cleared()])
            subscriber.sub.recv_multipart()
        replays, before, context = publisher.counts().replays, resident(), zmq.Context()
        all_of_them = [context.socket(zmq.DEALER) for _ in range(askers)]
        for number, never in enumerate(all_of_them):
            never.setsockopt(zmq.RCVHWM, 1)
            never.setsockopt(zmq.RCVBUF, 4096)
            never.connect(publisher.replay_endpoint)
            never.send_multipart([b"", (subscriber.last + 1).to_bytes(8, "big")])
            wait_until(publisher.counts, partial(_has_answered, replays + number))
        assert resident() - before < askers * 32 * megabyte // 4
        context.destroy(0)


def test_a_subscriber_that_never_reads_misses_batches_and_others_do_not() -> None:
    with publishing(HIGH_WATER=8) as (publisher, subscriber):
        context = zmq.Context()
        never = context.socket(zmq.SUB)
        never.setsockopt(zmq.RCVHWM, 1)
        never.setsockopt(zmq.RCVBUF, 4096)
        never.subscribe(b"")
        never.connect(publisher.endpoint)
        assert never.poll(0) == 0
        changes = [stored(number, 0) for number in range(2000)]
        gone = [removed(number) for number in range(2000)]
        sent = 0
        while not publisher.counts().overruns:
            publisher.publish(gone if sent % 2 else changes)
            sent += 1
            subscriber.read()
            assert sent < 10_000
        publisher.publish([Cleared()])
        assert subscriber.read() == [{"type": "AllBlocksCleared"}]
        context.destroy(0)


def test_answers_take_a_tenth_of_the_time_and_batches_do_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with publishing() as (publisher, subscriber):
        answering, asked = threading.Event(), list[list[bytes]]()

        def answer(self: KvEventPublisher) -> None:
            asked.append(self._replay.recv_multipart())
            answering.set()

        monkeypatch.setattr(KvEventPublisher, "_answer", answer)
        monkeypatch.setattr(kv_event_publisher, "_REST", 1e9)
        context = zmq.Context()
        asking = context.socket(zmq.DEALER)
        asking.connect(publisher.replay_endpoint)
        for _ in range(2):
            asking.send_multipart([b"", (0).to_bytes(8, "big")])
        assert answering.wait(PATIENCE_MS / 1000)
        publisher.publish([stored(1)])
        assert subscriber.read()[0]["block_hashes"] == [1]
        assert len(asked) == 1, "the other one waits"
        context.destroy(0)


def test_a_full_queue_says_so_and_wakes_the_engine_when_it_has_room() -> None:
    woken = threading.Event()
    publisher = KvEventPublisher(FREE, None, "")
    try:
        for number in range(MAX_QUEUE):
            assert publisher.has_room()
            publisher.publish([stored(number)])
        assert not publisher.has_room()
        publisher.start(FORM, woken.set)
        assert woken.wait(PATIENCE_MS / 1000)
        assert publisher.has_room()
        assert publisher.replay_endpoint == ""
    finally:
        publisher.close()
    assert publisher.counts().batches == MAX_QUEUE + 1


def test_a_thread_that_fails_says_so_and_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    publisher = KvEventPublisher(FREE, None, "")
    publisher.publish([removed(1)])  # nobody stored it
    publisher.start(FORM, lambda: None)
    wait_until(publisher.counts, lambda counts: counts.failed == 1)
    assert not publisher.has_room()
    publisher.close()
    assert "no KV events are published any more" in caplog.text


# ---------------------------------------------------------------- options


def settings(**options: Any) -> GpuWorkerSettings:
    return GpuWorkerSettings(model="m", **options)


def problems(**options: Any) -> dict[str, str]:
    return {each.field: each.description for each in settings(**options).problems()}


def test_without_the_libraries_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_kv_events(settings()) is None
    monkeypatch.delitem(sys.modules, "gpuworker.server.kv_event_publisher", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidConfig, match=r"needs the package zmq.*pip install 'quire-llm\[events\]'"):
        open_kv_events(settings(kv_events=FREE))


def test_an_endpoint_that_is_taken_is_refused_with_its_name() -> None:
    publisher = KvEventPublisher(FREE, None, "")
    try:
        with pytest.raises(InvalidConfig, match=f"--kv-events-replay: is {publisher.endpoint}.*in use"):
            KvEventPublisher(FREE, publisher.endpoint, "")
    finally:
        publisher.close()


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5557", "tcp://*:5557", "tcp://10.1.2.3:0", "tcp://[::]:1"])
def test_an_endpoint_beyond_loopback_must_be_asked_for_in_so_many_words(endpoint: str) -> None:
    assert "tells prompts as token ids to whoever connects" in problems(kv_events=endpoint)["--kv-events"]
    assert problems(kv_events=FREE, kv_events_replay=endpoint).keys() == {"--kv-events-replay"}
    assert not problems(kv_events=endpoint, kv_events_replay=endpoint, kv_events_unprotected=True)
    assert problems(kv_events=endpoint, insecure=True), "plain text between services is another thing"


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:5557",
        "ipc:///tmp/x",
        "tcp://worker:5557",
        "tcp://::1:5557",
        "tcp://127.0.0.1:",
        "tcp://::1:70000",
    ],
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="is not tcp://HOST:PORT"):
        settings(kv_events=endpoint)


def test_parts_of_the_option_need_it() -> None:
    parts = {"kv_events_replay": FREE, "kv_events_topic": "kv", "kv_events_unprotected": True}
    assert problems(**parts).keys() == {"--kv-events-replay", "--kv-events-topic", "--kv-events-unprotected"}
    assert problems(kv_events=FREE, prefix_caching=False).keys() == {"--kv-events"}


def test_the_end_of_a_replay_is_minus_one() -> None:
    assert END_SEQ == b"\xff" * 8
