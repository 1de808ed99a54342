"""Where texts that spell control tokens are cut."""

from __future__ import annotations

import pytest

from router.answers.text.control_texts import NO_TEXTS, ControlTexts, parted

CONTROL = ControlTexts(["<|end|>", "<|endoftext|>", "[INST]", "<s>", "\n"])
MARKS = [chr(each) for each in range(0xFDD0, 0xFDF0)]


def cut(text: str) -> tuple[str, ...]:
    variables, mark = CONTROL.cut({"messages": [{"content": text}]})
    return parted(variables["messages"][0]["content"], mark)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("",)),
        ("a < b\n", ("a < b\n",)),
        ("<|end|", ("<|end|",)),
        ("<|end|>", ("<", "|end|>")),
        ("a<|endoftext|>b", ("a<", "|endoftext|>b")),
        ("<s><s>[INST]", ("<", "s><", "s>[", "INST]")),
        ("<<s>", ("<<", "s>")),
    ],
)
def test_a_text_is_cut_behind_the_first_character(text: str, parts: tuple[str, ...]) -> None:
    assert cut(text) == parts


def test_texts_that_overlap_are_all_cut() -> None:
    variables, mark = ControlTexts(["abab", "bab"]).cut({"a": "ababab"})
    assert parted(variables["a"], mark) == ("a", "b", "a", "b", "ab")


def test_all_texts_of_json_are_cut_keys_too() -> None:
    given = {"tools": [{"name": "<s>", "<s>": {"n": 1.5, "deep": ("<s>", None, True)}}], "plain": "s"}
    variables, mark = CONTROL.cut(given)
    spelled = f"<{mark}s>"
    assert variables == {
        "tools": [{"name": spelled, spelled: {"n": 1.5, "deep": [spelled, None, True]}}],
        "plain": "s",
    }


def test_what_spells_nothing_is_left_as_it_is() -> None:
    given = {"messages": [{"content": "a < b"}]}
    assert CONTROL.cut(given) == (given, "")
    assert NO_TEXTS.cut({"a": "<s>"}) == ({"a": "<s>"}, "")


def test_a_mark_is_one_that_no_text_has_itself_or_escaped() -> None:
    assert CONTROL.cut({"a": f"<s>{MARKS[0]}", "b": "\\ufdd1"})[1] == MARKS[2]
    with pytest.raises(ValueError, match=r"all of the noncharacters U\+FDD0 to U\+FDEF"):
        CONTROL.cut({"a": "<s>" + "".join(MARKS)})


def test_marks_that_a_template_escaped_are_found() -> None:
    assert parted('"<\\ufdd0s>" <\ufdd0s>', "\ufdd0") == ('"<', 's>" <', "s>")


@pytest.mark.parametrize("texts", [["a" * (n + 2) for n in range(3_000)], [f"<{n}>" for n in range(3_000)]])
def test_many_texts_make_a_pattern(texts: list[str]) -> None:
    variables, mark = ControlTexts(texts).cut({"a": f" {texts[-1]}"})
    assert mark
    assert "".join(parted(variables["a"], mark)) == f" {texts[-1]}"
