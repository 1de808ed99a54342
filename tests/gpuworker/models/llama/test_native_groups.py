"""Groups of layers in native steps: tokens of transformers, from pages that other sequences take at once."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from common.contracts.errors import EngineFailure
from common.contracts.types import BlockId, KvGroup, KvGroupKind, SequenceId
from gpuworker.config import GpuWorkerSettings
from gpuworker.native.library import best
from gpuworker.plane.assembly import assemble
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.runner.native_executor import NativeExecutor
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from tests.support.checkpoints import hf_greedy, tokenizer
from tests.support.gpuworker.full_forward import random_prompt
from tests.support.gpuworker.runner_harness import GREEDY, SLOTS, Driver, queued_on

pytestmark = pytest.mark.skipif(best() is None, reason="the native library was not built")

S, F = "sliding_attention", "full_attention"
GROUPS = KvGroup(KvGroupKind.FULL, 0, 1, (1, 4)), KvGroup(KvGroupKind.WINDOW, 8, 2, (0, 2, 3, 5))
CASES = ((1, 9), (33, 7), (48, 13), (70, 99), (9, 1))


@functools.cache
def directory() -> Path:
    """Return a checkpoint of six layers, four of which have a window."""
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=[S, F, S, S, F, S],
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    made = Path(tempfile.mkdtemp(prefix="quire-groups-"))
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


def run(runner: ModelRunner, block_size: int, groups: Sequence[KvGroup]) -> list[list[int]]:
    driver = Driver(runner, block_size, groups=groups)
    streams = [driver.add(random_prompt(length), 30, chunk) for length, chunk in CASES]
    try:
        driver.run()
    finally:
        runner.close()
    return [stream.output for stream in streams]


@pytest.mark.parametrize("block_size", [4, 16])
def test_tokens_are_those_of_transformers(block_size: int) -> None:
    runner = queued_on(directory(), block_size, grouped=True)
    assert isinstance(runner.executor, NativeExecutor)
    wanted = [hf_greedy(directory(), random_prompt(length), 30) for length, _ in CASES]
    assert run(runner, block_size, GROUPS) == wanted


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_narrower_caches_give_the_tokens_of_one_group(kv_dtype: str) -> None:
    grouped, plain = (queued_on(directory(), 4, grouped=grouped, kv_cache_dtype=kv_dtype) for grouped in (True, False))
    assert run(grouped, 4, GROUPS) == run(plain, 4, ())


@pytest.mark.parametrize("group", [0, 1])
def test_a_page_that_the_cache_does_not_have_is_refused(group: int) -> None:
    runner = queued_on(directory(), 16, grouped=True)
    runner.add_sequence(SequenceId(1), [7, 8, 9], GREEDY, 3)
    tables = [(BlockId(1),), (BlockId(2), BlockId(3))]
    tables[group] = (*tables[group][:-1], BlockId(SLOTS // 16))
    row = ScheduledRow(SequenceId(1), 0, 3, (), True, tables=tuple(tables))
    with pytest.raises(EngineFailure, match="a block that the cache does not know"):
        runner.submit_step(StepPlan(1, (row,))).result(timeout=60)
    runner.close()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_worker_serves_the_groups_natively(deterministic: bool) -> None:
    settings = GpuWorkerSettings(
        model=str(directory()), dtype="float32", kv_blocks=300, threads=1, deterministic=deterministic
    )
    plane = assemble(settings)
    plane.runner.close()
    assert isinstance(plane.runner.executor, NativeExecutor)
    assert plane.agent_config().groups == GROUPS
