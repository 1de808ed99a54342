"""Prompts of several cache domains: what another domain sent is told, and the memory is bounded."""

from __future__ import annotations

from router.placement.domains_seen import NOWHERE, DomainsSeen, SeenElsewhere, SentBy

RED, BLUE, GREEN = (SentBy(name.encode(), name) for name in ("red", "blue", "green"))
BLOCK = 64


def prompt(blocks: int, tail: int = 0) -> bytes:
    return b"".join(bytes([number]) * BLOCK for number in range(blocks)) + b"x" * tail


def test_a_prompt_that_another_domain_sent_is_found_at_powers_of_two() -> None:
    seen = DomainsSeen(b"k" * 16)
    assert seen.send(prompt(6), BLOCK, RED) == NOWHERE
    assert seen.send(prompt(5, tail=9), BLOCK, BLUE) == SeenElsewhere(4, RED)
    assert seen.send(prompt(1, tail=BLOCK), BLOCK, GREEN) == SeenElsewhere(1, BLUE)


def test_a_domain_that_sent_the_prompt_itself_is_told_of_no_other() -> None:
    seen = DomainsSeen(b"k" * 16)
    seen.send(prompt(2), BLOCK, RED)
    seen.send(prompt(2), BLOCK, BLUE)
    assert seen.send(prompt(2), BLOCK, RED) == NOWHERE
    assert seen.send(prompt(2), BLOCK, BLUE) == NOWHERE


def test_a_prompt_below_a_block_is_not_remembered() -> None:
    seen = DomainsSeen(b"k" * 16)
    assert seen.send(prompt(0, tail=BLOCK - 1), BLOCK, RED) == NOWHERE
    assert len(seen) == 0


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    seen = DomainsSeen(b"k" * 16, max_prefixes=3)
    seen.send(b"a" * BLOCK, BLOCK, RED)
    for letter in (b"b", b"c", b"d"):
        seen.send(letter * BLOCK, BLOCK, RED)
    assert len(seen) == 3
    assert seen.send(b"a" * BLOCK, BLOCK, BLUE) == NOWHERE
    assert seen.send(b"d" * BLOCK, BLOCK, BLUE) == SeenElsewhere(1, RED)
