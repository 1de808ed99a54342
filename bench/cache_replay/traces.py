"""The requests of a recorded trace for a prefix cache, in blocks of any size that divides those of the trace."""

from __future__ import annotations

from bench.cache_replay.workloads import CacheRequest
from cli.replay.trace import Arrival, Trace
from common.contracts.types import BlockHash

_OUTPUT = 1 << 127
"""Where the hashes of outputs begin: a trace names the blocks of prompts alone."""


def requests_of(trace: Trace, block_size: int, token_seconds: float = 0.0) -> list[CacheRequest]:
    """Return the requests with the full blocks of their prompts.

    With `token_seconds` a request is there for so many seconds for each token of its output, and has blocks of its own
    for that. Raises ValueError where blocks of that size do not divide those of the trace, or it names no contents.
    """
    if not any(each.blocks for each in trace.arrivals):
        raise ValueError(
            "the trace names no contents, so nothing in it can be a hit; expected one of Mooncake or Quire"
        )
    if trace.block_size % block_size:
        raise ValueError(f"blocks of {block_size} tokens; expected a divisor of the trace's {trace.block_size}")
    return [_request_of(each, number, trace, block_size, token_seconds) for number, each in enumerate(trace.arrivals)]


def _request_of(arrival: Arrival, number: int, trace: Trace, block_size: int, token_seconds: float) -> CacheRequest:
    parts = trace.block_size // block_size
    full = min(arrival.prompt_tokens // block_size, len(arrival.blocks) * parts)
    prompt = tuple(_hash_of(arrival.blocks[place // parts] * parts + place % parts + 1) for place in range(full))
    if not token_seconds:
        return CacheRequest(prompt, ())
    own = -(-(arrival.prompt_tokens + arrival.output_tokens) // block_size) - full
    output = tuple(_hash_of(_OUTPUT + (number << 32) + place) for place in range(own))
    return CacheRequest(prompt, output, arrival.at, lasts=token_seconds * arrival.output_tokens)


def _hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))
