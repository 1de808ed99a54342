"""Which pools embed, and vectors that a client wants shorter."""

from __future__ import annotations

import math
from array import array

import pytest

from common.contracts.errors import Unsupported
from router.contracts.embedding import check_kind, cosine, numbers_of, packed, shortened


def test_a_pool_serves_its_own_kind_alone() -> None:
    check_kind(embeds=True, pooling="mean")
    check_kind(embeds=False, pooling="none")
    with pytest.raises(Unsupported, match=r"generates and embeds nothing; .* --pooling last, or mean"):
        check_kind(embeds=True, pooling="none")
    with pytest.raises(Unsupported, match=r"embeds \(pooling: last, normalised\) .* --pooling none"):
        check_kind(embeds=False, pooling="last, normalised")


def test_a_shorter_vector_has_length_one() -> None:
    vector = packed(array("f", [3.0, 4.0, 12.0]))
    assert list(numbers_of(shortened(vector, 2))) == pytest.approx([0.6, 0.8])
    assert math.hypot(*numbers_of(shortened(vector, 3))) == pytest.approx(1.0)


def test_a_vector_of_zeros_stays() -> None:
    assert list(numbers_of(shortened(packed(array("f", [0.0, 0.0, 1.0])), 2))) == [0.0, 0.0]


def test_vectors_travel_in_little_endian_float32() -> None:
    assert packed(array("f", [1.0])) == b"\x00\x00\x80\x3f"
    assert list(numbers_of(b"\x00\x00\x80\x3f\x00\x00\x00\xc0")) == [1.0, -2.0]


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ((1.0, 0.0), (5.0, 0.0), 1.0),
        ((1.0, 0.0), (-2.0, 0.0), -1.0),
        ((1.0, 0.0), (0.0, 3.0), 0.0),
        ((3.0, 4.0), (4.0, 3.0), 0.96),
        ((0.0, 0.0), (1.0, 1.0), 0.0),
        ((1e-30, 0.0), (1e-30, 0.0), 1.0),
        ((1e30, 1e30), (1e30, 1e30), 1.0),
    ],
)
def test_the_cosine_of_two_vectors(one: tuple[float, ...], other: tuple[float, ...], wanted: float) -> None:
    found = cosine(array("f", one), array("f", other))
    assert found == pytest.approx(wanted)
    assert -1.0 <= found <= 1.0
