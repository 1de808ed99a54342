"""Stop texts that are special tokens, which no text shows."""

from __future__ import annotations

from typing import Any

import pytest

from quire.types.v1 import types_pb2
from tests.support.router.validation import accepted, refused, request


@pytest.mark.parametrize(
    ("stop", "fields", "texts", "tokens"),
    [
        (["a"], {}, ("a",), (3,)),
        (["a", "<|end|>", "<|user|>"], {}, ("a",), (3, 7, 8)),
        (["<|end|>"], {"skip_special_tokens": False}, ("<|end|>",), (3,)),
        (["<|end|>x"], {"skip_special_tokens": False}, ("<|end|>x",), (3,)),
        (["<|end|>", "<|user|>"], {"kept_special_tokens": ["<|end|>"]}, ("<|end|>",), (3, 8)),
        (["<|end"], {}, ("<|end",), (3,)),
    ],
)
async def test_a_special_token_stops_by_its_id(
    stop: list[str], fields: dict[str, Any], texts: tuple[str, ...], tokens: tuple[int, ...]
) -> None:
    sampling = types_pb2.SamplingParams(stop=stop, stop_token_ids=[3])
    found = (await accepted(request(sampling=sampling, **fields))).sampling
    assert (found.stop, found.stop_token_ids) == (texts, tokens)


async def test_a_stop_text_around_a_special_token_is_refused_as_it_never_comes() -> None:
    what = "has <|end|> within it, a special token that no text shows; give that token alone, or set"
    sampling = types_pb2.SamplingParams(stop=["a", "<|end|>\n"])
    assert await refused(request(sampling=sampling)) == [f"sampling.stop[1]: {what} skip_special_tokens to false"]
