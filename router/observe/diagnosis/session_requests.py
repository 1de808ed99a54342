"""The requests of one session in the order in which they came: think times, waits, hits, and why each was slow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from common.contracts.types import Decision, DecisionKind
from router.observe.diagnosis.outcome import Outcome, outcome_of
from router.observe.diagnosis.phases import WORK
from router.observe.diagnosis.request_history import REFUSED_BY_MANAGER
from router.observe.diagnosis.verdict import Diagnosis


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """One request of a session. `outcome` is None where it was refused at its arrival.

    `think_s` are the seconds from the end of the session's requests so far to its arrival; None for the first one, and
    for one that came while another ran. `diagnosis` is None where nobody asked why.
    """

    request_id: str
    began_ns: int
    ended_ns: int
    outcome: Outcome | None = None
    think_s: float | None = None
    diagnosis: Diagnosis | None = None

    @property
    def waited_s(self) -> float:
        """Seconds before the first token in which nothing was done for it."""
        before = () if self.outcome is None else self.outcome.before
        return sum(seconds for phase, seconds in before if phase not in WORK)


def requests_of_session(records: Iterable[Decision]) -> list[SessionRequest]:
    """Return the requests that these records end, the first that came first."""
    found: dict[str, SessionRequest] = {}
    for record in sorted(records, key=lambda record: record.time_ns):
        refused = record.kind is DecisionKind.REJECTION and record.chosen != REFUSED_BY_MANAGER
        if not record.request_id or not (refused or record.kind is DecisionKind.OUTCOME):
            continue
        outcome = None if refused else outcome_of(record)
        began = record.time_ns - (0 if outcome is None else round(outcome.total_s * 1e9))
        found[record.request_id] = SessionRequest(record.request_id, began, record.time_ns, outcome)
    requests, last_end = list[SessionRequest](), 0
    for each in sorted(found.values(), key=lambda each: (each.began_ns, each.ended_ns)):
        thought = (each.began_ns - last_end) / 1e9 if 0 < last_end <= each.began_ns else None
        requests.append(replace(each, think_s=thought))
        last_end = max(last_end, each.ended_ns)
    return requests
