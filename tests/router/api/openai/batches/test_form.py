"""The form of an upload: what it says when it is whole, and how each mistake is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts import limits
from common.contracts.errors import InvalidRequest
from router.api.openai.batches.form import Upload, UploadForm
from router.api.openai.errors import BodyTooLarge

B = "boundary"


def line(custom_id: str = "a", url: str = "/v1/completions") -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "x"}}).encode() + b"\n"


def form(content: bytes | None = None, filename: str = "in.jsonl", **fields: str) -> bytes:
    """Return a form with a file, if there is content, and with fields; `purpose` is batch unless it is given."""
    parts = b""
    for name, value in ({"purpose": "batch"} | fields).items():
        parts += f'--{B}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    if content is not None:
        head = f'--{B}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
        parts += head.encode() + content + b"\r\n"
    return parts + f"--{B}--\r\n".encode()


def read(body: bytes, piece: int = 1 << 20, room: int = 1 << 30) -> tuple[Upload, bytes]:
    reader, content = UploadForm(B.encode(), room), b""
    for place in range(0, len(body), piece):
        content += reader.feed(body[place : place + piece])
    return reader.finish(), content


@given(st.integers(1, 200), st.booleans())
def test_a_file_is_counted_and_handed_on_whatever_the_pieces(piece: int, ends: bool) -> None:
    content = line("a") + b"\r\n" + line("b", "/v1/embeddings") + (line("c") if ends else line("c")[:-1])
    upload, written = read(form(content), piece)
    assert written == content
    urls = ("/v1/completions", "/v1/embeddings")
    assert upload == Upload("in.jsonl", len(content), limits.BATCH_FILE_SECONDS, 3, urls)


def test_the_file_may_come_before_its_purpose() -> None:
    only = form(line()).replace(b'name="purpose"', b'name="other"').removesuffix(f"--{B}--\r\n".encode())
    assert read(only + form())[0].lines == 1
    with pytest.raises(InvalidRequest, match="purpose: is missing"):
        read(only + form().replace(b'name="purpose"', b'name="other"'))


def test_lines_may_end_as_on_windows_and_begin_with_a_mark_of_their_order() -> None:
    content = b"\xef\xbb\xbf" + line("a").replace(b"\n", b"\r\n") + line("b")
    assert read(form(content))[0].lines == 2


def test_a_client_says_how_long_a_file_is_kept() -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    assert read(form(line(), **fields))[0].seconds == 3600


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (form(), "file", "is missing; expected a part of the form with a filename"),
        (form(b"", filename=""), "file", "is missing"),
        (form(file="text"), "file", "is missing"),
        (form(line(), purpose=""), "purpose", "is missing; expected batch"),
        (form(line(), purpose="fine-tune"), "purpose", "is 'fine-tune'; expected batch"),
        (form(line(), filename="../../etc/passwd"), "file", "has the name '../../etc/passwd'; expected"),
        (form(line(), filename="a\\\\b"), "file", "and no path"),
        (form(line(), filename=".."), "file", "and no path"),
        (form(line(), filename="a\0b"), "file", "and no path"),
        (form(line(), filename="x" * 256), "file", "expected at most 255 characters"),
        (form(b""), "file", "has no lines"),
        (form(b"\r\n \n"), "file", "has no lines"),
        (form(b"not json\n" + line()), "line 1", "is not valid JSON"),
        (form(line() + line()), "line 2", 'custom_id "a" stands in line 1 too'),
        (form(line("b") + b'\n{"custom_id": "a"}'), "line 3", "url is missing"),
        (form(b"\x89PNG\r\n\x1a\n"), "line 1", "is not valid JSON"),
        (form(b"[" + b" " * (limits.MAX_HTTP_BODY_BYTES + 1)), "line 1", "the server takes at most"),
        (form(line(), **{"expires_after[seconds]": "3600"}), "expires_after.anchor", "expected created_at"),
        (
            form(line(), **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}),
            "expires_after.seconds",
            "is '5'; expected 3600 to 2592000",
        ),
        (form(line(), purpose="x" * 2000), "purpose", "has more than 1024 bytes"),
    ],
)
def test_what_is_wrong_is_said_with_what_was_expected(body: bytes, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        read(body, 1 << 16)
    violation = wrong.value.violations[0]
    assert (violation.field, words in violation.description) == (field, True), violation


def test_two_files_are_one_too_many() -> None:
    second = form(line()).removesuffix(f"--{B}--\r\n".encode()) + form(line())
    with pytest.raises(InvalidRequest, match="file: comes twice"):
        read(second)


def test_a_file_has_as_many_bytes_as_there_is_room_for() -> None:
    content = line("a") + line("b")
    assert read(form(content), room=len(content))[0].size == len(content)
    with pytest.raises(BodyTooLarge, match=f"at most {len(content) - 1}"):
        read(form(content), room=len(content) - 1)


def test_a_file_has_as_many_requests_as_openai_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BATCH_LINES", 2)
    assert read(form(line("a") + line("b")))[0].lines == 2
    with pytest.raises(InvalidRequest, match="file: has more than 2 requests"):
        read(form(line("a") + line("b") + line("c")))
