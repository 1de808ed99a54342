"""For how long a worker without a KV manager still counts as ready for new requests."""

from __future__ import annotations


class ManagerAbsence:
    """Routers send a worker new requests for `patience` seconds without a KV manager: its leases last for a while.

    A worker that has had no manager yet is not ready. It reads no clock itself.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._attached_at: float | None = None

    def why_not_ready(self, attached: bool, now: float) -> str:
        """Return why the worker is not ready at a time; "" if it is. Call it with times that only rise."""
        if attached:
            self._attached_at = now
        if self._attached_at is None:
            return "the worker has no KV manager yet"
        if now - self._attached_at < self._patience:
            return ""
        return f"the worker has had no KV manager for {self._patience:g} s (--manager-patience)"
