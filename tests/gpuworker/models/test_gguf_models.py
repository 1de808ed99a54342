"""Whole models from GGUF files: what transformers makes of the same file, on both paths; and what stays quantised."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from common.checkpoint.gguf.folder import gguf_folder
from gpuworker.attention.backends import make_backend
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.choose import open_native
from gpuworker.models.hf.loader import ModelSource, load_model
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.weights import EMBEDDING
from gpuworker.native import library as native
from gpuworker.native.linear import Kind
from gpuworker.plane.memory import mapped_weight_bytes
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.thread_executor import thread_executor
from tests.support.gguf_files import FAMILIES, model_of, reference, write_model
from tests.support.gpuworker.runner_harness import SLOTS, Driver

CPU = torch.device("cpu")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
TOKENS = torch.arange(6, 38)[None]
built = pytest.mark.skipif(native.best() is None, reason="the native library was not built")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    path = write_model(tmp_path / "m.gguf", family, kind)
    theirs = reference(path, family)
    with torch.inference_mode():
        wanted = theirs(TOKENS).logits[0]
    found = load_model(ModelSource(str(gguf_folder(path)), dtype="float32"), CPU).reference_logits(TOKENS)
    # Float32 sums in another order: random blocks make logits of some 50, and errors beside the largest of them.
    assert torch.allclose(found.view(wanted.shape), wanted, atol=5e-5 * float(wanted.abs().max()), rtol=1e-4)


@built
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_mixed_batch_equal_those_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    path = write_model(tmp_path / "m.gguf", family, kind, tied=True)
    source = ModelSource(str(gguf_folder(path)), dtype="float32")
    opened = open_native(source, CPU, "native", functools.partial(make_backend, "auto"))
    assert opened is not None
    model, geometry = opened
    cache = KvCache(geometry, SLOTS // 16, 16, CPU)
    runner = ModelRunner(model, cache, make_backend("auto", cache), RunnerLimits(8, 256, threads=1), thread_executor())
    driver = Driver(runner)
    prompts = [[6 + (31 * n + 7 * i) % 250 for i in range(length)] for n, length in enumerate((3, 41, 17))]
    streams = [driver.add(prompt, 16, chunk) for prompt, chunk in zip(prompts, (99, 7, 1), strict=True)]
    driver.run()
    runner.close()
    theirs = reference(path, family, tied=True)
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
        ("Q4_K", "float32", "F32"),
        ("Q6_K", "bfloat16", "BF16"),
        ("F16", "float32", "F16"),
    ],
)
def test_blocks_of_32_and_float16_stay_as_they_are_and_the_others_are_widened(
    tmp_path: Path, kind: str, dtype: str, wanted: str
) -> None:
    assert kinds(native_model(write_model(tmp_path / "m.gguf", kind=kind), dtype)) == {wanted}


@built
@pytest.mark.parametrize(("kind", "nbytes"), [("Q8_0", 1.25), ("Q4_0", 0.75), ("Q4_1", 1.0)])
def test_a_tied_embedding_is_held_once_as_the_integers_of_the_file(tmp_path: Path, kind: str, nbytes: float) -> None:
    model = native_model(write_model(tmp_path / "m.gguf", kind=kind, tied=True))
    matrices = sum(tensor.numel() for tensor in model_of("llama", tied=True)[1].values() if tensor.dim() == 2)
    assert model.packed.struct.embedding is None
    assert model.weight_bytes < nbytes * matrices


@built
def test_linears_that_run_as_one_are_widened_where_their_types_differ(tmp_path: Path) -> None:
    def mixed(name: str) -> str:
        return "Q8_0" if "v_proj" in name else "Q4_0"

    model = native_model(write_model(tmp_path / "m.gguf", kind=mixed))
    layer = model.packed.layers[0]
    assert (Kind(layer.qkv.kind), Kind(layer.down.kind)) == (Kind.F32, Kind.I4_F32)


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
