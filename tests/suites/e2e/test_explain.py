"""`Explain` against what then happens on a quiet suite of two workers: hits and worker are exact, nothing changes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable

import grpc
import pytest

from common.process.python import module_command
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc
from quire.inference.v1 import inference_pb2
from tests.support.suite import PATIENCE, Suite, greedy
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 16
_random = random.Random(1409)


def fresh(tokens: int) -> list[int]:
    """Return a prompt that no other test has."""
    return _random.choices(range(100, 400), k=tokens)


async def explained(suite: Suite, request: inference_pb2.GenerateRequest) -> pb.ExplainResponse:
    return await suite.decisions.Explain(pb.ExplainRequest(request=request), timeout=PATIENCE)


async def until_cached(suite: Suite, request: inference_pb2.GenerateRequest, tokens: int) -> None:
    """Wait until the index has so much of a prompt: the manager publishes beside the requests."""
    await until(
        lambda: explained(suite, request), lambda told: told.cached_tokens >= tokens, every=0.05, seconds=PATIENCE
    )


async def settled(suite: Suite, request: inference_pb2.GenerateRequest) -> pb.ExplainResponse:
    """Return the explanation once the router has heard of the idle workers: until two are the same."""
    found = await explained(suite, request)
    async with asyncio.timeout(PATIENCE):
        while True:
            before, found = found, await explained(suite, request)
            idle = not any(each.running_sequences for each in (await suite.status()).workers)
            if idle and costs(before.workers) == costs(found.workers):
                return found


async def routing_of(suite: Suite, request_id: str) -> pb.DecisionRecord:
    asked = pb.ListDecisionsRequest(request_id=request_id, kind="routing")
    (found,) = (await suite.decisions.ListDecisions(asked, timeout=PATIENCE)).decisions
    return found


def costs(workers: Iterable[pb.Candidate]) -> dict[str, float]:
    return {each.name: each.cost for each in workers}


async def counts(suite: Suite) -> tuple[int, list[tuple[int, int]]]:
    """Return how many records the routers have, and what is in use at the workers."""
    listed = await suite.decisions.ListDecisions(pb.ListDecisionsRequest(limit=1000), timeout=PATIENCE)
    return len(listed.decisions), [(pool.in_use, pool.waiting) for pool in await suite.pools()]


async def test_explain_hit_exact(suite: Suite) -> None:
    """Cold, warm, longer, diverging, shorter than a block, whole blocks, salted, without the cache, an answer's end."""
    base = fresh(10 * BLOCK + 5)
    first = await suite.generate(greedy(base, 2 * BLOCK))
    salted, uncached = greedy(base, 2), greedy(base, 2)
    salted.cache.salt, uncached.cache.no_cache = "other", True
    conversation = [*base, *first.tokens, *fresh(BLOCK)]
    cases = [
        greedy(base, 2), greedy(base + fresh(3 * BLOCK), 2), greedy(base[: 6 * BLOCK] + fresh(40), 2),
        greedy(fresh(BLOCK - 1), 2), greedy(base[: 4 * BLOCK], 2), salted, salted, uncached,
        greedy(fresh(5 * BLOCK), 2), greedy(conversation, 2),
    ]  # fmt: skip
    await suite.until_all_free(2)
    # The blocks of the answer are published too; its last token was never computed.
    await until_cached(suite, cases[-1], (len(base) + len(first.tokens) - 1) // BLOCK * BLOCK)
    exact, seen = 0, list[int]()
    for number, case in enumerate(cases):
        case.request_id = f"explained-{number}"
        before = await settled(suite, case)
        outcome = await suite.generate(case)
        assert outcome.admitted is not None
        assert outcome.finished is not None
        assert (before.outcome, before.index_answered) == ("placed", True)
        routed = await routing_of(suite, case.request_id)
        hits = {each.name: each.figures["hit_blocks"] * BLOCK for each in before.workers}
        assert hits == {each.name: each.figures["hit_blocks"] * BLOCK for each in routed.candidates}
        # A heartbeat between question and request may change the costs, and then the worker.
        assert routed.chosen in before.tied or costs(before.workers) != costs(routed.candidates)
        told = hits[outcome.admitted.worker_id]
        exact += told == outcome.admitted.cached_tokens == outcome.finished.usage.cached_tokens
        # Of the worker that has most: the cheapest one may be another.
        seen.append(int(max(hits.values())))
        await suite.until_all_free(2)
    assert exact / len(cases) == 1.0, seen
    assert seen[:5] == [10 * BLOCK, 10 * BLOCK, 6 * BLOCK, 0, 3 * BLOCK]
    assert seen[5:9] == [0, 10 * BLOCK, 0, 0]


async def test_a_dry_run_changes_nothing(suite: Suite) -> None:
    await suite.until_all_free(2)
    prompt = greedy(fresh(5 * BLOCK), 2)
    before = await counts(suite)
    for _ in range(3):
        found = await explained(suite, prompt)
        assert (found.cached_tokens, found.shareable_tokens, found.block_size) == (0, 5 * BLOCK, BLOCK)
        assert sorted(each.name for each in found.workers) == ["worker-0", "worker-1"]
        assert found.worker_id in found.tied
    assert await counts(suite) == before


async def test_a_caller_of_the_public_port_is_answered_about_its_own(suite: Suite) -> None:
    stub = rpc.DecisionServiceStub(suite.channel)
    found = await stub.Explain(pb.ExplainRequest(request=greedy(fresh(20), 2)), timeout=PATIENCE)
    assert (found.outcome, found.prompt_tokens) == ("placed", 20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Explain(pb.ExplainRequest(request=greedy([1 << 30], 2)), timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def quire_explain(suite: Suite, *flags: str) -> tuple[int, str, str]:
    where = ["--admin-address", suite.stack.admin_address, "--state-dir", str(suite.stack.options.state_dir)]
    pipe = asyncio.subprocess.PIPE
    command = module_command("cli.main", "explain", *flags, *where)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_command_takes_text_chats_and_token_ids(suite: Suite) -> None:
    prompt = fresh(3 * BLOCK)
    chat = suite.stack.options.state_dir / "chat.json"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 7}))
    answers = await asyncio.gather(
        quire_explain(suite, "--token-ids", " ".join(map(str, prompt)), "--json"),
        quire_explain(suite, "--chat", str(chat), "--json"),
        quire_explain(suite, "What is a block?"),
        quire_explain(suite, "--raw", "A block", "--max-tokens", "100000000"),
        quire_explain(suite, "a", "--token-ids", "1"),
    )
    assert [status for status, *_ in answers[:3]] == [0, 0, 0], answers
    assert json.loads(answers[0][1])["prompt_tokens"] == len(prompt)
    assert json.loads(answers[1][1])["max_tokens"] == 7
    assert "would get it at once" in answers[2][1]
    assert (answers[3][0], answers[4][0]) == (2, 2)
    assert "PROMPT" in answers[4][2]
