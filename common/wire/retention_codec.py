"""What a sequence retains, to and from its protos. Of a peer, ranges that say nothing sensible are left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from common.contracts.lease import LAST_BLOCK, MAX_RETENTION_PRIORITY, RetainedBlocks, RetainedTokens
from common.contracts.limits import MAX_RETENTION_RANGES
from quire.gpuworker.v1 import gpuworker_pb2
from quire.kvmanager.v1 import kvmanager_pb2

MOST_RANGES: Final = MAX_RETENTION_RANGES + 2
"""Those of the prompt, that of the whole request, and that of the output."""


def tokens_to_proto(retention: Iterable[RetainedTokens]) -> Iterator[gpuworker_pb2.RetainedTokens]:
    for each in retention:
        yield gpuworker_pb2.RetainedTokens(
            start=each.start, end=each.end or 0, priority=each.priority, seconds=each.seconds
        )


def tokens_from_proto(messages: Iterable[gpuworker_pb2.RetainedTokens]) -> tuple[RetainedTokens, ...]:
    return tuple(
        [
            RetainedTokens(each.start, each.end or None, each.priority, each.seconds)
            for each in islice(messages, MOST_RANGES)
            if _is_sensible(each.start, each.end, each.priority, each.seconds)
        ]
    )


def blocks_to_proto(retention: Iterable[RetainedBlocks]) -> Iterator[kvmanager_pb2.RetainedBlocks]:
    for each in retention:
        end = 0 if each.end == LAST_BLOCK else each.end
        yield kvmanager_pb2.RetainedBlocks(first=each.first, end=end, priority=each.priority, seconds=each.seconds)


def blocks_from_proto(messages: Iterable[kvmanager_pb2.RetainedBlocks]) -> tuple[RetainedBlocks, ...]:
    return tuple(
        [
            RetainedBlocks(each.first, each.end or LAST_BLOCK, each.priority, each.seconds)
            for each in islice(messages, MOST_RANGES)
            if _is_sensible(each.first, each.end, each.priority, each.seconds)
        ]
    )


def _is_sensible(first: int, end: int, priority: int, seconds: float) -> bool:
    return (not end or first < end) and priority <= MAX_RETENTION_PRIORITY and 0.0 < seconds < math.inf
