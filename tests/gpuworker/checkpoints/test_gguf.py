"""Weights of GGUF files: the floats that the gguf package and the descriptions of the formats say, and integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGUFReader

from common.checkpoint.gguf.folder import gguf_folder
from gpuworker.checkpoints import gguf as reader
from gpuworker.checkpoints.weights import Checkpoint
from tests.support.gguf_files import gguf_name, model_of, random_blocks, write_model

# The bits and the group of each type as it is kept, and whether groups have minimums.
INTEGERS = {
    "Q8_0": (8, 32, False),
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (8, 32, False),
    "Q5_1": (8, 32, True),
    "Q2_K": (4, 16, True),
    "Q3_K": (4, 16, False),
    "Q4_K": (4, 32, True),
    "Q5_K": (8, 32, True),
    "Q6_K": (8, 16, False),
}
MLP = "model.layers.1.mlp.down_proj.weight"
QUERIES = "model.layers.0.self_attn.q_proj.weight"
Floats = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(tmp_path: Path, kind: str, family: str = "llama") -> tuple[Checkpoint, dict[str, Floats]]:
    """Return a written checkpoint, and its tensors as the gguf package widens them, by their names in the file."""
    path = write_model(tmp_path / "m.gguf", family, kind)
    plain = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in GGUFReader(path).tensors}
    return Checkpoint(gguf_folder(path)), plain


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *INTEGERS])
def test_every_type_is_widened_to_the_floats_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    checkpoint, plain = opened(tmp_path, kind)
    assert set(checkpoint) == set(model_of("llama")[1])
    for name in checkpoint:
        if "q_proj" not in name and "k_proj" not in name:
            assert np.array_equal(checkpoint.tensor(name, torch.float32).float().numpy(), plain[gguf_name(name)]), name


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_rows_of_queries_and_keys_of_llama_are_put_in_order(tmp_path: Path, kind: str) -> None:
    checkpoint, _ = opened(tmp_path, kind)
    _, weights = model_of("llama")
    for name in (QUERIES, QUERIES.replace("q_proj", "k_proj")):
        found = checkpoint.tensor(name, torch.float32).float()
        assert torch.allclose(found, weights[name], atol=3e-3)


def test_other_families_are_in_order_already(tmp_path: Path) -> None:
    checkpoint, _ = opened(tmp_path, "F32", "qwen2")
    _, weights = model_of("qwen2")
    assert all(torch.equal(checkpoint.tensor(name, torch.float32), weights[name]) for name in weights)


@pytest.mark.parametrize("kind", INTEGERS)
def test_blocks_are_read_as_the_integers_that_are_stored(tmp_path: Path, kind: str) -> None:
    checkpoint, plain = opened(tmp_path, kind)
    found = checkpoint.integers(MLP)
    assert found is not None
    bits, group, shifted = INTEGERS[kind]
    assert (found.bits, found.group_size, found.group_of) == (bits, group, None)
    assert (found.minimums is not None) == shifted
    assert -(1 << bits - 1) <= int(found.values.min()) <= int(found.values.max()) < 1 << bits - 1
    scales, values = found.scales.repeat_interleave(group, 1), found.values.float()
    if found.zeros is not None:
        values -= found.zeros.repeat_interleave(group, 1)
    meant = values * scales
    if found.minimums is not None:
        meant = meant + found.minimums.repeat_interleave(group, 1)
    assert np.array_equal(meant.numpy(), plain[gguf_name(MLP)])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_have_no_integers(tmp_path: Path, kind: str) -> None:
    checkpoint, _ = opened(tmp_path, kind)
    assert all(checkpoint.integers(name) is None for name in (MLP, QUERIES))


@pytest.mark.parametrize("at_once", [1, 256, 1000])
def test_rows_are_read_a_few_at_a_time(tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_AT_ONCE", at_once)
    checkpoint, plain = opened(tmp_path, "Q4_K")
    assert np.array_equal(checkpoint.tensor(MLP, torch.float32).numpy(), plain[gguf_name(MLP)])


def half(raw: Any) -> float:
    return float(np.frombuffer(bytes(raw), np.float16)[0])


def q4_k(block: Any) -> list[float]:
    """Return the 256 numbers of a block, as the format says: eight runs of 32 with 6 bits of scale and minimum each."""
    d, least, packed, quants = half(block[:2]), half(block[2:4]), block[4:16], block[16:]
    out = []
    for run in range(8):
        if run < 4:
            scale, minimum = packed[run] & 63, packed[run + 4] & 63
        else:
            scale = packed[run + 4] & 15 | packed[run - 4] >> 6 << 4
            minimum = packed[run + 4] >> 4 | packed[run] >> 6 << 4
        for i in range(32):
            byte = quants[run // 2 * 32 + i]
            out.append(d * scale * (byte >> 4 if run % 2 else byte & 15) - least * minimum)
    return out


def q5_k(block: Any) -> list[float]:
    """Return the 256 numbers of a block: those of Q4_K and a fifth bit; byte i has that of number i of each run."""
    rest = np.concatenate([block[:16], block[48:]])
    whole, d, packed = q4_k(rest), half(block[:2]), block[4:16]
    scales = [packed[run] & 63 if run < 4 else packed[run + 4] & 15 | packed[run - 4] >> 6 << 4 for run in range(8)]
    return [
        number + 16 * d * scales[index // 32] * (block[16 + index % 32] >> index // 32 & 1)
        for index, number in enumerate(whole)
    ]


def q6_k(block: Any) -> list[float]:
    """Return the 256 numbers of a block: four bits and two, less 32; sixteen runs of 16 with a scale of 8 bits each."""
    low, high, scales, d = block[:128], block[128:192], block[192:208].view(np.int8), half(block[208:])
    out = []
    for index in range(256):
        part, rest = index // 128, index % 128
        byte, shift = low[part * 64 + rest % 64], 4 * (rest // 64)
        two = high[part * 32 + rest % 32] >> 2 * (rest // 32) & 3
        out.append(d * int(scales[index // 16]) * (int(byte >> shift & 15 | two << 4) - 32))
    return out


@pytest.mark.parametrize(("kind", "meaning"), [("Q4_K", q4_k), ("Q5_K", q5_k), ("Q6_K", q6_k)])
def test_the_k_types_are_what_their_formats_say(tmp_path: Path, kind: str, meaning: Any) -> None:
    checkpoint, _ = opened(tmp_path, kind)
    shape = model_of("llama")[1][MLP].shape
    rows = random_blocks(kind, shape)
    found = checkpoint.tensor(MLP, torch.float32)
    for row in (0, 7, 255):
        blocks = rows[row].reshape(shape[1] // 256, -1)
        wanted = torch.tensor([number for block in blocks for number in meaning(block)], dtype=torch.float32)
        assert torch.allclose(found[row], wanted, rtol=1e-5, atol=1e-7)
