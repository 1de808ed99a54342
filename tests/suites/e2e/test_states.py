"""A model whose layers keep states: tokens over worker deaths, siblings and preemptions, and hits on checkpoints."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.load import kill
from tests.support.suite import Suite, cached_tokens, greedy, running_suite

TOKENS = 60
FLAGS = ("--dtype", "float32", "--kv-blocks", "80", "--max-model-len", "160", "--max-num-seqs", "6")
_random = random.Random(7)
SHARED = [_random.randrange(6, VOCAB_SIZE) for _ in range(40)]
PROMPTS = [[*SHARED, *(_random.randrange(6, VOCAB_SIZE) for _ in range(1 + 3 * n))] for n in range(8)]


async def test_streams_outlive_a_worker_and_a_manager(tmp_path: Path) -> None:
    """Two workers, pools too small for all; one worker and the manager are killed while all streams run."""
    folder = checkpoint("qwen3_next")
    wanted = [hf_greedy(folder, prompt, TOKENS) for prompt in PROMPTS]
    options = StackOptions(model=folder, block_size=4, workers=2, worker_flags=FLAGS)
    async with running_suite(tmp_path, options) as suite:
        await suite.until_connected(2)
        begun = [asyncio.Event() for _ in PROMPTS]
        streams = [
            asyncio.create_task(suite.generate(greedy(prompt, TOKENS), first_token=first))
            for prompt, first in zip(PROMPTS, begun, strict=True)
        ]
        await asyncio.wait([asyncio.create_task(first.wait()) for first in begun], return_when=asyncio.FIRST_COMPLETED)
        kill(suite, "worker-0")
        kill(suite, "kvmanager")
        outcomes = await asyncio.gather(*streams)
        assert [outcome.tokens for outcome in outcomes] == wanted
        again = await suite.generate(greedy(PROMPTS[0], TOKENS))
        assert again.tokens == wanted[0]
        several = greedy(PROMPTS[1], TOKENS)
        several.sampling.n = 3
        assert (await suite.generate(several)).sequences == dict.fromkeys(range(3), wanted[1])
        await suite.until_connected(2)
        await suite.until_all_free(2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """A suite of one worker, whose pool is large."""
    flags = ("--dtype", "float32", "--kv-blocks", "400", "--max-model-len", "160", "--max-num-seqs", "6")
    options = StackOptions(model=checkpoint("qwen3_next"), block_size=4, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("alone"), options) as suite:
        yield suite


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_goes_on_from_checkpoints_also_behind_a_new_manager(alone: Suite) -> None:
    """Each turn goes on behind the last answer; so it does at a manager that knows the inventory alone."""
    folder, answer = checkpoint("qwen3_next"), 12
    prompt, before, tokens = PROMPTS[2], 0, []
    for turn in range(4):
        outcome = await alone.generate(greedy(prompt, answer))
        tokens.append((outcome.tokens, hf_greedy(folder, prompt, answer)))
        assert cached_tokens(outcome) == before
        before = (len(prompt) + answer - 1) // 4 * 4
        prompt = [*prompt, *outcome.tokens, 7 + turn, 8]
        await alone.until_all_free(1)
        if turn == 1:
            kill(alone, "kvmanager")
    assert all(found == wanted for found, wanted in tokens)
    parted = await alone.generate(greedy([*PROMPTS[2][:30], 9, 9], answer))
    assert cached_tokens(parted) == 0
    again = await alone.generate(greedy([*PROMPTS[2][:30], 11], answer))
    assert (again.tokens, cached_tokens(again)) == (hf_greedy(folder, [*PROMPTS[2][:30], 11], answer), 28)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_second_chat_with_one_system_prompt_goes_on_behind_it(alone: Suite) -> None:
    """The first one leaves a checkpoint at the end of its first message, although it goes on."""
    system = "Answer in words of few letters, and be kind."
    for number, question in enumerate(("Who are you?", "What is new?")):
        request = greedy([], 8)
        request.prompt.chat.messages.add(role="system", content=system)
        request.prompt.chat.messages.add(role="user", content=question)
        outcome = await alone.generate(request)
        uncached = pb.GenerateRequest()
        uncached.CopyFrom(request)
        uncached.cache.no_cache = True
        assert (await alone.generate(uncached)).tokens == outcome.tokens
        assert (cached_tokens(outcome) > len(system)) == bool(number)
        await alone.until_all_free(1)


async def test_prompts_that_come_at_once_go_on_from_the_checkpoint_of_the_first(tmp_path: Path) -> None:
    """Whoever is admitted first computes the prompt. The others wait for its checkpoint, or come when it is there."""
    folder, prompt = checkpoint("qwen3_next"), [3 + n % 40 for n in range(101)]
    flags = ("--dtype", "float32", "--kv-blocks", "900", "--max-model-len", "160", "--max-num-seqs", "6")
    options = StackOptions(model=folder, block_size=4, worker_flags=(*flags, "--max-num-batched-tokens", "16"))
    async with running_suite(tmp_path, options) as suite:
        outcomes = await asyncio.gather(*(suite.generate(greedy([*prompt, n], 8)) for n in (7, 7, 7, 7)))
        assert sorted(map(cached_tokens, outcomes)) == [0, 100, 100, 100]
        wanted = hf_greedy(folder, [*prompt, 7], 8)
        assert all(outcome.tokens == wanted for outcome in outcomes)
        await suite.until_all_free(1)
