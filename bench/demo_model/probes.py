"""Questions with a known answer at a known distance, for judging a checkpoint."""

import random
from dataclasses import dataclass
from typing import Final

from bench.demo_model.tokenizer import ASSISTANT, BOS, END, SYSTEM, USER, Encoder
from cli.demo_model import world
from cli.demo_model.world import Fact, World

LEAD_IN: Final = 40
"""The most tokens before the fact that the question asks for."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A chat up to the assistant's turn, and the answer that the text calls for."""

    fact: Fact
    context: list[int]
    answer: list[int]
    value_at: int  # index in `context` of the last token of the fact's value
    facts: int  # facts in the context, the one asked for included

    @property
    def distance(self) -> int:
        """Tokens from the stated value to the answer's first token."""
        return len(self.context) - self.value_at


def draw(rng: random.Random, encode: Encoder, distance: int, density: float) -> Probe:
    """A held-out fact about `distance` tokens before its answer; of the other sentences a share `density` are facts."""
    document = World(rng)
    asked = document.fact("held_out")
    if asked is None:
        raise ValueError("the world has no held-out fact to draw")
    before, facts_before = _sentences(rng, encode, document, rng.randint(0, LEAD_IN), density)
    head = encode(BOS + SYSTEM) + before + encode(asked.sentence)
    question = encode(END + USER + asked.question + END + ASSISTANT)
    after, facts_after = _sentences(rng, encode, document, distance - len(question) - 1, density)
    value_at = len(head) - len(encode(asked.relation.tail)) - 1
    answer = encode(asked.sentence + END)
    return Probe(asked, head + after + question, answer, value_at, facts_before + facts_after + 1)


def _sentences(
    rng: random.Random, encode: Encoder, document: World, tokens: int, density: float
) -> tuple[list[int], int]:
    """Facts and plain sentences of `tokens` tokens or a few more, and how many facts they hold."""
    ids: list[int] = []
    facts = 0
    while len(ids) < tokens:
        fact = document.fact() if rng.random() < density else None
        facts += fact is not None
        ids += encode(fact.sentence if fact else rng.choice(world.PLAIN))
    return ids, facts
