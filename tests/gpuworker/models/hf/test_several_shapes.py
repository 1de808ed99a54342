"""Models whose layers differ in heads or head sizes: the same tokens as transformers, from blocks of several pools."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from common.contracts.lease import Copy
from common.contracts.types import BlockId, KvGroup, KvGroupKind, SequenceId
from gpuworker.attention.backends import make_backend
from gpuworker.config import GpuWorkerSettings
from gpuworker.models.hf.loader import random_module
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import self_test
from gpuworker.plane.assembly import assemble
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from tests.support.checkpoints import tokenizer
from tests.support.gpuworker.full_forward import greedy_tokens, random_prompt
from tests.support.gpuworker.runner_harness import GREEDY, Driver, runner_on

CPU = torch.device("cpu")
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# What a family's published checkpoints say, and the line of their layers.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mimo_v2_flash": ("mimo_v2_flash", {}, "a=2x16+16 b=4x16+16 aba"),
    "mimo_v2_flash, V narrower than K": ("mimo_v2_flash", {"v_head_dim": 8}, "a=2x16+8 b=4x16+8 aba"),
    "gemma4": ("gemma4_text", {}, "a=2x16+16 b=2x32+32 aab"),
    "gemma4 31b": (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 1},
        "a=4x16+16 b=1x32+32 abab",
    ),
    "gemma4 26b a4b": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        "a=2x16+16 b=2x32+32 abab",
    ),
    "gemma4 e2b": ("gemma4_text", {"num_kv_shared_layers": 2}, "a=2x16+16 b=2x32+32 ab"),
    "gemma4_unified": ("gemma4_unified_text", {}, "a=2x16+16 b=2x32+32 aab"),
}
A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)


def config_of(name: str) -> PretrainedConfig:
    family, options, _ = CASES[name]
    if family == "gemma4_text" and options:
        wide = {"head_dim": 32}
        if heads := options.get("num_global_key_value_heads"):
            wide["num_key_value_heads"] = heads
        layers = {layer: wide for layer, kind in enumerate(KINDS) if kind == "full_attention"}
        options = options | {"num_hidden_layers": len(KINDS), "layer_types": KINDS, "per_layer_config": layers}
    return tiny_config(CONFIG_MAPPING[family](), **options)


@functools.cache
def module_of(name: str) -> PreTrainedModel:
    module = random_module(config_of(name), torch.float32, 0, CPU)
    module.train(False)
    return module


def model_of(name: str, kv_dtype: str | None = None) -> TransformersModel:
    return TransformersModel(copy.deepcopy(module_of(name)), kv_dtype)


def greedy(name: str, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    return greedy_tokens(module_of(name), prompt, count, guess)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, block_size: int) -> None:
    model = model_of(name)
    runner = runner_on(model, block_size, max_model_len=96)
    cases = [(random_prompt(length), chunk) for length, chunk in ((1, 9), (33, 7), (48, 13), (9, 1))]
    driver = Driver(runner, block_size)
    streams = [driver.add(prompt, 16, chunk) for prompt, chunk in cases]
    driver.run()
    runner.close()
    for (prompt, _), stream in zip(cases, streams, strict=True):
        assert stream.output == greedy(name, prompt, 16, stream.output)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_the_self_test_finds_the_shape_of_each_layer(name: str, kv_dtype: str) -> None:
    found = self_test(model_of(name, kv_dtype), lambda cache: make_backend("auto", cache))
    assert (found.shapes, found.dtype, found.window) == (CASES[name][2], kv_dtype, 0)


def row(sequence: SequenceId, start: int, length: int, *blocks: int) -> ScheduledRow:
    return ScheduledRow(sequence, start, length, tuple(map(BlockId, blocks)), samples=True)


def test_shared_and_copied_blocks_hold_every_layer() -> None:
    name, prompt = "gemma4 e2b", random_prompt(11)
    runner = runner_on(model_of(name), 4)
    for sequence in (A, B, C):
        runner.add_sequence(sequence, prompt, GREEDY, len(prompt))
    first = runner.submit_step(StepPlan(1, (row(A, 0, 11, 5, 2, 9),))).result(timeout=60).sampled[A]
    plan = StepPlan(2, (row(B, 10, 1, 5, 2, 3), row(C, 8, 3, 5, 2, 7)), (Copy(BlockId(9), BlockId(3), 2),))
    assert runner.submit_step(plan).result(timeout=60).sampled == {B: first, C: first}
    runner.close()
    assert list(first) == greedy(name, prompt, 1)


def test_a_start_says_what_windows_cost_where_shapes_share_no_lanes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module_of("gemma4").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    settings = GpuWorkerSettings(model=str(tmp_path), dtype="float32", kv_cache_dtype="int8", kv_blocks=8, threads=1)
    with caplog.at_level("INFO"):
        plane = assemble(settings)
    plane.runner.close()
    words = "2 of 3 layers have a window of 8 tokens and keep K/V of the whole context: 160 B of 304 B a token"
    assert words in caplog.text
    assert plane.memory.block_bytes == 16 * 304


def test_a_start_says_what_each_group_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module_of("gemma4").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    settings = GpuWorkerSettings(model=str(tmp_path), dtype="float32", kv_blocks=40, threads=1)
    with caplog.at_level("INFO"):
        plane = assemble(settings)
    plane.runner.close()
    assert "whole context" not in caplog.text
    assert plane.memory.block_bytes == 16 * 2 * 64 * 4
    assert plane.start_lines()[4:7] == [
        "  KV cache      320.0 KiB  40 pages of 16 slots in float32, 8.0 KiB each",
        "    all tokens       1 layer, 1 page a block, 512 B a token, at most 8 blocks a sequence",
        "    window of 8      2 layers, 1 page a block, 512 B a token, at most 3 blocks a sequence",
    ]
    assert plane.agent_config().groups == (
        KvGroup(KvGroupKind.FULL, 0, 1, (2,)),
        KvGroup(KvGroupKind.WINDOW, 8, 1, (0, 1)),
    )
