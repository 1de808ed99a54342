"""Layers that keep a state, in native steps: logits and tokens of transformers, at each level of the library."""

from __future__ import annotations

import ctypes
import functools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from common.contracts.errors import EngineFailure
from common.contracts.types import BlockId, KvGeometry
from gpuworker.attention.by_shape import AttentionByShape
from gpuworker.attention.native_backend import NativeAttention
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import with_states
from gpuworker.memory.state_store import StateStore
from gpuworker.models.bit_equality import refuse_unequal_bits
from gpuworker.models.choose import why_not_native
from gpuworker.models.hf.loader import ModelSource
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.linears import LinearReader
from gpuworker.models.llama.pack import pack_model
from gpuworker.models.llama.spec import LlamaSpec, llama_spec, why_not_llama
from gpuworker.models.llama.weights import tensor_names, with_merged_experts
from gpuworker.native import library as native
from gpuworker.native.library import levels_here, load
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.runner.native_executor import NativeExecutor
from gpuworker.scheduling.batch_plan import Checkpoint, ScheduledRow, StepNotBuilt, StepPlan
from tests.gpuworker.models.test_checkpoints import Steps
from tests.support.gpuworker.full_forward import greedy_tokens, random_prompt
from tests.support.gpuworker.runner_harness import CPU, queued_on

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")

F, L, C = "full_attention", "linear_attention", "conv"
BLOCK_SIZE = 4
_SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_DELTA = {
    **_SHAPE,
    "layer_types": [L, L, L, F],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}
_LFM2_MOE = _SHAPE | {
    "layer_types": [C, C, F, C],
    "num_hidden_layers": 4,
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", _SHAPE | {"layer_types": [C, C, F, C], "num_hidden_layers": 4}),
    "lfm2, biases, wide convolutions, a last layer that attends": (
        "Lfm2Config",
        _SHAPE
        | {"layer_types": [C, F], "num_hidden_layers": 2, "conv_bias": True, "conv_L_cache": 5}
        | {"tie_word_embeddings": True, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2_moe": ("Lfm2MoeConfig", _LFM2_MOE),
    "lfm2_moe, no bias, not normalised, a factor, experts in all layers": (
        "Lfm2MoeConfig",
        _LFM2_MOE
        | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.5, "num_dense_layers": 0},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5, odd sizes, biases": (
        "Qwen3_5TextConfig",
        _DELTA
        | {"layer_types": [F, L], "num_hidden_layers": 2, "hidden_size": 33, "num_attention_heads": 3}
        | {"num_key_value_heads": 1, "linear_key_head_dim": 11, "linear_value_head_dim": 21, "attention_bias": True}
        | {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
    ),
    "qwen3_5, wide heads": (
        "Qwen3_5TextConfig",
        _DELTA
        | {"layer_types": [L, F], "num_hidden_layers": 2, "linear_value_head_dim": 72}
        | {"linear_key_head_dim": 40, "linear_num_key_heads": 1, "linear_num_value_heads": 1},
    ),
    "qwen3_5, a scaled rope": ("Qwen3_5TextConfig", _DELTA | {"rope_parameters": _YARN}),
    "qwen3_next": ("Qwen3NextConfig", _DELTA | _EXPERTS),
    "qwen3_next, dense layers, not normalised": (
        "Qwen3NextConfig",
        _DELTA | _EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_value_heads": 6},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {name: size for name, size in _DELTA.items() if name != "intermediate_size"} | _EXPERTS,
    ),
}
EVERY_FAMILY = ("lfm2", "lfm2_moe", "qwen3_5", "qwen3_next", "qwen3_5_moe")


@functools.cache
def module_of(name: str) -> PreTrainedModel:
    """Return a model with random norms, biases and decays: those of a new model hide mistakes."""
    kind, options = CASES[name]
    config: PretrainedConfig = getattr(transformers, kind)(**options)
    with torch.random.fork_rng([]):
        torch.manual_seed(11)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for weight in module.parameters():
                if weight.dim() > 1:
                    weight.normal_(0.0, 0.3)
                else:
                    weight.add_(0.3 * torch.randn(weight.shape))
            for bias in (each for name, each in module.named_buffers() if name.endswith("expert_bias")):
                bias.normal_(0.0, 0.3)
    module.train(False)
    return module


@functools.cache
def directory(name: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix="quire-states-"))
    module_of(name).save_pretrained(made)
    return made


def spec_of(name: str) -> LlamaSpec:
    spec = llama_spec(module_of(name).config)
    assert spec is not None
    return spec


@pytest.fixture(params=levels_here())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Return the library of each level that this processor runs."""
    return load(request.param)


def native_model(
    name: str, library: ctypes.CDLL, dtype: torch.dtype = torch.float32, quantization: str = "none"
) -> LlamaCpuModel:
    tensors: dict[str, torch.Tensor] = module_of(name).state_dict()
    source = with_merged_experts(tensors, tensors.__getitem__)
    reader = LinearReader(source, lambda _: None, dtype, quantization)
    return LlamaCpuModel(module_of(name).config, pack_model(library, spec_of(name), reader), "float32")


def geometry_of(spec: LlamaSpec) -> KvGeometry:
    layers = "".join("a" if layer in spec.attending else "-" for layer in range(max(spec.attending) + 1))
    dim = spec.head_dim
    shapes = f"a={spec.num_kv_heads}x{dim}+{dim} {layers}"
    return KvGeometry(len(spec.attending), spec.num_kv_heads, dim, dim, "float32", shapes=shapes)


class Walk:
    """Sequences of one model, each cut into steps as a test likes, at places that are not their numbers."""

    def __init__(self, model: LlamaCpuModel, tokens: torch.Tensor) -> None:
        assert model.states is not None
        self.model, self.states, self.tokens = model, model.states, tokens
        count, length = tokens.shape
        blocks = -(-length // BLOCK_SIZE)
        cache = KvCache(geometry_of(model.packed.spec), count * blocks, BLOCK_SIZE, CPU)
        (part,) = cache.parts
        self._table = np.random.default_rng(0).permutation(count * blocks).astype(np.int32).reshape(count, blocks)
        self._attention = attention_of(part, model)
        self.states.reserve(count + 1)
        self.states.kept.fill_(255)  # NaN: a sequence from position 0 on begins without a state

    def step(self, *rows: tuple[int, int, int], keep: Sequence[int] | None = None) -> torch.Tensor:
        """Compute positions from one to another of some sequences; return the logits of all tokens, or of some."""
        which, start, end = np.array(sorted(rows, key=lambda row: row[2] - row[1] > 1), dtype=np.int32).T
        packed = pack_rows(start, end - start, self._table[which], BLOCK_SIZE)
        *arrays, row, position = to_device([*attention_arrays(packed), packed.row_of_token, packed.positions], CPU)
        metadata = attention_metadata(packed, arrays)
        self._attention.begin(metadata)
        self.states.begin(metadata, np.int32(len(self.tokens)) - which)
        ids = self.tokens[torch.from_numpy(which)[row.long()].long(), position.long()]
        kept = torch.arange(len(ids)) if keep is None else torch.tensor(keep, dtype=torch.int64)
        return self.model.forward(ids, position.long(), kept, self._attention).clone()


def attention_of(cache: KvCache, model: LlamaCpuModel) -> AttentionByShape:
    attention = NativeAttention(cache, library=model.packed.library, deterministic=True)
    lanes = {layer: lane for lane, layer in enumerate(model.packed.spec.attending)}
    return AttentionByShape([attention], [lanes])


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = (ours - theirs).norm(dim=-1) / (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    return error


@torch.inference_mode()
def reference_of(name: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits [N, T, vocab]."""
    logits: torch.Tensor = module_of(name)(input_ids=tokens, use_cache=False).logits
    return logits


def drawn(name: str, count: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(spec_of(name).vocab_size, (count, length), generator=generator)


def walked(model: LlamaCpuModel, tokens: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Return the logits of each sequence, cut at random into steps that some sequences take part in."""
    walk, draw = Walk(model, tokens), random.Random(seed)
    done, found = [0] * len(tokens), [list[torch.Tensor]() for _ in tokens]
    length = tokens.shape[1]
    while min(done) < length:
        rows = []
        for which, at in enumerate(done):
            count = min(draw.choice((0, 1, 1, 2, 3, 9)), length - at)
            if count:
                rows.append((which, at, at + count))
        rows.sort(key=lambda row: row[2] - row[1] > 1)
        if not rows:
            continue
        logits, first = walk.step(*rows), 0
        for which, start, end in rows:
            found[which].append(logits[first : first + end - start])
            first, done[which] = first + end - start, end
    return [torch.cat(each) for each in found]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_however_sequences_are_cut(name: str, library: ctypes.CDLL) -> None:
    tokens = drawn(name, 3, 29)
    wanted = reference_of(name, tokens)
    ours = torch.stack(walked(native_model(name, library), tokens, 0))
    error = relative(ours, wanted)
    assert error.median() < 2e-5
    assert error.max() < 2e-3
    assert ours.argmax(-1).tolist() == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_no_bit_depends_on_how_sequences_are_cut(name: str, library: ctypes.CDLL) -> None:
    tokens, model = drawn(name, 3, 29), native_model(name, library, torch.bfloat16)
    first, *others = (walked(model, tokens, seed) for seed in range(3))
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_the_test_of_a_deterministic_start_passes(name: str) -> None:
    model = native_model(name, load(levels_here()[-1]), torch.bfloat16)
    refuse_unequal_bits(model, geometry_of(model.packed.spec), lambda cache: attention_of(cache.parts[0], model))


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_bfloat16_is_about_as_close_to_float32_as_transformers(name: str, library: ctypes.CDLL) -> None:
    tokens = drawn(name, 2, 29)
    exact = reference_of(name, tokens)
    ours = relative(torch.stack(walked(native_model(name, library, torch.bfloat16), tokens, 1)), exact)
    rounded: Any = AutoModelForCausalLM.from_pretrained(directory(name), dtype=torch.bfloat16)
    with torch.inference_mode():
        theirs = relative(rounded(input_ids=tokens, use_cache=False).logits.float(), exact)
    assert ours.median() < 1.2 * theirs.median()
    assert ours.quantile(0.9) < 1.5 * theirs.quantile(0.9)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("w8a8", 0.3)])
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_linears_may_be_quantised(name: str, quantization: str, most: float, library: ctypes.CDLL) -> None:
    tokens = drawn(name, 2, 29)
    exact = reference_of(name, tokens)
    model = native_model(name, library, quantization=quantization)
    error = relative(torch.stack(walked(model, tokens, 1)), exact)
    assert 1e-4 < error.median() < most


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_what_is_kept_does_not_change_it(name: str) -> None:
    """The last layer goes on with the kept tokens alone, and still leaves the states of all."""
    tokens, library = drawn(name, 2, 12), load(levels_here()[-1])
    every, some = (Walk(native_model(name, library), tokens) for _ in range(2))
    wanted = every.step((0, 0, 7), (1, 0, 5))
    for keep in ([2, 6, 11], []):
        assert torch.equal(some.step((0, 0, 7), (1, 0, 5), keep=keep), wanted[keep])
        assert torch.equal(some.states.kept[1:], every.states.kept[1:])
    assert torch.equal(some.step((0, 7, 8), (1, 5, 12), keep=[0, 7]), every.step((0, 7, 8), (1, 5, 12))[[0, 7]])


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_a_model_is_read(name: str) -> None:
    spec, stored = spec_of(name), set(module_of(name).state_dict())
    names = set(tensor_names(spec))
    without = {each for each in stored if ".experts." in each} | ({"lm_head.weight"} if spec.tied else set())
    assert {each for each in names if ".experts." not in each} == stored - without


@pytest.mark.parametrize("place", [-1, 2, 2**31 - 1])
def test_a_place_beyond_the_states_fails_the_step(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model("lfm2", load(levels_here()[-1]))
    walk = Walk(model, drawn("lfm2", 1, 8))
    begin = walk.states.begin
    monkeypatch.setattr(walk.states, "begin", lambda step, _: begin(step, np.array([place], dtype=np.int32)))
    with pytest.raises(EngineFailure, match="the step has a place that the model does not know"):
        walk.step((0, 0, 3))


# ---------------------------------------------------------------- checkpoints of states, in queued steps


def queued(name: str, block_size: int, kv_dtype: str = "float32") -> tuple[ModelRunner, Steps]:
    runner = queued_on(directory(name), block_size, 96, grouped=True, kv_cache_dtype=kv_dtype)
    assert isinstance(runner.executor, NativeExecutor)
    spec, states = spec_of(name), runner.executor._model.states
    assert states is not None
    geometry = replace(geometry_of(spec), dtype=kv_dtype)
    groups = with_states(geometry, spec.keeping, states.bytes_a_sequence, block_size).groups
    return runner, Steps(runner, groups, block_size)


@pytest.mark.parametrize(("name", "block_size"), [*((name, 4) for name in EVERY_FAMILY), ("lfm2", 16)])
def test_sequences_go_on_from_checkpoints_with_the_tokens_of_transformers(name: str, block_size: int) -> None:
    """One is saved behind a chunk of a prompt, one behind a decode whose sequence has left when it is loaded."""
    runner, steps = queued(name, block_size)
    early, late = 2 * block_size, 3 * block_size
    first = steps.add(random_prompt(early + 3), block_size + 2)
    second = steps.add([*first.prompt[:early], *random_prompt(7)], 10, (first, 2))
    kept, kept_late = steps.checkpoint(first), steps.checkpoint(first)
    try:
        steps.step((first, 0, early - 3))
        steps.step((first, early - 3, early), save=[kept])
        steps.step(
            (first, early, early + 3), (second, early, early + 7), load=[kept._replace(sequence=second.sequence)]
        )
        for at in range(early + 3, late):
            done = at - early - 3
            rows = [(first, at, at + 1)]
            if done < 8:
                rows.append((second, early + 7 + done, early + 8 + done))
            steps.step(*rows, save=[kept_late] if at + 1 == late else ())
        steps.take()
        runner.remove(first.sequence)
        known = [*first.prompt, *first.output][:late]
        third = steps.add([*known, *random_prompt(5)], 6, (first, 3))
        steps.step((third, late, late + 5), load=[kept_late._replace(sequence=third.sequence)])
        for done in range(4):
            steps.step((third, late + 5 + done, late + 6 + done))
        steps.take()
    finally:
        runner.close()
    for line in (first, second, third):
        assert line.output
        wanted = greedy_tokens(module_of(name), line.prompt, len(line.output), line.output)
        assert line.output == wanted, line.sequence


def tokens_in_bfloat16(name: str, had_states: bool) -> list[list[int]]:
    """Return what sequences sample on K and V in bfloat16, on pages that checkpoints may have filled.

    Most pages are taken by decodes, whose steps run on arrays of earlier ones.
    """
    runner, steps = queued(name, 4, "bfloat16")
    first = steps.add(random_prompt(9), 2)
    steps.step((first, 0, 9), save=steps.checkpoints_everywhere(first) if had_states else ())
    lines = [steps.add(random_prompt(length), 40) for length in (1, 21)]
    try:
        steps.step(*((line, 0, len(line.prompt)) for line in sorted(lines, key=lambda line: len(line.prompt))))
        for done in range(36):
            ends = [(line, len(line.prompt) + done) for line in lines]
            steps.step(*((line, end, end + 1) for line, end in ends))
            steps.take()
    finally:
        runner.close()
    return [line.output for line in lines]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_pages_that_held_states_are_numbers_again(name: str) -> None:
    assert tokens_in_bfloat16(name, had_states=True) == tokens_in_bfloat16(name, had_states=False)


def test_pages_that_were_not_cleared_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above would see it."""
    monkeypatch.setattr(StateStore, "bytes_of", lambda *_: np.empty((0, 2), dtype=np.int64))
    assert tokens_in_bfloat16("qwen3_5", had_states=True) != tokens_in_bfloat16("qwen3_5", had_states=False)


@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_page_that_the_cache_does_not_have_is_refused(page: int) -> None:
    runner, steps = queued("lfm2", 4)
    line = steps.add(random_prompt(8), 2)
    try:
        pages = (*steps.checkpoint(line).pages[1:], BlockId(page))
        with pytest.raises(StepNotBuilt, match="not among the 512 of the cache"):
            steps.step((line, 0, 8), save=[Checkpoint(line.sequence, pages)])
        steps.step((line, 0, 8))
        steps.take()
    finally:
        runner.close()
    assert line.output == greedy_tokens(module_of("lfm2"), line.prompt, 1)


def test_pages_are_cleared_behind_a_step_that_failed() -> None:
    """The rows of a new sequence take a page of a checkpoint; their step never runs, and the page is zeroes."""
    runner, steps = queued("lfm2", 4)
    executor = runner.executor
    assert isinstance(executor, NativeExecutor)
    first = steps.add(random_prompt(9), 2)
    steps.step((first, 0, 9), save=steps.checkpoints_everywhere(first))
    steps.take()
    second = steps.add(random_prompt(5), 2)
    store = executor._forwards._checkpoints._store  # type: ignore[union-attr]
    pages = second.tables[0]
    assert any(held(store, pages))
    broken = steps.add(random_prompt(5), 2)
    broken.tables = ((*broken.tables[0][:-1], BlockId(10**6)),)
    rows = [ScheduledRow(each.sequence, 0, 5, (), True, tables=each.tables) for each in (broken, second)]
    for number, row in enumerate(rows):
        with pytest.raises(EngineFailure):
            runner.submit_step(StepPlan(number, (row,))).result(timeout=60)
    runner.close()
    assert not any(held(store, pages))


def held(store: StateStore, pages: Sequence[int]) -> bytes:
    """Return what lies in pages."""
    return b"".join(ctypes.string_at(at, count) for at, count in store.bytes_of(pages).tolist())


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("lfm2", {"layer_types": [C, C, "sliding_attention", C]}, "its 4 layers are of kinds conv, sliding_attention"),
        ("lfm2", {"layer_types": [C] * 4}, "its 4 layers are of kinds conv"),
        ("lfm2", {"layer_types": [C, F]}, "its 4 layers are of kinds conv, full_attention"),
        ("lfm2", {"conv_L_cache": 1}, "it convolves 1 tokens, not 2 to 8"),
        ("lfm2", {"conv_L_cache": 9}, "it convolves 9 tokens, not 2 to 8"),
        ("qwen3_5", {"hidden_act": "gelu"}, "its activation is gelu, not silu"),
        ("qwen3_5", {"layer_types": [C, F, C, F]}, "its 4 layers are of kinds conv, full_attention"),
        ("qwen3_5", {"linear_num_value_heads": 3}, "2 key heads do not divide 3 value heads"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "longrope"}}, "its rotary embedding is of kind longrope"),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}},
            "it rotates 3 numbers of each head",
        ),
        ("qwen3_next", {"num_experts_per_tok": 7}, "a token goes through 7 of its 6 experts"),
        ("lfm2_moe", {"num_experts_per_tok": 7}, "a token goes through 7 of its 6 experts"),
    ],
)
def test_an_option_that_is_not_known_is_refused(name: str, change: dict[str, Any], why: str) -> None:
    kind, options = CASES[name]
    config: PretrainedConfig = getattr(transformers, kind)(**options)
    assert why_not_llama(config) is None
    for field, value in change.items():
        setattr(config, field, value)
    assert why_not_llama(config) == why


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_they_run_natively_on_cpus_alone(name: str) -> None:
    config, source = module_of(name).config, ModelSource("", dtype="float32")
    assert why_not_native(config, source, CPU) is None
    why = f"on CUDA no layer of a {config.model_type} that keeps a state is run natively"
    assert why_not_native(config, source, torch.device("cuda")) == why


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_an_entry_that_a_later_transformers_declares_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options = CASES[name]
    config: PretrainedConfig = getattr(transformers, kind)(**options)
    fields = type(config).__dataclass_fields__
    monkeypatch.setattr(type(config), "__dataclass_fields__", fields | {"use_something": fields["vocab_size"]})
    assert why_not_llama(config) == "its configuration has use_something, which the native path does not know"
