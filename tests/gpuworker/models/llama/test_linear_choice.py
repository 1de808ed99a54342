"""The choice of a kind by measurement: it is the fastest of those measured, and says what was measured."""

from __future__ import annotations

import math

import pytest

from gpuworker.models.llama.linears import LinearChoice, LinearShape, choose
from gpuworker.native import library as native
from gpuworker.native.linear import Kind

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")


def test_the_kind_with_the_least_time_is_chosen_for_each_shape() -> None:
    shapes, kinds = [LinearShape(96, 128), LinearShape(64, 256)], [Kind.F32, Kind.I8_F32, Kind.I4_F32, Kind.W8A8]
    choices = choose(shapes, kinds, threads=1, rows=(1, 4))
    assert [choice.shape for choice in choices] == shapes
    for choice in choices:
        assert list(choice.seconds) == kinds
        product = {kind: math.prod(seconds) for kind, seconds in choice.seconds.items()}
        assert product[choice.kind] == min(product.values())
        assert all(0 < second < 1 for seconds in choice.seconds.values() for second in seconds)


def test_a_weight_larger_than_the_memory_is_measured_in_part_and_counted_whole() -> None:
    n, k = 70_000, 512
    (choice,) = choose([LinearShape(n, k)], [Kind.F32], threads=2, rows=(1,))
    assert n * k * 4 / choice.seconds[Kind.F32][0] < 1e12  # bytes a second, more than any memory has


def test_a_shape_that_a_kind_cannot_serve_is_refused() -> None:
    with pytest.raises(ValueError, match="no native linear"):
        choose([LinearShape(32, 100)], [Kind.I4_F32], threads=1)


def test_the_choice_in_words() -> None:
    seconds = {Kind.BF16: (12e-6, 20e-6), Kind.I8_BF16: (8e-6, 19e-6)}
    choice = LinearChoice(LinearShape(32, 64), Kind.I8_BF16, (1, 8), seconds)
    assert str(choice) == "linear 32 x 64: I8_BF16 (us for 1/8 rows: BF16 12/20, I8_BF16 8/19)"
