"""A huge prompt begins while another request still has some of its blocks, and no token changes by it."""

from __future__ import annotations

import asyncio
import random
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
