"""Blocks come to a worker before a request asks for them: by an operator's word, and because others are asked for them.

The next prompt then has hits from host memory and waits for nothing. When either end dies in the middle, what did not
come is computed.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from cli.commands import prefetch
from common.contracts.lease import AHEAD_REASON
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.kvmanager.v1 import kvmanager_pb2
from tests.suites.e2e.test_peer_fetch import (
    BLOCK,
    DESTINATION,
    HITS,
    IN_GROUPS,
    SOURCE,
    TOKENS,
    Pair,
    prompt,
    running_pair,
)
from tests.support.checkpoints import checkpoint, hf_greedy
from tests.support.direct_worker import records_of
from tests.support.load import kill, until_restarted
from tests.support.suite import PATIENCE
from tests.support.waiting import until

BLOCKS, THIRD = HITS // BLOCK, "worker-2"


async def prefetched(pair: Pair, tokens: Sequence[int], worker: str = DESTINATION) -> pb.PrefetchResponse:
    """Ask the router's admin plane for a prompt at a worker."""
    asked = pb.PrefetchRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=tokens)), worker_id=worker)
    return await rpc.InferenceServiceStub(pair.suite.admin).Prefetch(asked, timeout=PATIENCE)


async def records(pair: Pair) -> list[str]:
    """Return what became of wishes, the oldest first."""
    wanted = decision_pb2.ListDecisionsRequest(kind="prefetch", from_manager=True)
    found = (await pair.suite.decisions.ListDecisions(wanted, timeout=PATIENCE)).decisions
    return [each.chosen for each in sorted(found, key=lambda each: each.time_unix_nano)]


async def until_recorded(pair: Pair, words: str) -> None:
    await until(lambda: records(pair), lambda found: any(words in each for each in found), seconds=PATIENCE)


async def pool_of(pair: Pair, worker: str) -> kvmanager_pb2.Pool:
    return next(each for each in await pair.suite.pools() if each.worker_id == worker)


async def test_a_prompt_that_an_operator_prefetched_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pair(tmp_path, monkeypatch, PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        answer = await prefetched(pair, prompt(1))
        assert (answer.outcome, answer.num_blocks, answer.blocks_there) == ("accepted", BLOCKS, 0)
        assert (answer.blocks_coming, answer.reason) == (BLOCKS, "")
        await until_recorded(pair, f"prefetch: {BLOCKS} of {BLOCKS} blocks came")
        pool = await pool_of(pair, DESTINATION)
        assert (dict(pool.ahead_loads), pool.ahead, pool.host_held) == ({"prefetch": BLOCKS}, 0, BLOCKS)
        assert await pair.answer(DESTINATION, prompt(1), "hits") == (wanted, HITS)
        assert await records_of(pair.suite, "hits", "shortfall") == []
        (grant,) = await records_of(pair.suite, "hits", "grant")
        assert (grant.figures["host_blocks"], "fetched_blocks" in grant.figures) == (BLOCKS, False)
        said = f"{BLOCKS} of the {BLOCKS} loaded blocks came before a request asked for them (prefetch)"
        assert f"{AHEAD_REASON}{said}" in grant.reasons
        again = await prefetched(pair, prompt(1))
        assert (again.outcome, again.blocks_there, again.blocks_coming) == ("accepted", BLOCKS, 0)
        await pair.suite.until_all_free(2)


@pytest.mark.rest
@pytest.mark.parametrize("model", IN_GROUPS)
async def test_windows_chunks_and_states_are_prefetched(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of a model with groups comes up to the deepest block from which it could go on."""
    async with running_pair(tmp_path, monkeypatch, model=model, pages=IN_GROUPS[model], PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint(model), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        answer = await prefetched(pair, prompt(1))
        assert (answer.outcome, answer.blocks_coming) == ("accepted", BLOCKS)
        await until_recorded(pair, f"prefetch: {BLOCKS} of {BLOCKS} blocks came")
        assert await pair.answer(DESTINATION, prompt(1), "hits") == (wanted, HITS)
        assert await records_of(pair.suite, "hits", "shortfall") == []
        await pair.suite.until_all_free(2)


@pytest.mark.rest
async def test_the_command_says_what_is_refused_and_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pair(tmp_path, monkeypatch) as pair:
        address = pair.suite.stack.admin_address

        async def said(*words: str) -> tuple[int, str]:
            with redirect_stdout(io.StringIO()) as out:
                status = await asyncio.to_thread(prefetch.main, [*words, "--admin-address", address])
            return status, " ".join(out.getvalue().split())

        ids = " ".join(map(str, prompt(1)))
        status, words = await said("--token-ids", ids, "--worker", DESTINATION)
        assert status == 0
        nobody = "neither its disk nor another worker has the next block, block 0 of it"
        assert words == f"refused by {DESTINATION}: 0 of {BLOCKS} blocks are there, 0 are to come; {nobody}"
        for wrong in (("--token-ids", ids, "--worker", "nobody"), ("--token-ids", "7 8", "--worker", DESTINATION)):
            status, _ = await said(*wrong)
            assert status != 0
        assert await records(pair) == ["prefetch: refused"]


@pytest.mark.rest
async def test_a_pin_computes_once_and_the_other_worker_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pair(tmp_path, monkeypatch, manager_flags=("--pin-share", "0.4"), PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        asked = pb.PinRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt(1))), compute_on=2)
        answer = await rpc.InferenceServiceStub(pair.suite.admin).Pin(asked, timeout=PATIENCE)
        assert sorted(answer.computed_on) == [SOURCE, DESTINATION]
        pool = await pool_of(pair, DESTINATION)
        assert (pool.peer_loads, pool.kept_pinned) == (BLOCKS, BLOCKS)
        assert await pair.answer(DESTINATION, prompt(1)) == (wanted, HITS)


@pytest.mark.rest
async def test_a_prefix_of_two_workers_comes_to_the_third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pair(tmp_path, monkeypatch, workers=3, manager_flags=("--replicate",), PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        assert await pair.answer(DESTINATION, prompt(1)) == (wanted, HITS)
        await until_recorded(pair, "replica: 8 of 8 blocks came")
        assert dict((await pool_of(pair, THIRD)).ahead_loads) == {"replica": 8}
        other = [*prompt(1)[: 8 * BLOCK], *prompt(2)[8 * BLOCK :]]
        assert await pair.answer(THIRD, other, "hits") == (hf_greedy(checkpoint("llama"), other, TOKENS), 8 * BLOCK)
        assert await records_of(pair.suite, "hits", "shortfall") == []
        await pair.suite.until_all_free(3)


@pytest.mark.rest
async def test_a_source_that_is_killed_in_the_middle_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pair(tmp_path, monkeypatch, PATIENCE="10") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        pair.hold()
        pid = pair.suite.stack.children[SOURCE].pid
        answer = await prefetched(pair, prompt(1))
        assert (answer.outcome, answer.reason) == ("accepted", "")
        await pair.until_held()
        kill(pair.suite, SOURCE)
        await until_recorded(pair, f"of {BLOCKS} blocks came")
        pair.release()
        tokens, cached = await pair.answer(DESTINATION, prompt(1))
        assert tokens == wanted
        assert cached < HITS
        await until_restarted(pair.suite, SOURCE, pid)
        await pair.suite.until_connected(2)
        await pair.suite.until_all_free(2)
        assert [each.ahead for each in await pair.suite.pools()] == [0, 0]


@pytest.mark.rest
async def test_a_destination_that_is_killed_in_the_middle_begins_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pair(tmp_path, monkeypatch, PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        pair.hold()
        pid = pair.suite.stack.children[DESTINATION].pid
        answer = await prefetched(pair, prompt(1))
        assert (answer.outcome, answer.reason) == ("accepted", "")
        await pair.until_held()
        kill(pair.suite, DESTINATION)
        pair.release()
        await until_restarted(pair.suite, DESTINATION, pid)
        await pair.suite.until_connected(2)
        await pair.suite.until_all_free(2)
        assert [each.ahead for each in await pair.suite.pools()] == [0, 0]
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, HITS), "nobody holds its blocks"
        assert await pair.answer(DESTINATION, prompt(1)) == (wanted, HITS), "it fetches them for the prompt"


@pytest.mark.rest
async def test_a_reset_in_the_middle_leaves_no_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pair(tmp_path, monkeypatch, PATIENCE="60") as pair:
        wanted = hf_greedy(checkpoint("llama"), prompt(1), TOKENS)
        assert await pair.answer(SOURCE, prompt(1)) == (wanted, 0)
        pair.hold()
        answer = await prefetched(pair, prompt(1))
        assert (answer.outcome, answer.reason) == ("accepted", "")
        await pair.until_held()
        await pair.suite.manager.ResetPrefixCache(kvmanager_pb2.ResetPrefixCacheRequest(), timeout=PATIENCE)
        pair.release()
        assert await pair.answer(DESTINATION, prompt(1)) == (wanted, 0)
        assert [each.ahead for each in await pair.suite.pools()] == [0, 0]
        await pair.suite.until_all_free(2)
