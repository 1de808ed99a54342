"""Latents, index keys, states, shared K/V and layers of several shapes behind all services: no token changes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from cli.suite.stack import StackOptions
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.tiny import tiny_config
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy, tokenizer
from tests.support.load import kill
from tests.support.suite import PATIENCE, cached_tokens, greedy, running_suite

SIZE, TOKENS, BLOCKS = 4, 16, 30
_random = random.Random(5)
LONG, *SHORT = [[_random.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in (41, 1, 7, 5, 9, 6, 8)]
GROWN = 44  # tokens of an answer: six sequences that begin in 2 or 3 blocks end in 12 or 14


def gemma4(folder: Path) -> Path:
    """Save a tiny gemma4 of six layers: two shapes, and the last two attend on the K/V of layers before."""
    kinds = [*["sliding_attention"] * 2, "full_attention"] * 2
    wide = {layer: {"head_dim": 32} for layer, kind in enumerate(kinds) if kind == "full_attention"}
    layers = {"num_hidden_layers": 6, "layer_types": kinds, "per_layer_config": wide, "num_kv_shared_layers": 3}
    ids = {"vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2}
    config = tiny_config(CONFIG_MAPPING["gemma4_text"](), **layers, **ids)
    random_module(config, torch.float32, 0, torch.device("cpu")).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


# What the latents of deepseek_v3 are, those of deepseek_v32 are, beside index keys.
LATENTS = (pytest.param("deepseek_v3", marks=pytest.mark.exhaustive), "deepseek_v32")


@pytest.mark.parametrize("kind", [*LATENTS, "gemma4", "lfm2"])
async def test_preemptions_hits_drafts_and_a_new_manager_change_no_token(kind: str, tmp_path: Path) -> None:
    folder = gemma4(tmp_path / "gemma4") if kind == "gemma4" else checkpoint(kind)
    # gemma4 has windows, and a block of each of its two groups takes a page.
    blocks = BLOCKS * 3 // 2 if kind == "gemma4" else BLOCKS
    flags: tuple[str, ...] = ("--kv-blocks", str(blocks), "--dtype", "float32", "--max-model-len", "96")
    if kind == "lfm2":  # the native path keeps no states of drafts
        flags += ("--model-impl", "transformers")
    options = StackOptions(model=folder, block_size=SIZE, worker_flags=(*flags, "--speculative", "ngram"))
    wanted = [hf_greedy(folder, prompt, GROWN) for prompt in SHORT]
    async with running_suite(tmp_path / "suite", options) as suite:
        preemptions = 0
        for _ in range(30):  # who is preempted depends on when each arrives
            outcomes = await asyncio.gather(*(suite.generate(greedy(prompt, GROWN)) for prompt in SHORT))
            assert [outcome.tokens for outcome in outcomes] == wanted
            preemptions += sum(each.finished.usage.preemptions for each in outcomes if each.finished is not None)
            if preemptions:
                break
        assert preemptions
        await suite.until_all_free(1)
        # The pool has room for the blocks of the next request alone: 19 in each group.
        await suite.manager.ResetPrefixCache(kvmanager_pb2.ResetPrefixCacheRequest(), timeout=PATIENCE)
        going_on = [*LONG, *hf_greedy(folder, LONG, TOKENS), 7, 8]
        first = await suite.generate(greedy(going_on, TOKENS))
        await suite.until_all_free(1)
        kill(suite, "kvmanager")
        second = await suite.generate(greedy(going_on, TOKENS))
        uncached = greedy(going_on, TOKENS)
        uncached.cache.no_cache = True
        alone = await suite.generate(uncached)
        assert [each.tokens for each in (first, second, alone)] == [hf_greedy(folder, going_on, TOKENS)] * 3
        assert cached_tokens(second) == (len(going_on) - 1) // SIZE * SIZE
        assert cached_tokens(alone) == 0


@pytest.mark.parametrize("kind", LATENTS)
async def test_an_int8_cache_gives_the_same_tokens_with_hits_and_without(kind: str, tmp_path: Path) -> None:
    flags = ("--kv-blocks", "64", "--dtype", "float32", "--kv-cache-dtype", "int8", "--max-model-len", "96")
    options = StackOptions(model=checkpoint(kind), block_size=SIZE, worker_flags=flags)
    async with running_suite(tmp_path, options) as suite:
        first = await suite.generate(greedy(LONG, TOKENS))
        await suite.until_all_free(1)
        second = await suite.generate(greedy(LONG, TOKENS))
        assert (first.tokens, cached_tokens(first), cached_tokens(second)) == (second.tokens, 0, 40)
