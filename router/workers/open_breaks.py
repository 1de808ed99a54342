"""Breaks of one worker's connection of which it is not known yet whether the worker's process ended."""

from __future__ import annotations

from grpc import StatusCode, aio

from quire.api.status import DETAILS_KEY, code_from_rpc
from router.workers.suspicion import Breakdown


def is_severed(error: aio.AioRpcError) -> bool:
    """Return whether a connection broke under a call: a worker that ends a call itself says why."""
    said = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    return code_from_rpc(error) is StatusCode.UNAVAILABLE and not said


class OpenBreaks:
    """Settles each break by the next handshake: the same process answers, another one, or nothing listens."""

    def __init__(self) -> None:
        self._incarnation = b""
        self._open: list[Breakdown] = []

    def add(self, breakdown: Breakdown) -> None:
        if not breakdown.settled:
            self._open.append(breakdown)

    def greeted(self, incarnation: bytes) -> None:
        """Note which process answers now."""
        self._settle(lives=incarnation == self._incarnation)
        self._incarnation = incarnation

    def gone(self) -> None:
        """Note that the process has ended, or that it is asked no more."""
        self._settle(lives=False)

    def _settle(self, lives: bool) -> None:
        settled, self._open = self._open, []
        for each in settled:
            each.settle(lives)
