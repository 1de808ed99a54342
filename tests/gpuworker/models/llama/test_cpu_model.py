"""The native forward on CPUs, on every level of vector instructions: it computes what the transformers path does."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.contracts.errors import EngineFailure
from common.contracts.types import KvGeometry
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.native_backend import NativeAttention
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.bit_equality import refuse_unequal_bits
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama import cpu_model
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.linears import LinearReader
from gpuworker.models.llama.pack import pack_model
from gpuworker.models.llama.weights import TensorOf, tensor_names
from gpuworker.native import library as native
from gpuworker.native.library import levels_here, load
from gpuworker.native.llama import PHASES
from tests.support.gpuworker.llama_cases import BLOCK_SIZE, CASES, EXPERT_CASES, Case, case_tokens, make_case, steps

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")
CPU = torch.device("cpu")
EVERY_SWITCH = ("llama with biases", "llama, tied, scaled", "qwen2, a window above", "qwen3 with biases")


@pytest.fixture(params=levels_here())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Return the library of each level that this processor runs."""
    return load(request.param)


def llama_model(case: Case, library: ctypes.CDLL, dtype: torch.dtype = torch.float32) -> LlamaCpuModel:
    return LlamaCpuModel(case.config, pack_model(library, case.spec, reading(case.tensor, dtype)), "float32")


def reading(tensor_of: TensorOf, dtype: torch.dtype = torch.float32) -> LinearReader:
    return LinearReader(tensor_of, lambda _: None, dtype, "none")


def logits_of(model: Any, attention: AttentionBackend, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([logits.clone() for logits in steps(model, attention, tokens)])


def cache_of(case: Case, kv_dtype: str) -> KvCache:
    spec = case.spec
    geometry = KvGeometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim, kv_dtype)
    return KvCache(geometry, 8, BLOCK_SIZE, CPU)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the error of each position's logits, relative to the logits without their mean."""
    error: torch.Tensor = (ours - theirs).norm(dim=-1) / (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    return error


def in_type(case: Case, dtype: torch.dtype) -> TransformersModel:
    """Return the transformers model with its weights in a type; the rope table stays in float32."""
    for weight in case.transformers_model.module.parameters():
        weight.data = weight.data.to(dtype)
    return TransformersModel(case.transformers_model.module)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_transformers_path(name: str, library: ctypes.CDLL) -> None:
    case = make_case(name)
    tokens = case_tokens(case.spec)
    ours = logits_of(llama_model(case, library), NativeAttention(case.cache(), library=library), tokens)
    theirs = logits_of(case.transformers_model, TorchAttention(case.cache()), tokens)
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()
    assert relative(ours, theirs).max() < 2e-5


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_about_as_close_to_float32_as_the_transformers_path(name: str, library: ctypes.CDLL) -> None:
    case = make_case(name)
    tokens = case_tokens(case.spec)
    exact = logits_of(case.transformers_model, TorchAttention(case.cache()), tokens)
    attention = NativeAttention(cache_of(case, "bfloat16"), library=library)
    ours = relative(logits_of(llama_model(case, library, torch.bfloat16), attention, tokens), exact)
    transformers_model = in_type(case, torch.bfloat16)
    theirs = relative(logits_of(transformers_model, TorchAttention(cache_of(case, "bfloat16")), tokens), exact)
    assert ours.median() < 2 * theirs.median()
    assert ours.max() < 0.25


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 0.25)])
def test_sizes_need_not_suit_vectors(
    dtype: torch.dtype, limit: float, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"hidden_size": 33, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}
    monkeypatch.setitem(CASES, "odd", ("LlamaConfig", odd | {"intermediate_size": 47, "vocab_size": 101}))
    case = make_case("odd")
    tokens = case_tokens(case.spec)
    ours = logits_of(llama_model(case, library, dtype), NativeAttention(case.cache(), library=library), tokens)
    theirs = logits_of(case.transformers_model, TorchAttention(case.cache()), tokens)
    assert relative(ours, theirs).max() < limit


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8"])
def test_the_type_of_the_cache_is_its_own(kv_dtype: str, library: ctypes.CDLL) -> None:
    case = make_case("qwen3, wide heads")
    tokens = case_tokens(case.spec)
    ours = logits_of(llama_model(case, library), NativeAttention(cache_of(case, kv_dtype), library=library), tokens)
    theirs = logits_of(case.transformers_model, NativeAttention(cache_of(case, kv_dtype), library=library), tokens)
    exact = logits_of(case.transformers_model, TorchAttention(case.cache()), tokens)
    assert relative(ours, theirs).max() < 0.3 * relative(theirs, exact).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY_SWITCH)
def test_no_bit_depends_on_the_rest_of_the_step(name: str, dtype: torch.dtype, library: ctypes.CDLL) -> None:
    case = make_case(name)
    model = llama_model(case, library, dtype)
    case.config.max_position_embeddings = 128
    geometry = case.cache().geometry
    refuse_unequal_bits(model, geometry, lambda cache: NativeAttention(cache, deterministic=True, library=library))


def run_row(model: LlamaCpuModel, attention: NativeAttention, start: int, tokens: torch.Tensor, keep: list[int]) -> Any:
    """Run one row on the first blocks of a cache; return the logits of the tokens to keep."""
    table = np.arange(16, dtype=np.int32)[None]
    first, length = np.array([[start], [len(tokens)]], dtype=np.int32)
    rows = pack_rows(first, length, table, BLOCK_SIZE)
    attention.begin(attention_metadata(rows, to_device(attention_arrays(rows), CPU)))
    positions = torch.from_numpy(rows.positions).long()
    return model.forward(tokens, positions, torch.tensor(keep, dtype=torch.int64), attention).clone()


@pytest.fixture
def case() -> Case:
    """Return the plain model."""
    return make_case("llama")


@pytest.fixture
def model(case: Case) -> LlamaCpuModel:
    """Return the plain model on the best level."""
    return llama_model(case, load(levels_here()[-1]))


def test_what_is_kept_does_not_change_it(case: Case, model: LlamaCpuModel) -> None:
    tokens, attention = case_tokens(case.spec)[0], NativeAttention(case.cache(16))
    every = run_row(model, attention, 0, tokens, list(range(16)))
    assert torch.equal(run_row(model, attention, 0, tokens, [3, 15]), every[[3, 15]])


def test_a_step_that_keeps_nothing_writes_the_cache(case: Case, model: LlamaCpuModel) -> None:
    tokens = case_tokens(case.spec)[0]
    whole, chunked = NativeAttention(case.cache(16)), NativeAttention(case.cache(16))
    expected = run_row(model, whole, 0, tokens, [15])
    assert run_row(model, chunked, 0, tokens[:15], []).shape == (0, case.spec.vocab_size)
    assert relative(run_row(model, chunked, 15, tokens[15:], [0]), expected).max() < 1e-5


def test_positions_beyond_the_first_table_are_known(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, library = case_tokens(case.spec)[0], load(levels_here()[-1])
    expected = run_row(llama_model(case, library), NativeAttention(case.cache(16)), 0, tokens, [15])
    monkeypatch.setattr(cpu_model, "_FIRST_POSITIONS", 5)
    assert torch.equal(run_row(llama_model(case, library), NativeAttention(case.cache(16)), 0, tokens, [15]), expected)


@pytest.mark.parametrize("rope", [{"rope_type": "linear"}, {"rope_type": "yarn"}])
def test_a_scaled_rope_runs_beyond_the_positions_that_are_named(rope: dict[str, str]) -> None:
    case = make_case("llama")
    case.config.max_position_embeddings = 4
    case.config.rope_parameters = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4} | rope
    tokens = case_tokens(case.spec)[0]
    with torch.inference_mode():
        module = AutoModelForCausalLM.from_config(copy.deepcopy(case.config), attn_implementation="eager")
        module.load_state_dict(case.transformers_model.module.state_dict())
        expected = module(tokens[None]).logits[0, 15:16]
    model = llama_model(case, load(levels_here()[-1]))
    assert relative(run_row(model, NativeAttention(case.cache(16)), 0, tokens, [15]), expected).max() < 1e-5


@pytest.mark.parametrize("token", [-1, 96])
def test_a_token_outside_of_the_vocabulary_fails_the_step(case: Case, model: LlamaCpuModel, token: int) -> None:
    attention = NativeAttention(case.cache(16))
    with pytest.raises(EngineFailure, match="the step has a token that the model does not know"):
        run_row(model, attention, 0, torch.tensor([5, token]), [1])


def test_another_attention_is_an_error(case: Case, model: LlamaCpuModel) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(EngineFailure, match="TorchAttention has no native call"):
        model.forward(zero, zero, zero, TorchAttention(case.cache()))


def test_some_of_the_layers_are_a_model_on_the_same_weights(case: Case, model: LlamaCpuModel) -> None:
    tokens = case_tokens(case.spec)[0]
    part = model.only([2, 0])
    layers = case.transformers_model.module.get_submodule("model.layers")
    case.transformers_model.module.get_submodule("model").layers = torch.nn.ModuleList([layers[2], layers[0]])  # type: ignore[index]
    layers[2].self_attn.layer_idx, layers[0].self_attn.layer_idx = 0, 1  # type: ignore[index]
    expected = case.transformers_model.reference_logits(tokens[None])[0, [15]]
    assert relative(run_row(part, NativeAttention(case.cache(16)), 0, tokens, [15]), expected).max() < 1e-5


def test_the_time_of_each_phase_is_added_up_when_asked(case: Case, model: LlamaCpuModel) -> None:
    tokens, attention = case_tokens(case.spec)[0], NativeAttention(case.cache(16))
    model.seconds = {}
    run_row(model, attention, 0, tokens, [15])
    once = dict(model.seconds)
    run_row(model, attention, 0, tokens, [15])
    assert tuple(once) == PHASES
    assert all(0 < once[phase] < model.seconds[phase] for phase in PHASES)


def changed(case: Case, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    return lambda asked: change(case.tensor(asked)) if asked == name else case.tensor(asked)


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_a_model_is_read(name: str) -> None:
    case = make_case(name)
    stored = set(case.transformers_model.module.state_dict()) - ({"lm_head.weight"} if case.spec.tied else set())
    assert set(tensor_names(case.spec)) == stored


def test_a_tensor_of_another_shape_is_refused(case: Case) -> None:
    wrong = changed(case, "model.norm.weight", lambda tensor: tensor[:-1])
    with pytest.raises(ValueError, match=r"model.norm.weight is \(31,\); the configuration says \(32,\)"):
        pack_model(load(levels_here()[-1]), case.spec, reading(wrong))


def bytes_of_linears(model: LlamaCpuModel) -> int:
    held = (getattr(holder, linear.role) for linear, holder in model.packed.linears())
    return sum(model.packed.library.quire_linear_bytes(ctypes.byref(linear)) for linear in held)


@pytest.mark.parametrize("name", [*CASES, *EXPERT_CASES])
def test_float16_stays_in_16_bits_and_has_the_logits_of_float32(name: str, library: ctypes.CDLL) -> None:
    case, logits, sizes = make_case(name), [], []
    for dtype in (torch.float16, torch.float32):  # the second has the numbers of the first
        in_type(case, dtype)
        model = llama_model(case, library)
        logits.append(logits_of(model, NativeAttention(case.cache(), library=library), case_tokens(case.spec)))
        sizes.append(bytes_of_linears(model))
        assert model.packed.kinds_in_words == f"linears in {'F16' if dtype == torch.float16 else 'F32'}"
    assert torch.equal(*logits)
    # Each 32 outputs have 384 bytes of ends too, beside 1024 bytes of float16 at sixteen inputs.
    assert sizes[0] < 0.65 * sizes[1]


def test_a_linear_of_several_types_is_held_in_float32() -> None:
    case = make_case("llama")

    def mixed(name: str) -> torch.Tensor:
        return case.tensor(name) if name.endswith("k_proj.weight") else case.tensor(name).half()

    packed = pack_model(load(levels_here()[-1]), case.spec, reading(mixed))
    assert packed.kinds_in_words == "linears in qkv F32, output F16, gate_up F16, down F16, head F16"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_another_type_are_converted(case: Case, dtype: torch.dtype) -> None:
    library, tokens = load(levels_here()[-1]), case_tokens(case.spec)[0]
    in_type(case, dtype)
    ours = llama_model(case, library)
    expected = in_type(case, torch.float32).reference_logits(tokens[None])[0, [15]]
    assert relative(run_row(ours, NativeAttention(case.cache(16)), 0, tokens, [15]), expected).max() < 1e-5


def test_a_tied_model_holds_its_embedding_once() -> None:
    case = make_case("llama, tied, scaled")
    packed = llama_model(case, load(levels_here()[-1])).packed
    assert packed.struct.embedding is None
    assert packed.num_bytes < 1.2 * 4 * sum(
        parameter.numel() for parameter in case.transformers_model.module.parameters()
    )
