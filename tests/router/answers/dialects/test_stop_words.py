"""Stop texts are looked for in the words of an answer; how the output is cut changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers.dialects.reader import reader, words_parser
from router.answers.dialects.stop_words import StopWords
from router.contracts.answer_parts import Part, Thought, Words
from tests.router.answers.dialects.reading import TOOLS, pieces, read, text_of

THINKS = "<think>The town is Oslo.</think>It is Oslo, I think."
CALLS = 'I ask.<tool_call>\n{"name": "f", "arguments": {"s": "Oslo"}}\n</tool_call>'


def stopped_at(output: str, *stops: str, includes: bool = False) -> tuple[str, str, str | None]:
    """Return the thought and the words of an output that ends at the first stop text."""
    router = StopWords(reader("deepseek_r1", "hermes", TOOLS), stops)
    words = StopWords(reader("deepseek_r1", "hermes", TOOLS), stops)
    parts = list[Part]()
    for character in output:
        router.feed(character)
        parts += words.feed(character)
        if router.complete is not None:
            parts += words.stopped(router.complete, includes)
            return text_of(parts, Thought), text_of(parts, Words), router.complete
    parts += words.finish()
    return text_of(parts, Thought), text_of(parts, Words), None


@pytest.mark.parametrize(
    ("output", "stops", "words", "stop"),
    [
        (THINKS, ("Oslo",), "It is ", "Oslo"),
        (THINKS, ("town",), "It is Oslo, I think.", None),
        (THINKS, ("Oslo.",), "It is Oslo, I think.", None),
        (THINKS, (", I", "lo, I"), "It is Os", "lo, I"),
        (CALLS, ("Oslo",), "I ask.", None),
        (CALLS, ("ask.<",), "I ask.", None),
        (CALLS, ("sk",), "I a", "sk"),
        ("a <b", (" <",), "a", " <"),
        ("aab", ("ab",), "a", "ab"),
    ],
)
def test_a_stop_text_counts_in_words_alone(output: str, stops: tuple[str, ...], words: str, stop: str | None) -> None:
    assert stopped_at(output, *stops)[1:] == (words, stop)


def test_the_thought_before_a_stop_text_is_whole() -> None:
    assert stopped_at(THINKS, "Oslo")[0] == "The town is Oslo."


def test_an_output_may_include_its_stop_text() -> None:
    assert stopped_at(THINKS, "Oslo", includes=True)[1] == "It is Oslo"


def test_a_stop_text_that_comes_too_early_is_a_word_like_others() -> None:
    parser = StopWords(words_parser(), ("ab",))
    assert text_of(parser.feed("xab"), Words) == "x"
    assert parser.complete == "ab"
    assert text_of([*parser.feed("y"), *parser.feed("zab")], Words) == "abyz"
    assert parser.stopped("ab", False) == []


@given(
    output=st.lists(st.sampled_from([*"ab<>", "<think>", "</think>", CALLS, THINKS]), max_size=9).map("".join),
    stops=st.lists(st.text(st.sampled_from("ab<>IOslo "), min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 7),
)
def test_nothing_is_lost_where_no_stop_text_ends_the_output(output: str, stops: list[str], size: int) -> None:
    plain = read(reader("deepseek_r1", "hermes", TOOLS), [output])
    assert read(StopWords(reader("deepseek_r1", "hermes", TOOLS), stops), pieces(output, size)) == plain
