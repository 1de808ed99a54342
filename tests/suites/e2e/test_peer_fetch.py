"""Blocks that one worker computed come to another one: tokens and hits, by each carrier, and when either worker fails.

Each prompt is submitted to a worker of the test's choice. What was in the middle of a fetch when something failed is
computed, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio

from cli.suite import programs
from cli.suite.stack import StackOptions
from common.contracts.hashing import block_digests, block_hash_of, root_digest
from common.contracts.types import PoolIdentity
from common.wire.packing import pack_hashes
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.direct_worker import answer_of, records_of
from tests.support.gpuworker.nixl import IS_INSTALLED, use_double
from tests.support.index_view import identity_of
from tests.support.load import kill, until_restarted
from tests.support.suite import PATIENCE, Suite, running_suite
from tests.support.waiting import until

TOKENS, BLOCK = 4, 4
HITS = 36
"""Tokens of the nine full blocks of a prompt of 37."""
SOURCE, DESTINATION = "worker-0", "worker-1"


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, VOCAB_SIZE) for _ in range(HITS + 1)]


class Pair:
    """A suite of two workers; the first one has a prompt that the second one is asked for."""

    def __init__(self, suite: Suite, identity: PoolIdentity, hold: Path) -> None:
        self.suite, self._identity, self._hold = suite, identity, hold
        self._names = iter(f"request-{number}" for number in range(1000))

    async def answer(self, worker_id: str, tokens: list[int], name: str = "") -> tuple[list[int], int]:
        """Return the tokens of an answer, and how many tokens of the prompt were cached.

        By then the manager knows what the source has: an answer may overtake the report of what it computed.
        """
        name = name or next(self._names)
        found = await answer_of(self.suite, worker_id, tokens, TOKENS, name, self._identity)
        if worker_id == SOURCE:
            await until(lambda: self._has_left(name), seconds=PATIENCE)
            await until(lambda: self._hits_at_source(tokens), lambda hits: hits >= HITS, seconds=PATIENCE)
        return found.tokens, found.cached_tokens

    async def _has_left(self, name: str) -> bool:
        """Return whether a request has no block table any more: until then blocks that it is to fill count as hits."""
        tables = (await self.suite.manager.GetBlockTable(kvmanager_pb2.GetBlockTableRequest(), timeout=PATIENCE)).tables
        return all(each.request_id != name for each in tables)

    async def _hits_at_source(self, tokens: list[int]) -> int:
        root = root_digest(self._identity.model_fingerprint, self._identity.tokenizer_fingerprint, BLOCK, b"")
        hashes = pack_hashes(map(block_hash_of, block_digests(root, tokens, BLOCK)))
        query = kvmanager_pb2.LookupRequest(block_hashes=hashes, num_tokens=len(tokens), worker_id=SOURCE)
        (match,) = (await self.suite.manager.Lookup(query, timeout=PATIENCE)).matches
        return match.hit_blocks * BLOCK

    def hold(self) -> None:
        """Let the source answer one block of the next request, and no other one."""
        (self._hold / SOURCE).touch()

    def release(self) -> None:
        (self._hold / SOURCE).unlink()

    async def until_held(self, count: int = 1) -> None:
        await until(lambda: self.count(f"{SOURCE}: HOLDS"), lambda found: found >= count, seconds=PATIENCE)

    def count(self, line: str) -> int:
        return sum(line in each for each in self.suite.lines)


@asynccontextmanager
async def running_pair(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *flags: str,
    tls: bool = False,
    workers: int = 2,
    manager_flags: tuple[str, ...] = (),
    model: str = "llama",
    pages: int = 32,
    **environment: str,
) -> AsyncIterator[Pair]:
    hold = folder / "hold"
    hold.mkdir()
    monkeypatch.setattr(programs, "module_command", _command)
    for name, value in {"HOLD": str(hold), **environment}.items():
        monkeypatch.setenv(f"PEER_TEST_{name}", value)
    sizes = ("--dtype", "float32", "--kv-blocks", f"{pages}", "--max-model-len", "64", "--max-num-seqs", "4")
    flags = (*sizes, "--host-memory", "1MiB" if model == "llama" else "4MiB", "--data-port", "0", *flags)
    certs = folder / "certs" if tls else None
    options = StackOptions(
        model=checkpoint(model),
        block_size=BLOCK,
        workers=workers,
        worker_flags=flags,
        manager_flags=manager_flags,
        certs=certs,
    )
    async with running_suite(folder, options) as suite:
        yield Pair(suite, await identity_of(suite), hold)


def _command(module: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.gpuworker.peer_worker" if module == "gpuworker" else module]


@pytest.mark.parametrize(
    ("tls", "carrier"),
    [
        (False, "shm"),
        pytest.param(True, "tcp", marks=pytest.mark.rest),
        pytest.param(True, "nixl", marks=pytest.mark.rest),
    ],
    ids=["shared memory", "TCP with TLS", "NIXL beside TLS"],
)
async def test_a_prefix_comes_from_the_worker_that_computed_it(
    tls: bool, carrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--carrier", "nixl") if carrier == "nixl" else ()
    if flags and not IS_INSTALLED:
        use_double(monkeypatch)
    async with running_pair(tmp_path, monkeypatch, *flags, tls=tls, CARRIER=carrier, PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        assert await pair.answer(DESTINATION, prompt(1), "fetched") == (wanted, HITS)
        assert pair.count(f"{DESTINATION}: CARRIER {carrier}") == pair.count("CARRIER") == 9
        (wait,) = await records_of(pair.suite, "fetched", "shortfall")
        assert (wait.beneficiary, wait.figures["needed"]) == (SOURCE, 9.0)
        (grant,) = await records_of(pair.suite, "fetched", "grant")
        assert (grant.figures["fetched_blocks"], grant.figures["host_blocks"]) == (9.0, 9.0)
        assert await pair.answer(DESTINATION, prompt(1)) == (wanted, HITS)
        assert pair.count("CARRIER") == 9, "it is in the pool now"
        await pair.suite.until_all_free(2)


IN_GROUPS = {"gemma4_text": 100, "llama4_text": 80, "qwen3_next": 80}
"""Models with windows, chunks and states, and pages of a pool."""


@pytest.mark.rest
@pytest.mark.parametrize("model", IN_GROUPS)
async def test_windows_chunks_and_states_come_from_a_worker_that_is_killed_during_another_fetch(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, patience = IN_GROUPS[model], "10"
    async with running_pair(tmp_path, monkeypatch, model=model, pages=pages, PATIENCE=patience) as pair:
        wanted = [hf_greedy(checkpoint(model), prompt(seed), TOKENS) for seed in (1, 2)]
        for seed, right in enumerate(wanted, 1):
            assert await pair.answer(SOURCE, prompt(seed)) == (right, 0)
        assert await pair.answer(DESTINATION, prompt(1), "fetched") == (wanted[0], HITS)
        images = pair.count(f"{DESTINATION}: CARRIER")
        assert images == 9 if model == "llama4_text" else images > 9, "no token behind 36 reads a chunk before it"
        pair.hold()
        pid = pair.suite.stack.children[SOURCE].pid
        asked = asyncio.create_task(pair.answer(DESTINATION, prompt(2), "cut"))
        await pair.until_held()
        kill(pair.suite, SOURCE)
        tokens, cached = await asked
        assert (tokens, cached) == (wanted[1], 0)
        pair.release()
        await until_restarted(pair.suite, SOURCE, pid)
        await pair.suite.until_connected(2)
        assert await pair.answer(SOURCE, prompt(1), "back") == (wanted[0], HITS)
        await pair.suite.until_all_free(2)


@pytest.mark.rest
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_source_that_dies_or_stands_still_in_the_middle_is_a_miss(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its own half second would be over before a busy machine has brought the request to the source.
    async with running_pair(tmp_path, monkeypatch, PATIENCE="10") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        pair.hold()
        pid = pair.suite.stack.children[SOURCE].pid
        asked = asyncio.create_task(pair.answer(DESTINATION, prompt(1), "cut"))
        await pair.until_held()
        kill(pair.suite, SOURCE, number)
        tokens, cached = await asked
        assert tokens == wanted
        assert cached < HITS
        pair.release()
        if number is signal.SIGSTOP:
            kill(pair.suite, SOURCE, signal.SIGCONT)
        else:
            await until_restarted(pair.suite, SOURCE, pid)
        await pair.suite.until_connected(2)
        await pair.suite.until_all_free(2)


@pytest.mark.rest
async def test_what_the_source_has_evicted_meanwhile_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pair(tmp_path, monkeypatch, "--host-memory", "8KiB", PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        pair.hold()
        asked = asyncio.create_task(pair.answer(DESTINATION, prompt(1), "stale"))
        await pair.until_held()
        for seed in range(2, 8):  # its pool has room for three of them, and its host memory for few blocks
            await pair.answer(SOURCE, prompt(seed))
        pair.release()
        assert await asked == (wanted, BLOCK)
        await pair.suite.until_all_free(2)


@pytest.mark.rest
async def test_a_reset_in_the_middle_leaves_no_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pair(tmp_path, monkeypatch, PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        pair.hold()
        asked = asyncio.create_task(pair.answer(DESTINATION, prompt(1), "reset"))
        await pair.until_held()
        await pair.suite.manager.ResetPrefixCache(kvmanager_pb2.ResetPrefixCacheRequest(), timeout=PATIENCE)
        assert await asked == (wanted, 0), "it waits for no transfer that is void"
        pair.release()
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, HITS), "the other one has computed it since"
        await pair.suite.until_all_free(2)


@pytest.mark.rest
async def test_a_destination_that_is_killed_in_the_middle_fetches_again_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pair(tmp_path, monkeypatch, PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        pair.hold()
        pid = pair.suite.stack.children[DESTINATION].pid
        asked = asyncio.create_task(pair.answer(DESTINATION, prompt(1), "killed"))
        await pair.until_held()
        kill(pair.suite, DESTINATION)
        with pytest.raises((aio.AioRpcError, AssertionError)):
            await asked
        pair.release()
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, HITS), "nobody holds its blocks"
        await until_restarted(pair.suite, DESTINATION, pid)
        await pair.suite.until_connected(2)
        assert await pair.answer(DESTINATION, prompt(1)) == (wanted, HITS)
        await pair.suite.until_all_free(2)
