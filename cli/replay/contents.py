"""The tokens of replayed requests: made up, but equal where the recorded blocks were equal."""

from __future__ import annotations

from collections.abc import Sequence

from cli.replay.trace import Arrival
from common.contracts.hashing import block_digests, block_hash_of
from common.contracts.types import BlockHash

# Tokens of blocks that nothing names begin here: each is of one request alone.
_NAMELESS = 1 << 30


class Contents:
    """Names of blocks, numbered in the order in which they come; a block's number stands at each of its slots."""

    def __init__(self, block_size: int) -> None:
        """`block_size` is that of the trace."""
        self._size = block_size
        self._numbers: dict[int, int] = {}

    def tokens(self, request: int, arrival: Arrival) -> tuple[int, ...]:
        """Return the tokens of prompt and output."""
        total, numbers, found = arrival.prompt_tokens + arrival.output_tokens, self._numbers, list[int]()
        for name in arrival.blocks:
            found += [numbers.setdefault(name, len(numbers) % _NAMELESS)] * self._size
        del found[total:]
        return (*found, *[_NAMELESS + request % _NAMELESS] * (total - len(found)))


def chain(root: bytes, prompt: Sequence[int], block_size: int) -> tuple[tuple[BlockHash, ...], bytes]:
    """Return the hashes of a prompt's full blocks, and the digest of the last one, or the root."""
    digests = block_digests(root, prompt, block_size)
    return tuple([block_hash_of(each) for each in digests]), digests[-1] if digests else root
