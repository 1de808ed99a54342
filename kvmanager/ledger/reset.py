"""The reset of a prefix cache as the worker is to carry it out: ordered, sent, confirmed.

The manager forgets at once. The worker still claims the content, and an inventory would bring it back. So the id of a
reset is a level: the worker confirms it, keeps it and names it at each attach. A worker that names another id than the
manager's latest is reset again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ResetOrder:
    """Ids of resets in one session; 0 is none."""

    wanted: int = 0
    sent: int = 0
    confirmed: int = 0

    @property
    def pending(self) -> bool:
        """Whether the worker has still to confirm the latest reset."""
        return self.wanted != self.confirmed

    def take(self) -> int:
        """Return the id for the next batch; 0 when it was sent already."""
        if self.sent == self.wanted:
            return 0
        self.sent = self.wanted
        return self.sent

    def key(self) -> tuple[int, int, int]:
        return self.wanted, self.sent, self.confirmed
