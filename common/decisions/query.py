"""Which decision records are asked for. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from common.contracts.types import Decision


@dataclass(frozen=True, slots=True)
class DecisionQuery:
    """Filters of records; an empty one matches all.

    `since_ns` is the first time and `until_ns` the first after it; 0 leaves a side open.
    """

    request_id: str = ""
    kind: str = ""
    tenant: str = ""
    worker: str = ""
    session: str = ""
    since_ns: int = 0
    until_ns: int = 0

    def matches(self, decision: Decision) -> bool:
        """Return whether a record passes all filters; a request's records are those that concern it."""
        return (
            self.kind in ("", decision.kind)
            and self.tenant in ("", decision.tenant)
            and self.worker in ("", decision.worker)
            and self.session in ("", decision.session)
            and decision.time_ns >= self.since_ns
            and (not self.until_ns or decision.time_ns < self.until_ns)
            and (not self.request_id or self.request_id in concerned(decision))
        )


EVERYTHING = DecisionQuery()


def concerned(decision: Decision) -> set[str]:
    """Return the ids of the requests that a record concerns: its subject, the victim and the beneficiary."""
    return {decision.request_id, decision.victim, decision.beneficiary} - {""}
