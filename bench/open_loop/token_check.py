"""Checks the tokens of one stream of a simulated worker: none may be lost, repeated, out of order or foreign.

The token at a position follows from the seed alone (`gpuworker/simulated/tokens.py`), so a client can compute it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuworker.simulated.tokens import SimulatedTokens


class TokenCheck:
    """Follows a stream whose first output token stands at `position`. `faults` lists the mistakes, in order."""

    __slots__ = ("_next", "_tokens", "count", "faults")

    def __init__(self, tokens: SimulatedTokens, seed: int, position: int) -> None:
        self._tokens, self._next = tokens, tokens.phase(seed) + position
        self.count = 0
        self.faults: list[str] = []

    def take(self, ids: Sequence[int]) -> None:
        """Compare the next tokens with the expected ones. After a fault it continues at the stream's position."""
        if self._tokens.run(self._next, len(ids)) == tuple(ids):
            self._next += len(ids)
            self.count += len(ids)
            return
        for token in ids:
            self._take_one(token)

    def end(self, count: int) -> None:
        """Compare the number of tokens with the requested one."""
        if self.count != count:
            self.faults.append(f"ended with {self.count} tokens; {count} were due")

    def _take_one(self, token: int) -> None:
        place, cycle = self._tokens.place(token), self._tokens.count
        if place is None:
            self.faults.append(f"token {self.count} is {token}, which no simulated worker draws")
        elif ahead := (place - self._next) % cycle:
            behind = cycle - ahead
            what = f"{ahead} lost before" if ahead <= behind else f"the stream went back by {behind} at"
            self.faults.append(f"{what} token {self.count}")
            self._next += ahead if ahead <= behind else -behind
        self._next += 1
        self.count += 1
