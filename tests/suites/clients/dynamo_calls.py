"""What Dynamo's radix tree finds of prompts that a worker has cached, by the worker's KV events alone.

.clients/dynamo/bin/python runs this script. It reads endpoints, block size, prompts and a name of an adapter as JSON on
stdin. Events are decoded into structs with the fields and types of vLLM 0.33, which refuse all else.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import zmq
from dynamo._core import RadixTree, compute_block_hash_for_seq

WORKER = 7
PATIENCE_MS = 60_000
END = (-1).to_bytes(8, "big", signed=True)


OPTIONAL = (int | None, None)
STORED: Any = msgspec.defstruct(
    "BlockStored",
    [
        ("block_hashes", list[int]),
        ("parent_block_hash", int | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        ("medium", str | None),
        ("lora_name", str | None),
        ("extra_keys", list[list[str] | None] | None, None),
        ("group_idx", *OPTIONAL),
        ("kv_cache_spec_kind", str | None, None),
        ("kv_cache_spec_sliding_window", *OPTIONAL),
    ],
    tag=True,
    forbid_unknown_fields=True,
)
REMOVED: Any = msgspec.defstruct(
    "BlockRemoved",
    [("block_hashes", list[int]), ("medium", str | None), ("group_idx", *OPTIONAL)],
    tag=True,
    forbid_unknown_fields=True,
)
CLEARED: Any = msgspec.defstruct("AllBlocksCleared", [], tag=True, forbid_unknown_fields=True)
BATCH: Any = msgspec.defstruct(
    "Batch",
    [("ts", float), ("events", list[STORED | REMOVED | CLEARED]), ("data_parallel_rank", *OPTIONAL)],
    array_like=True,
    forbid_unknown_fields=True,
)


def batches(given: dict[str, Any]) -> list[Any]:
    """Return all batches so far, by a replay."""
    asking, decoder, found = zmq.Context().socket(zmq.DEALER), msgspec.msgpack.Decoder(BATCH), list[Any]()
    asking.connect(given["replay_endpoint"])
    asking.send_multipart([b"", (0).to_bytes(8, "big")])
    while True:
        if not asking.poll(PATIENCE_MS):
            raise TimeoutError("no answer came")
        _, _, number, payload = asking.recv_multipart()
        if number == END:
            return found
        found.append(decoder.decode(payload))


def apply(tree: RadixTree, number: int, event: Any) -> None:
    """Give an event of the pool to the tree, in Dynamo's own form."""
    if isinstance(event, STORED):
        hashes = compute_block_hash_for_seq(event.token_ids, event.block_size, lora_name=event.lora_name)
        blocks = [
            {"block_hash": block, "tokens_hash": tokens}
            for block, tokens in zip(event.block_hashes, hashes, strict=True)
        ]
        data: Any = {"stored": {"parent_hash": event.parent_block_hash, "blocks": blocks}}
    elif isinstance(event, REMOVED):
        data = {"removed": {"block_hashes": event.block_hashes}}
    else:
        data = "cleared"
    tree.apply_event(WORKER, json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode())


def main() -> None:
    given, tree = json.load(sys.stdin), RadixTree()
    events = [event for batch in batches(given) for event in batch.events]
    for number, event in enumerate(events):
        apply(tree, number, event)
    size, found = given["block_size"], []
    for prompt, adapter in given["prompts"]:
        hashes = compute_block_hash_for_seq(prompt, size, lora_name=adapter or None)
        found.append(tree.find_matches(hashes).scores.get((WORKER, 0), 0))
    kinds = sorted({type(event).__name__ for event in events})
    json.dump({"blocks": found, "kinds": kinds, "events": len(events)}, sys.stdout)


if __name__ == "__main__":
    main()
