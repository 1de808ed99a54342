"""The pseudo-random function splitmix64 (Steele, Lea and Flood, 2014): the worker derives seeds and samples from it."""

from __future__ import annotations

from typing import Final

GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB
WORD: Final = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """Return the finaliser of splitmix64, a bijection on 64-bit words, at `x` modulo 2**64."""
    x &= WORD
    x = ((x ^ (x >> 30)) * MIX_1) & WORD
    x = ((x ^ (x >> 27)) * MIX_2) & WORD
    return x ^ (x >> 31)
