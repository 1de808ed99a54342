"""The reader of multipart bodies: what other libraries write comes out, whatever the pieces, and garbage is named."""

from __future__ import annotations

import io

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.errors import InvalidRequest
from router.api.openai.batches.multipart import MultipartReader, PartBegun, PartData, boundary_of

Part = tuple[str, str | None, bytes]
CONTENTS = st.one_of(
    st.binary(max_size=200), st.sampled_from([b"\r\n", b"\r\n--", b"--x", b"\r\n--x", b"\r\n--xy\r", b"\r", b"-"])
)


def read(body: bytes, boundary: bytes, piece: int = 1 << 20) -> list[Part]:
    """Return the parts of a body that comes in pieces of so many bytes."""
    reader, parts = MultipartReader(boundary), list[Part]()
    for place in range(0, len(body), piece):
        for event in reader.feed(body[place : place + piece]):
            match event:
                case PartBegun(name, filename):
                    parts.append((name, filename, b""))
                case PartData(data):
                    name, filename, before = parts[-1]
                    parts[-1] = name, filename, before + data
    reader.finish()
    return parts


@given(st.lists(CONTENTS, min_size=1, max_size=4), st.integers(1, 50))
def test_what_httpx_sends_comes_out_whatever_the_pieces(contents: list[bytes], piece: int) -> None:
    files = [(f"f{place}", ("in.jsonl", io.BytesIO(each))) for place, each in enumerate(contents)]
    request = httpx.Request("POST", "http://a", data={"purpose": "batch"}, files=files)
    found = read(request.read(), boundary_of(request.headers["content-type"]), piece)
    wanted = [(f"f{place}", "in.jsonl", each) for place, each in enumerate(contents)]
    assert found == [("purpose", None, b"batch"), *wanted]


@given(st.lists(CONTENTS, max_size=4).map(b"".join), st.integers(1, 9))
def test_content_may_look_like_a_boundary(content: bytes, piece: int) -> None:
    body = b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + content + b"\r\n--xyz--\r\nepilogue"
    assert read(body, b"xyz", piece) == [("a", None, content)]


def test_a_preamble_and_blanks_after_a_boundary_are_no_content() -> None:
    body = b'before\r\n--b  \r\ncontent-disposition: form-data; name="a"; filename="x.jsonl"\r\n\r\n1\r\n--b--'
    assert read(body, b"b") == [("a", "x.jsonl", b"1")]


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (b'form-data; name="a"; filename="../x"', ("a", "../x")),
        (b'form-data; name="a"; filename=""', ("a", "")),
        (b'form-data; name="a\\"b"; filename="C:\\\\x;y.jsonl"', ('a"b', "C:\\x;y.jsonl")),
        (b"form-data; name=a; filename=b.jsonl", ("a", "b.jsonl")),
        (b'form-data; name="a"; name="b"', ("a", None)),
    ],
)
def test_names_are_those_of_the_header(header: bytes, wanted: tuple[str, str | None]) -> None:
    body = b"--b\r\nContent-Disposition: " + header + b"\r\nX: y\r\n\r\n\r\n--b--\r\n"
    assert read(body, b"b") == [(*wanted, b"")]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends before its last boundary"),
        (b"{}", "ends before its last boundary"),
        (b"--b\r\n", "ends before its last boundary"),
        (b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n1\r\n--b', "ends before its last boundary"),
        (b"--b\r\nX: y\r\n\r\n1\r\n--b--", "has a part without"),
        (b"--b\r\ncontent-disposition: form-data\r\n\r\n1\r\n--b--", "has a part without"),
        (b'--b\r\ncontent-disposition: attachment; name="a"\r\n\r\n1\r\n--b--', "has a part without"),
        (b"--b\r\n\r\n1\r\n--b--", "has a part without"),
        (b"--b\r\n\xff: y\r\n\r\n1\r\n--b--", "not in UTF-8"),
        (b"--b\r\n" + b"x" * 9000, "headers of more than 8192 bytes"),
        (b"--b" + b" " * 9000, "without an end of its line"),
        (b"--bother\r\n", "something behind it"),
        (b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' * 33 + b"--b--", "has more than 32 parts"),
    ],
)
def test_what_is_no_multipart_is_named(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read(body, b"b")


@pytest.mark.parametrize("given", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"])
def test_another_content_type_is_named(given: str) -> None:
    with pytest.raises(InvalidRequest, match=r"content-type: is .*; expected multipart/form-data with a boundary"):
        boundary_of(given)


def test_a_boundary_may_have_quotes() -> None:
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="a b"') == b"a b"
