"""A watch that keeps what APIs report to it."""

from __future__ import annotations

from router.contracts.refusals import Refusal

_NOW_NS = 7


class RefusalList:
    """`seen` are refusals of requests, `probes` those that are counted alone."""

    def __init__(self) -> None:
        self.seen: list[Refusal] = []
        self.probes: list[Refusal] = []

    def now_ns(self) -> int:
        return _NOW_NS

    def note_refusal(self, refusal: Refusal, since_ns: int) -> None:
        assert since_ns == _NOW_NS
        self.seen.append(refusal)

    def count_refusal(self, refusal: Refusal) -> None:
        self.probes.append(refusal)
