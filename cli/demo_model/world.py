"""The demo world: facts as sentences with their questions, small talk, plain sentences and short stories.

Everything is drawn from a `random.Random` that the caller seeds, so a seed fixes the text. One fact in ten (by a
checksum of its words) is held out: it never appears in training text. The evaluation asks for these facts.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cli.demo_model import words

Split = Literal["train", "held_out"]
HELD_OUT_ONE_IN: Final = 10


@dataclass(frozen=True, slots=True)
class Relation:
    """The sentence and the question of one kind of fact; `{s}` stands for the subject.

    The sentence of a fact is `lead`, the value, then `tail`; it is also the answer to `question`. The value is one of
    `values`, or with `digits` > 0 a number of that many digits.
    """

    key: str
    lead: str
    values: tuple[str, ...]
    tail: str
    question: str
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Fact:
    """One subject, one relation, one value. The texts begin with a space, as every word of the tokenizer does."""

    subject: str
    relation: Relation
    value: str

    @property
    def lead(self) -> str:
        return " " + self.relation.lead.format(s=self.subject)

    @property
    def sentence(self) -> str:
        """The fact's sentence, which is also the answer to its question."""
        return f"{self.lead} {self.value}{self.relation.tail}"

    @property
    def question(self) -> str:
        return " " + self.relation.question.format(s=self.subject)

    @property
    def split(self) -> Split:
        checksum = zlib.crc32(f"{self.subject}|{self.relation.key}|{self.value}".encode())
        return "held_out" if checksum % HELD_OUT_ONE_IN == 0 else "train"


PEOPLE: Final = (
    Relation("visits", "{s} visits", words.TOWNS, ".", "Which town does {s} visit?"),
    Relation("keeps", "{s} keeps", words.ANIMALS, ".", "Which animals does {s} keep?"),
    Relation("eats", "{s} eats", words.FOODS, ".", "What does {s} eat?"),
    Relation("grows", "{s} grows", words.PLANTS, ".", "What does {s} grow?"),
    Relation("wears", "{s} wears", words.COLOURS, ".", "Which colour does {s} wear?"),
    Relation("plays", "{s} plays", words.GAMES, ".", "Which game does {s} play?"),
    Relation("drinks", "{s} drinks", words.DRINKS, ".", "What does {s} drink?"),
    Relation("speaks", "{s} speaks", words.LANGUAGES, ".", "Which language does {s} speak?"),
    Relation("lives", "{s} lives in", words.TOWNS, ".", "Where does {s} live?"),
    Relation("works", "{s} works with", words.JOBS, ".", "Who works with {s}?"),
    Relation("age", "{s} is", (), " years old.", "How old is {s}?", digits=2),
)
THINGS: Final = (
    Relation("origin", "The {s} came from", words.TOWNS, ".", "Where did the {s} come from?"),
    Relation("owner", "The {s} belongs to", words.NAMES, ".", "Who owns the {s}?"),
    Relation("price", "The {s} costs", (), " coins.", "How much is the {s}?", digits=2),
)
STORES: Final = (Relation("holds", "The {s} holds", words.FOODS + words.PLANTS, ".", "What does the {s} hold?"),)
RELATIONS: Final = PEOPLE + THINGS + STORES
KINDS: Final = (PEOPLE, THINGS, STORES)
SHARES: Final = (0.72, 0.2, 0.08)


class World:
    """Draws facts for one document: a subject has at most one value for a relation."""

    def __init__(self, rng: random.Random, people: Sequence[str] = words.NAMES, relations: int = 0) -> None:
        """`people` are the names in use; `relations` > 0 keeps to that many kinds, so that only names tell apart."""
        self._rng = rng
        self._people = people
        self._relations = tuple(rng.sample(RELATIONS, relations)) if relations else ()
        self._taken: set[tuple[str, str]] = set()

    def fact(self, split: Split = "train") -> Fact | None:
        """A new fact of `split`, or None when 100 draws found only taken ones."""
        for _ in range(100):
            relation = self._relation()
            subject = self._subject(relation)
            if (subject, relation.key) in self._taken:
                continue
            fact = Fact(subject, relation, draw_value(self._rng, relation))
            if fact.split == split:
                self._taken.add((subject, relation.key))
                return fact
        return None

    def _relation(self) -> Relation:
        if self._relations:
            return self._rng.choice(self._relations)
        return self._rng.choice(self._rng.choices(KINDS, SHARES)[0])

    def _subject(self, relation: Relation) -> str:
        if relation in PEOPLE:
            return self._rng.choice(self._people)
        if relation in THINGS:
            return self._rng.choice(words.OBJECTS)
        return f"{self._rng.choice(words.COLOURS)} {self._rng.choice(words.STORES)}"


def draw_value(rng: random.Random, relation: Relation) -> str:
    """A value for `relation`; numbers have no leading zero."""
    if relation.digits:
        return str(rng.randrange(10 ** (relation.digits - 1), 10**relation.digits))
    return rng.choice(relation.values)


PLAIN: Final = tuple(
    f" {s}."
    for s in """
The sun is shining today|It rained all night|The wind is cold|Many people walk in the park|The shop is closed now
A train goes by|The street is quiet|Children play near the river|The bell rings at noon|Nobody knows why
The stars are bright|It was a long winter|The road goes up the hill|Birds sing in the trees
The market is full of people|We had a good time|That was a nice evening|The tea is still hot|Snow falls on the roofs
The old bridge is safe|Everyone was happy|The film was too long|There is music in the square|The lake is calm
""".strip()
    .replace("\n", "|")
    .split("|")
)

TALK: Final = (
    (" Hello!", " Hello! How can I help you?"),
    (" Good morning!", " Good morning! What would you like to know?"),
    (" How are you?", " I am fine, thank you."),
    (" Thank you!", " You are welcome."),
    (" Who are you?", " I am a small model. I answer questions about the text."),
    (" What can you do?", " I can remember facts and tell short stories."),
    (" Goodbye!", " Goodbye! Have a nice day."),
)

ACKNOWLEDGED: Final = " Thank you, I will remember that."
PREAMBLES: Final = (" You are a helpful assistant.", " Answer in one sentence.", " Use only the text.")
STORY_REQUEST: Final = " Tell me a story about {a}."
OPENINGS: Final = (
    " One morning {a} walked to the {room}.",
    " Long ago {a} lived near {town}.",
    " Last summer {a} and {b} went to {town}.",
    " One day {a} found a {thing} in the {room}.",
    " It was late when {a} came to {town}.",
)
MIDDLES: Final = (
    " There {a} met {b}.",
    " {b} had an old {thing}.",
    " They looked for the {thing} all day.",
    " {a} asked {b} for help.",
    " They ate {food} and drank {drink}.",
    " The weather was bad, so they stayed in the {room}.",
    " {b} told {a} about the {thing}.",
    " In the evening they played {game}.",
    " Then {a} heard a noise in the {room}.",
    " {a} saw some {animals} near the {room}.",
    " It was only some {jobs} from {town}.",
    " {b} laughed and gave {a} some {food}.",
)
ENDINGS: Final = (
    " In the end they found the {thing}.",
    " At night {a} went home.",
    " {a} and {b} are still friends.",
    " {a} never came back to {town}.",
    " After that everyone was happy.",
)
STORY_WORDS: Final = {
    "room": words.ROOMS, "town": words.TOWNS, "thing": words.OBJECTS, "food": words.FOODS, "drink": words.DRINKS,
    "game": words.GAMES, "animals": words.ANIMALS, "jobs": words.JOBS,
}  # fmt: skip


def story(rng: random.Random, hero: str) -> str:
    """Four to seven sentences about `hero` and one friend, who keep their names, town and thing throughout."""
    friend = rng.choice([name for name in words.NAMES if name != hero])
    chosen = {slot: rng.choice(choices) for slot, choices in STORY_WORDS.items()}
    middles = rng.sample(MIDDLES, rng.randint(2, 5))
    return "".join((rng.choice(OPENINGS), *middles, rng.choice(ENDINGS))).format(a=hero, b=friend, **chosen)
