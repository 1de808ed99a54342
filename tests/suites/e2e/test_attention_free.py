"""A model of which no layer attends: its blocks keep nothing, and yet streams outlive workers and a manager."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from cli.suite.stack import StackOptions
from common.checkpoint.context import USUAL_OF_STATES
from quire.inference.v1 import inference_pb2 as pb
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.load import kill
from tests.support.suite import PATIENCE, cached_tokens, greedy, running_suite

TOKENS = 60
_random = random.Random(9)
PROMPTS = [[_random.randrange(6, VOCAB_SIZE) for _ in range(25 + 5 * n)] for n in range(8)]


async def test_streams_outlive_a_worker_and_a_manager_where_blocks_keep_nothing(tmp_path: Path) -> None:
    """Two workers, pools too small for all; one worker and the manager are killed while all streams run."""
    flags = ("--dtype", "float32", "--kv-blocks", "60", "--max-model-len", "160", "--max-num-seqs", "6")
    folder = checkpoint("mamba2")
    wanted = [hf_greedy(folder, prompt, TOKENS) for prompt in PROMPTS]
    options = StackOptions(model=folder, block_size=4, workers=2, worker_flags=flags)
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
        assert (again.tokens, cached_tokens(again)) == (wanted[0], 0)
        await suite.until_connected(2)
        await suite.until_all_free(2)


async def test_a_usual_length_is_served_where_no_option_says_one(tmp_path: Path) -> None:
    options = StackOptions(model=checkpoint("falcon_mamba"), block_size=16, worker_flags=("--dtype", "float32"))
    async with running_suite(tmp_path, options) as suite:
        await suite.until_connected(1)
        (worker,) = (await suite.status()).workers
        model = await suite.inference.GetModel(pb.GetModelRequest(), timeout=PATIENCE)
        assert (worker.num_blocks, model.max_model_len) == (64 * USUAL_OF_STATES // 16, USUAL_OF_STATES)
        assert (await suite.generate(greedy(PROMPTS[0], 9))).tokens == hf_greedy(options.model, PROMPTS[0], 9)
