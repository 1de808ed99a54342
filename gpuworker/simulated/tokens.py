"""The tokens of a simulated worker: which token stands at a position. Standard library only.

    token(seed, position) = ids[(mix(seed) + position) mod len(ids)]

`ids` are tokens of the vocabulary in plain ASCII letters or digits, none of them special or an end of sequence. The
checkpoint and the seed of a sequence determine each of its tokens. A lost, repeated or misplaced token makes the next
one differ, and so does a token of another sequence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from common.checkpoint.files import read_object
from common.checkpoint.tokenizer_checks import refuse_hostile
from gpuworker.scheduling.splitmix64 import GOLDEN, splitmix64

# With the mark that byte-level BPE or Unigram has for a space.
_PLAIN: Final = re.compile("[\u0120\u2581]?[A-Za-z0-9]+")
_MOST_IDS: Final = 1021


class SimulatedTokens:
    """The cycle of tokens of simulated sequences; `sampled` has each token as the result of one step."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.sampled = tuple((token,) for token in ids)
        self.count = len(self.sampled)
        self._ids = tuple(ids)
        self._places = {token: place for place, token in enumerate(ids)}

    def phase(self, seed: int) -> int:
        """Return where in the cycle a seed begins."""
        return splitmix64(seed + GOLDEN) % self.count

    def run(self, place: int, count: int) -> tuple[int, ...]:
        """Return the tokens from a place of the cycle on."""
        place %= self.count
        ids = self._ids
        while place + count > len(ids):
            ids += self._ids
        return ids[place : place + count]

    def place(self, token: int) -> int | None:
        """Return where a token stands in the cycle; None for a token outside it."""
        return self._places.get(token)

    def expected(self, seed: int, position: int, count: int) -> tuple[int, ...]:
        """Return the tokens at `position` and after it, as a sequence with this seed has them."""
        return self.run(self.phase(seed) + position, count)


def readable_ids(directory: Path, vocab_size: int, eos: Sequence[int]) -> list[int]:
    """Return at most 1021 ids of a checkpoint's plain tokens; without a tokenizer.json all but `eos` count as plain."""
    path = directory / "tokenizer.json"
    if path.is_file():
        refuse_hostile(path)
    tokenizer = read_object(path) if path.is_file() else {}
    vocabulary = tokenizer.get("model", {}).get("vocab")
    unwanted = {*eos, *(each["id"] for each in tokenizer.get("added_tokens", ()))}
    if isinstance(vocabulary, dict):
        plain = sorted(token for word, token in vocabulary.items() if _PLAIN.fullmatch(word))
    elif isinstance(vocabulary, list):  # Unigram: pairs of word and score, in the order of their ids
        plain = [token for token, (word, _) in enumerate(vocabulary) if _PLAIN.fullmatch(word)]
    else:
        plain = list(range(vocab_size))
    wanted = [token for token in plain if token < vocab_size and token not in unwanted]
    return wanted[:_MOST_IDS] or [0]
