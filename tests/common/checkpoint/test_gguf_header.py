"""Headers of GGUF files: what the gguf package reads from the same file; and broken files, each with a plain reason."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from common.checkpoint.gguf.header import TYPES, Header, read_header
from common.contracts.errors import InvalidConfig
from tests.support.gguf_files import finish, write_model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with a value of every type."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"number.{kind}", 77)
    writer.add_float32("number.float32", 0.5)
    writer.add_float64("number.float64", 0.25)
    writer.add_bool("number.bool", True)
    writer.add_string("text", "zwölf ▁ tokens")
    writer.add_array("texts", ["a", "", "ccc ▁"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("floats", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("halves", np.ones((3, 5), dtype=np.float16))
    blocks = gguf.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    return finish(writer, path)


def reason(path: Path) -> str:
    with pytest.raises(InvalidConfig) as caught:
        read_header(path)
    (violation,) = caught.value.violations
    assert violation.field == "--model"
    assert str(path) in violation.description
    return violation.description


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "made.gguf"
    path.write_bytes(content)
    return path


def test_a_header_is_what_the_gguf_package_reads(file: Path) -> None:
    ours, theirs = read_header(file), GGUFReader(file)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert dict(ours.metadata) == expected
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.type, found.offset, found.nbytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert found.shape == tuple(tensor.shape.tolist()[::-1])
    assert ours.floats("floats") == tuple(range(6))


def test_the_types_have_the_sizes_of_the_gguf_package() -> None:
    known = {gguf.GGMLQuantizationType[each.name]: (each.numbers, each.nbytes) for each in TYPES.values()}
    assert known == {kind: gguf.GGML_QUANT_SIZES[kind] for kind in known}
    assert [kind.value for kind in known] == list(TYPES)


def test_a_file_that_was_cut_short_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    last = max(tensor.offset + tensor.nbytes for tensor in read_header(file).tensors.values())
    for size in {*range(1, len(whole), 61), last - 1}:
        if size < last:
            assert "download or convert it again" in reason(written(tmp_path, whole[:size])) or size < 8


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_flipped_bytes_give_a_header_or_a_reason(
    file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(bytes(content))
    with contextlib.suppress(InvalidConfig):  # any other exception fails
        assert isinstance(read_header(path), Header)


def test_what_is_no_gguf_file_is_refused_with_what_it_is(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    assert "Git LFS pointer" in reason(written(tmp_path, pointer))
    assert "git lfs pull" in reason(written(tmp_path, pointer))
    assert "does not begin with GGUF" in reason(written(tmp_path, b"\x80\x02}q\x00" * 20))
    assert "cut short" in reason(written(tmp_path, b""))
    assert "No such file" in reason(tmp_path / "absent.gguf")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_are_named(tmp_path: Path, version: int) -> None:
    content = b"GGUF" + struct.pack("<IQQ", version, 0, 0)
    assert f"GGUF of version {version}; only versions 2 and 3, little-endian, are read" in reason(
        written(tmp_path, content)
    )


def test_a_type_that_is_not_read_is_named_with_those_that_are(tmp_path: Path) -> None:
    blocks = np.zeros((2, 18), dtype=np.uint8)
    path = tmp_path / "iq.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
    said = reason(finish(writer, path))
    assert "tensor 'blk.0.attn_q.weight' is stored as IQ4_NL, which is not read; take a file of F32, F16, Q4_0" in said


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def made(*entries: bytes, tensors: bytes = b"", count: int = 0, number: int | None = None) -> bytes:
    """Return a file of entries of metadata and of tensors; `count` and `number` are what it says it has of them."""
    head = struct.pack("<IQQ", 3, count, len(entries) if number is None else number)
    return b"".join((b"GGUF", head, *entries, tensors, bytes(64)))


def array(kind: int, length: int, content: bytes = b"") -> bytes:
    return text("a") + struct.pack("<IIQ", 9, kind, length) + content


def tensor(name: str, shape: Sequence[int], offset: int = 0, kind: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


TWICE = text("a") + struct.pack("<II", 4, 1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            made(array(9, 1, struct.pack("<IQ", 9, 1) * 100_000)),
            "arrays are nested in each other; expected at most 4 levels",
        ),
        (made(array(0, 2**60)), "its arrays have 1152921504606846976 values; expected at most 8388608"),
        (made(array(8, 2**60)), "its arrays have 1152921504606846976 values; expected at most 8388608"),
        (made(array(8, 10**6)), "8 bytes are expected at"),
        (made(struct.pack("<Q", 2**60)), "1152921504606846976 bytes are expected at 32"),
        (made(count=2**32), "it has 4294967296 tensors; expected at most 1048576"),
        (made(number=2**40), "it has 1099511627776 entries of metadata; expected at most 1048576"),
        (made(TWICE, TWICE), "it has the entry 'a' twice"),
        (made(text("general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0; expected a power of two"),
        (made(text("general.alignment") + struct.pack("<II", 4, 48)), "general.alignment is 48; expected a power of"),
        (made(text("general.alignment") + struct.pack("<IB", 7, 1)), "general.alignment is True; expected a power of"),
        (made(tensors=tensor("t", (0, 4)), count=1), "'t' of shape (0, 4) cannot be stored as F32"),
        (made(tensors=tensor("t", (4, 0)), count=1), "'t' of shape (4, 0) cannot be stored as F32"),
        (made(tensors=tensor("t", ()), count=1), "'t' of shape () cannot be stored as F32"),
        (made(tensors=tensor("t", (32,), kind=8), count=1), "'t' of shape (32,) cannot be stored as Q8_0"),
        (made(tensors=tensor("t", (2**60, 1)), count=1), "'t' ends at 4611686018427388000"),
        (made(tensors=tensor("t", (1,), offset=2**62), count=1), "'t' ends at 4611686018427387972"),
        (made(tensors=text("t") + struct.pack("<I", 2**32 - 1), count=1), "'t' has 4294967295 dimensions; expected"),
        (made(tensors=tensor("t", (1,)) * 2, count=2), "it has the tensor 't' twice"),
        (
            made(tensors=tensor("t", (4,)) + tensor("u", (4,), 8), count=2),
            "tensors 't' and 'u' share bytes of the file",
        ),
    ],
)
def test_a_hostile_header_has_a_reason(content: bytes, why: str, tmp_path: Path) -> None:
    assert f"the file is broken or was cut short ({why}" in reason(written(tmp_path, content))


@pytest.mark.parametrize("content", [made(array(0, 10**9)), made(array(8, 10**9)), made(struct.pack("<Q", 10**9))])
def test_a_file_of_gigabytes_makes_no_values_of_them(content: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    os.truncate(path, 9 * 10**9)  # takes no room on the disk
    said = reason(path)
    assert "expected at most 8388608" in said or "its header has more than 134217728 bytes" in said


def test_a_whole_model_is_read(tmp_path: Path) -> None:
    header = read_header(write_model(tmp_path / "m.gguf", kind="Q8_0"))
    assert header.metadata["general.architecture"] == "llama"
    assert header.tensors["blk.1.ffn_down.weight"].type == "Q8_0"
