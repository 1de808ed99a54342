"""Lines of a batch: what is accepted, and how each wrong line is named."""

from __future__ import annotations

import json

import pytest

from common.batch.lines import BadLine, Item, checked_ids, items, parsed
from common.contracts.errors import InvalidRequest


def line(custom_id: object = "a", **changes: object) -> bytes:
    entry = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}} | changes
    return json.dumps(entry).encode() + b"\n"


def test_a_line_becomes_a_request() -> None:
    assert parsed(line()) == Item("a", "/v1/completions", {"prompt": "x"})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (b"{\n", "is not valid JSON"),
        (b"[" * 100_000, "has 100000 lists and objects; expected at most 8192"),
        (line(body={"prompt": [7] * 140_000}), "values; expected at most 135000"),
        (b"[]\n", "must be an object"),
        (line(body={"temperature": float("nan")}), "is not valid JSON (Out of range float values are not JSON"),
        (line(body={"prompt": "\ud800"}), "is not valid JSON ('utf-8' codec can't encode character"),
        (line("\ud800"), "is not valid JSON ('utf-8' codec can't encode character"),
        (b'{"custom_id": "a", "url": "/v1/completions"}\n', "body is missing; expected an object"),
        (line(None), "custom_id is missing"),
        (line(7), "custom_id is 7"),
        (line(""), 'custom_id is ""'),
        (line("x" * 513), "expected a text of 1 to 512 characters"),
        (line(method="GET"), 'method is "GET"; expected POST'),
        (line(url="/v1/models"), "expected one of /v1/chat/completions, /v1/completions, /v1/responses"),
        (line(url=["/v1/completions"]), "url is"),
        (line(body=[]), "body is []"),
        (line(body={"stream": True}), "body.stream is true"),
        (line(body={"background": True}), "body.background is true"),
        (b" " * (4 << 20) + b"{}", "the server takes at most"),
    ],
)
def test_what_is_wrong_is_said_with_what_was_expected(wrong: bytes, words: str) -> None:
    with pytest.raises(BadLine) as bad:
        parsed(wrong)
    assert words in str(bad.value)


def test_all_bad_lines_are_named_with_their_numbers() -> None:
    with pytest.raises(InvalidRequest) as bad:
        checked_ids([line("a"), b"\n", b"{\n", line("b"), line("a"), line("c", method="PUT")])
    assert [each.field for each in bad.value.violations] == ["line 3", "line 5", "line 6"]
    assert 'custom_id "a" stands in line 1 too' in bad.value.violations[1].description


def test_of_very_many_bad_lines_the_first_are_named_and_the_others_counted() -> None:
    with pytest.raises(InvalidRequest) as bad:
        checked_ids([b"{\n"] * 1000)
    assert len(bad.value.violations) == 21
    assert (bad.value.violations[-1].field, bad.value.violations[-1].description) == (
        "further lines",
        "980 more are wrong",
    )


def test_an_input_without_lines_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="has no lines"):
        checked_ids([b"\n", b"  \n"])


def test_the_last_line_needs_no_end() -> None:
    lines = [line("a"), line("b").rstrip(b"\n")]
    assert checked_ids(lines) == ["a", "b"]
    assert [item.custom_id for item in items(lines)] == ["a", "b"]
