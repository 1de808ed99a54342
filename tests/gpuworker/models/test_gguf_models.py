"""Whole models from GGUF files: what transformers makes of the same file, on both paths; and what stays quantised."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint.gguf.folder import gguf_folder
from common.checkpoint.gguf.memory import weight_memory
from common.contracts.types import KvGeometry
from gpuworker.attention.backends import make_backend
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.choose import open_native
from gpuworker.models.hf.loader import ModelSource, load_model
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.weights import EMBEDDING
from gpuworker.models.self_test import self_test
from gpuworker.models.step_model import StepModel
from gpuworker.native import library as native
from gpuworker.native.linear import Kind
from gpuworker.plane.memory import mapped_weight_bytes
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.thread_executor import thread_executor
from tests.support.gguf_files import FAMILIES, NATIVE, model_of, reference, write_model
from tests.support.gpuworker.runner_harness import SLOTS, Driver

CPU = torch.device("cpu")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q2_K", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M")
TOKENS = torch.arange(6, 38)[None]
built = pytest.mark.skipif(native.best() is None, reason="the native library was not built")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def q4_k_m(name: str) -> str:
    """Return the type of a matrix in what llama.cpp calls Q4_K_M: some layers have values and down in six bits."""
    six = ("layers.0.self_attn.v_proj", "layers.0.mlp.down_proj", "lm_head")
    return "Q6_K" if any(part in name for part in six) else "Q4_K"


def written(path: Path, family: str, kind: str, *, tied: bool = False) -> Path:
    return write_model(path, family, q4_k_m if kind == "Q4_K_M" else kind, tied=tied)


def native_model(path: Path, dtype: str = "float32") -> LlamaCpuModel:
    """Return a file's model on the native path; its test at start compares it with transformers on the same weights."""
    source = ModelSource(str(gguf_folder(path)), dtype=dtype)
    found = open_native(source, CPU, "native", functools.partial(make_backend, "auto"))
    assert found is not None
    assert isinstance(found[0], LlamaCpuModel)
    return found[0]


def kinds(model: LlamaCpuModel) -> set[str]:
    return {Kind(getattr(holder, linear.role).kind).name for linear, holder in model.packed.linears()}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_computes_what_transformers_makes_of_it(tmp_path: Path, family: str, kind: str) -> None:
    path = written(tmp_path / "m.gguf", family, kind)
    theirs = reference(path, family)
    with torch.inference_mode():
        wanted = theirs(TOKENS).logits[0]
    found = load_model(ModelSource(str(gguf_folder(path)), dtype="float32"), CPU).reference_logits(TOKENS)
    # Float32 sums in another order: random blocks make logits of some 50, and errors beside the largest of them.
    assert torch.allclose(found.view(wanted.shape), wanted, atol=5e-5 * float(wanted.abs().max()), rtol=1e-4)


@built
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", NATIVE)
def test_greedy_tokens_of_a_mixed_batch_equal_those_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    assert_greedy_as_transformers(written(tmp_path / "m.gguf", family, kind, tied=True), family, tied=True)


@pytest.mark.parametrize("kind", ["F32", "Q4_K_M"])
def test_gemma3_sees_its_windows_and_turns_by_its_ropes_on_transformers(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path / "m.gguf", "gemma3", kind, tied=True)
    model = load_model(ModelSource(str(gguf_folder(path)), dtype="float32"), CPU)
    geometry = self_test(model, functools.partial(make_backend, "auto"))
    assert_tokens_of_transformers(model, geometry, reference(path, "gemma3", tied=True))


def assert_greedy_as_transformers(path: Path, family: str, *, tied: bool) -> None:
    """Compare the tokens of a batch on the native path with those of transformers on the same weights."""
    source = ModelSource(str(gguf_folder(path)), dtype="float32")
    opened = open_native(source, CPU, "native", functools.partial(make_backend, "auto"))
    assert opened is not None
    assert_tokens_of_transformers(*opened, reference(path, family, tied=tied))


def assert_tokens_of_transformers(model: StepModel, geometry: KvGeometry, theirs: Any) -> None:
    """Run a batch of prompts, in several chunks, and compare each greedy token."""
    cache = KvCache(geometry, SLOTS // 16, 16, CPU)
    runner = ModelRunner(model, cache, make_backend("auto", cache), RunnerLimits(8, 256, threads=1), thread_executor())
    driver = Driver(runner)
    prompts = [[6 + (31 * n + 7 * i) % 250 for i in range(length)] for n, length in enumerate((3, 41, 17))]
    streams = [driver.add(prompt, 16, chunk) for prompt, chunk in zip(prompts, (99, 7, 1), strict=True)]
    driver.run()
    runner.close()
    for stream, prompt in zip(streams, prompts, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*prompt, *stream.output[:-1]]])).logits[0, len(prompt) - 1 :]
        assert stream.output == logits.argmax(-1).tolist()


@built
@pytest.mark.parametrize(
    ("kind", "dtype", "wanted"),
    [
        ("Q4_0", "float32", "I4_F32"),
        ("Q4_1", "float32", "I4_F32"),
        ("Q4_1", "bfloat16", "I4_BF16"),
        ("Q8_0", "float32", "I8_F32"),
        ("Q8_0", "bfloat16", "I8_BF16"),
        ("Q5_0", "float32", "I8_F32"),
        ("Q5_1", "bfloat16", "I8_BF16"),
        ("Q2_K", "float32", "I4_F32"),
        ("Q3_K", "bfloat16", "I4_BF16"),
        ("Q4_K", "float32", "I4_F32"),
        ("Q4_K", "bfloat16", "I4_BF16"),
        ("Q5_K", "float32", "I8_F32"),
        ("Q6_K", "bfloat16", "I8_BF16"),
        ("F16", "float32", "F16"),
    ],
)
def test_integers_and_float16_stay_as_they_are(tmp_path: Path, kind: str, dtype: str, wanted: str) -> None:
    assert kinds(native_model(write_model(tmp_path / "m.gguf", kind=kind), dtype)) == {wanted}


@built
@pytest.mark.parametrize(
    ("kind", "nbytes"), [("Q8_0", 1.25), ("Q4_0", 0.75), ("Q4_1", 1.0), ("Q4_K", 1.0), ("Q6_K", 1.4)]
)
def test_a_tied_embedding_is_held_once_as_the_integers_of_the_file(tmp_path: Path, kind: str, nbytes: float) -> None:
    model = native_model(write_model(tmp_path / "m.gguf", kind=kind, tied=True))
    matrices = sum(tensor.numel() for tensor in model_of("llama", tied=True)[1].values() if tensor.dim() == 2)
    assert model.packed.struct.embedding is None
    assert model.weight_bytes < nbytes * matrices


@built
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "F32"])
def test_an_embedding_beside_another_last_linear_stays_in_its_integers(tmp_path: Path, kind: str) -> None:
    def mixed(name: str) -> str:
        return kind if "embed_tokens" in name else "Q8_0"

    path = write_model(tmp_path / "m.gguf", kind=mixed)
    model = native_model(path)
    assert (model.packed.struct.embedding is None) == bool(model.packed.struct.rows.memory) == (kind != "F32")
    assert_greedy_as_transformers(path, "llama", tied=False)


@built
@pytest.mark.parametrize(
    ("first", "other", "kind", "group"),
    [
        ("Q4_0", "Q8_0", Kind.I8_F32, 32),
        ("Q4_K", "Q6_K", Kind.I8_F32, 16),
        ("Q3_K", "Q5_K", Kind.I8_F32, 16),
        ("Q2_K", "Q4_K", Kind.I4_F32, 16),
        ("Q5_0", "Q8_0", Kind.I8_F32, 32),
        ("Q5_1", "Q6_K", Kind.I8_F32, 16),
        ("Q4_K", "F16", Kind.F32, 0),
    ],
)
def test_linears_that_run_as_one_take_the_widest_bits_and_the_finest_groups(
    tmp_path: Path, first: str, other: str, kind: Kind, group: int
) -> None:
    def mixed(name: str) -> str:
        return other if "v_proj" in name or "up_proj" in name else first

    path = write_model(tmp_path / "m.gguf", kind=mixed)
    layer = native_model(path).packed.layers[0]
    assert {(Kind(linear.kind), linear.group) for linear in (layer.qkv, layer.gate_up)} == {(kind, group)}
    assert Kind(layer.down.kind) in (Kind.I4_F32, Kind.I8_F32)
    assert_greedy_as_transformers(path, "llama", tied=False)


@built
def test_a_mix_of_four_and_six_bits_takes_less_than_half_of_what_bfloat16_takes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", kind=q4_k_m)
    model = native_model(path, "bfloat16")
    assert kinds(model) == {"I4_BF16", "I8_BF16"}
    assert weight_memory(gguf_folder(path)) == pytest.approx(model.weight_bytes, rel=0.2)
    assert model.weight_bytes < 0.5 * 2 * sum(tensor.numel() for tensor in model_of("llama")[1].values())


@built
def test_blocks_with_and_without_a_minimum_run_as_one(tmp_path: Path) -> None:
    def mixed(name: str) -> str:
        return "Q4_1" if "v_proj" in name else "Q4_0"

    model = native_model(write_model(tmp_path / "m.gguf", kind=mixed))
    assert Kind(model.packed.layers[0].qkv.kind) == Kind.I4_F32


def test_a_mapped_file_counts_as_memory_that_the_system_can_drop(tmp_path: Path) -> None:
    tensor = Checkpoint(gguf_folder(write_model(tmp_path / "m.gguf"))).tensor(EMBEDDING, torch.float32)
    assert float(tensor.sum()) != 0.0  # which reads its pages
    assert mapped_weight_bytes() >= tensor.nbytes
