"""Cancellations near a deadline."""

from __future__ import annotations

import pytest

from common.rpc.deadline import is_expiry


@pytest.mark.parametrize(
    ("timeout", "left", "expired"),
    [
        (0.2, 0.0, True),
        (0.2, 0.05, True),
        (0.2, 0.06, False),
        (5.0, 0.055, True),
        (5.0, 0.07, False),
        (10.1, 0.14, True),  # 10.01 s, rounded up to tenths
        (10.1, 0.16, False),
        (0.0, 0.0, True),
        (-1.0, 0.0, True),
    ],
)
def test_a_cancellation_counts_as_expiry_within_what_clocks_and_rounding_explain(
    timeout: float, left: float, expired: bool
) -> None:
    assert is_expiry(timeout, left) is expired
