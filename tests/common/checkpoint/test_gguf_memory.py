"""The memory of weights: what the native path keeps of each type, and the widened weights of other families."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint.gguf.folder import gguf_folder
from common.checkpoint.gguf.memory import KEPT_BITS, weight_memory
from gpuworker.checkpoints.gguf import TYPES
from tests.support.gguf_files import model_of, write_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def numbers(family: str) -> tuple[int, int]:
    """Return how many numbers matrices and other tensors have."""
    tensors = model_of(family)[1].values()
    matrices = sum(tensor.numel() for tensor in tensors if tensor.dim() == 2)
    return matrices, sum(tensor.numel() for tensor in tensors) - matrices


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_takes_its_bits_and_those_of_the_numbers_of_its_groups(kind: str) -> None:
    form = TYPES[kind]
    assert KEPT_BITS[kind] == form.bits + 32 * (1 + form.shifted) / form.group


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 6), ("Q6_K", 10), ("F16", 16)])
def test_matrices_take_what_their_type_takes_and_norms_four_bytes(tmp_path: Path, kind: str, bits: int) -> None:
    matrices, others = numbers("llama")
    folder = gguf_folder(write_model(tmp_path / "m.gguf", kind=kind))
    assert weight_memory(folder) == matrices * bits // 8 + 4 * others


def test_a_family_that_runs_on_transformers_is_widened(tmp_path: Path) -> None:
    folder = gguf_folder(write_model(tmp_path / "m.gguf", "gemma3", kind="Q4_K"))
    assert weight_memory(folder) == 2 * sum(numbers("gemma3"))
