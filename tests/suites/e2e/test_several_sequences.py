"""n > 1 on a real suite, through both APIs: shared blocks, a private last block, samples by seed alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.demo_model.prompts import questions, system_text
from cli.suite.stack import StackOptions
from gpuworker.server.codec import fold_seed
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2
from quire.types.v1 import types_pb2 as types
from tests.support.load import kill
from tests.support.reference import chat_tokens
from tests.support.simulated import expected
from tests.support.suite import PATIENCE, Suite, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
FLAGS = ("--kv-blocks", "1024", "--dtype", "float32", "--deterministic")
SEED = 20_261
MAX_NUM_SEQS = 5


def prompt(number: int) -> list[int]:
    """Return a chat that does not end at the end of a block; another one for each number, from its first block on."""
    ids = chat_tokens(questions(8)[number].text, f"Number {number} of these. {system_text()[:500]}")
    return ids if len(ids) % BLOCK > 1 else [*ids, *ids[-2:]]


def request(ids: Sequence[int], n: int, seed: int = SEED, max_tokens: int = 48, salt: str = "") -> pb.GenerateRequest:
    """Return a request at temperature 1 that runs to its length; another `salt` finds nothing in the cache."""
    sampling = types.SamplingParams(temperature=1.0, n=n, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=ids))
    return pb.GenerateRequest(prompt=prompt, sampling=sampling, cache=pb.CacheOptions(salt=salt))


async def outputs(suite: Suite, message: pb.GenerateRequest) -> list[list[int]]:
    """Return the tokens of each sequence of a request."""
    answer = await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=message), timeout=PATIENCE)
    assert [output.index for output in answer.outputs] == list(range(message.sampling.n))
    return [list(output.token_ids) for output in answer.outputs]


def client(suite: Suite) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{suite.stack.http_url}/v1", api_key="none", max_retries=0)


async def over_http(suite: Suite, ids: Sequence[int], n: int, **fields: Any) -> list[list[int]]:
    """Return the tokens of each choice of a completion, the same request as `request` makes."""
    async with client(suite) as http:
        answer = await http.completions.create(
            model="checkpoint", prompt=list(ids), n=n, seed=SEED, temperature=1, max_tokens=48,
            extra_body={"ignore_eos": True, "return_token_ids": True}, **fields,
        )  # fmt: skip
    assert [choice.index for choice in answer.choices] == list(range(n))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 48 * n)
    return [choice.model_dump()["token_ids"] for choice in answer.choices]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    flags = (*FLAGS, "--max-num-seqs", str(MAX_NUM_SEQS))
    options = StackOptions(model=CHECKPOINT, workers=1, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("suite"), options) as running:
        yield running


async def until_all_run(call: Any, n: int) -> None:
    """Read a stream until every sequence has tokens."""
    seen: set[int] = set()
    async with asyncio.timeout(PATIENCE):
        while len(seen) < n:
            event = await call.read()
            if event.WhichOneof("event") == "tokens":
                seen.add(event.tokens.index)


async def rows(suite: Suite) -> list[list[int]]:
    """Return the block table of every running sequence, as the KV manager has it."""
    answer = await suite.manager.GetBlockTable(kvmanager_pb2.GetBlockTableRequest(), timeout=PATIENCE)
    return [list(table.block_ids) for table in answer.tables]


async def prefill_chunks(suite: Suite, trace_id: str, sequences: int) -> list[tuple[int, int]]:
    """Return (first position, tokens) of every prefill chunk of a request, once all its sequences are traced."""
    stub = suite.decisions
    async with asyncio.timeout(PATIENCE):
        while True:
            trace = await stub.GetTrace(decision_pb2.GetTraceRequest(trace_id=trace_id), timeout=PATIENCE)
            if sum(span.name == "decode" for span in trace.spans) == sequences:
                break
            await asyncio.sleep(0.05)
    found = [span.attributes for span in trace.spans if span.name == "prefill chunk"]
    return sorted((int(each["quire.start"]), int(each["quire.scheduled_tokens"])) for each in found)


async def test_full_blocks_of_the_prompt_are_shared_and_counted_once_and_the_rest_is_ones_own(
    one_worker: Suite,
) -> None:
    ids = prompt(0)
    full = len(ids) // BLOCK
    call = one_worker.inference.Generate(request(ids, n=4, max_tokens=3500), timeout=PATIENCE)
    await until_all_run(call, 4)
    before, (pool,), after = await rows(one_worker), await one_worker.pools(), await rows(one_worker)
    call.cancel()
    assert len(before) == 4
    assert len({tuple(row[:full]) for row in before}) == 1
    own = [block for row in before for block in row[full:]]
    assert len(own) == len(set(own)) >= 4
    # The sequences go on meanwhile: the count lies between those of the two tables.
    distinct = [len(set(itertools.chain(*tables))) for tables in (before, after)]
    assert distinct[0] <= pool.in_use <= distinct[1]
    assert distinct[0] == full + len(own)
    await one_worker.until_all_free(workers=1)


async def test_only_the_tokens_after_the_last_full_block_are_computed_more_than_once(one_worker: Suite) -> None:
    ids = prompt(1)
    full = len(ids) // BLOCK * BLOCK
    answer = await one_worker.inference.GenerateUnary(
        pb.GenerateUnaryRequest(request=request(ids, n=4)), timeout=PATIENCE
    )
    assert (answer.admitted.prompt_tokens, answer.admitted.cached_tokens) == (len(ids), 0)
    usage = [output.finished.usage for output in answer.outputs]
    assert [each.prompt_tokens for each in usage] == [len(ids)] * 4
    assert [each.cached_tokens for each in usage] == [0, full, full, full]
    first, *later = await prefill_chunks(one_worker, answer.admitted.trace_id, sequences=4)
    assert first == (0, len(ids))
    # A sequence granted together with the first has no block to copy yet, and computes the rest itself.
    assert len(later) == 3
    assert set(later) <= {(full, len(ids) - full), (len(ids) - 1, 1)}


async def test_the_last_block_is_copied_for_a_sequence_that_is_granted_later(one_worker: Suite) -> None:
    ids = prompt(6)
    undisturbed = await outputs(one_worker, request(ids, n=2, max_tokens=200))
    others = one_worker.inference.Generate(request(prompt(7), n=MAX_NUM_SEQS - 1, max_tokens=3000), timeout=PATIENCE)
    await until_all_run(others, MAX_NUM_SEQS - 1)
    # One place is left: the first sequence takes it, the second waits. The first is cancelled, long before its end: it
    # must still run when the second gets a place.
    call = one_worker.inference.Generate(request(ids, n=2, max_tokens=3000, salt="new"), timeout=PATIENCE)
    drawn: list[list[int]] = [[], []]
    trace_id = ""
    async for event in call:
        match event.WhichOneof("event"):
            case "admitted":
                trace_id = event.admitted.trace_id
            case "tokens":
                drawn[event.tokens.index] += event.tokens.token_ids
                others.cancel()
        if min(map(len, drawn)) >= 200:
            break
    call.cancel()
    chunks = await prefill_chunks(one_worker, trace_id, sequences=2)
    assert chunks == [(0, len(ids)), (len(ids) - 1, 1)], "all was copied but the token that it needs the logits of"
    assert [each[:200] for each in drawn] == undisturbed
    await one_worker.until_all_free(workers=1)


async def test_draws_follow_from_seed_and_index_alone(one_worker: Suite) -> None:
    ids = prompt(2)
    four = await outputs(one_worker, request(ids, n=4))
    assert len({tuple(each) for each in four}) == 4
    assert await outputs(one_worker, request(ids, n=4)) == four
    assert await outputs(one_worker, request(ids, n=1)) == four[:1]
    # A copied block holds the same values as a sequence computes alone.
    for index in range(4):
        assert await outputs(one_worker, request(ids, n=1, seed=_signed(fold_seed(SEED, index)))) == [four[index]]
    await one_worker.until_all_free(workers=1)


async def test_both_apis_draw_the_same(one_worker: Suite) -> None:
    ids = prompt(3)
    four = await over_http(one_worker, ids, n=4)
    assert await outputs(one_worker, request(ids, n=4)) == four
    assert await over_http(one_worker, ids, n=1) == four[:1]
    async with client(one_worker) as http:
        stream = await http.completions.create(
            model="checkpoint", prompt=ids, n=4, seed=SEED, temperature=1, max_tokens=48, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        drawn: list[list[int]] = [[] for _ in range(4)]
        async for chunk in stream:
            drawn[chunk.choices[0].index] += chunk.choices[0].model_dump()["token_ids"]
    assert drawn == four
    await one_worker.until_all_free(workers=1)


async def test_over_http_too_full_blocks_are_counted_once(one_worker: Suite) -> None:
    ids = prompt(4)
    full = len(ids) // BLOCK
    async with client(one_worker) as http:
        stream = await http.completions.create(
            model="checkpoint", prompt=ids, n=4, max_tokens=3500, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        seen: set[int] = set()
        async with asyncio.timeout(PATIENCE):
            while len(seen) < 4:
                seen.add((await anext(stream)).choices[0].index)
        held = await rows(one_worker)
        await stream.close()
    assert len(held) == 4
    assert len({tuple(row[:full]) for row in held}) == 1
    own = [block for row in held for block in row[full:]]
    assert len(own) == len(set(own)) >= 4
    await one_worker.until_all_free(workers=1)


async def test_several_sequences_outlive_a_killed_worker_without_a_changed_token(tmp_path: Path) -> None:
    """The tokens of simulated workers follow from seed and position, as those of real ones do; test_recovery.py kills
    real workers."""
    flags = ("--kv-blocks", "1024", "--simulate", "base=4ms,prefill=10us")
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=flags)
    ids = prompt(5)
    async with running_suite(tmp_path, options) as suite:
        undisturbed = await outputs(suite, request(ids, n=4, max_tokens=400))
        call = suite.inference.Generate(request(ids, n=4, max_tokens=400), timeout=PATIENCE)
        drawn: list[list[int]] = [[] for _ in range(4)]
        reasons = {}
        worker, killed = "", False
        async for event in call:
            match event.WhichOneof("event"):
                case "admitted":
                    worker = event.admitted.worker_id
                case "tokens":
                    drawn[event.tokens.index] += event.tokens.token_ids
                case "finished":
                    reasons[event.finished.index] = event.finished.reason
            if not killed and all(len(each) >= 8 for each in drawn):
                kill(suite, worker)
                killed = True
        assert killed
        assert reasons == dict.fromkeys(range(4), types.FINISH_REASON_LENGTH)
        assert drawn == undisturbed
        assert drawn == [expected(ids, 400, fold_seed(SEED, index)) for index in range(4)]
        await suite.until_all_free(workers=2)


def _signed(seed: int) -> int:
    """Return the 64 bits of a seed as the API takes them."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
