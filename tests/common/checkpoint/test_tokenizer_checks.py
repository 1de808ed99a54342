"""Tokenizers that would take a process its memory, or whose parts have another form: each is named beforehand."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.checkpoint.ends import named_ends
from common.checkpoint.tokenizer_checks import read_tokens, refuse_hostile
from common.checkpoint.tokenizer_file import tokenizer_json
from common.contracts.errors import InvalidConfig
from router.answers.text.tokenizer import Tokenizer
from tests.support.checkpoints import tokenizer

Json = dict[str, Any]
GOOD: Final[Json] = json.loads(tokenizer().backend_tokenizer.to_str())
PLAIN: Final = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TEXT_A: Final = {"Sequence": {"id": "A", "type_id": 0}}


def replaced(pattern: Json, content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


def normalised(step: Json) -> Callable[[Json], None]:
    return lambda whole: whole.update(normalizer=step)


def added(number: object, content: object = "<big>") -> Callable[[Json], None]:
    return lambda whole: whole["added_tokens"].append({"id": number, "content": content, **PLAIN})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            added(10**9),
            "it has 269 tokens, and one of them has the id 1000000000; expected ids below 1049652",
        ),
        (added(-1), "added_tokens[6].id is -1; expected a whole number from 0 on"),
        (added(True), "added_tokens[6].id is True; expected a whole number from 0 on"),
        (added(7, None), "added_tokens[6] is an object; expected an object with content and id"),
        (
            lambda whole: whole["model"]["vocab"].update({"zz": 2**32 - 1}),
            "it has 269 tokens, and one of them has the id 4294967295; expected ids below 1049652",
        ),
        (
            lambda whole: whole["model"]["vocab"].update({"zz": "7"}),
            "model.vocab has the id '7' for 'zz'; expected a whole number from 0 on",
        ),
        (
            lambda whole: whole["model"]["vocab"].update({"z" * 20_000: 263}),
            "token 263 has 20000 characters; expected at most 16384",
        ),
        (lambda whole: whole.update(model=[1]), "model is [1]; expected an object"),
        (lambda whole: whole.update(added_tokens={"a": 1}), "added_tokens is an object; expected a list of tokens"),
        (lambda whole: whole["model"].update(vocab="abc"), "model.vocab is 'abc'; expected an object of ids by token"),
        (
            lambda whole: whole["model"].update(vocab=[["a"]]),
            "model.vocab[0] is ['a']; expected a pair of text and score",
        ),
        (lambda whole: whole.update(decoder=5), "decoder is 5; expected an object or null"),
        (
            normalised(replaced({"String": ""}, "x")),
            "normalizer replaces an empty text; expected a pattern of one character or more",
        ),
        (
            normalised(replaced({"Regex": "a*"}, "x" * 256)),
            "normalizer may make a text 257 times as long; expected at most 256 times",
        ),
        (
            normalised(replaced({"String": "a"}, "x" * 10_000_000)),
            "normalizer.content has 10000000 characters; expected at most 65536",
        ),
        (
            normalised({"type": "Sequence", "normalizers": [replaced({"String": "a"}, "aa")] * 40}),
            "normalizer may make a text 1099511627776 times as long; expected at most 256 times",
        ),
        (
            normalised({"type": "Sequence", "normalizers": [{"type": "NFC"}] * 257}),
            "normalizer.normalizers has 257 steps; expected at most 256",
        ),
        (
            normalised({"type": "Prepend", "prepend": "x" * 256}),
            "normalizer may make a text 257 times as long; expected at most 256 times",
        ),
        (
            lambda whole: whole.update(
                decoder={"type": "Sequence", "decoders": [replaced({"Regex": r"\p{L}"}, "aaa")] * 8}
            ),
            "decoder may make a text 65536 times as long; expected at most 256 times",
        ),
        (
            lambda whole: whole.update(
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [TEXT_A] * 100_000,
                    "pair": [TEXT_A],
                    "special_tokens": {},
                }
            ),
            "post_processor.single has 100000 parts; expected at most 256",
        ),
    ],
)
def test_a_hostile_tokenizer_is_named(change: Callable[[Json], None], why: str, tmp_path: Path) -> None:
    whole = copy.deepcopy(GOOD)
    change(whole)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole))
    for read in (tokenizer_json, Tokenizer.load):
        with pytest.raises(InvalidConfig) as caught:
            read(tmp_path)
        assert [each.description for each in caught.value.violations] == [
            f"{path}: {why}; correct it, or download the file again"
        ]


@pytest.mark.parametrize(
    "step",
    [
        None,
        {"type": "NFC"},
        {"type": "Sequence", "normalizers": [replaced({"Regex": r"\s+"}, " ")] * 50},
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaced({"String": " "}, "▁")]},
        # Each character has a spelling of its own, and no spelling is spelled again.
        {"type": "Sequence", "normalizers": [replaced({"String": mark}, "abc") for mark in "½⅓⅔¼¾⅛⅜⅝⅞…℃№™"]},
    ],
)
def test_steps_as_models_have_them_are_right(step: Json | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(GOOD | {"normalizer": step}))
    refuse_hostile(path)
    assert dict(read_tokens(path)) == tokenizer().get_vocab()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"model":' * 100_000 + "1" + "}" * 100_000, "it is nested too deeply"),
        (json.dumps(GOOD)[:-100], "is not valid JSON"),
        ("[1]", "holds a list; expected a JSON object"),
    ],
    ids=["nested", "cut", "list"],
)
def test_a_file_that_is_no_object_is_named(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InvalidConfig, match=why):
        tokenizer_json(tmp_path)


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(GOOD))
    refuse_hostile(path)
    path.write_text("[1]")
    with pytest.raises(InvalidConfig, match="holds a list"):
        refuse_hostile(path)


def test_code_of_the_library_that_panics_is_an_error_in_words(tmp_path: Path) -> None:
    nothing: Json = {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": False}
    table = {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(GOOD | {"model": nothing, "normalizer": table}))
    with pytest.raises(InvalidConfig, match=r"tokenizer\.json cannot be read: "):
        Tokenizer.load(tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**10) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "content", "type", "pattern", "String", "normalizers"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the ways to the values of a tree; of a long list or object to the first ones alone."""
    inner = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())[:12]
    return [path, *(each for key, part in inner for each in places(part, (*path, key)))]


@given(place=st.sampled_from(places(GOOD)[1:]), value=VALUES)
def test_any_tokenizer_is_read_or_refused(
    place: tuple[Any, ...], value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = copy.deepcopy(GOOD)
    functools.reduce(lambda part, key: part[key], place[:-1], whole)[place[-1]] = value
    folder = tmp_path_factory.getbasetemp()
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    for read in (Tokenizer.load, named_ends):
        with contextlib.suppress(InvalidConfig):
            read(folder)
