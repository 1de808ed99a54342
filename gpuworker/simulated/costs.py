"""What a simulated worker computes: how long a step takes, and which token stands at a position. Standard library only.

    seconds of a step = base + decode · (rows that draw a token) + prefill · (positions beyond one for each such row)
    token(seed, position) = ids[(mix(seed) + position) mod len(ids)]

`ids` are tokens of the vocabulary that are written in plain ASCII letters or digits, so that they can be read, none of
them special or an end of sequence. Who knows the checkpoint and the seed of a sequence knows each of its tokens: one
that is lost, repeated or out of order makes the next differ, and so does one of another sequence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

DEFAULT_COSTS: Final = "base=5ms,decode=20us,prefill=50us"
_UNITS_PER_SECOND: Final = {"us": 1e6, "ms": 1e3, "s": 1.0}
_TERM: Final = re.compile(r"(\w+)=(\d+(?:\.\d+)?)(us|ms|s)")
_PLAIN: Final = re.compile(
    "[\u0120\u2581]?[A-Za-z0-9]+"
)  # with the mark that byte-level BPE or Unigram has for a space
_MOST_IDS: Final = 1021
_WORD: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The cost model of a step, in seconds."""

    base: float = 0.0
    decode: float = 0.0
    prefill: float = 0.0

    def of(self, decodes: int, prefilled: int) -> float:
        """Return the seconds of a step with this many rows that draw, and positions beyond those."""
        return self.base + self.decode * decodes + self.prefill * prefilled


def parse_costs(text: str) -> StepCosts:
    """Return the costs in words such as DEFAULT_COSTS; what is left out costs nothing. Raises ValueError otherwise."""
    terms = [_TERM.fullmatch(term.strip()) for term in text.split(",")]
    known = {each.name for each in fields(StepCosts)}
    found = {term[1]: float(term[2]) / _UNITS_PER_SECOND[term[3]] for term in terms if term is not None}
    if None in terms or not found.keys() <= known or len(found) < len(terms):
        raise ValueError(f"expected terms of {DEFAULT_COSTS}, each at most once, in us, ms or s")
    return StepCosts(**found)


class SimulatedTokens:
    """The cycle of tokens that simulated sequences draw; `drawn` has each of them as the draw of one sequence."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.drawn = tuple((token,) for token in ids)
        self.count = len(self.drawn)
        self._ids = tuple(ids)
        self._places = {token: place for place, token in enumerate(ids)}

    def phase(self, seed: int) -> int:
        """Return where in the cycle a seed begins (splitmix64: Steele, Lea and Flood 2014)."""
        z = (seed + 0x9E3779B97F4A7C15) & _WORD
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
        return (z ^ (z >> 31)) % self.count

    def run(self, place: int, count: int) -> tuple[int, ...]:
        """Return the tokens from a place of the cycle on."""
        place %= self.count
        ids = self._ids
        while place + count > len(ids):
            ids += self._ids
        return ids[place : place + count]

    def place(self, token: int) -> int | None:
        """Return where a token stands in the cycle; None when it is none of them."""
        return self._places.get(token)

    def expected(self, seed: int, position: int, count: int) -> tuple[int, ...]:
        """Return the tokens at `position` and after it, as a sequence with this seed has them."""
        return self.run(self.phase(seed) + position, count)


def readable_ids(directory: Path, vocab_size: int, eos: Sequence[int]) -> list[int]:
    """Return at most 1021 ids of a checkpoint's plain tokens; without a tokenizer.json all but `eos` count as plain."""
    path = directory / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
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
