"""Gemma 4 in native steps: logits and tokens of transformers, at each level of the library."""

from __future__ import annotations

import ctypes
import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, PreTrainedModel

from common.contracts.lease import Copy
from common.contracts.types import BlockId, KvGeometry, KvGroup, SequenceId
from gpuworker.attention.by_shape import AttentionByShape
from gpuworker.attention.native_backend import NativeAttention
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import LayerShape, geometry_of, pools_of, reach_of, with_groups
from gpuworker.models.bit_equality import refuse_unequal_bits
from gpuworker.models.choose import why_not_native
from gpuworker.models.hf.loader import ModelSource
from gpuworker.models.llama import reference
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.linears import LinearReader
from gpuworker.models.llama.pack import pack_model
from gpuworker.models.llama.spec import LlamaSpec, llama_spec, why_not_llama
from gpuworker.models.llama.weights import tensor_names, with_merged_experts
from gpuworker.native import library as native
from gpuworker.native.library import levels_here, load
from gpuworker.runner.native_executor import NativeExecutor
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from tests.support.checkpoints import hf_greedy, tokenizer
from tests.support.gpuworker.full_forward import random_prompt
from tests.support.gpuworker.runner_harness import CPU, GREEDY, Driver, queued_on

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")

S, F = "sliding_attention", "full_attention"
BLOCK_SIZE, WINDOW, VOCAB = 4, 8, 264
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "layer_types": [S, F, S, F],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "final_logit_softcapping": 30.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
_INPUTS = {"hidden_size_per_layer_input": 16}
# What published checkpoints say in small, and what they do not say.
CASES: dict[str, dict[str, Any]] = {
    "e2b": _INPUTS | {"num_key_value_heads": 1, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "e4b": _INPUTS
    | {"num_hidden_layers": 7, "layer_types": [S, S, F, S, S, S, F], "num_kv_shared_layers": 3, "head_dim": 8}
    | {"global_head_dim": 16},
    "26b a4b": _EXPERTS
    | {"num_attention_heads": 12, "num_key_value_heads": 6, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "31b": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "odd sizes, biases, all at once": _EXPERTS
    | {
        "hidden_size": 36,
        "moe_intermediate_size": 28,
        "intermediate_size": 37,
        "hidden_size_per_layer_input": 7,
        "head_dim": 10,
    }
    | {"global_head_dim": 22, "attention_bias": True, "num_kv_shared_layers": 2, "tie_word_embeddings": False},
    "one shape, whose last layers have no K and V": _INPUTS
    | {"num_kv_shared_layers": 2, "layer_types": [F] * 4, "tie_word_embeddings": False},
    "one shape, no cap, a scaled rope": {"global_head_dim": 16, "final_logit_softcapping": None}
    | {
        "rope_parameters": {
            S: {"rope_type": "default", "rope_theta": 1e4},
            F: {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
        }
    },
}


@functools.cache
def module_of(name: str) -> PreTrainedModel:
    """Return a model with random norms, biases and scalars: those of a new model hide mistakes."""
    with torch.random.fork_rng([]):
        torch.manual_seed(11)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            Gemma4TextConfig(**_SHAPE | CASES[name]), dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for weight in module.parameters():
                if weight.dim() > 1:
                    weight.normal_(0.0, 0.3)
                else:
                    weight.add_(0.3 * torch.randn(weight.shape))
            for layer in module.model.layers:
                layer.layer_scalar.add_(0.2 * torch.randn(1))
    module.train(False)
    return module


@functools.cache
def directory(name: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix="quire-gemma-"))
    module_of(name).save_pretrained(made)
    tokenizer().save_pretrained(made)
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


def geometry_of_spec(spec: LlamaSpec) -> KvGeometry:
    heads = {layer: spec.heads(layer) for layer in spec.attending}
    return geometry_of({layer: LayerShape(count, dim, dim) for layer, (dim, count) in heads.items()}, "float32", 0)


def groups_of(spec: LlamaSpec, block_size: int) -> tuple[KvGroup, ...]:
    reaches = {layer: reach_of(window, None, 512) for layer, window in enumerate(spec.windows)}
    return with_groups(geometry_of_spec(spec), reaches, spec.sources, block_size).groups


def attention_of(cache: KvCache, model: LlamaCpuModel) -> AttentionByShape:
    parts = cache.parts or (cache,)
    backends = [NativeAttention(part, library=model.packed.library, deterministic=True) for part in parts]
    places = [{layer: lane for lane, layer in enumerate(pool.layers)} for pool in pools_of(cache.geometry)]
    return AttentionByShape(backends, places)


class Walk:
    """Sequences of one model, each cut into steps as a test likes."""

    def __init__(self, model: LlamaCpuModel, tokens: torch.Tensor) -> None:
        self.model, self.tokens = model, tokens
        count, length = tokens.shape
        blocks = -(-length // BLOCK_SIZE)
        cache = KvCache(geometry_of_spec(model.packed.spec), count * blocks, BLOCK_SIZE, CPU)
        for pool in cache.pools:
            pool.fill_(7.0)
        self._table = np.random.default_rng(0).permutation(count * blocks).astype(np.int32).reshape(count, blocks)
        self._attention = attention_of(cache, model)

    def step(self, *rows: tuple[int, int, int], keep: Sequence[int] | None = None) -> torch.Tensor:
        """Compute positions from one to another of some sequences; return the logits of all tokens, or of some."""
        which, start, end = np.array(sorted(rows, key=lambda row: row[2] - row[1] > 1), dtype=np.int32).T
        packed = pack_rows(start, end - start, self._table[which], BLOCK_SIZE)
        *arrays, row, position = to_device([*attention_arrays(packed), packed.row_of_token, packed.positions], CPU)
        self._attention.begin(attention_metadata(packed, arrays))
        ids = self.tokens[torch.from_numpy(which)[row.long()].long(), position.long()]
        kept = torch.arange(len(ids)) if keep is None else torch.tensor(keep, dtype=torch.int64)
        return self.model.forward(ids, position.long(), kept, self._attention).clone()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = (ours - theirs).norm(dim=-1) / (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    return error


@torch.inference_mode()
def reference_of(name: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits [N, T, vocab]."""
    logits: torch.Tensor = module_of(name)(input_ids=tokens, use_cache=False).logits
    return logits


def drawn(count: int, length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(3))


def walked(model: LlamaCpuModel, tokens: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Return the logits of each sequence, cut at random into steps that some sequences take part in."""
    walk, draw = Walk(model, tokens), random.Random(seed)
    done, found = [0] * len(tokens), [list[torch.Tensor]() for _ in tokens]
    length = tokens.shape[1]
    while min(done) < length:
        rows = [(which, at, at + min(draw.choice((0, 1, 1, 2, 3, 9)), length - at)) for which, at in enumerate(done)]
        rows = sorted((row for row in rows if row[2] > row[1]), key=lambda row: row[2] - row[1] > 1)
        if not rows:
            continue
        logits, first = walk.step(*rows), 0
        for which, start, end in rows:
            found[which].append(logits[first : first + end - start])
            first, done[which] = first + end - start, end
    return [torch.cat(each) for each in found]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_however_sequences_are_cut(name: str, library: ctypes.CDLL) -> None:
    tokens = drawn(3, 29)
    wanted = reference_of(name, tokens)
    ours = torch.stack(walked(native_model(name, library), tokens, 0))
    error = relative(ours, wanted)
    assert error.median() < 2e-5
    assert error.max() < 2e-3
    assert ours.argmax(-1).tolist() == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_how_sequences_are_cut(name: str, library: ctypes.CDLL) -> None:
    tokens, model = drawn(3, 29), native_model(name, library, torch.bfloat16)
    first, *others = (walked(model, tokens, seed) for seed in range(3))
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("name", CASES)
def test_the_test_of_a_deterministic_start_passes(name: str) -> None:
    model = native_model(name, load(levels_here()[-1]), torch.bfloat16)
    refuse_unequal_bits(model, geometry_of_spec(model.packed.spec), lambda cache: attention_of(cache, model))


@pytest.mark.parametrize("name", ["e2b", "26b a4b"])
def test_bfloat16_is_about_as_close_to_float32_as_transformers(name: str, library: ctypes.CDLL) -> None:
    tokens = drawn(2, 29)
    exact = reference_of(name, tokens)
    ours = relative(torch.stack(walked(native_model(name, library, torch.bfloat16), tokens, 1)), exact)
    rounded: Any = AutoModelForCausalLM.from_pretrained(directory(name), dtype=torch.bfloat16)
    with torch.inference_mode():
        theirs = relative(rounded(input_ids=tokens, use_cache=False).logits.float(), exact)
    assert ours.median() < 1.2 * theirs.median()
    assert ours.quantile(0.9) < 1.5 * theirs.quantile(0.9)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("w8a8", 0.3)])
@pytest.mark.parametrize("name", ["e2b", "26b a4b"])
def test_linears_may_be_quantised(name: str, quantization: str, most: float, library: ctypes.CDLL) -> None:
    tokens = drawn(2, 29)
    model = native_model(name, library, quantization=quantization)
    error = relative(torch.stack(walked(model, tokens, 1)), reference_of(name, tokens))
    assert 1e-4 < error.median() < most


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_does_not_change_it(name: str) -> None:
    """A step that keeps no token ends with the last layer that writes K and V, and leaves all of these."""
    tokens, library = drawn(2, 12), load(levels_here()[-1])
    every, some = (Walk(native_model(name, library), tokens) for _ in range(2))
    wanted = every.step((0, 0, 7), (1, 0, 5))
    for keep in ([2, 6, 11], [6], []):
        assert torch.equal(some.step((0, 0, 7), (1, 0, 5), keep=keep), wanted[keep])
    assert torch.equal(some.step((0, 7, 8), (1, 5, 12), keep=[0, 7]), every.step((0, 7, 8), (1, 5, 12))[[0, 7]])


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_a_model_is_read(name: str) -> None:
    spec, stored = spec_of(name), set(module_of(name).state_dict())
    without = {each for each in stored if ".experts." in each} | ({"lm_head.weight"} if spec.tied else set())
    assert {each for each in tensor_names(spec) if ".experts." not in each} == stored - without


@pytest.mark.parametrize("name", CASES)
def test_the_test_at_start_has_a_layer_of_each_kind(name: str) -> None:
    spec = spec_of(name)
    assert spec.gemma is not None
    tested = [spec.gemma.layers[layer] for layer in reference.tested_layers(spec)]
    assert set(tested) == set(spec.gemma.layers)


@pytest.mark.parametrize(("block_size", "grouped"), [(4, True), (16, True), (16, False)])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, block_size: int, grouped: bool) -> None:
    """Steps are queued; pages that nobody reads any more are taken by other sequences at once."""
    runner = queued_on(directory(name), block_size, 96, grouped=grouped)
    assert isinstance(runner.executor, NativeExecutor)
    driver = Driver(runner, block_size, groups=groups_of(spec_of(name), block_size) if grouped else ())
    cases = ((1, 9), (33, 7), (48, 13), (70, 99), (9, 1))
    streams = [driver.add(random_prompt(length), 20, chunk) for length, chunk in cases]
    try:
        driver.run()
    finally:
        runner.close()
    wanted = [hf_greedy(directory(name), random_prompt(length), 20) for length, _ in cases]
    assert [stream.output for stream in streams] == wanted


def test_blocks_are_copied_in_the_pool_of_each_shape() -> None:
    """Where K and V are in eight bits the shapes share no lanes. A sequence goes on from copies of another one's."""
    runner, prompt = queued_on(directory("e2b"), 4, 96, kv_cache_dtype="int8"), random_prompt(21)
    first, second = [BlockId(n) for n in range(7)], [BlockId(n) for n in range(10, 17)]
    found = []
    for sequence in (SequenceId(1), SequenceId(2)):
        runner.add_sequence(sequence, prompt, GREEDY, len(prompt))
    for number, (start, length) in enumerate([(0, 19), (19, 2)], 1):
        row = ScheduledRow(SequenceId(1), start, length, tuple(first), start > 0)
        found.append(runner.submit_step(StepPlan(number, (row,))).result(timeout=60))
    copies = tuple(Copy(*pair, 0) for pair in zip(first, second, strict=True))
    row = ScheduledRow(SequenceId(2), 19, 2, tuple(second), True)
    found.append(runner.submit_step(StepPlan(3, (row,), copies)).result(timeout=60))
    runner.close()
    assert found[2].sampled[SequenceId(2)] == found[1].sampled[SequenceId(1)]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_narrower_caches_give_the_tokens_of_one_group(kv_dtype: str) -> None:
    found = []
    for grouped in (True, False):
        runner = queued_on(directory("e2b"), 4, 96, grouped=grouped, kv_cache_dtype=kv_dtype)
        driver = Driver(runner, 4, groups=groups_of(spec_of("e2b"), 4) if grouped else ())
        streams = [driver.add(random_prompt(length), 20, chunk) for length, chunk in ((33, 7), (48, 13), (9, 1))]
        try:
            driver.run()
        finally:
            runner.close()
        found.append([stream.output for stream in streams])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden_activation": "silu"}, "its activation is silu, not gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": "all"}, "its tokens attend in both directions"),
        (_INPUTS | {"vocab_size_per_layer_input": 100}, "its layers take inputs of 100 tokens, and it has 264"),
        (_EXPERTS | {"top_k_experts": 7}, "a token goes through 7 of its 6 experts"),
        ({"per_layer_config": {1: {"num_attention_heads": 2}}}, "its layers differ in num_attention_heads"),
        ({"head_dim": 15}, "layer 0 has 4 heads of 15, 2 with K and V"),
        (
            {"per_layer_config": {0: {"num_key_value_heads": 1}}, "num_kv_shared_layers": 2},
            "layer 2 attends on K and V of other heads than its own",
        ),
        (
            {"rope_parameters": {S: {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, F: None}},
            "its rotary embedding is of kind None",
        ),
    ],
)
def test_other_variants_are_refused_in_words(options: dict[str, Any], reason: str) -> None:
    assert why_not_llama(Gemma4TextConfig(**_SHAPE | options)) == reason


def test_gpus_run_it_through_transformers(tmp_path: Path) -> None:
    config = module_of("e2b").config
    reason = why_not_native(config, ModelSource(str(tmp_path), dtype="bfloat16"), torch.device("cuda"))
    assert reason == "on CUDA no gemma4_text is run natively"
