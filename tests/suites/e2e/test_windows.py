"""Every layer has a window: what it covers is used again, also by a new manager, and no token changes."""

from __future__ import annotations

import random
from pathlib import Path

from cli.commands.record import suite_of
from cli.suite.stack import StackOptions
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.load import kill
from tests.support.suite import cached_tokens, greedy, running_suite

SIZE, TOKENS = 4, 12
WINDOW = 8
"""Of the checkpoint."""
_random = random.Random(12)
FIRST = [_random.randrange(6, VOCAB_SIZE) for _ in range(79)]


async def test_a_conversation_goes_on_behind_what_its_window_covers(tmp_path: Path) -> None:
    """Of 90 computed tokens 88 are in full blocks. A pool of 16 blocks of 4 has lost the first of them by then."""
    flags = ("--kv-blocks", "16", "--dtype", "float32", "--max-model-len", "256")
    folder = checkpoint("mistral")
    options = StackOptions(model=folder, block_size=SIZE, worker_flags=flags)
    async with running_suite(tmp_path, options) as suite:
        assert suite_of(await suite.status())["window"] == WINDOW, "what `quire record` writes for a replay"
        first = await suite.generate(greedy(FIRST, TOKENS, "first"))
        await suite.until_all_free(1)
        going_on = [*FIRST, *first.tokens, 7, 8, 9]
        second = await suite.generate(greedy(going_on, TOKENS, "second"))
        await suite.until_all_free(1)
        assert [first.tokens, second.tokens] == [hf_greedy(folder, each, TOKENS) for each in (FIRST, going_on)]
        assert (cached_tokens(first), cached_tokens(second)) == (0, 88)
        kill(suite, "kvmanager")
        further = [*going_on, *second.tokens, 10, 11]
        third = await suite.generate(greedy(further, TOKENS, "third"))
        assert third.tokens == hf_greedy(folder, further, TOKENS)
        assert cached_tokens(third) == (len(going_on) + TOKENS - 1) // SIZE * SIZE
        uncached = greedy(further, TOKENS)
        uncached.cache.no_cache = True
        alone = await suite.generate(uncached)
        assert (alone.tokens, cached_tokens(alone)) == (third.tokens, 0)


async def test_beside_full_layers_a_window_alone_is_kept_and_its_hits_are_deep(tmp_path: Path) -> None:
    """Of three layers two have a window: 64 pages hold what one group keeps of 85 tokens, and more than 128 run."""
    flags = ("--kv-blocks", "64", "--dtype", "float32", "--max-model-len", "160")
    folder = checkpoint("gemma2")
    options = StackOptions(model=folder, block_size=SIZE, worker_flags=flags)
    async with running_suite(tmp_path, options) as suite:
        first = await suite.generate(greedy(FIRST, TOKENS, "first"))
        await suite.until_all_free(1)
        going_on = [*FIRST, *first.tokens, 7, 8, 9]
        second = await suite.generate(greedy(going_on, TOKENS, "second"))
        assert [first.tokens, second.tokens] == [hf_greedy(folder, each, TOKENS) for each in (FIRST, going_on)]
        assert (cached_tokens(first), cached_tokens(second)) == (0, 88)
        await suite.until_all_free(1)
        kill(suite, "kvmanager")
        further = [*going_on, *second.tokens, 10, 11]
        third = await suite.generate(greedy(further, TOKENS, "third"))
        assert third.tokens == hf_greedy(folder, further, TOKENS)
        assert cached_tokens(third) == (len(going_on) + TOKENS - 1) // SIZE * SIZE
