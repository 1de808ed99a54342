"""Makes the demo model's tokenizer: byte-level BPE in which every word of the world is one token, digits apart.

python -m bench.demo_model.tokenizer OUT_DIR
"""

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cli.demo_model import words, world

PAD: Final = "<|pad|>"
BOS: Final = "<|bos|>"
SYSTEM: Final = "<|system|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
END: Final = "<|end|>"
SPECIALS: Final = (PAD, BOS, SYSTEM, USER, ASSISTANT, END)
VOCABULARY: Final = 2048
MAX_LENGTH: Final = 4096
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|> ' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORD_LISTS: Final = (
    words.NAMES, words.TOWNS, words.JOBS,  words.ANIMALS, words.FOODS, words.PLANTS, words.COLOURS, words.GAMES,
    words.DRINKS, words.LANGUAGES, words.OBJECTS, words.ROOMS, words.STORES,
)  # fmt: skip
_PIECE: Final = re.compile(r"<\|[a-z]+\|>| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d<]+|\s")


def text(seed: int, documents: int) -> Iterator[str]:
    """Text to count pairs on: facts, questions, stories and small talk, then each word often enough to win a merge."""
    rng = random.Random(seed)
    for _ in range(documents):
        document = world.World(rng)
        facts = [fact for fact in (document.fact() for _ in range(20)) if fact]
        talk = rng.choice(world.TALK)
        stories = [world.STORY_REQUEST + world.story(rng, rng.choice(words.NAMES)) for _ in range(2)]
        fixed = [*talk, rng.choice(world.PLAIN), rng.choice(world.PREAMBLES), world.ACKNOWLEDGED]
        yield "".join([f.sentence + f.question for f in facts] + stories + fixed)
    for group in WORD_LISTS:
        yield "".join(f" {word}" for word in group) * 60


def train(seed: int = 1, documents: int = 4000) -> Tokenizer:
    """The tokenizer, learnt from generated text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text(seed, documents), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer and chat template as transformers reads them."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=MAX_LENGTH,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)


class Encoder:
    """The tokenizer behind a cache of its pieces; exact for the world's text, and far faster in a training loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _PIECE.findall(text):
            known = self._pieces.get(piece)
            if known is None:
                known = self._pieces[piece] = self.tokenizer.encode(piece, add_special_tokens=False).ids
            ids += known
        return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    save(train(), parser.parse_args().out)


if __name__ == "__main__":
    main()
