"""The area under the ROC curve on small examples."""

from __future__ import annotations

import pytest

from bench.oracle import auc

CASES = [
    ([2, 3], [0, 1], 1.0),
    ([0, 1], [2, 3], 0.0),
    ([1, 1], [1, 1, 1], 0.5),
    ([0, 3], [1, 2], 0.5),
    ([2], [1, 2], 0.75),
]


@pytest.mark.parametrize(("higher", "lower", "expected"), CASES)
def test_the_area_is_the_share_of_pairs_in_order(higher: list[float], lower: list[float], expected: float) -> None:
    assert auc(higher, lower) == expected
