"""A subscriber of KV events as vLLM's documents have it: SUB for batches, and a request for those that were missed.

The request comes from a DEALER. vLLM's example has a REQ there, which takes the first answer alone.
"""

from __future__ import annotations

from typing import Any

import msgpack
import zmq

PATIENCE_MS = 60_000
END = (-1).to_bytes(8, "big", signed=True)
Event = dict[str, Any]


class KvSubscriber:
    """What it has read, and the contents that follow from that: by medium, group and hash, the tokens of each block."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "") -> None:
        self._context = zmq.Context()
        self.sub, self._replay_endpoint = self._context.socket(zmq.SUB), replay_endpoint
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(endpoint)
        self.last = -1
        self.topics: set[str] = set()
        self.events: list[Event] = []
        self.known: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def __enter__(self) -> KvSubscriber:
        return self

    def __exit__(self, *raised: object) -> None:
        self._context.destroy(0)

    def read(self) -> list[Event]:
        """Return the events of the next batch; what is missing before it is replayed first."""
        assert self.sub.poll(PATIENCE_MS), "no batch came"
        topic, number, payload = self.sub.recv_multipart()
        self.topics.add(topic.decode())
        found = self._take(int.from_bytes(number, "big"), payload)
        return found if found is not None else self.read()

    def _take(self, number: int, payload: bytes) -> list[Event] | None:
        if number <= self.last:
            return None  # a replay had it
        if number > self.last + 1 and self._replay_endpoint:
            for missed, batch in self.replay(self.last + 1):
                if self.last < missed < number:
                    self.last = missed
                    self._apply(batch)
        self.last = number
        return self._apply(payload)

    def replay(self, first: int | bytes) -> list[tuple[int, bytes]]:
        """Return the numbers and batches with which a request for a replay is answered."""
        asking, found = self._context.socket(zmq.DEALER), list[tuple[int, bytes]]()
        asking.connect(self._replay_endpoint)
        asking.send_multipart([b"", first if isinstance(first, bytes) else first.to_bytes(8, "big")])
        while True:
            assert asking.poll(PATIENCE_MS), "no answer came"
            _, _, number, payload = asking.recv_multipart()
            if number == END:
                assert payload == b""
                asking.close()
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def catch_up(self) -> int:
        """Take everything that a replay from the beginning has, and return how many contents there are."""
        for number, batch in self.replay(0):
            self.last = max(number, self.last)
            self._apply(batch)
        return len(self.known)

    def _apply(self, payload: bytes) -> list[Event]:
        _, events, _ = msgpack.unpackb(payload)
        self.events += events
        for event in events:
            where = event.get("medium"), event.get("group_idx")
            match event["type"]:
                case "BlockStored":
                    size, tokens = event["block_size"], event["token_ids"]
                    for at, block_hash in enumerate(event["block_hashes"]):
                        self.known[*where, block_hash] = tuple(tokens[at * size : (at + 1) * size])
                case "BlockRemoved":
                    for block_hash in event["block_hashes"]:
                        del self.known[*where, block_hash]
                case "AllBlocksCleared":
                    self.known.clear()
        return events  # type: ignore[no-any-return]
