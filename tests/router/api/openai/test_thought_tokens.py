"""A thought has as many tokens however its output was cut into events."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.contracts.types import FinishReason, SamplingParams
from router.answers.dialects.reader import kept_tokens, reader
from router.answers.reading import Reading
from router.answers.text.checkpoint_text import CheckpointText
from router.answers.text.tokenizer import Tokenizer
from router.api.openai.answer import Answer, Form, Piece
from tests.support.router.tokenizers import byte_level

INNER = byte_level()
INNER.add_special_tokens(["<think>", "</think>"])
SAMPLING = SamplingParams()
TEXT = CheckpointText(Tokenizer(INNER), None, 64)
THOUGHT = "Ja, a 你好 😀.\n"
WORDS = INNER.encode(f"<think>{THOUGHT}</think>\n\n a 你 b").ids


def thought_tokens(cuts: list[int], words: Sequence[int] = WORDS, is_open: bool = False) -> int | None:
    """Return the tokens of the thought where the events end at these places."""
    kept = kept_tokens("deepseek_r1", None)
    reading = Reading(partial(reader, "deepseek_r1", None, thought_open=is_open), kept, None)
    answer = Answer(Form(True, "m", "f", 0, TEXT, reading=reading), 1)
    output = answer._reader(0)
    assembler = TEXT.assembler(SAMPLING, kept)
    for start, end in pairwise([0, *sorted(set(cuts)), len(words)]):
        ids = words[start:end]
        output.read(Piece(0, assembler.push(ids).text, token_ids=ids))
    output.end(Piece(0, finish_reason=FinishReason.STOP))
    return answer.bill.reasoning_tokens


@given(cuts=st.lists(st.integers(0, len(WORDS)), max_size=6))
def test_cuts_do_not_change_the_number_of_tokens(cuts: list[int]) -> None:
    assert thought_tokens(cuts) == thought_tokens(list(range(len(WORDS))))


def test_equal_thoughts_have_equally_many_tokens_however_they_begin_and_end() -> None:
    expected = len(INNER.encode(THOUGHT).ids)
    for begin in ("<think>", ""):  # without a mark the prompt has opened the thought
        for end in ("</think>", "</think>a", "<|end|>", ""):
            words = INNER.encode(begin + THOUGHT + end).ids
            for cuts in ([], list(range(len(words)))):
                assert thought_tokens(cuts, words, is_open=not begin) == expected, (begin, end)
