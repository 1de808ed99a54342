"""Heads of prompts: what is shared to the token, in one domain alone, and a bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.placement.prompt_heads import PromptHeads


def test_tokens_that_an_earlier_prompt_shares_count_one_by_one() -> None:
    heads = PromptHeads()
    assert heads.send(b"aaaabbbbccccdddd", 4, b"red") == 0
    assert heads.send(b"aaaabbbbcccceeee", 4, b"red") == 3
    assert heads.send(b"aaaabbbbccxceeee", 4, b"red") == 2, "half a token is none"
    assert heads.send(b"aaaabbbbcccceeee", 4, b"red") == 4
    assert heads.send(b"zzzz", 4, b"red") == 0


def test_another_domain_shares_nothing() -> None:
    heads = PromptHeads()
    heads.send(b"aaaabbbb", 4, b"red")
    assert heads.send(b"aaaabbbb", 4, b"blue") == 0
    assert heads.send(b"daaaabbb", 4, b"re") == 0, "a domain is not read as tokens"


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    heads = PromptHeads(most=2, head_bytes=8)
    for letter in (b"a", b"b", b"c"):
        heads.send(letter * 12, 4, b"red")
    assert len(heads) == 2
    assert heads.send(b"c" * 12, 4, b"red") == 2, "of a long prompt the head is kept"
    assert heads.send(b"a" * 12, 4, b"red") == 0


@given(st.lists(st.text("ab", max_size=6), max_size=12))
def test_the_longest_of_all_is_found(prompts: list[str]) -> None:
    heads, sent = PromptHeads(most=20), list[bytes]()
    for prompt in (each.encode() for each in prompts):
        common = [
            next((at for at in range(len(each)) if each[: at + 1] != prompt[: at + 1]), len(each)) for each in sent
        ]
        assert heads.send(prompt, 1, b"red") == max(common, default=0)
        sent.append(prompt)
