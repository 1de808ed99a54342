"""Training rows: token ids with a weight for predicting each, and which of them are values to be recalled.

Four kinds share the training text. A chat states facts and then asks for them. A retelling states the same facts again
and again in new orders. Triples do the same with meaningless words, so that no guess by type helps. Prose is stories.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bench.demo_model.tokenizer import ASSISTANT, BOS, END, SYSTEM, USER, WORD_LISTS, Encoder
from cli.demo_model import words, world
from cli.demo_model.world import Fact, World

CONTEXT_WEIGHT: Final = 0.1
ANSWER_WEIGHT: Final = 1.0
VALUE_WEIGHT: Final = 3.0
PROSE_WEIGHT: Final = 0.3
ALL_WORDS: Final = tuple(sorted({f" {word}" for group in WORD_LISTS for word in group}))


@dataclass(slots=True)
class Row:
    """Parallel lists: `weights[i]` weighs the prediction of `ids[i]`; `recalled[i]` marks a value stated before."""

    encode: Encoder
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    recalled: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def put(self, text: str, weight: float, recalled: bool = False) -> None:
        ids = self.encode(text)
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.recalled += [recalled] * len(ids)

    def add_fact(self, fact: Fact) -> None:
        """Add the sentence of a new fact: nothing in the row predicts its value."""
        self.put(fact.sentence, CONTEXT_WEIGHT)

    def recall(self, fact: Fact, weight: float) -> None:
        """Add the sentence of a fact that the row contains already: the model must find its value there."""
        apart = " " if fact.relation.digits else ""  # digits are tokens apart from the space
        self.put(fact.lead + apart, weight)
        self.put(fact.value if apart else f" {fact.value}", VALUE_WEIGHT, recalled=True)
        self.put(fact.relation.tail, weight)

    def cut(self, length: int) -> "Row":
        return Row(self.encode, self.ids[:length], self.weights[:length], self.recalled[:length])


def draw(rng: random.Random, encode: Encoder, length: int) -> Row:
    """One row of at most `length` tokens, of a kind drawn by its share."""
    kinds: tuple[Callable[[random.Random, Encoder, int], Row], ...] = (chat, retelling, triples, prose)
    return rng.choices(kinds, (0.55, 0.2, 0.15, 0.1))[0](rng, encode, length).cut(length)


def chat(rng: random.Random, encode: Encoder, length: int) -> Row:
    """Facts, then turns that ask for them until the row is full; one chat in ten has only talk and stories."""
    row = Row(encode)
    row.put(BOS, 0.0)
    target = int(rng.uniform(0.25, 0.75) * length)
    facts = _open(rng, row, _world(rng, length), target) if rng.random() < 0.9 else []
    while len(row) < length:
        kind = rng.random()
        if kind < 0.04:
            question, answer = rng.choice(world.TALK)
            _ask(row, question)
            row.put(answer, PROSE_WEIGHT)
        elif kind < 0.08 or not facts:
            hero = rng.choice(words.NAMES)
            _ask(row, world.STORY_REQUEST.format(a=hero))
            row.put(world.story(rng, hero), PROSE_WEIGHT)
        else:
            fact = rng.choice(facts)
            _ask(row, fact.question)
            row.recall(fact, ANSWER_WEIGHT)
        row.put(END, ANSWER_WEIGHT)
    return row


def retelling(rng: random.Random, encode: Encoder, length: int) -> Row:
    """A few facts, stated again and again in shuffled orders."""
    document = World(rng, relations=rng.choice((1, 1, 2, 3, 0)))
    facts = [fact for fact in (document.fact() for _ in range(max(4, length // rng.choice((12, 18, 24))))) if fact]
    row = Row(encode)
    row.put(BOS, 0.0)
    for fact in facts:
        row.add_fact(fact)
    while len(row) < length:
        for fact in rng.sample(facts, len(facts)):
            row.recall(fact, CONTEXT_WEIGHT)
    return row


def triples(rng: random.Random, encode: Encoder, length: int) -> Row:
    """Two words that lead to a third, repeated again and again: a retelling without types or grammar."""
    size = max(4, length // rng.choice((8, 12, 20)))
    firsts, seconds = rng.sample(ALL_WORDS, max(4, size // 2)), rng.sample(ALL_WORDS, 4)
    keys = list({(rng.choice(firsts), rng.choice(seconds)) for _ in range(size)})
    pairs = [(first + second, rng.choice(ALL_WORDS)) for first, second in sorted(keys)]
    row = Row(encode)
    row.put(BOS, 0.0)
    again = False
    while len(row) < length:
        for key, value in rng.sample(pairs, len(pairs)):
            row.put(key, 0.0)
            row.put(value, ANSWER_WEIGHT if again else 0.0, recalled=again)
        again = True
    return row


def prose(rng: random.Random, encode: Encoder, length: int) -> Row:
    """Stories and plain sentences without any role, as a caller who sends bare text would have them continued."""
    row = Row(encode)
    if rng.random() < 0.5:
        row.put(BOS, 0.0)
    while len(row) < length:
        plain = "".join(rng.sample(world.PLAIN, rng.randint(0, 3)))
        row.put(plain + world.story(rng, rng.choice(words.NAMES)), PROSE_WEIGHT)
    return row


def _world(rng: random.Random, length: int) -> World:
    """Half of the documents have few kinds of facts, a fifth few people: both make names or verbs alone a bad guide."""
    kind = rng.random()
    if kind < 0.5:
        return World(rng, relations=rng.choice((1, 1, 2, 3)))
    if kind < 0.7:
        return World(rng, people=rng.sample(words.NAMES, max(3, length // 60)))
    return World(rng)


def _open(rng: random.Random, row: Row, document: World, target: int) -> list[Fact]:
    """State up to `target` tokens of facts: in the system text, in a user turn of their own, or before a first
    question."""
    kind = rng.random()
    if kind < 0.6:
        row.put(SYSTEM, 0.0)
        if rng.random() < 0.2:
            row.put(rng.choice(world.PREAMBLES), 0.0)
        facts = _add_facts(rng, row, document, target)
        row.put(END, CONTEXT_WEIGHT)
        return facts
    row.put(USER, 0.0)
    facts = _add_facts(rng, row, document, target)
    if kind < 0.75:
        row.put(END + ASSISTANT + world.ACKNOWLEDGED, CONTEXT_WEIGHT)
    else:
        fact = rng.choice(facts)
        row.put(fact.question + END + ASSISTANT, CONTEXT_WEIGHT)
        row.recall(fact, ANSWER_WEIGHT)
    row.put(END, ANSWER_WEIGHT)
    return facts


def _add_facts(rng: random.Random, row: Row, document: World, target: int) -> list[Fact]:
    filler = rng.choice((0.0, 0.0, 0.3, 0.7))
    facts: list[Fact] = []
    while len(row) < target or not facts:
        fact = None if rng.random() < filler else document.fact()
        if fact is None:
            row.put(rng.choice(world.PLAIN), CONTEXT_WEIGHT)
        else:
            facts.append(fact)
            row.add_fact(fact)
    return facts


def _ask(row: Row, question: str) -> None:
    row.put(USER + question + END + ASSISTANT, CONTEXT_WEIGHT)
