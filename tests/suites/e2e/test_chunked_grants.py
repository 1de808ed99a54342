"""A huge prompt begins while another request still has some of its blocks, and no token changes by it."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from cli.suite.stack import StackOptions
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.load import manager_stopped
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite
from tests.support.waiting import until
from tests.support.why import quire_why

_random = random.Random(5)
CHAT, HUGE = ([_random.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in (100, 440))
CHAT_TOKENS, HUGE_TOKENS = 150, 12
OLD_S = 3.0


async def test_a_huge_prompt_begins_before_its_blocks_are_free(tmp_path: Path) -> None:
    """Of 130 blocks of 4 the chat needs up to 63, and the prompt 110: it begins with the others, at least 64.

    The manager stands still until the worker has both, the chat first: it reads of the prompt before the chat can end.
    """
    flags = ("--kv-blocks", "130", "--dtype", "float32", "--max-model-len", "512")
    folder = checkpoint("llama")
    options = StackOptions(model=folder, block_size=4, worker_flags=flags)
    async with running_suite(tmp_path, options) as suite:
        async with asyncio.timeout(PATIENCE):
            requests = greedy(CHAT, CHAT_TOKENS, "chat"), greedy(HUGE, HUGE_TOKENS, "huge")
            tasks = list[asyncio.Task[Outcome]]()
            async with manager_stopped(suite):
                for request in requests:
                    tasks.append(asyncio.create_task(suite.generate(request)))
                    await until(lambda: _waiting(suite, len(tasks)), every=0.05, seconds=PATIENCE)
            chat, huge = await asyncio.gather(*tasks)
        assert chat.tokens == hf_greedy(folder, CHAT, CHAT_TOKENS)
        assert huge.tokens == hf_greedy(folder, HUGE, HUGE_TOKENS)
        status, why, err = await quire_why(suite, "huge")
        assert (status, err) == (0, "")
        assert "begins with a part of its prompt's blocks" in why, why
        await suite.until_all_free(1)


async def _waiting(suite: Suite, sequences: int) -> bool:
    """Say whether so many sequences wait in the worker."""
    return [each.waiting_sequences for each in (await suite.status()).workers] == [sequences]


async def test_an_old_request_and_a_higher_priority_behind_a_begun_prompt_all_end(tmp_path: Path) -> None:
    """While a chat holds its blocks, a prompt begins with a part of its own, one of its priority grows old behind it,
    and a higher priority comes. Each waited for another one, and all stood still when the chat had left.
    """
    worker = ("--kv-blocks", "130", "--max-model-len", "512", "--simulate", "base=500ms,prefill=10us")
    manager = ("--max-wait", str(OLD_S))
    options = StackOptions(model=checkpoint("llama"), block_size=4, worker_flags=worker, manager_flags=manager)
    async with running_suite(tmp_path, options) as suite, asyncio.timeout(PATIENCE):
        # After these admissions by priority comes one by age.
        await asyncio.gather(*(suite.generate(greedy(CHAT[:number], 1)) for number in range(1, 9)))
        first = asyncio.Event()
        chat = asyncio.create_task(suite.generate(greedy(CHAT, CHAT_TOKENS), first_token=first))
        await first.wait()
        others = list[asyncio.Task[Outcome]]()

        async def send(tokens: list[int], priority: int, running: int, waiting: int) -> None:
            request = greedy(tokens, 2)
            request.priority = priority
            others.append(asyncio.create_task(suite.generate(request)))
            await until(
                suite.pools, lambda pools: [(each.running, each.waiting) for each in pools] == [(running, waiting)]
            )

        await send(HUGE, -5, running=2, waiting=0)
        await send(HUGE[::-1], -5, running=2, waiting=1)
        waits_since = time.monotonic()
        await until(lambda: time.monotonic() - waits_since > OLD_S)
        await send(HUGE[1:], 0, running=2, waiting=2)
        chat.cancel()
        ended = await asyncio.gather(*others)
        assert [len(each.tokens) for each in ended] == [2, 2, 2]
        await suite.until_all_free(1)
