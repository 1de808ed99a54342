"""Embeddings: which pools make them, and what a client's `dimensions` make of a vector."""

from __future__ import annotations

import math
import operator
import sys
from array import array

from common.contracts.errors import Unsupported
from common.contracts.types import NO_POOLING


def check_kind(embeds: bool, pooling: str) -> None:
    """Raise Unsupported for a request that workers of this pooling do not serve."""
    if embeds and pooling == NO_POOLING:
        raise Unsupported(
            "this pool generates and embeds nothing; for embeddings start another one: "
            "quire serve MODEL --pooling last, or mean"
        )
    if not embeds and pooling != NO_POOLING:
        raise Unsupported(
            f"this pool embeds (pooling: {pooling}) and generates nothing; ask /v1/embeddings or Embed, or to generate "
            "start another pool: quire serve MODEL --pooling none"
        )


def numbers_of(embedding: bytes) -> array[float]:
    """Return the numbers of a vector in little-endian float32."""
    numbers = array("f", embedding)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def packed(numbers: array[float]) -> bytes:
    """Return numbers as little-endian float32."""
    if sys.byteorder == "big":
        numbers = array("f", numbers)
        numbers.byteswap()
    return numbers.tobytes()


def shortened(embedding: bytes, dimensions: int) -> bytes:
    """Return the first numbers of a vector, scaled to length 1; a vector of zeros stays as it is."""
    first = numbers_of(embedding)[:dimensions]
    length = math.sqrt(math.fsum(each * each for each in first))
    return packed(array("f", (each / length for each in first)) if length else first)


def cosine(one: array[float], other: array[float]) -> float:
    """Return the cosine of the angle between two vectors, -1 to 1; 0 where one of them is all zeros."""
    lengths = math.sqrt(_dot(one, one) * _dot(other, other))
    return max(-1.0, min(1.0, _dot(one, other) / lengths)) if lengths else 0.0


def _dot(one: array[float], other: array[float]) -> float:
    return math.fsum(map(operator.mul, one, other))
