"""Publishes KV events over ZeroMQ in vLLM's form, and replays what a subscriber has missed.

    PUB      topic | sequence number, 8 bytes, big-endian | batch
    ROUTER   a request has the number of the first batch that is wanted; each answer has topic, number and batch, and
             the last one has the number -1 and no batch

A batch is msgpack: [seconds since 1970, [event, ...], rank]. An event is a map whose "type" is BlockStored,
BlockRemoved or AllBlocksCleared, with the fields that vLLM 0.33 has. A block hash is an integer: the last 8 of its 16
bytes, big-endian, as vLLM makes its own.

The engine's thread puts changes into a bounded queue and never waits. While the queue is full it keeps them, and what
comes and goes meanwhile is never told. One thread packs, sends and answers. A subscriber that does not read loses
batches, and sees that by their numbers. What is not kept any more is answered by everything that was cached once, and
by the batches since then.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import msgpack
import zmq

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.transfers import Medium
from common.contracts.types import BlockHash
from common.settings.options import host_of
from common.untrusted.rare_lines import RareLines
from gpuworker.engine.ports import KvEventCounts
from gpuworker.scheduling.kv_events import CacheLabel, Change, Cleared, EventForm, Removed, Stored
from quire.types.v1 import types_pb2

MAX_QUEUE: Final = 1024
"""Turns of the engine whose changes wait for the thread."""
HIGH_WATER: Final = 2048
"""Batches that wait for one subscriber; further ones are dropped for it."""
BUFFER_STEPS: Final = 10_000
BUFFER_BYTES: Final = 64 << 20
"""Batches that can be replayed: so many at most, and of so many bytes together."""
MAX_REQUEST: Final = 1024
"""Bytes of a message from a subscriber: a subscription, or a request of 8 bytes. A longer one ends its connection."""
END_SEQ: Final = (-1).to_bytes(8, "big", signed=True)
_HANDSHAKE_MS: Final = 5_000
_REST: Final = 9
"""Times what an answer to a request took, no other one is answered: they take a tenth of the thread's time at most."""
_LAST_MS: Final = 200
"""For what is still to be sent at the end."""
_RUN_BLOCKS: Final = 512
"""Blocks of one event."""
_DOMAIN: Final = b"quire-kv-event-domain-v1"
_MEDIA: Final = {Medium.BLOCK: "GPU", Medium.HOST: "CPU", Medium.DISK: "STORAGE"}

log = logging.getLogger(__name__)


# ---------------------------------------------------------------- events as maps


def hash_number(block_hash: BlockHash) -> int:
    """Return the number that stands for a block hash in an event, below 2^64."""
    return int.from_bytes(block_hash[-8:], "big")


def pack_batch(changes: Iterable[Change], form: EventForm, now: float) -> bytes:
    """Return the batch of these changes; neighbouring blocks of one prompt are one event, and so are removed ones."""
    packer = msgpack.Packer()
    events = [packer.pack(event) for event in _events_of(changes, form)]
    head = packer.pack_array_header(3) + packer.pack(now) + packer.pack_array_header(len(events))
    return b"".join((head, *events, packer.pack(0)))


def _events_of(changes: Iterable[Change], form: EventForm) -> Iterator[dict[str, Any]]:
    run: list[Stored | Removed] = []
    for change in changes:
        if run and not (_continues(run[-1], change) and len(run) < _RUN_BLOCKS):
            yield _event_of(run, form)
            run = []
        if isinstance(change, Cleared):
            yield {"type": "AllBlocksCleared"}
        else:
            run.append(change)
    if run:
        yield _event_of(run, form)


def _continues(last: Stored | Removed, change: Change) -> bool:
    if isinstance(change, Cleared) or type(last) is not type(change) or last[:2] != change[:2]:
        return False
    if isinstance(last, Stored) and isinstance(change, Stored):
        return change.origin.parent == last.hash and change.origin.label == last.origin.label
    return True


def _event_of(run: Sequence[Stored | Removed], form: EventForm) -> dict[str, Any]:
    stored = [each for each in run if isinstance(each, Stored)]
    if stored:
        return _stored(stored, form)
    return {
        "type": "BlockRemoved",
        "block_hashes": [hash_number(each.hash) for each in run],
        "medium": _MEDIA[run[0].medium],
        "group_idx": run[0].group,
    }


def _stored(run: Sequence[Stored], form: EventForm) -> dict[str, Any]:
    first = run[0]
    parent, label = first.origin.parent, first.origin.label
    kind, window = form.specs[first.group]
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [hash_number(each.hash) for each in run],
        "parent_block_hash": None if parent is None else hash_number(parent),
        "token_ids": [token for each in run for token in each.origin.tokens],
        "block_size": form.block_size,
        "lora_id": _lora_id(label),
        "medium": _MEDIA[first.medium],
        "lora_name": label.adapter or None,
    }
    if any(extra := [_extra_keys(each) for each in run]):
        event["extra_keys"] = extra
    event |= {"group_idx": first.group, "kv_cache_spec_kind": kind}
    if window is not None:
        event["kv_cache_spec_sliding_window"] = window
    return event


def _lora_id(label: CacheLabel) -> int | None:
    """Return a number above 0 of the adapter's content: another content under the same name has another one."""
    return int(label.adapter_fingerprint[:7], 16) + 1 if label.adapter_fingerprint else None


def _extra_keys(stored: Stored) -> list[str] | None:
    """Return what beside its tokens a block is hashed with, as vLLM has it: the adapter, and once the cache domain.

    vLLM has the salt of a request at the place of the domain, with a prompt's first block. The domain itself stays
    secret: hashes of a tenant's blocks begin with it.
    """
    label = stored.origin.label
    found = [label.adapter] if label.adapter else []
    if label.cache_domain and stored.origin.parent is None:
        found.append(f"domain:{hashlib.sha256(_DOMAIN + label.cache_domain).hexdigest()[:32]}")
    return found or None


# ---------------------------------------------------------------- sockets


class KvEventPublisher:
    """The sockets of one worker, from the beginning of its process, and the thread that serves them from `start` on."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        """Bind both endpoints, tcp://HOST:PORT. Raises InvalidConfig where one cannot be had."""
        self.topic = topic
        self._context = zmq.Context()
        self._pub, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        try:
            for each in (self._pub, self._replay):
                each.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
                each.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
                each.setsockopt(zmq.LINGER, _LAST_MS)
                each.setsockopt(zmq.RCVHWM, 16)
            self._pub.setsockopt(zmq.SNDHWM, HIGH_WATER)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)  # `_send` says what it does when a queue is full
            # A replay and its end fit beside one that is still to be read.
            self._replay.setsockopt(zmq.SNDHWM, 2 * (BUFFER_STEPS + 1))
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.endpoint = _bind(self._pub, endpoint, "--kv-events")
            self.replay_endpoint = (
                "" if replay_endpoint is None else _bind(self._replay, replay_endpoint, "--kv-events-replay")
            )
        except BaseException:
            self._context.destroy(0)
            raise
        self._queue: deque[Sequence[Change]] = deque()
        self._full, self._stopping = False, False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._counts = KvEventCounts()
        # A batch is one piece of memory for all subscribers: one that never reads takes little more.
        self._buffer: deque[tuple[int, zmq.Frame]] = deque()
        self._buffer_bytes = 0
        # All that was cached once the batch of a number was published.
        self._whole: tuple[int, zmq.Frame] | None = None
        self._next = 0
        # What a subscriber knows that has read everything.
        self._stored: dict[tuple[Medium, int, BlockHash], Stored] = {}
        self._thread: threading.Thread | None = None
        self._strange = RareLines(60.0)

    def start(self, form: EventForm, wake: Callable[[], None]) -> None:
        """Begin to publish. `wake` is called once there is room again, after `has_room` was false."""
        self._form, self._wake_engine = form, wake
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the engine's thread

    def has_room(self) -> bool:
        """Return whether `publish` may be called now."""
        self._full = len(self._queue) >= MAX_QUEUE
        if self._full:
            self._ring()  # the thread may have emptied the queue meanwhile, without a look at this
        return not self._full and not self._counts.failed

    def publish(self, changes: Sequence[Change]) -> None:
        """Queue the changes of a turn; never waits."""
        self._queue.append(changes)
        self._ring()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # the thread has not read the last ones
            os.write(self._wake_write, b"\0")

    # ------------------------------------------------------------ any thread

    def counts(self) -> KvEventCounts:
        return self._counts

    def source(self, address: str) -> types_pb2.KvEventSource:
        """Return where subscribers find it: sockets that take all addresses are at the host of `address`, HOST:PORT."""
        return types_pb2.KvEventSource(
            endpoint=_reachable(self.endpoint, address),
            replay_endpoint=_reachable(self.replay_endpoint, address),
            topic=self.topic,
            buffer_steps=BUFFER_STEPS,
            hwm=HIGH_WATER,
            max_queue_size=MAX_QUEUE,
        )

    def close(self) -> None:
        """Publish what is queued, and end."""
        self._stopping = True
        self._ring()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(_LAST_MS)
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ------------------------------------------------------------ its own thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.critical("no KV events are published any more, until the worker starts anew", exc_info=True)
            self._counts = self._counts.more(failed=1)

    def _serve(self) -> None:
        bell, both = zmq.Poller(), zmq.Poller()
        for poller in (bell, both):
            poller.register(self._wake_read, zmq.POLLIN)
        if self.replay_endpoint:
            both.register(self._replay, zmq.POLLIN)
        self._publish([Cleared()])  # subscribers of an earlier process of this worker forget what they know
        rest_until = 0.0
        while True:
            rest = rest_until - time.monotonic()
            ready = dict(bell.poll(math.ceil(1000 * rest)) if rest > 0 else both.poll())
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            while self._queue:
                self._publish(self._queue.popleft())
            if self._full:
                self._full = False
                self._wake_engine()
            if self._replay in ready:
                began = time.monotonic()
                self._answer()
                rest_until = time.monotonic() + _REST * (time.monotonic() - began)
            if self._stopping and not self._queue:
                return

    def _publish(self, changes: Sequence[Change]) -> None:
        for change in changes:
            match change:
                case Stored():
                    self._stored[change[:3]] = change
                case Removed():
                    del self._stored[change[:]]
                case Cleared():
                    self._stored.clear()
        number, batch = self._next, self._pack(changes)
        self._next += 1
        self._buffer.append((number, batch))
        self._buffer_bytes += len(batch)
        while len(self._buffer) > BUFFER_STEPS or (self._buffer_bytes > BUFFER_BYTES and len(self._buffer) > 1):
            self._buffer_bytes -= len(self._buffer.popleft()[1])
        self._counts = self._counts.more(batches=1, changes=len(changes))
        self._send((self.topic.encode(), number.to_bytes(8, "big"), batch))

    def _pack(self, changes: Iterable[Change]) -> zmq.Frame:
        return zmq.Frame(pack_batch(changes, self._form, time.time()), copy=False)

    def _send(self, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Send to all whose queues have room. Count when one is full: its subscriber misses this batch, and others
        until it reads again.
        """
        try:
            self._pub.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:
            self._counts = self._counts.more(overruns=1)
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.DONTWAIT, copy=False)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def _answer(self) -> None:
        """Answer one request for a replay."""
        asker, *rest = self._replay.recv_multipart()
        first = int.from_bytes(rest[1], "big") if len(rest) == 2 and not rest[0] and len(rest[1]) == 8 else None
        batches: Sequence[tuple[int, zmq.Frame]] = ()
        if first is None:
            if (held_back := self._strange.next()) is not None:
                what = "a request for a replay is not 8 bytes behind an empty frame, and nothing is replayed"
                log.warning("%s; %d more such lines were held back", what, held_back)
        elif self._buffer and first < self._buffer[0][0]:
            batches = self._everything()
        else:
            batches = [each for each in self._buffer if each[0] >= first]
        self._counts = self._counts.more(replays=1)
        topic = self.topic.encode()
        try:
            for number, batch in batches:
                parts = asker, b"", topic, number.to_bytes(8, "big"), batch
                self._replay.send_multipart(parts, zmq.DONTWAIT, copy=False)
            self._replay.send_multipart((asker, b"", b"", END_SEQ, b""), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            self._counts = self._counts.more(overruns=1)  # it asked again without reading, or has gone

    def _everything(self) -> list[tuple[int, zmq.Frame]]:
        """Return batches after which a subscriber knows all that is cached: what was once, and what came since.

        Subscribers share the first one for as long as the buffer goes on behind it.
        """
        if self._whole is None or self._whole[0] + 1 < self._buffer[0][0]:
            self._whole = self._next - 1, self._pack((Cleared(), *self._stored.values()))
        return [self._whole, *(each for each in self._buffer if each[0] > self._whole[0])]


def _reachable(endpoint: str, address: str) -> str:
    host, port = host_of(endpoint.removeprefix("tcp://")), endpoint.rpartition(":")[2]
    return f"tcp://{host_of(address)}:{port}" if host in ("0.0.0.0", "[::]") else endpoint


def _bind(to: zmq.Socket[bytes], endpoint: str, flag: str) -> str:
    """Bind, and return the endpoint with the port that was taken. Raises InvalidConfig."""
    try:
        if "[" in endpoint:
            to.setsockopt(zmq.IPV6, 1)
        to.bind(endpoint.replace("tcp://localhost:", "tcp://127.0.0.1:"))
    except zmq.ZMQError as error:
        what = f"is {endpoint}, and it cannot be had: {error}; name an address of this host and a free port"
        raise InvalidConfig(FieldViolation(flag, what)) from error
    return to.getsockopt_string(zmq.LAST_ENDPOINT)
