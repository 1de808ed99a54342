"""Which requests `quire why` explains, when none is named: the last one, the slowest, those that were refused, ..."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.types import Decision, DecisionKind
from router.observe.diagnosis.outcome import Outcome, outcome_of
from router.observe.diagnosis.request_history import REFUSED_BY_MANAGER

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# A century. Times of records are nanoseconds since 1970 in 64 bits; two centuries before now are among them.
_LONGEST_S: Final = 36500 * _UNITS["d"]
# Reasons of errors with which the service, and not the client, ended a request.
_REFUSALS: Final = frozenset(
    {"OVERLOADED", "RATE_LIMITED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INVALID_FIELD", "CONTEXT_LENGTH_EXCEEDED"}
    | {"INVALID_ARGUMENT"}  # of logs on disk that an earlier version wrote
)
_NO_MISS: Final = frozenset({"", "full_hit", "capped"})


@dataclass(frozen=True, slots=True)
class Choice:
    """What is asked for; `since` is in seconds before now, None for all that there is."""

    last: bool = False
    slowest: int = 0
    rejected: bool = False
    preempted: bool = False
    misses: bool = False
    since: float | None = None


def seconds_of(text: str, flag: str = "--since") -> float:
    """Return the seconds of a span of time such as 30s, 5m, 2h or 1d. Raises InvalidConfig."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise InvalidConfig(FieldViolation(flag, f"is {text!r}; expected a span of time such as 30s, 5m, 2h or 1d"))
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds > _LONGEST_S:
        raise InvalidConfig(FieldViolation(flag, f"is {text!r}; expected {_LONGEST_S / _UNITS['d']:g}d at most"))
    return seconds


def chosen(choice: Choice, records: Iterable[Decision], now_ns: int) -> list[str]:
    """Return the ids of the requests that a choice names, of the records that end requests; the most wanted first."""
    oldest = 0 if choice.since is None else now_ns - int(choice.since * 1e9)
    ends = {each.request_id: each for each in sorted(records, key=lambda each: each.time_ns) if _ends(each)}
    newest = [each for each in reversed(ends.values()) if each.time_ns >= oldest]
    newest.sort(key=lambda each: -each.time_ns)
    wanted = [each.request_id for each in newest if _is_wanted(choice, each)]
    if choice.slowest:
        times = {each.request_id: _first_token_s(each) for each in newest}
        return sorted(wanted, key=lambda each: -times[each])[: choice.slowest]
    return wanted[:1] if choice.last else wanted


def _ends(record: Decision) -> bool:
    refused = record.kind is DecisionKind.REJECTION and record.chosen != REFUSED_BY_MANAGER
    return bool(record.request_id) and (refused or record.kind is DecisionKind.OUTCOME)


def _is_wanted(choice: Choice, record: Decision) -> bool:
    """Return whether a request has everything that the choice asks for."""
    outcome = outcome_of(record) if record.kind is DecisionKind.OUTCOME else None
    return all(test(outcome) for asked, test in _tests(choice) if asked)


def _tests(choice: Choice) -> tuple[tuple[bool, Callable[[Outcome | None], bool]], ...]:
    return (
        (choice.rejected, lambda outcome: outcome is None or outcome.ended in _REFUSALS),
        (choice.preempted, lambda outcome: outcome is not None and outcome.preemptions > 0),
        (choice.misses, lambda outcome: outcome is not None and outcome.miss not in _NO_MISS),
        (bool(choice.slowest), lambda outcome: outcome is not None),
    )


def _first_token_s(record: Decision) -> float:
    return outcome_of(record).first_token_s if record.kind is DecisionKind.OUTCOME else 0.0
