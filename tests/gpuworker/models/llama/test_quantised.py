"""Linears of the native path in integers: they compute what the weights that they stand for compute, in any batch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuworker.attention.backends import make_backend
from gpuworker.attention.native_backend import NativeAttention
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.checkpoints.quantised import QuantisedLinear
from gpuworker.models.bit_equality import refuse_unequal_bits
from gpuworker.models.choose import open_native
from gpuworker.models.hf.loader import ModelSource
from gpuworker.models.llama import linears
from gpuworker.models.llama import reference as llama_reference
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.linears import LinearChoice, LinearReader, LinearShape
from gpuworker.models.llama.pack import pack_model
from gpuworker.models.llama.weights import FusedLinear
from gpuworker.native import library as native
from gpuworker.native.library import levels_here, load
from gpuworker.native.linear import IntegerWeight, Kind
from tests.gpuworker.checkpoints.test_quantised import GPTQ
from tests.gpuworker.models.test_quantised_models import FORMATS, packed_by
from tests.support.checkpoints import checkpoint
from tests.support.gpuworker import packers
from tests.support.gpuworker.llama_cases import Case, case_tokens, make_case, steps

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")
CPU = torch.device("cpu")
WEIGHT_ONLY = ("int8", "int4")


def reader(case: Case, quantization: str, dtype: torch.dtype = torch.float32) -> LinearReader:
    return LinearReader(case.tensor, lambda _: None, dtype, quantization)


def llama_model(case: Case, read: LinearReader, level: str = levels_here()[-1]) -> LlamaCpuModel:
    return LlamaCpuModel(case.config, pack_model(load(level), case.spec, read), "float32")


def error(case: Case, model: LlamaCpuModel, read: LinearReader, level: str = levels_here()[-1]) -> float:
    """Return the worst relative error of logits against transformers on the dequantised weights."""
    weights = (case.tensor, read.dequantised, torch.float32, CPU, "float32")
    reference = llama_reference.reference_part(case.config, case.spec, *weights)
    tokens = case_tokens(case.spec)
    ours, theirs = (
        torch.cat([logits.clone() for logits in steps(runs, attention, tokens)])
        for runs, attention in (
            (model.only(llama_reference.tested_layers(case.spec)), NativeAttention(case.cache(), library=load(level))),
            (reference, TorchAttention(case.cache())),
        )
    )
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


@pytest.mark.parametrize("level", levels_here())
@pytest.mark.parametrize("quantization", WEIGHT_ONLY)
@pytest.mark.parametrize("name", ["llama with biases", "llama, tied, scaled", "qwen3 with biases"])
def test_weights_alone_compute_what_they_stand_for(name: str, quantization: str, level: str) -> None:
    case = make_case(name)
    read = reader(case, quantization)
    assert error(case, llama_model(case, read, level), read, level) < 2e-5


@pytest.mark.parametrize("level", levels_here())
def test_activations_of_eight_bits_lose_little(level: str) -> None:
    case = make_case("llama with biases")
    read = reader(case, "w8a8")
    found = error(case, llama_model(case, read, level), read, level)
    assert 1e-4 < found < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [*WEIGHT_ONLY, "w8a8"])
def test_no_bit_depends_on_the_rest_of_the_step(quantization: str, dtype: torch.dtype) -> None:
    case = make_case("qwen2, a window above")
    case.config.max_position_embeddings = 128
    model = llama_model(case, reader(case, quantization, dtype))
    refuse_unequal_bits(model, case.cache().geometry, lambda cache: NativeAttention(cache, deterministic=True))


def kinds(model: LlamaCpuModel) -> dict[str, Kind]:
    """Return the kinds of the first layer's linears and of the last linear, by role."""
    struct, layer = model.packed.struct, model.packed.layers[0]
    roles = ("qkv", "output", "gate_up", "down")
    return {role: Kind(getattr(layer, role).kind) for role in roles} | {"head": Kind(struct.head.kind)}


def test_four_bits_are_for_whole_groups_of_inputs_and_not_for_the_last_linear() -> None:
    assert kinds(llama_model(make_case("llama"), reader(make_case("llama"), "int4"))) == {
        "qkv": Kind.I4_F32,
        "output": Kind.I4_F32,
        "gate_up": Kind.I4_F32,
        "down": Kind.I8_F32,  # of 48 inputs
        "head": Kind.I8_F32,
    }


def test_a_model_says_how_its_linears_are_held() -> None:
    case = make_case("llama")
    model = llama_model(case, reader(case, "int4", torch.bfloat16))
    assert model.packed.kinds_in_words == (
        "linears in qkv I4_BF16, output I4_BF16, gate_up I4_BF16, down I8_BF16, head I8_BF16"
    )
    assert llama_model(case, reader(case, "w8a8")).packed.kinds_in_words == "linears in W8A8"


def test_integers_take_less_memory() -> None:
    case = make_case("llama")
    sizes = [llama_model(case, reader(case, each, torch.bfloat16)).weight_bytes for each in ("none", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)


def test_the_embedding_of_a_tied_model_is_not_quantised() -> None:
    case = make_case("llama, tied, scaled")
    model = llama_model(case, reader(case, "int8"))
    assert model.packed.struct.embedding == case.tensor("model.embed_tokens.weight").data_ptr()


# ---------------------------------------------------------------- what a checkpoint stores


def stored(bits: int = 4, group_size: int = 32, zeros: bool = False, shuffled: bool = False) -> QuantisedLinear:
    draw = torch.Generator().manual_seed(bits + group_size)
    values = torch.randint(-(1 << bits - 1), 1 << bits - 1, (32, 32), generator=draw, dtype=torch.int8)
    groups = 32 // group_size
    return QuantisedLinear(
        "a",
        bits,
        group_size,
        values,
        torch.rand((32, groups), generator=draw) + 0.1,
        torch.randint(-4, 4, (32, groups), generator=draw, dtype=torch.int16) if zeros else None,
        torch.arange(32).flip(0) // group_size if shuffled else None,
    )


def read_stored(quantization: str, *parts: QuantisedLinear | None) -> tuple[Kind, tuple[Any, ...]]:
    """Return the kind and the weights of a linear of which these parts are stored."""
    linear = FusedLinear("qkv", tuple("abc"[: len(parts)]), (32,) * len(parts), 32)
    found = dict(zip(linear.weights, parts, strict=True))

    def tensor(name: str) -> torch.Tensor:
        part = found[name]
        return torch.ones(32, 32) if part is None else part.dequantise(torch.float32)

    read = LinearReader(tensor, found.__getitem__, torch.float32, quantization).read(linear)
    return read.kind, tuple(rows.weight for rows in read.parts)


@pytest.mark.parametrize("quantization", ["none", "auto", "int4"])
def test_stored_integers_stay_what_they_are(quantization: str) -> None:
    first, second = stored(), stored(zeros=True)
    kind, weights = read_stored(quantization, first, second)
    assert kind == Kind.I4_F32
    assert all(isinstance(weight, IntegerWeight) for weight in weights)
    assert weights[0].values is first.values
    assert torch.equal(weights[0].zeros, torch.zeros(32, 1))
    assert weights[1].zeros is second.zeros


def test_eight_bits_stay_eight_bits() -> None:
    assert read_stored("none", stored(8))[0] == Kind.I8_F32
    assert read_stored("int8", stored(8))[0] == Kind.I8_F32


@pytest.mark.parametrize("zeros", [False, True])
def test_parts_that_differ_have_the_bits_of_the_widest_and_the_groups_of_the_finest(zeros: bool) -> None:
    parts = (stored(zeros=zeros), stored(8, 16), stored(8))
    kind, weights = read_stored("none", *parts)
    assert kind == Kind.I8_F32
    for part, weight in zip(parts, weights, strict=True):
        assert weight.scales.shape == (32, 2)
        assert (weight.zeros is not None) == zeros
        whole = QuantisedLinear("a", 8, 16, weight.values, weight.scales, weight.zeros)
        assert torch.equal(whole.dequantise(torch.float32), part.dequantise(torch.float32))


@pytest.mark.parametrize(
    "parts",
    [
        (stored(), None),
        (stored(group_size=8), stored(group_size=8)),
        (stored(shuffled=True),),
    ],
    ids=["one is not stored so", "groups are too small", "inputs are not in order"],
)
def test_integers_that_do_not_fit_are_dequantised(parts: tuple[QuantisedLinear | None, ...]) -> None:
    kind, weights = read_stored("none", *parts)
    assert kind == Kind.F32
    assert all(
        torch.equal(weight, torch.ones(32, 32) if part is None else part.dequantise(torch.float32))
        for weight, part in zip(weights, parts, strict=True)
    )


@pytest.mark.parametrize(("quantization", "kind"), [("int8", Kind.I8_F32), ("w8a8", Kind.W8A8)])
def test_what_is_asked_for_goes_before_what_is_stored(quantization: str, kind: Kind) -> None:
    assert read_stored(quantization, stored())[0] == kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("gptq", "qkv I4_{}, output I4_{}, gate_up I4_{}, down I4_{}, head {}"),
        ("int-quantized", "qkv I8_{}, output I8_{}, gate_up I8_{}, down I8_{}, head {}"),
        ("float-quantized", "{}"),
    ],
)
def test_a_quantised_checkpoint_runs_in_its_integers(
    form: str, words: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pack, quantisation = FORMATS[form]
    if form == "gptq":  # in groups that can be multiplied
        pack, quantisation = packed_by(packers.gptq, group_size=32, asymmetric=True), GPTQ | {"group_size": 32}
    packers.rewrite(checkpoint("llama"), tmp_path / "packed", pack, quantisation)
    source = ModelSource(str(tmp_path / "packed"), dtype)
    with caplog.at_level(logging.INFO):
        found = open_native(source, CPU, "native", lambda cache: make_backend("auto", cache))
    assert found is not None
    name = "F32" if dtype == "float32" else "BF16"
    assert f"linears in {words.replace('{}', name)}" in caplog.text


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_quantised_at_start_passes_its_test(
    quantization: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = ModelSource(str(checkpoint("llama")), dtype, quantization=quantization)
    with caplog.at_level(logging.INFO):
        found = open_native(source, CPU, "native", lambda cache: make_backend("auto", cache))
    assert found is not None
    assert ("linear 264 x 64: " in caplog.text) == (quantization == "auto")  # the choice for the last linear


@pytest.mark.parametrize(("outlier", "kind"), [(1.0, Kind.I8_F32), (400.0, Kind.F32)])
def test_auto_keeps_floats_whose_rounding_would_lose_too_much(
    outlier: float, kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def int8_wins(shapes: list[LinearShape], kinds: tuple[Kind, ...], *_: object, **__: object) -> list[LinearChoice]:
        assert Kind.W8A8 not in kinds
        return [LinearChoice(shape, Kind.I8_F32, (), {}) for shape in shapes]

    monkeypatch.setattr(linears, "choose", int8_wins)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 0] *= outlier
    read = LinearReader(lambda _: weight, lambda _: None, torch.float32, "auto")
    linear = FusedLinear("down", ("model.layers.0.mlp.down_proj",), (32,), 64)
    with caplog.at_level(logging.INFO):
        read.choose([linear], load(levels_here()[-1]))
        assert read.read(linear).kind == kind
    assert ("model.layers.0.mlp.down_proj stays in F32: int8: weights round with" in caplog.text) == (kind == Kind.F32)
    assert "auto takes what loses at most 1 %: int8: " in caplog.text


@pytest.mark.parametrize("stored_as", [torch.float16, torch.float32])
def test_auto_compares_with_what_float_weights_would_be_held_as(
    stored_as: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Floats win: a linear of the same shape but of another type keeps its own type."""
    compared = []

    def first_wins(shapes: list[LinearShape], kinds: tuple[Kind, ...], *_: object, **__: object) -> list[LinearChoice]:
        compared.append(kinds[0])
        return [LinearChoice(shape, kinds[0], (), {}) for shape in shapes]

    monkeypatch.setattr(linears, "choose", first_wins)
    weights = {"down.weight": torch.ones(32, 64, dtype=stored_as), "other.weight": torch.ones(32, 64)}
    read = LinearReader(weights.__getitem__, lambda _: None, torch.float32, "auto")
    down, other = (FusedLinear("down", (name,), (32,), 64) for name in ("down", "other"))
    read.choose([down], load(levels_here()[-1]))
    expected = Kind.F16 if stored_as == torch.float16 else Kind.F32
    assert compared == [expected]
    assert (read.read(down).kind, read.read(other).kind) == (expected, Kind.F32)
