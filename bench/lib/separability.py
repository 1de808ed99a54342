"""How well one figure separates two kinds of request."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def auc(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Return the chance that a sample of `higher` exceeds one of `lower`; ties count half. 0.5 separates nothing.

    That is the area under the ROC curve (Mann and Whitney's U over the number of pairs).
    """
    ordered = sorted(lower)
    wins = sum(bisect.bisect_left(ordered, each) + bisect.bisect_right(ordered, each) for each in higher)
    return wins / (2 * len(higher) * len(ordered))
