"""What is done to a suite, and when: a plan from a seed, that can be printed and replayed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """One row of the failure table in ARCHITECTURE.md, or a part of one."""

    MANAGER_KILLED = "manager_killed"
    MANAGER_STOPPED = "manager_stopped"
    ROUTER_KILLED = "router_killed"
    ROUTER_STOPPED = "router_stopped"
    WORKER_KILLED = "worker_killed"
    WORKER_STOPPED = "worker_stopped"
    REDIS_KILLED = "redis_killed"
    REDIS_STOPPED = "redis_stopped"
    REDIS_WIPED = "redis_wiped"
    CLIENTS_GONE = "clients_gone"
    DEADLINES_PASSED = "deadlines_passed"
    NONE = "none"


# The processes of which one is hit.
VICTIMS: Final = {
    Kind.MANAGER_KILLED: ("kvmanager",),
    Kind.MANAGER_STOPPED: ("kvmanager",),
    Kind.ROUTER_KILLED: ("router-0", "router-1"),
    Kind.ROUTER_STOPPED: ("router-0", "router-1"),
    Kind.WORKER_KILLED: ("worker-0", "worker-1"),
    Kind.WORKER_STOPPED: ("worker-0", "worker-1"),
    Kind.REDIS_KILLED: ("redis",),
    Kind.REDIS_STOPPED: ("redis",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`victim` is a process, "" for none. It comes when the streams have `after_tokens` tokens each, on average."""

    kind: Kind
    victim: str
    after_tokens: int


def planned(seed: int, kinds: Sequence[Kind], rounds: int, most_tokens: int) -> list[Fault]:
    """Return each kind once a round, in an order, at processes and at moments that the seed determines."""
    rng = random.Random(f"faults/{seed}")
    plan: list[Fault] = []
    for _ in range(rounds):
        order = list(kinds)
        rng.shuffle(order)
        for kind in order:
            victim = rng.choice(VICTIMS.get(kind, ("",)))
            plan.append(Fault(kind, victim, rng.randrange(1, max(2, most_tokens))))
    return plan


def written(plan: Sequence[Fault]) -> str:
    """Return a plan as one line of JSON."""
    return json.dumps([asdict(fault) for fault in plan], separators=(",", ":"))


def read(text: str) -> list[Fault]:
    """Return the plan that `written` wrote. Raises ValueError for anything else."""
    try:
        found = json.loads(text)
        if not isinstance(found, list):
            raise TypeError("it is no list")
        return [Fault(Kind(each["kind"]), str(each["victim"]), int(each["after_tokens"])) for each in found]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"this is no plan: {error}; expected the line that a run prints after `plan:`") from None
