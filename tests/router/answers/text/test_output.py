"""Stop strings in a sequence's output: across tokens, several at once, before min_tokens, and what is held back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.types import SamplingParams
from router.answers.dialects.reader import reader
from router.answers.stop_matcher import StopMatcher
from router.answers.text.assembler import AnswerText, NoText, OutputText
from router.answers.text.detokenizer import detokenizers
from router.contracts.ports import TextDelta
from tests.support.router.tokenizers import byte_level

TOKENIZER = byte_level()
NEW_DETOKENIZER = detokenizers(TOKENIZER)


class Pieces:
    """A detokenizer whose token i stands for the i-th text given."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)

    def finish(self) -> str:
        return ""


def output(pieces: Sequence[str], *stop: str, min_tokens: int = 0, include_stop: bool = False) -> OutputText:
    return OutputText(Pieces(*pieces), SamplingParams(stop=stop, min_tokens=min_tokens, include_stop=include_stop))


def one_by_one(pieces: Sequence[str], *stop: str, min_tokens: int = 0, include_stop: bool = False) -> list[TextDelta]:
    """The delta of each token up to the stop."""
    assembler = output(pieces, *stop, min_tokens=min_tokens, include_stop=include_stop)
    deltas = []
    for token_id in range(len(pieces)):
        deltas.append(assembler.push([token_id]))
        if deltas[-1].stop_string is not None:
            break
    return deltas


def test_without_stops_all_text_passes_at_once() -> None:
    assert output(["a", "b", "c"]).push([0, 1, 2]) == TextDelta("abc", 3)


def test_a_stop_over_three_tokens_is_cut_where_it_begins() -> None:
    assert one_by_one(["one E", "N", "D two"], "END") == [
        TextDelta("one ", 1),
        TextDelta("", 1),
        TextDelta("", 1, "END"),
    ]


def test_include_stop_keeps_the_stop_and_drops_what_follows() -> None:
    assert one_by_one(["one E", "ND two"], "END", include_stop=True)[-1] == TextDelta("END", 1, "END")


def test_text_that_did_not_become_a_stop_is_released() -> None:
    assert one_by_one(["E", "N", "TER"], "END") == [TextDelta("", 1), TextDelta("", 1), TextDelta("ENTER", 1)]


def test_only_the_longest_possible_beginning_is_held_back() -> None:
    assert one_by_one(["aab aa"], "aac") == [TextDelta("aab ", 1)]


def test_a_stop_that_overlaps_its_own_false_start_is_found() -> None:
    assert one_by_one(["aa", "ab"], "aab")[-1] == TextDelta("a", 1, "aab")


def test_the_stop_that_is_complete_first_wins() -> None:
    assert one_by_one(["abcd"], "abcd", "c") == [TextDelta("ab", 1, "c")]


def test_of_stops_that_end_together_the_longer_wins() -> None:
    assert one_by_one(["xab"], "b", "ab") == [TextDelta("x", 1, "ab")]


def test_a_push_of_several_tokens_counts_those_up_to_the_stop() -> None:
    assert output(["a", "EN", "D", "more", "more"], "END").push([0, 1, 2, 3, 4]) == TextDelta("a", 3, "END")


def test_a_stop_before_min_tokens_is_ordinary_text() -> None:
    deltas = one_by_one(["a.", "b.", "c."], ".", min_tokens=2)
    assert deltas == [TextDelta("a", 1), TextDelta(".b", 1, ".")]


def test_a_stop_that_begins_before_min_tokens_and_ends_after_counts() -> None:
    assert one_by_one(["a E", "ND"], "END", min_tokens=2)[-1] == TextDelta("", 1, "END")


def test_finish_releases_the_beginning_of_a_stop() -> None:
    assembler = output(["one E", "N"], "END")
    assembler.push([0, 1])
    assert assembler.finish() == "EN"


def test_finish_releases_an_unfinished_character_after_the_held_text() -> None:
    assembler = OutputText(NEW_DETOKENIZER(frozenset()), SamplingParams(stop=("END",)))
    first_byte = TOKENIZER.encode("E\u00e9").ids
    assert assembler.push([first_byte[0], TOKENIZER.encode("你").ids[0]]) == TextDelta("", 2)
    assert assembler.finish() == "E\N{REPLACEMENT CHARACTER}"


def test_without_a_tokenizer_tokens_have_no_text() -> None:
    assert NoText().push([5, 6]) == TextDelta("", 2)
    assert NoText().finish() == ""


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What the text is once cut at the stop that is complete first: a plain search at every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text("ab.", max_size=4), max_size=8),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_result_does_not_depend_on_how_text_is_divided(pieces: list[str], stops: list[str]) -> None:
    deltas = one_by_one(pieces, *stops)
    text = "".join(delta.text for delta in deltas)
    stopped = deltas[-1].stop_string if deltas else None
    if stopped is None:
        assembler = output(pieces, *stops)
        text = assembler.push(range(len(pieces))).text + assembler.finish()
    assert (text, stopped) == expected("".join(pieces), stops)


@given(pieces=st.lists(st.text("ab.", max_size=4), max_size=8), stop=st.text("ab.", min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_become_a_stop(pieces: list[str], stop: str) -> None:
    seen = sent = ""
    for piece, delta in zip(pieces, one_by_one(pieces, stop), strict=False):
        seen, sent = seen + piece, sent + delta.text
        held = seen.removeprefix(sent)
        assert delta.stop_string is not None or (held == "" or stop.startswith(held))


def test_the_sequences_of_a_request_share_the_tables_of_their_stop_strings() -> None:
    stop = "a stop string that no other test has"
    assert StopMatcher(stop)._failure is StopMatcher(stop)._failure


@pytest.mark.parametrize(("min_tokens", "taken", "stop"), [(0, 4, "b"), (5, 6, "b"), (9, 6, None)])
def test_a_stop_in_a_thought_ends_no_answer(min_tokens: int, taken: int, stop: str | None) -> None:
    """The text reaches up to the stop, which the reader of the answer leaves out."""
    words = ["<think>", "b", "</think>", "ab", "a", "b"]
    sampling = SamplingParams(stop=("b",), min_tokens=min_tokens)
    delta = AnswerText(Pieces(*words), sampling, reader("deepseek_r1", None)).push(range(6))
    assert (delta.text, delta.taken, delta.stop_string) == ("".join(words[:taken]), taken, stop)
