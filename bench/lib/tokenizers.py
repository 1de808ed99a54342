"""A byte-level BPE tokenizer of any size, built from random merges: as wide as real ones, and read in a moment."""

from __future__ import annotations

import random
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 0
_LONGEST = 10
_SPACE = "Ġ"  # how byte-level BPE writes a space
# What text and JSON are made of, by how often a merge begins or ends with it.
_PARTS = 6 * string.ascii_lowercase + 2 * string.ascii_uppercase + 2 * string.digits + 40 * _SPACE + 3 * '",:{}[]._-'


def write_tokenizer(path: Path, size: int, seed: int = 0) -> None:
    """Write a tokenizer.json of `size` tokens: one for the end of text, 256 bytes, and merges of two tokens each."""
    rng = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<end>", *alphabet])}
    merges, pool = [], list(_PARTS)
    while len(vocabulary) < size:
        left, right = rng.choice(pool), rng.choice(pool)
        made = left + right
        if len(made) > _LONGEST or _SPACE in right or made in vocabulary:
            continue
        vocabulary[made] = len(vocabulary)
        merges.append((left, right))
        pool.append(made)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path))
