"""Latent attention on latents: the same tokens as transformers, in a fraction of the bytes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from common.contracts.errors import Unsupported
from common.contracts.lease import Copy
from common.contracts.types import BlockId, KvGeometry, SequenceId
from gpuworker.attention.backends import make_backend
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.models.hf.latents import Absorbed
from gpuworker.models.hf.loader import ModelSource, load_model, prepack, random_module
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import self_test
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from tests.support.checkpoints import checkpoint
from tests.support.gpuworker.full_forward import greedy_tokens, random_prompt
from tests.support.gpuworker.runner_harness import GREEDY, Driver, runner_on

CPU = torch.device("cpu")
FAMILIES = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
# What the published checkpoints of a family do differently from its default configuration.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "deepseek_v3, rope by halves": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v3, queries without latents": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3, 3 heads": ("deepseek_v3", {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 10}),
    "deepseek_v3, biases": ("deepseek_v3", {"attention_bias": True}),
    "deepseek_v2, yarn": ("deepseek_v2", {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
}
A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)


def config_of(name: str, **changes: Any) -> PretrainedConfig:
    family, options = VARIANTS.get(name, (name, {}))
    needed = {"num_experts_per_tok": 2} if family == "deepseek_v2" else {}
    return tiny_config(CONFIG_MAPPING[family](), **(needed | options | changes))


@functools.cache
def module_of(name: str) -> PreTrainedModel:
    """Return a model with random weights as transformers runs it."""
    module = random_module(config_of(name), torch.float32, 0, CPU)
    module.train(False)
    return module


def model_of(name: str, kv_dtype: str | None = None) -> TransformersModel:
    return TransformersModel(copy.deepcopy(module_of(name)), kv_dtype)


def greedy(name: str, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    return greedy_tokens(module_of(name), prompt, count, guess)


def shape_by_test(model: TransformersModel) -> KvGeometry:
    return self_test(model, lambda cache: make_backend("auto", cache))


@pytest.mark.parametrize("block_size", [4, pytest.param(16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_tokens_are_those_of_transformers(name: str, block_size: int) -> None:
    """Prefills in chunks beside decodes, over the edges of blocks, from a prompt of one token on."""
    model = model_of(name)
    config = model.config
    runner = runner_on(model, block_size, max_model_len=96)
    cases = [(random_prompt(length, model.vocab_size), chunk) for length, chunk in ((1, 9), (33, 7), (48, 13), (9, 1))]
    driver = Driver(runner, block_size)
    streams = [driver.add(prompt, 16, chunk) for prompt, chunk in cases]
    driver.run()
    runner.close()
    for (prompt, _), stream in zip(cases, streams, strict=True):
        assert stream.output == greedy(name, prompt, 16, stream.output)
    wide = config.kv_lora_rank + config.qk_rope_head_dim
    geometry = KvGeometry(config.num_hidden_layers, 1, wide, config.kv_lora_rank, "float32", values_in_keys=True)
    assert shape_by_test(model) == geometry
    assert bytes_per_block(geometry, 16) == 16 * config.num_hidden_layers * wide * 4


@pytest.mark.parametrize(("name", "shapes"), [("kimi_linear", "a=1x24/16 --a"), ("bailing_hybrid", "a=1x24/16 ---a")])
def test_latents_beside_layers_that_keep_a_state(name: str, shapes: str) -> None:
    model = model_of(name)
    runner = runner_on(model, 4, max_model_len=96)
    driver = Driver(runner, 4)
    prompts = [random_prompt(length, model.vocab_size) for length in (3, 33, 17)]
    streams = [driver.add(prompt, 12, chunk) for prompt, chunk in zip(prompts, (9, 7, 1), strict=True)]
    driver.run()
    runner.close()
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.output == greedy(name, prompt, 12, stream.output)
    assert shape_by_test(model).shapes == shapes


def row(sequence: SequenceId, start: int, length: int, *blocks: int, drafts: tuple[int, ...] = ()) -> ScheduledRow:
    return ScheduledRow(sequence, start, length, tuple(map(BlockId, blocks)), samples=True, drafts=drafts)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_shared_and_copied_blocks_hold_what_was_written(kv_dtype: str) -> None:
    """A prefix hit on the blocks of another sequence, a copied block, and a sequence that is computed anew."""
    name, prompt = "deepseek_v3", random_prompt(11, 160)
    model = model_of(name, kv_dtype)
    runner = runner_on(model, 4)
    for sequence in (A, B, C):
        runner.add_sequence(sequence, prompt, GREEDY, len(prompt))
    first = runner.submit_step(StepPlan(1, (row(A, 0, 11, 5, 2, 9),))).result(timeout=60).sampled[A]
    copies = (Copy(BlockId(9), BlockId(3), 2),)
    plan = StepPlan(2, (row(B, 10, 1, 5, 2, 3), row(C, 8, 3, 5, 2, 7)), copies)
    found = runner.submit_step(plan).result(timeout=60).sampled
    assert found == {B: first, C: first}
    if kv_dtype == "float32":
        assert list(first) == greedy(name, prompt, 1)
    runner.remove(A)
    runner.add_sequence(A, [*prompt, *first], GREEDY, len(prompt))  # preempted, and back on other blocks
    anew = runner.submit_step(StepPlan(3, (row(A, 0, 12, 11, 12, 13),))).result(timeout=60).sampled[A]
    assert runner.submit_step(StepPlan(4, (row(B, 11, 1, 5, 2, 3),))).result(timeout=60).sampled[B] == anew
    runner.close()


def test_drafts_are_verified_on_latents() -> None:
    name, prompt = "deepseek_v3", random_prompt(9, 160)
    wanted = greedy(name, prompt, 5)
    runner = runner_on(model_of(name), 4)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    runner.submit_step(StepPlan(1, (row(A, 0, 9, 0, 1, 2),))).result(timeout=60)
    drafts = (wanted[1], wanted[2], (wanted[3] + 1) % 160)
    drafted = StepPlan(2, (row(A, 9, 1, 0, 1, 2, 3, drafts=drafts),), drafts=3)
    assert runner.submit_step(drafted).result(timeout=60).sampled[A] == tuple(wanted[1:4])
    # The K of the refused draft is overwritten.
    assert runner.submit_step(StepPlan(3, (row(A, 12, 1, 0, 1, 2, 3),))).result(timeout=60).sampled[A] == (wanted[4],)
    runner.close()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_narrow_caches_pass_the_test_at_start(name: str, kv_dtype: str) -> None:
    found = shape_by_test(model_of(name, kv_dtype))
    assert (found.values_in_keys, found.num_kv_heads, found.dtype) == (True, 1, kv_dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_sixteen_bits_pass_the_test_at_start(name: str) -> None:
    module = random_module(config_of(name), torch.bfloat16, 0, CPU)
    assert shape_by_test(TransformersModel(module)).values_in_keys


def test_prepacking_leaves_what_attention_reads() -> None:
    model = model_of("deepseek_v3")
    before = sum(type(each) is nn.Linear for each in model.module.modules())
    assert prepack(model).total == before - len(model.absorbed.layers)
    assert all(type(each.linear) is nn.Linear and each.linear.weight.numel() for each in model.absorbed.layers)
    assert shape_by_test(model).values_in_keys


class ForgetsRope(TorchAttention):
    """Writes latents without what rope has rotated."""

    def write_and_attend(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        latent = torch.cat((value, torch.zeros_like(key[..., value.shape[-1] :])), dim=-1)
        return super().write_and_attend(layer, query, latent, value)


def test_a_cache_of_wrong_latents_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="deepseek_v3 cannot be served: run through the paged cache, its logits diff"):
        self_test(model_of("deepseek_v3"), ForgetsRope)


# ---------------------------------------------------------------- where K and V of every head stay


def changed(name: str, layers: slice, change: Any) -> TransformersModel:
    """Return a model of which some attention layers are changed before they are absorbed."""
    module = copy.deepcopy(module_of(name))
    for each in [each for each in module.modules() if hasattr(each, "expand_kv")][layers]:
        change(each)
    return TransformersModel(module)


def give_bias(module: Any) -> None:
    module.kv_b_proj.bias = nn.Parameter(torch.randn(module.kv_b_proj.out_features))


def scale_values(module: Any) -> None:
    expand = module.expand_kv

    def scaled(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = expand(latent, rope)
        return keys, 2 * values

    module.expand_kv = scaled


class Wrapped(nn.Module):
    """A linear layer of another kind, such as one of quantised weights."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def wrap(module: Any) -> None:
    module.kv_b_proj = Wrapped(module.kv_b_proj)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (give_bias, "kv_b_proj of DeepseekV3Attention has a bias"),
        (scale_values, "DeepseekV3Attention expands its latents in another way"),
        (wrap, "kv_b_proj of DeepseekV3Attention is a Wrapped and not a plain linear layer"),
    ],
)
def test_what_cannot_be_absorbed_keeps_every_head(change: Any, words: str) -> None:
    model = changed("deepseek_v3", slice(None), change)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    assert model.absorbed.reason == (
        f"in {layers} of {layers} layers K and V of every head are kept, which takes many times the bytes of latents:"
        f" {words}"
    )
    assert shape_by_test(model) == KvGeometry(layers, heads, 24, 16, "float32")


def test_layers_that_can_attend_on_latents_beside_one_that_cannot() -> None:
    """Each layer keeps what it can, in a block of several shapes; tokens stay those of transformers."""
    model = changed("deepseek_v3, biases", slice(1, 2), wrap)
    layers = model.config.num_hidden_layers
    assert "in 1 of" in model.absorbed.reason
    geometry = shape_by_test(model)
    assert geometry.shapes == "a=1x24/16 b=4x24+16 " + "ab" + "a" * (layers - 2)
    assert bytes_per_block(geometry, 1) == 4 * (24 * (layers - 1) + 4 * 40)
    runner = runner_on(model, 4)
    driver = Driver(runner, 4)
    prompts = [random_prompt(length, 160) for length in (1, 14, 30)]
    streams = [driver.add(prompt, 12, 7) for prompt in prompts]
    driver.run()
    runner.close()
    assert [stream.output for stream in streams] == [greedy("deepseek_v3, biases", prompt, 12) for prompt in prompts]


def test_a_model_without_latents_has_nothing_to_absorb() -> None:
    assert model_of("llama").absorbed == Absorbed([])


@pytest.mark.parametrize(
    ("bias", "words"), [(False, "attends on latents"), (True, "in 3 of 3 layers K and V of every head are kept")]
)
def test_the_log_says_what_is_kept(
    bias: bool, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bias:
        monkeypatch.setattr("gpuworker.models.hf.latents._why_not", lambda _: "it has a bias")
    with caplog.at_level("INFO"):
        load_model(ModelSource(str(checkpoint("deepseek_v3"))), CPU)
    assert f"deepseek_v3{':' if bias else ''} {words}" in caplog.text
