"""Text of tokens as they come: character boundaries, leading spaces, special tokens, and the sum is a full decode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.answers.text.detokenizer import BytesDetokenizer, WindowDetokenizer, bytes_of_tokens, detokenizers
from tests.support.router.tokenizers import byte_fallback, byte_level, metaspace, word_piece

BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE, METASPACE = byte_level(), byte_fallback(), word_piece(), metaspace()
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def deltas(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    """One delta a token, then what was held back."""
    special = [key for key, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    detokenizer = detokenizers(tokenizer)(frozenset(special if skip else ()))
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def the(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=24)


@given(ids=token_ids(BYTE_LEVEL), skip=st.booleans())
def test_byte_level_deltas_sum_to_the_full_decode_of_any_tokens(ids: list[int], skip: bool) -> None:
    assert "".join(deltas(BYTE_LEVEL, ids, skip)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(text=st.text(st.sampled_from("a é你好😀👩\u200d🚀 \n"), max_size=20), tail=token_ids(BYTE_LEVEL))
def test_byte_level_text_with_emoji_and_chinese_is_split_only_between_characters(text: str, tail: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    assert "".join(deltas(BYTE_LEVEL, ids)) == text
    assert all(REPLACEMENT not in delta for delta in deltas(BYTE_LEVEL, ids))
    assert "".join(deltas(BYTE_LEVEL, ids + tail)).startswith(text)


def fallback_pieces() -> st.SearchStrategy[list[int]]:
    """Tokens of a sentencepiece vocabulary in which every run of byte tokens is well-formed UTF-8."""
    spelled = st.text(st.sampled_from("é你好😀\u0f40"), min_size=1, max_size=3).map(lambda text: list(text.encode()))
    whole = st.integers(256, BYTE_FALLBACK.get_vocab_size() - 1).map(lambda token_id: [token_id])
    return st.lists(st.one_of(spelled, whole), max_size=12).map(lambda parts: list(itertools.chain(*parts)))


@given(ids=fallback_pieces(), skip=st.booleans())
def test_byte_fallback_deltas_sum_to_the_full_decode(ids: list[int], skip: bool) -> None:
    assert "".join(deltas(BYTE_FALLBACK, ids, skip)) == BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)


@given(ids=token_ids(BYTE_FALLBACK))
def test_ill_formed_byte_fallback_keeps_every_good_character_of_its_run(ids: list[int]) -> None:
    spelled = [bytes([i]) if i < 256 else (BYTE_FALLBACK.id_to_token(i) or "").replace("▁", " ").encode() for i in ids]
    special = the(BYTE_FALLBACK, "<s>")
    visible = b"".join(piece for piece, token_id in zip(spelled, ids, strict=True) if token_id != special)
    expected = visible.decode("utf-8", "replace")
    assert "".join(deltas(BYTE_FALLBACK, ids)) == expected.removeprefix(" ")


@pytest.mark.parametrize("tokenizer", [WORD_PIECE, METASPACE], ids=["word_piece", "metaspace"])
@given(data=st.data(), skip=st.booleans())
def test_other_decoders_sum_to_the_full_decode(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(token_ids(tokenizer))
    assert "".join(deltas(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 6), min_size=1))
def test_tokens_of_metaspace_spell_their_spaces_as_they_stand_within_a_text(ids: list[int]) -> None:
    spelled = bytes_of_tokens(METASPACE)
    assert spelled is not None
    first = the(METASPACE, "the")
    assert b"".join(map(spelled, [first, *ids])).decode() == METASPACE.decode([first, *ids])


@given(data=st.data(), ids=token_ids(BYTE_LEVEL))
def test_how_tokens_are_grouped_does_not_change_the_text(data: st.DataObject, ids: list[int]) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = detokenizers(BYTE_LEVEL)(frozenset([the(BYTE_LEVEL, "<|end|>")]))
    assert detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.finish() == "".join(
        deltas(BYTE_LEVEL, ids)
    )


def test_an_emoji_over_four_tokens_comes_with_its_last_byte() -> None:
    assert deltas(BYTE_FALLBACK, list("😀".encode())) == ["", "", "", "😀", ""]


def test_a_character_that_never_completes_is_released_at_the_end() -> None:
    assert deltas(BYTE_FALLBACK, list("a你".encode())[:-1]) == ["a", "", "", REPLACEMENT]


def test_bytes_that_cannot_begin_a_character_are_not_held_back() -> None:
    assert deltas(BYTE_FALLBACK, [0xFF, 0xFF]) == [REPLACEMENT, REPLACEMENT, ""]


def test_only_the_first_leading_space_is_stripped() -> None:
    space = the(BYTE_FALLBACK, "▁a")
    assert deltas(BYTE_FALLBACK, [space, space]) == ["a", " a", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, METASPACE], ids=["level", "fallback", "metaspace"])
@pytest.mark.parametrize("skip", [False, True])
@given(data=st.data())
def test_a_prompt_and_its_output_are_the_full_decode(tokenizer: Tokenizer, skip: bool, data: st.DataObject) -> None:
    words = st.text(st.sampled_from("a é你好b "), max_size=8)
    prompt, output = (tokenizer.encode(data.draw(words)).ids for _ in range(2))
    special = [key for key, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    prompt = [*data.draw(st.lists(st.sampled_from(special), max_size=2)), *prompt]
    detokenizer = detokenizers(tokenizer)(frozenset(special if skip else ()), prompt)
    text = "".join([*(detokenizer.push([token_id]) for token_id in output), detokenizer.finish()])
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert before + text == tokenizer.decode(prompt + output, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [(["<s>", "▁a"], " a"), (["▁a"], " a"), (["<s>"], "a"), ([], "a"), (["b", "<s>"], " a"), (["<s>", "b"], " a")],
)
def test_an_output_keeps_its_first_space_behind_words(prompt: list[str], text: str) -> None:
    hidden = frozenset({the(BYTE_FALLBACK, "<s>")})
    detokenizer = detokenizers(BYTE_FALLBACK)(hidden, [the(BYTE_FALLBACK, token) for token in prompt])
    assert detokenizer.push([the(BYTE_FALLBACK, "▁a")]) == text


def test_special_tokens_are_left_out_or_kept() -> None:
    end, a = the(BYTE_LEVEL, "<|end|>"), the(BYTE_LEVEL, "a")
    assert deltas(BYTE_LEVEL, [a, end]) == ["a", "", ""]
    assert deltas(BYTE_LEVEL, [a, end], skip=False) == ["a", "<|end|>", ""]


def test_an_id_without_a_token_has_no_text() -> None:
    a = the(BYTE_LEVEL, "a")
    assert deltas(BYTE_LEVEL, [a, BYTE_LEVEL.get_vocab_size() + 7, a]) == ["a", "", "a", ""]


def test_families_of_tokenizers_are_recognised() -> None:
    kinds = [type(detokenizers(each)(frozenset())) for each in (BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE, METASPACE)]
    assert kinds == [BytesDetokenizer, BytesDetokenizer, WindowDetokenizer, WindowDetokenizer]


@pytest.mark.parametrize(
    ("tokenizer", "token", "spelt"),
    [
        (BYTE_LEVEL, "Ġa", b" a"),
        (BYTE_LEVEL, "ðŁ", b"\xf0\x9f"),
        (BYTE_LEVEL, "<|end|>", b"<|end|>"),
        (BYTE_FALLBACK, "<0xE4>", b"\xe4"),
        (BYTE_FALLBACK, "▁a", b" a"),
    ],
)
def test_a_token_of_bytes_shows_them(tokenizer: Tokenizer, token: str, spelt: bytes) -> None:
    bytes_of = bytes_of_tokens(tokenizer)
    assert bytes_of is not None
    assert bytes_of(the(tokenizer, token)) == spelt


def test_tokens_of_word_pieces_have_text_alone() -> None:
    assert bytes_of_tokens(WORD_PIECE) is None


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_ids_without_a_token_have_no_bytes_and_are_not_kept(tokenizer: Tokenizer) -> None:
    lookup = bytes_of_tokens(tokenizer)
    assert lookup is not None
    table = lookup.__self__  # type: ignore[attr-defined]
    first = tokenizer.get_vocab_size(with_added_tokens=True)
    assert {lookup(token_id) for token_id in range(first, first + 10_000)} == {b""}
    assert len(table) == 0
    assert {lookup(token_id) for token_id in range(first)} != {b""}
    assert len(table) <= first
