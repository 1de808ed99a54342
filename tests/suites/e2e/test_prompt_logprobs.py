"""Log-probabilities of prompts on real processes: transformers' values, once and complete, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from tests.suites.e2e.conftest import WORKERS
from tests.support.load import kill, manager_stopped, prompts, until_all_wait, with_a_worker_killed
from tests.support.reference import assert_greedy, next_logprobs
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite, stream
from tests.support.waiting import until

# Where steps cut a prompt changes the order of float32 sums: 1.01e-4 was seen. A wrong token is off by 1e-2 and more.
TOLERANCE = 3e-4

pytestmark = pytest.mark.asyncio(loop_scope="session")


def scoring(prompt: Sequence[int], max_tokens: int, likely: int = 2) -> pb.GenerateRequest:
    request = greedy(prompt, max_tokens)
    request.sampling.prompt_logprobs = likely
    return request


def assert_scored(prompt: Sequence[int], found: Sequence[types_pb2.TokenLogprobs], likely: int = 2) -> None:
    assert [entry.token_id for entry in found] == list(prompt[1:])
    wanted = next_logprobs(prompt)
    for entry, row in zip(found, wanted, strict=True):
        assert abs(entry.logprob - float(row[entry.token_id])) < TOLERANCE
        best = row.topk(likely).values.tolist()
        assert entry.top_logprobs == pytest.approx(best, abs=TOLERANCE)
        assert entry.rank >= 1


def long_prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts that a step cannot score as a whole."""
    return [
        [*first, *second, *first] for first, second in zip(prompts(count, seed), prompts(count, seed + 1), strict=True)
    ]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def http(suite: Suite) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=suite.stack.http_url, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_the_requests_of_lm_eval_get_the_log_likelihoods_of_transformers(
    suite: Suite, http: httpx.AsyncClient, max_tokens: int
) -> None:
    """Token ids in a batch, echo, one log-probability: as lm-eval's local-completions sends and reads them."""
    asked = prompts(6, seed=31)
    contexts = [len(prompt) - 5 for prompt in asked]
    fields = {"prompt": asked, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    answer = await http.post("/v1/completions", json={"model": "checkpoint"} | fields)
    assert answer.status_code == 200, answer.text
    for prompt, context, choice in zip(asked, contexts, answer.json()["choices"], strict=True):
        lists: dict[str, list[Any]] = choice["logprobs"]
        values, best = (lists[name][context : len(prompt)] for name in ("token_logprobs", "top_logprobs"))
        wanted = next_logprobs(prompt)[context - 1 :]
        targets = prompt[context:]
        theirs = [float(row[token]) for row, token in zip(wanted, targets, strict=True)]
        assert values == pytest.approx(theirs, abs=TOLERANCE)
        greedy_ones = [value == max(top.values()) for value, top in zip(values, best, strict=True)]
        assert greedy_ones == [int(row.argmax()) == token for row, token in zip(wanted, targets, strict=True)]
        assert len(lists["tokens"]) == len(prompt) + max_tokens
        assert lists["token_logprobs"][0] is None


async def test_cached_blocks_spare_no_work_and_its_own_serve_others(suite: Suite) -> None:
    (prompt,) = long_prompts(1, seed=41)
    first = await suite.generate(greedy(prompt, 4))
    scored = [
        await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=scoring(prompt, 4))) for _ in range(2)
    ]
    for answer in scored:
        assert answer.admitted.cached_tokens == 0
        assert_scored(prompt, answer.prompt_logprobs)
        assert list(answer.outputs[0].token_ids) == first.tokens
    (other,) = long_prompts(1, seed=43)
    await suite.generate(scoring(other, 0))
    later = await suite.generate(greedy(other, 4))
    assert later.admitted is not None
    assert later.admitted.cached_tokens == (len(other) - 1) // 16 * 16
    await suite.until_all_free(WORKERS)


async def test_several_sequences_score_their_prompt_once(suite: Suite) -> None:
    (prompt,) = long_prompts(1, seed=45)
    request = scoring(prompt, 6)
    request.sampling.n = 3
    answer = await suite.inference.GenerateUnary(pb.GenerateUnaryRequest(request=request))
    assert_scored(prompt, answer.prompt_logprobs)
    assert_greedy([prompt] * 3, [list(output.token_ids) for output in answer.outputs], 6)
    await suite.until_all_free(WORKERS)


async def test_a_prompt_alone_is_computed_and_nothing_is_sampled(suite: Suite) -> None:
    (prompt,) = prompts(1, seed=47)
    outcome = await suite.generate(scoring(prompt, 0))
    assert outcome.finished is not None
    assert (outcome.tokens, outcome.text, outcome.finished.usage.output_tokens) == ([], "", 0)
    assert outcome.finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert_scored(prompt, outcome.prompt_logprobs)


async def some_scored(outcomes: Sequence[Outcome]) -> None:
    """Return when a prompt is scored in part."""
    await until(lambda: any(outcome.prompt_logprobs for outcome in outcomes), every=0, seconds=PATIENCE)


async def test_a_worker_killed_within_prompts_repeats_and_loses_no_value(suite: Suite) -> None:
    asked = long_prompts(12, seed=51)
    outcomes = [Outcome() for _ in asked]
    pairs = zip(asked, outcomes, strict=True)
    tasks = [
        asyncio.create_task(stream(suite.channel, scoring(prompt, 3), outcome=outcome)) for prompt, outcome in pairs
    ]
    await some_scored(outcomes)
    partial = [len(outcome.prompt_logprobs) for outcome in outcomes]
    assert any(0 < count < len(prompt) - 1 for count, prompt in zip(partial, asked, strict=True))
    begun, *_ = (o.admitted.worker_id for o, count in zip(outcomes, partial, strict=True) if count and o.admitted)
    kill(suite, begun)
    await asyncio.gather(*tasks)
    await suite.until_all_free(WORKERS)
    await suite.until_connected(WORKERS)
    for prompt, outcome in zip(asked, outcomes, strict=True):
        assert_scored(prompt, outcome.prompt_logprobs)
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], 3)


async def test_a_worker_killed_within_answers_repeats_no_value(suite: Suite) -> None:
    asked = prompts(12, seed=61)
    _, outcomes = await with_a_worker_killed(suite, [scoring(prompt, 64) for prompt in asked])
    await suite.until_all_free(WORKERS)
    await suite.until_connected(WORKERS)
    for prompt, outcome in zip(asked, outcomes, strict=True):
        assert_scored(prompt, outcome.prompt_logprobs)
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], 64)


async def test_preemptions_repeat_and_lose_no_value(tmp_path: Path) -> None:
    """All sequences start together, however fast the machine is; the pool holds a part of them at full length."""
    options = StackOptions(model=CHECKPOINT, workers=1, worker_flags=("--kv-blocks", "160", "--dtype", "float32"))
    asked = prompts(16, seed=71)
    async with running_suite(tmp_path, options) as suite:
        async with manager_stopped(suite):
            tasks = [asyncio.create_task(suite.generate(scoring(prompt, 120))) for prompt in asked]
            await until_all_wait(suite, len(asked))
        outcomes = await asyncio.gather(*tasks)
        await suite.until_all_free(workers=1)
        (pool,) = await suite.pools()
    assert pool.preemptions > 0
    for prompt, outcome in zip(asked, outcomes, strict=True):
        assert_scored(prompt, outcome.prompt_logprobs)
    assert_greedy(asked, [outcome.tokens for outcome in outcomes], 120)
