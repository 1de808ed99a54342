"""Experts in the native forward: the choice of each token, the products by expert, and the names of their tensors."""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from gpuworker.attention.backends import make_backend
from gpuworker.attention.native_backend import NativeAttention
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.models.bit_equality import refuse_unequal_bits
from gpuworker.models.choose import open_native, why_not_native
from gpuworker.models.hf.loader import ModelSource, read_config
from gpuworker.models.llama import reference as llama_reference
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.linears import LinearReader
from gpuworker.models.llama.pack import PackedModel, pack_model
from gpuworker.models.llama.spec import llama_spec
from gpuworker.models.llama.weights import TensorOf, tensor_names, with_merged_experts
from gpuworker.native import library as native
from gpuworker.native.library import levels_here, load
from gpuworker.native.linear import Kind
from tests.gpuworker.checkpoints.test_quantised import GPTQ
from tests.gpuworker.models.test_quantised_models import packed_by
from tests.support.checkpoints import checkpoint
from tests.support.gpuworker import packers
from tests.support.gpuworker.llama_cases import CASES, EXPERT_CASES, Case, case_tokens, make_case, steps

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")
CPU = torch.device("cpu")
# Options of the native path, as `--quantization` and `--dtype` name them.
HELD = [(each, dtype) for dtype in (torch.float32, torch.bfloat16) for each in ("none", "int8", "int4", "w8a8")]
held = pytest.mark.parametrize(("quantization", "dtype"), HELD, ids=lambda each: str(each).removeprefix("torch."))


@pytest.fixture(params=levels_here())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Return the library of each level that this processor runs."""
    return load(request.param)


def reader(tensor_of: TensorOf, quantization: str = "none", dtype: torch.dtype = torch.float32) -> LinearReader:
    return LinearReader(tensor_of, lambda _: None, dtype, quantization)


def native_model(
    case: Case, read: LinearReader, library: ctypes.CDLL, config: PretrainedConfig | None = None
) -> LlamaCpuModel:
    """Return a native model of a case, or of another configuration with the same cache."""
    spec = case.spec if config is None else llama_spec(config)
    assert spec is not None
    return LlamaCpuModel(config or case.config, pack_model(library, spec, read), "float32")


def logits(case: Case, model: Any, library: ctypes.CDLL | None = None, threads: int = 0) -> torch.Tensor:
    """Return the logits of a case's steps, on native attention where a library is given."""
    cache = case.cache()
    attention = TorchAttention(cache) if library is None else NativeAttention(cache, threads=threads, library=library)
    return torch.cat([each.clone() for each in steps(model, attention, case_tokens(case.spec))])


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = (ours - theirs).norm(dim=-1) / (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    return error


@pytest.mark.parametrize("name", EXPERT_CASES)
def test_logits_are_those_of_the_transformers_path(name: str, library: ctypes.CDLL) -> None:
    case = make_case(name)
    ours = logits(case, native_model(case, reader(case.tensor), library), library)
    assert relative(ours, logits(case, case.transformers_model)).max() < 2e-5


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", EXPERT_CASES)
def test_weights_alone_compute_what_they_stand_for(name: str, quantization: str, library: ctypes.CDLL) -> None:
    case = make_case(name)
    read = reader(case.tensor, quantization)
    model = native_model(case, read, library).only(llama_reference.tested_layers(case.spec))
    weights = (case.tensor, read.dequantised, torch.float32, torch.device("cpu"), "float32")
    reference = llama_reference.reference_part(case.config, case.spec, *weights)
    assert relative(logits(case, model, library), logits(case, reference)).max() < 2e-5


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
@pytest.mark.parametrize("name", EXPERT_CASES)
def test_in_bfloat16_most_tokens_stay_close(name: str, quantization: str, library: ctypes.CDLL) -> None:
    """A token whose router is undecided may go to another expert; a wrong computation changes every token."""
    case = make_case(name)
    model = native_model(case, reader(case.tensor, quantization, torch.bfloat16), library)
    errors = relative(logits(case, model, library), logits(case, case.transformers_model))
    assert errors.median() < 0.3


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_sizes_need_not_suit_vectors(
    dtype: torch.dtype, limit: float, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"hidden_size": 33, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "vocab_size": 101}
    odd |= {"intermediate_size": 47, "num_local_experts": 5, "num_experts_per_tok": 3}
    monkeypatch.setitem(CASES, "odd", ("MixtralConfig", odd))
    case = make_case("odd")
    case.transformers_model.module.set_experts_implementation("eager")  # torch's grouped product refuses odd sizes
    ours = logits(case, native_model(case, reader(case.tensor, dtype=dtype), library), library)
    assert relative(ours, logits(case, case.transformers_model)).median() < limit


# ---------------------------------------------------------------- what no bit depends on


@held
def test_no_bit_depends_on_the_rest_of_the_step(quantization: str, dtype: torch.dtype) -> None:
    case = make_case("qwen3_moe, dense layers, normalised")
    case.config.max_position_embeddings = 128
    model = native_model(case, reader(case.tensor, quantization, dtype), load(levels_here()[-1]))
    refuse_unequal_bits(model, case.cache().geometry, lambda cache: NativeAttention(cache, deterministic=True))


def test_no_bit_depends_on_the_rest_of_the_step_at_any_level(library: ctypes.CDLL) -> None:
    case = make_case("qwen3_moe")
    case.config.max_position_embeddings = 128
    model, geometry = native_model(case, reader(case.tensor), library), case.cache().geometry
    refuse_unequal_bits(model, geometry, lambda cache: NativeAttention(cache, deterministic=True, library=library))


@held
def test_no_bit_depends_on_the_number_of_threads(quantization: str, dtype: torch.dtype) -> None:
    case, library = make_case("qwen3_moe"), load(levels_here()[-1])
    model = native_model(case, reader(case.tensor, quantization, dtype), library)
    alone = logits(case, model, library, threads=1)
    for threads in (2, 3, 7):
        assert torch.equal(logits(case, model, library, threads), alone)


# ---------------------------------------------------------------- which experts, and how much of each


def mixtral(case: Case, experts: int, top_k: int) -> PretrainedConfig:
    changed = copy.deepcopy(case.config)
    changed.num_local_experts, changed.num_experts_per_tok = experts, top_k
    return changed


@held
def test_a_single_expert_of_each_token_is_the_mlp_that_it_equals(
    quantization: str, dtype: torch.dtype, library: ctypes.CDLL
) -> None:
    """Every expert is the MLP of a model without experts: all bits are those of that model, in each kind of weight."""
    case = make_case("mistral, a window")
    parts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

    def tensor(name: str) -> torch.Tensor:
        before, block, part = name.partition(".block_sparse_moe.")
        if not block:
            return case.tensor(name)
        if part == "gate.weight":
            return torch.randn((5, 32), generator=torch.Generator().manual_seed(1))
        return case.tensor(f"{before}.mlp.{parts[part.split('.')[2]]}.weight")

    config = mixtral(make_case("mixtral"), 5, 1)
    config.sliding_window, config.head_dim, config.rms_norm_eps = 6, 8, case.spec.norm_eps
    config.rope_parameters = case.config.rope_parameters
    ours = native_model(case, reader(tensor, quantization, dtype), library, config)
    dense = native_model(case, reader(case.tensor, quantization, dtype), library)
    assert torch.equal(logits(case, ours, library), logits(case, dense, library))


def undecided(tensor_of: TensorOf) -> TensorOf:
    """Return tensors with routers of zeros."""
    return lambda name: torch.zeros_like(tensor_of(name)) if name.endswith("moe.gate.weight") else tensor_of(name)


def test_of_equal_logits_the_lower_experts_are_taken(library: ctypes.CDLL) -> None:
    """All tokens go to experts 0 and 1 of 4, and the others get none; each weighs a half."""
    case, tensors = make_case("mixtral"), make_case("mixtral").transformers_model.module.state_dict()
    ours = native_model(case, reader(undecided(case.tensor)), library)
    first = {name: tensor[:2] if ".mlp." in name else tensor for name, tensor in tensors.items()}
    two = native_model(
        case, reader(undecided(with_merged_experts(first, first.__getitem__))), library, mixtral(case, 2, 2)
    )
    assert torch.equal(logits(case, ours, library), logits(case, two, library))


def test_a_router_that_is_not_a_number_stays_among_the_experts(library: ctypes.CDLL) -> None:
    case = make_case("qwen3_moe")

    def tensor(name: str) -> torch.Tensor:
        return torch.full_like(case.tensor(name), torch.nan) if name.endswith("mlp.gate.weight") else case.tensor(name)

    found = logits(case, native_model(case, reader(tensor), library), library)
    assert found.isnan().all()


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("name", EXPERT_CASES)
def test_every_tensor_of_a_checkpoint_is_read(name: str, tmp_path: Path) -> None:
    case = make_case(name)
    case.transformers_model.module.save_pretrained(tmp_path)
    stored = Checkpoint(tmp_path)
    assert set(tensor_names(case.spec)) == set(stored)
    for each in tensor_names(case.spec):
        assert torch.equal(stored.tensor(each, torch.float32), case.tensor(each)), each


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_may_be_stored_as_transformers_holds_them(kind: str, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    assert any(name.endswith("experts.gate_up_proj") for name in save_merged(checkpoint(kind), merged))
    opened = [packed_model(path) for path in (checkpoint(kind), merged)]
    assert weights_of(opened[0]) == weights_of(opened[1])


def save_merged(directory: Path, target: Path) -> list[str]:
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(target, save_original_format=False)
    return list(Checkpoint(target))


def packed_model(directory: Path) -> PackedModel:
    opened = open_native(ModelSource(str(directory), dtype="float32"), CPU, "native", backend)
    assert opened is not None
    assert isinstance(opened[0], LlamaCpuModel)
    return opened[0].packed


def backend(cache: Any) -> Any:
    return make_backend("auto", cache)


def weights_of(packed: PackedModel) -> list[bytes]:
    """Return the packed bytes of each linear."""
    found = []
    for linear, holder in packed.linears():
        struct = getattr(holder, linear.role)
        size = packed.library.quire_linear_bytes(ctypes.byref(struct))
        found.append(ctypes.string_at(struct.memory, size))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_integers_stay_integers(dtype: str, tmp_path: Path) -> None:
    """The self-test compares the model with transformers on the dequantised weights; groups have zeros."""
    pack, quantisation = packed_by(packers.gptq, group_size=32, asymmetric=True), GPTQ | {"group_size": 32}
    packers.rewrite(checkpoint("qwen3_moe"), tmp_path / "packed", pack, quantisation)
    opened = open_native(ModelSource(str(tmp_path / "packed"), dtype=dtype), CPU, "native", backend)
    assert opened is not None
    model, geometry = opened
    assert isinstance(model, LlamaCpuModel)
    expert = model.packed.layers[0].experts[0].each[0]
    kind = Kind.I4_F32 if dtype == "float32" else Kind.I4_BF16
    assert (expert.gate_up.kind, expert.down.kind, expert.down.has_zeros) == (kind, kind, True)
    model.config.max_position_embeddings = 128
    refuse_unequal_bits(model, geometry, lambda cache: NativeAttention(cache, deterministic=True))


def test_an_expert_too_few_is_named() -> None:
    tensors = make_case("qwen3_moe").transformers_model.module.state_dict()
    fewer = {name: tensor[:7] if ".experts." in name else tensor for name, tensor in tensors.items()}
    with pytest.raises(KeyError, match=r"model\.layers\.0\.mlp\.experts\.7"):
        native_model(
            make_case("qwen3_moe"), reader(with_merged_experts(fewer, fewer.__getitem__)), load(levels_here()[-1])
        )


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_a_gpu_has_native_experts_too(kind: str) -> None:
    source = ModelSource(str(checkpoint(kind)))
    assert why_not_native(read_config(checkpoint(kind)), source, torch.device("cuda")) is None


@pytest.mark.parametrize("forgotten", [{"clip": None}, {"joint_norm": False}, {"clip": 0.7}])
def test_each_option_of_olmoe_changes_what_is_computed(forgotten: dict[str, Any], library: ctypes.CDLL) -> None:
    """The norm of a head alone reads the first numbers of the weight of all heads."""
    case = make_case("olmoe, clipped, normalised, biases")
    packed = native_model(case, reader(case.tensor), library).packed
    packed.struct.clip = forgotten.get("clip", case.spec.clip) or 0.0
    packed.struct.joint_norm = forgotten.get("joint_norm", True)
    ours = logits(case, LlamaCpuModel(case.config, packed, "float32"), library)
    assert relative(ours, logits(case, case.transformers_model)).max() > 1e-2
