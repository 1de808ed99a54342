"""Computes the costs of each block size for requests of known lengths, and which size to choose.

Three costs depend on the block size. Waste: the last block of a sequence is partly empty, so the cache holds fewer
sequences. Hits: the cache serves whole blocks of a shared prefix, and the worker computes the rest again. Work: each
block is granted, sealed, hashed and published once, so smaller blocks cost more; `bench.phases` measures that cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cli.block_size.accounting import BLOCK_SIZES, count_waste
from cli.block_size.request_log import LoggedRequest

EQUAL_SPEED: Final = 0.98
"""Speeds from this share of the best one on count as equal: runs of one size differ by as much."""


@dataclass(frozen=True, slots=True)
class BlockSizeCost:
    """One block size. `waste` and `runway` are shares of slots with a token, the others of prompt tokens.

    `hits` is the prefix cache's expected share, None when the log has no cached tokens. `missed` is the share of shared
    prefixes that is computed again, because the prefixes end inside a block. `blocks` counts blocks granted for 1000
    tokens. `speed` is relative to the fastest size, None when it was not measured.
    """

    block_size: int
    waste: float
    runway: float
    hits: float | None
    missed: float
    blocks: float
    speed: float | None = None

    @property
    def lost(self) -> float:
        """The share that `max_loss` limits: wasted slots, and prompt tokens computed again."""
        return self.waste + self.missed


def expected_hit(cached: int, logged_size: int, prompt: int, block_size: int) -> float:
    """Return the expected hit on a prefix of which blocks of `logged_size` served `cached` tokens.

    The prefix ends inside the next block, at each place with equal probability. A hit excludes the last token.
    """
    ends = range(cached, min(cached + logged_size, prompt))
    return sum(end // block_size * block_size for end in ends) / len(ends)


def expected_prefix(cached: int, logged_size: int, prompt: int) -> float:
    """Return the expected length of that prefix: the hit with blocks of one slot."""
    return expected_hit(cached, logged_size, prompt, 1)


def costs(
    requests: Sequence[LoggedRequest], logged_size: int, speeds: Mapping[int, float] | None = None
) -> list[BlockSizeCost]:
    """Return the cost of each block size, smallest first; `speeds` are output tokens a second by block size."""
    fastest = max(speeds.values()) if speeds else 0.0
    return [
        _cost(requests, logged_size, size, speeds[size] / fastest if speeds and size in speeds else None)
        for size in BLOCK_SIZES
    ]


def _cost(requests: Sequence[LoggedRequest], logged_size: int, block_size: int, speed: float | None) -> BlockSizeCost:
    waste = count_waste(block_size, [(each.prompt, each.output) for each in requests])
    prompt = sum(each.prompt for each in requests)
    total = prompt + sum(each.output for each in requests)
    blocks = sum(-(-(each.prompt + each.output) // block_size) for each in requests)
    num_tokens = [(each.cached, logged_size, each.prompt) for each in requests if each.cached]
    served = sum(expected_hit(*each, block_size) for each in num_tokens)
    whole = sum(expected_prefix(*each) for each in num_tokens)
    reported = any(each.cached is not None for each in requests)
    return BlockSizeCost(
        block_size=block_size,
        waste=waste.share,
        runway=waste.runway_share,
        hits=served / prompt if reported else None,
        missed=(whole - served) / prompt,
        blocks=1000 * blocks / total,
        speed=speed,
    )


def recommend(table: Sequence[BlockSizeCost], max_loss: float) -> BlockSizeCost:
    """Return the size to choose, of those that lose at most `max_loss`; without any, the size that loses least.

    With speeds it is the smallest of the fastest sizes. Without speeds it is the largest, which needs the least work.
    """
    fit = [each for each in table if each.lost <= max_loss]
    if not fit:
        return min(table, key=lambda each: each.lost)
    measured = [each for each in fit if each.speed is not None]
    if not measured:
        return fit[-1]
    best = max(each.speed or 0.0 for each in measured)
    return next(each for each in measured if (each.speed or 0.0) >= EQUAL_SPEED * best)
