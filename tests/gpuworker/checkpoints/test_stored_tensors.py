"""Tensors on the pages of their files: the same as the safetensors library reads, and gone with the last reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.files import INDEX
from common.contracts.errors import InvalidConfig
from gpuworker.checkpoints.stored_tensors import StoredTensors
from tests.support.checkpoints import checkpoint

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.bool)


def test_a_checkpoint_is_what_the_library_reads() -> None:
    expected = load_file(checkpoint("llama") / "model.safetensors")
    stored = StoredTensors(checkpoint("llama"))
    assert list(stored) == sorted(expected)
    assert all(torch.equal(stored[name].map(), tensor) for name, tensor in expected.items())
    assert stored.nbytes == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_type_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(24).view(2, 3, 4).to(dtype)
    save_file({"before": torch.zeros(3, dtype=torch.uint8), "t": tensor}, tmp_path / "model.safetensors")
    read = StoredTensors(tmp_path)["t"].map()
    assert (read.dtype, read.shape) == (dtype, tensor.shape)
    assert torch.equal(read.float(), tensor.float())


def test_odd_places_and_empty_tensors_are_read(tmp_path: Path) -> None:
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "odd": {"dtype": "I32", "shape": [2], "data_offsets": [1, 9]},
        "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [9, 9]},
    }
    text = json.dumps(header).encode()
    data = b"\x07" + (5).to_bytes(4, "little") + (6).to_bytes(4, "little")
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    stored = StoredTensors(tmp_path)
    assert stored["odd"].map().tolist() == [5, 6]
    assert stored["none"].map().shape == (0, 3)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"t": torch.ones(4)}, tmp_path / "model.safetensors")
    StoredTensors(tmp_path)["t"].map().zero_()
    assert StoredTensors(tmp_path)["t"].map().tolist() == [1.0] * 4


def test_memory_goes_back_with_the_tensor(tmp_path: Path) -> None:
    size = 64 << 20
    save_file({"t": torch.ones(size, dtype=torch.uint8), "u": torch.ones(8)}, tmp_path / "model.safetensors")
    process = psutil.Process()
    before = process.memory_info().rss
    tensor = StoredTensors(tmp_path)["t"].map()
    untouched = process.memory_info().rss - before
    assert int(tensor.sum()) == size
    touched = process.memory_info().rss - before
    del tensor
    left = process.memory_info().rss - before
    assert (untouched < size / 8, touched > size / 2, left < size / 8) == (True, True, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"short", "cannot read .*model.safetensors"),
        ((1 << 40).to_bytes(8, "little"), "its header cannot be read"),
        ((1 << 20).to_bytes(8, "little"), "it has 8 bytes, and its header ends at 1048584"),
        (b"\x02" + bytes(7) + b"{]", "cannot read"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidConfig, match=words):
        StoredTensors(tmp_path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}, "F4 has 1 bytes"),
        ({"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}, "tensor 't' has the type 'F4'; known are F64, "),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "a tensor of shape .2. in F32 has 8 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "tensor 't' ends at 77, and the file at 73"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(tmp_path: Path, entry: dict[str, object], words: str) -> None:
    text = json.dumps({"t": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(InvalidConfig, match=words):
        StoredTensors(tmp_path)


def sharded(folder: Path, shards: Mapping[str, Mapping[str, float]], places: Mapping[str, str]) -> StoredTensors:
    """Write files of tensors of one number each, and an index that says where each tensor is."""
    for name, tensors in shards.items():
        save_file({tensor: torch.tensor([number]) for tensor, number in tensors.items()}, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return StoredTensors(folder)


def numbers(stored: StoredTensors) -> dict[str, float]:
    return {name: stored[name].map().item() for name in stored}


def test_the_index_decides_for_each_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both files have both tensors, and neither order of the files would be right."""
    shards = {"a.safetensors": {"t": 1.0, "u": 2.0}, "b.safetensors": {"t": 3.0, "u": 4.0}}
    stored = sharded(tmp_path, shards, {"t": "a.safetensors", "u": "b.safetensors"})
    assert numbers(stored) == {"t": 1.0, "u": 4.0}
    assert caplog.messages == []


def test_a_tensor_is_found_where_the_index_does_not_name_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = {"a.safetensors": {"t": 1.0, "more": 5.0}, "b.safetensors": {"u": 4.0}}
    stored = sharded(tmp_path, shards, {"t": "b.safetensors", "u": "b.safetensors", "more": "a.safetensors"})
    assert numbers(stored) == {"t": 1.0, "more": 5.0, "u": 4.0}
    assert caplog.messages == [f"{tmp_path}: {INDEX} names the wrong file of 1 tensors; they are read where they are"]


@pytest.mark.parametrize("places", [{"t": "gone.safetensors"}, {"t": "b.safetensors"}], ids=["stale", "both"])
def test_a_whole_file_is_read_as_transformers_reads_it_and_the_log_says_so(
    places: Mapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = sharded(tmp_path, {"model.safetensors": {"t": 1.0}, "b.safetensors": {"t": 2.0}}, places)
    assert numbers(stored) == {"t": 1.0}
    (line,) = caplog.messages
    assert f"the weights are those of model.safetensors; {INDEX} names {places['t']} instead" in line
