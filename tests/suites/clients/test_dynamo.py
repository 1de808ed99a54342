"""Dynamo's radix tree, fed with a worker's KV events, finds the prefixes that requests then find cached."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quire.types.v1 import types_pb2
from tests.suites.clients.other_python import answers_of, need_clients
from tests.suites.clients.served import Served, served_suite
from tests.support.suite import greedy

DYNAMO = "dynamo"
FREE = "tcp://127.0.0.1:0"
BLOCK = 16


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A suite of one worker with 48 blocks that publishes KV events."""
    need_clients(DYNAMO)
    flags = ("--kv-blocks", "48", "--kv-events", FREE, "--kv-events-replay", FREE)
    with served_suite(tmp_path_factory.mktemp("dynamo"), flags=flags) as running:
        yield running


def source_of(worker: Served) -> types_pb2.KvEventSource:
    (only,) = worker.run(lambda suite: suite.status()).workers
    return only.kv_events


def cached_blocks(worker: Served, prompt: Sequence[int]) -> int:
    """Send a prompt, and return how many of its blocks were hits."""
    outcome = worker.run(lambda suite: suite.generate(greedy(prompt, 8)))
    assert outcome.finished is not None
    return outcome.finished.usage.cached_tokens // BLOCK


def test_its_tree_finds_the_prefixes_that_requests_find(worker: Served) -> None:
    """No model: prompts of token ids share prefixes, and a small pool evicts blocks."""
    rng, events = random.Random(3), source_of(worker)
    trunk = [rng.randrange(10, 1000) for _ in range(200)]
    for number in range(12):
        cached_blocks(worker, [*trunk[: 20 * (number % 9)], *(rng.randrange(10, 1000) for _ in range(60))])
    worker.until_all_free()
    prompts = [[*trunk[:length], 7, 8, 9] for length in (0, 15, 16, 50, 100, 160, 200)]
    given: dict[str, Any] = {
        "replay_endpoint": events.replay_endpoint,
        "block_size": BLOCK,
        "prompts": [[prompt, ""] for prompt in prompts],
    }
    before = answers_of("dynamo_calls.py", given, DYNAMO)
    assert before["kinds"] == ["AllBlocksCleared", "BlockRemoved", "BlockStored"]
    assert max(before["blocks"]) >= 5
    for prompt in reversed(prompts):  # the longest one first: others would only add to it
        found = answers_of("dynamo_calls.py", given | {"prompts": [[prompt, ""]]}, DYNAMO)["blocks"]
        assert found == [cached_blocks(worker, prompt)]
        worker.until_all_free()
