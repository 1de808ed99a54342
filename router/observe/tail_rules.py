"""Which requests are kept whatever the sampling: those that an operator asks about. The rules see how a request ended.

refused     by a limit, by a worker, or because its deadline was hopeless
failed      any other error; a client that left, and an abort by a call, are none
preempted   it lost its blocks
migrated    it lost its worker
slow        its first token was late, or more than a hundredth of its other tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from router.observe.diagnosis.causes import Cause
from router.observe.diagnosis.ends import end_cause
from router.observe.diagnosis.outcome import Outcome


class Rule(StrEnum):
    REFUSED = "refused"
    FAILED = "failed"
    PREEMPTED = "preempted"
    MIGRATED = "migrated"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Objective:
    """What clients were promised, in seconds: time to first token, and inter-token latency of 99 % of the tokens.

    Without a promise no request is slow.
    """

    ttft: float = math.inf
    itl: float = math.inf

    @staticmethod
    def of(ttft: float | None, itl: float | None) -> Objective:
        """Return the objective of two options; None promises nothing."""
        return Objective(math.inf if ttft is None else ttft, math.inf if itl is None else itl)


_REFUSED: Final = (Cause.REFUSED, Cause.RATE_LIMITED, Cause.TOO_LARGE, Cause.WRONG_REQUEST, Cause.HOPELESS_DEADLINE)
_BY_CLIENT: Final = (Cause.CLIENT_GONE, Cause.ABORTED)
_LATE_SHARE: Final = 0.01


def rules_for(outcome: Outcome, objective: Objective) -> tuple[Rule, ...]:
    """Return the rules that keep a request; none for an ordinary one."""
    return tuple(_matching(outcome, objective))


def _matching(outcome: Outcome, objective: Objective) -> Iterator[Rule]:
    cause = end_cause(outcome)
    if cause in _REFUSED:
        yield Rule.REFUSED
    elif cause is not None and cause not in _BY_CLIENT:
        yield Rule.FAILED
    if outcome.preemptions:
        yield Rule.PREEMPTED
    if outcome.moves:
        yield Rule.MIGRATED
    if outcome.late_gaps > _LATE_SHARE * outcome.gaps or outcome.first_token_s > objective.ttft:
        yield Rule.SLOW
