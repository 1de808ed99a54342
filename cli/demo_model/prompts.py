"""Demonstration prompts: one long system text of facts, and questions over it that the demo model answers right.

Only the standard library is needed, so that a client can use them without torch.
"""

import random
from dataclasses import dataclass
from typing import Final

from cli.demo_model.world import World

SEED: Final = 7
FACTS: Final = 100


@dataclass(frozen=True, slots=True)
class Question:
    """A question to ask after `system_text()`, and the sentence that is the right answer."""

    text: str
    answer: str


def system_text() -> str:
    """About 500 tokens of facts: a prefix that every question shares."""
    return "".join(fact.sentence for fact in _FACTS).strip()


def questions(count: int = 8) -> tuple[Question, ...]:
    """`count` questions, spread evenly over the system text from its beginning to its end."""
    asked = [fact for fact in _FACTS if not fact.relation.digits]  # the model sometimes gets numbers wrong
    chosen = [asked[i * (len(asked) - 1) // max(1, count - 1)] for i in range(count)]
    return tuple(Question(fact.question.strip(), fact.sentence.strip()) for fact in chosen)


def messages(question: str) -> list[dict[str, str]]:
    """The chat that asks `question` over the system text, in the roles of the checkpoint's chat template."""
    return [{"role": "system", "content": system_text()}, {"role": "user", "content": question}]


_WORLD: Final = World(random.Random(SEED))
_FACTS: Final = tuple(fact for fact in (_WORLD.fact() for _ in range(FACTS)) if fact)
