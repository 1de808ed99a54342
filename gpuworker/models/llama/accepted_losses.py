"""Which quantisations `--quantization auto` may take: those that lose at most 1 % of perplexity. Pure functions.

The losses are measured on a real model (`bench.quality`). The loss of another model is predicted from how its weights
round: the power of the noise in a product grows with the square of the error, and the loss is taken to grow so too.
What rounding activations loses depends on their outliers, which weights do not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MOST_LOST: Final = 1.01
_WHERE: Final = "SmolLM2-135M"


@dataclass(frozen=True, slots=True)
class Loss:
    """What a quantisation lost: `ratio` is its perplexity over that of bf16.

    `error` is that of the measured model's weights (`quantise.rounding_error`), of the linear in the middle of all.
    """

    ratio: float
    error: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a quantisation may be taken, and why, for the log."""

    accepted: bool
    why: str


# bench.quality on SmolLM2-135M-Instruct, 12,264 tokens, AVX-512 bf16 (bench/RESULTS.md).
MEASURED: Final[Mapping[str, Loss]] = {
    "int8": Loss(1.0011, 0.011),
    "w8a8": Loss(1.0342, 0.011),
    "int4": Loss(1.4052, 0.134),
}


def by_type(name: str, measured: Mapping[str, Loss] = MEASURED) -> Verdict:
    """Return whether "auto" considers a quantisation at all; one that was not measured loses too much."""
    loss = measured.get(name)
    if loss is None:
        return Verdict(False, f"{name}: its loss is not measured")
    lost = f"{name}: {loss.ratio:.4f} of bf16's perplexity on {_WHERE}"
    if loss.ratio <= MOST_LOST:
        return Verdict(True, lost)
    return Verdict(False, f"{lost}, more than {MOST_LOST:g}")


def by_error(name: str, error: float, measured: Mapping[str, Loss] = MEASURED) -> Verdict:
    """Return whether a linear whose weights round with this relative error may be held so."""
    considered = by_type(name, measured)
    if not considered.accepted:
        return considered
    loss = measured[name]
    expected = 1 + max(0.0, loss.ratio - 1) * (error / loss.error) ** 2
    words = f"{name}: weights round with an error of {error:.2%}, those of {_WHERE} with {loss.error:.2%}"
    return Verdict(expected <= MOST_LOST, f"{words}; {expected:.4f} of bf16's perplexity expected")
