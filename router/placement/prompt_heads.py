"""How many tokens a prompt shares with an earlier one of its cache domain, whole blocks or not.

Services compare whole blocks alone, by their hashes. So that `quire why` can say what a prompt shares beyond these, a
router keeps the heads of the prompts that it sent last, in memory and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Final

MAX_HEADS: Final = 512
MAX_HEAD_BYTES: Final = 16 * 1024


class PromptHeads:
    """Heads in the order of their bytes: what shares the most with a prompt stands next to its place."""

    def __init__(self, most: int = MAX_HEADS, head_bytes: int = MAX_HEAD_BYTES) -> None:
        self._most, self._head_bytes = most, head_bytes
        self._sorted: list[bytes] = []
        self._arrivals: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._sorted)

    def send(self, packed_tokens: bytes, token_bytes: int, domain: bytes) -> int:
        """Remember the head of a prompt; return how many tokens it shares with an earlier one of the domain."""
        # Domains of different lengths must not read as one another's tokens.
        mark = len(domain).to_bytes(4, "big") + domain
        head = mark + packed_tokens[: self._head_bytes]
        place = bisect_left(self._sorted, head)
        beside = self._sorted[max(0, place - 1) : place + 1]
        shared = max((_common(head, each) for each in beside), default=0)
        if head not in beside:
            self._keep(head)
        return max(0, shared - len(mark)) // token_bytes

    def _keep(self, head: bytes) -> None:
        insort(self._sorted, head)
        self._arrivals.append(head)
        if len(self._arrivals) > self._most:
            del self._sorted[bisect_left(self._sorted, self._arrivals.popleft())]


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the longest common beginning, by comparisons of slices."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
