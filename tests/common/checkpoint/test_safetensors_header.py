"""Headers of safetensors files: what the safetensors package writes; and headers of strangers, each with its reason."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from common.checkpoint.files import weight_problems
from common.checkpoint.safetensors_header import Entry, read_header

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def written(folder: Path, header: bytes, data: int = 16) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))
    return path


def test_a_header_has_what_the_package_wrote(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(0, 3, dtype=torch.bfloat16)}, path, {"format": "pt"})
    begin = path.stat().st_size - 24
    assert read_header(path) == {
        "a": Entry("F32", (2, 3), begin, begin + 24),
        "b": Entry("BF16", (0, 3), begin + 24, begin + 24),
    }


def reason(path: Path) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read_header(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (5, "is 5; expected an object of dtype, shape and data_offsets"),
        ({**GOOD, "dtype": ["F32"]}, "has dtype ['F32']; expected a name such as BF16"),
        ({**GOOD, "shape": [-2]}, "has shape [-2]; expected a list of whole numbers, none below 0"),
        ({**GOOD, "shape": [True, 2]}, "has shape [True, 2]; expected a list of whole numbers, none below 0"),
        ({**GOOD, "shape": [2.0]}, "has shape [2.0]; expected a list of whole numbers, none below 0"),
        ({**GOOD, "shape": None}, "has shape None; expected a list of whole numbers, none below 0"),
        ({**GOOD, "shape": {"a": 1}}, "has shape an object; expected a list of whole numbers, none below 0"),
        (
            {**GOOD, "data_offsets": [-8, 0]},
            "has data_offsets [-8, 0]; expected the offsets of its first byte and of its end",
        ),
        (
            {**GOOD, "data_offsets": [8, 0]},
            "has data_offsets [8, 0]; expected the offsets of its first byte and of its end",
        ),
        (
            {**GOOD, "data_offsets": [0.0, 8]},
            "has data_offsets [0.0, 8]; expected the offsets of its first byte and of its end",
        ),
        (
            {**GOOD, "data_offsets": [0, 8, 9]},
            "has data_offsets [0, 8, 9]; expected the offsets of its first byte and of its end",
        ),
        (
            {**GOOD, "data_offsets": [10**50, 10**50 + 8]},
            (
                "has data_offsets [a number of more than 38 digits, a number of more than 38 digits]; expected the"
                " offsets of its first byte and of its end"
            ),
        ),
        (
            {**GOOD, "data_offsets": [0, 12]},
            "has data_offsets [0, 12]; a tensor of shape [2] in F32 has 8 bytes",
        ),
        (
            {**GOOD, "shape": [2**62, 2**62]},
            (
                "has data_offsets [0, 8]; a tensor of shape [4611686018427387904, 4611686018427387904] in F32 has"
                " 85070591730234615865843651857942052864 bytes"
            ),
        ),
    ],
)
def test_an_entry_that_cannot_be_has_words(entry: object, why: str, tmp_path: Path) -> None:
    assert reason(written(tmp_path, json.dumps({"t": entry}).encode())) == f"tensor 't' {why}"


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (
            b"[" * 100_000 + b"]" * 100_000,
            "it is nested too deeply; expected at most 8 lists and objects in each other",
        ),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "it is nested too deeply; expected at most 8 lists and objects"),
        (b'{"a":[' + b"[]," * 2_000_000 + b"[]]}", "it has 2000003 lists and objects; expected at most 1500000"),
        (b'{"t": {}, "t": {}}', "it has 't' twice"),
        (b"{]", "it is not JSON"),
        (b"\xff\xff", "it is not JSON"),
    ],
    ids=["lists", "objects", "wide", "twice", "json", "utf-8"],
)
def test_a_header_that_cannot_be_read_has_words(header: bytes, why: str, tmp_path: Path) -> None:
    assert reason(written(tmp_path, header)).startswith(f"its header cannot be read: {why}")


def test_a_header_that_is_no_object_has_words(tmp_path: Path) -> None:
    assert reason(written(tmp_path, b"[1]")) == "its header is [1]; expected an object of tensors by name"


def test_tensors_share_no_bytes(tmp_path: Path) -> None:
    header = {"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}
    assert reason(written(tmp_path, json.dumps(header).encode())) == "tensors 'a' and 'b' share bytes of the file"


def test_preflight_says_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"t": {**GOOD, "data_offsets": [-8, 0]}}).encode())
    (found,) = weight_problems(tmp_path)
    assert found.description == (
        f"{path} is not a safetensors file: tensor 't' has data_offsets [-8, 0]; expected the offsets of its first byte"
        " and of its end; download the file again"
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["F32", "I8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.just("F32") | VALUES,
        "shape": st.just([2]) | VALUES,
        "data_offsets": st.just([0, 8]) | VALUES,
    },
)


@given(header=st.dictionaries(st.text(max_size=3), ENTRIES | VALUES, max_size=3) | VALUES, cut=st.integers(0, 200))
def test_any_header_is_read_or_has_a_reason(header: Any, cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.getbasetemp(), json.dumps(header).encode())
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)] if cut > 100 else whole)
    with contextlib.suppress(ValueError):
        for entry in read_header(path).values():
            assert 8 < entry.begin <= entry.end
