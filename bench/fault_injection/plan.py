"""What is done to a suite, and when: a plan from a seed, that can be printed and replayed."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

STOP_S: Final = 2.0
JUMP_S: Final = 3600
FREEZE_S: Final = 20.0
CUT_S: Final = 8.0


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
    REQUESTS_ABORTED = "requests_aborted"
    MANAGER_DRAINED = "manager_drained"
    ROUTER_DRAINED = "router_drained"
    WORKER_DRAINED = "worker_drained"
    MANAGER_FROZEN = "manager_frozen"
    ROUTER_FROZEN = "router_frozen"
    WORKER_FROZEN = "worker_frozen"
    REDIS_FROZEN = "redis_frozen"
    REDIS_OVERWRITTEN = "redis_overwritten"
    MANAGER_WITHOUT_FILES = "manager_without_files"
    ROUTER_WITHOUT_FILES = "router_without_files"
    WORKER_WITHOUT_FILES = "worker_without_files"
    MANAGER_WITHOUT_DISK = "manager_without_disk"
    ROUTER_WITHOUT_DISK = "router_without_disk"
    MANAGER_CLOCK = "manager_clock"
    ROUTER_CLOCK = "router_clock"
    WORKER_CLOCK = "worker_clock"
    REDIS_CLOCK = "redis_clock"
    MANAGER_WITHOUT_MEMORY = "manager_without_memory"
    ROUTER_WITHOUT_MEMORY = "router_without_memory"
    WORKER_WITHOUT_MEMORY = "worker_without_memory"
    ALL_DRAINED = "all_drained"
    MANAGER_GONE = "manager_gone"
    LEADER_KILLED = "leader_killed"
    LEADER_FENCED = "leader_fenced"
    PACKETS_LOST = "packets_lost"
    LINKS_SLOW = "links_slow"
    ROUTER_WITHOUT_WORKER = "router_without_worker"
    MANAGER_WITHOUT_WORKER = "manager_without_worker"
    LEADER_ISOLATED = "leader_isolated"
    LEADER_WITHOUT_REDIS = "leader_without_redis"
    MANAGERS_APART = "managers_apart"
    ROUTER_WITHOUT_REDIS = "router_without_redis"
    ROUTER_WITHOUT_MANAGERS = "router_without_managers"
    CLIENT_WITHOUT_ROUTER = "client_without_router"
    WORKER_MOVED = "worker_moved"
    PREFILL_WORKER_KILLED = "prefill_worker_killed"
    PREFILL_WORKER_STOPPED = "prefill_worker_stopped"
    PREFILL_WORKER_FROZEN = "prefill_worker_frozen"
    PREFILL_WORKER_DRAINED = "prefill_worker_drained"
    DECODE_WORKER_KILLED = "decode_worker_killed"
    FETCH_SOURCE_KILLED = "fetch_source_killed"
    FETCH_SOURCE_STOPPED = "fetch_source_stopped"
    FETCH_TARGET_KILLED = "fetch_target_killed"
    FETCH_TARGET_STOPPED = "fetch_target_stopped"
    FETCH_MANAGER_KILLED = "fetch_manager_killed"
    FETCH_MANAGER_STOPPED = "fetch_manager_stopped"
    NONE = "none"


_ROUTERS: Final = ("router-0", "router-1")
_WORKERS: Final = ("worker-0", "worker-1")
# Where some workers compute prompts for the others.
_PREFILL: Final = ("worker-0",)
_DECODE: Final = ("worker-1", "worker-2")
# The processes of which one is hit: killed (SIGKILL), drained (SIGTERM), stopped for 2 s or frozen for 20 s (SIGSTOP).
VICTIMS: Final = {
    Kind.MANAGER_KILLED: ("kvmanager",),
    Kind.MANAGER_STOPPED: ("kvmanager",),
    Kind.MANAGER_DRAINED: ("kvmanager",),
    Kind.MANAGER_FROZEN: ("kvmanager",),
    Kind.ROUTER_KILLED: _ROUTERS,
    Kind.ROUTER_STOPPED: _ROUTERS,
    Kind.ROUTER_DRAINED: _ROUTERS,
    Kind.ROUTER_FROZEN: _ROUTERS,
    Kind.WORKER_KILLED: _WORKERS,
    Kind.WORKER_STOPPED: _WORKERS,
    Kind.WORKER_DRAINED: _WORKERS,
    Kind.WORKER_FROZEN: _WORKERS,
    Kind.REDIS_KILLED: ("redis",),
    Kind.REDIS_STOPPED: ("redis",),
    Kind.REDIS_FROZEN: ("redis",),
    Kind.MANAGER_WITHOUT_FILES: ("kvmanager",),
    Kind.ROUTER_WITHOUT_FILES: _ROUTERS,
    Kind.WORKER_WITHOUT_FILES: _WORKERS,
    Kind.MANAGER_WITHOUT_DISK: ("kvmanager",),
    Kind.ROUTER_WITHOUT_DISK: _ROUTERS,
    Kind.MANAGER_WITHOUT_MEMORY: ("kvmanager",),
    Kind.ROUTER_WITHOUT_MEMORY: _ROUTERS,
    Kind.WORKER_WITHOUT_MEMORY: _WORKERS,
    Kind.MANAGER_GONE: ("kvmanager",),
    Kind.ROUTER_WITHOUT_WORKER: _WORKERS,
    Kind.MANAGER_WITHOUT_WORKER: _WORKERS,
    Kind.LINKS_SLOW: _WORKERS,
    Kind.WORKER_MOVED: _WORKERS,
    Kind.MANAGER_CLOCK: ("kvmanager",),
    Kind.ROUTER_CLOCK: _ROUTERS,
    Kind.WORKER_CLOCK: _WORKERS,
    Kind.REDIS_CLOCK: ("redis",),
    Kind.PREFILL_WORKER_KILLED: _PREFILL,
    Kind.PREFILL_WORKER_STOPPED: _PREFILL,
    Kind.PREFILL_WORKER_FROZEN: _PREFILL,
    Kind.PREFILL_WORKER_DRAINED: _PREFILL,
    Kind.DECODE_WORKER_KILLED: _DECODE,
    Kind.FETCH_SOURCE_KILLED: _PREFILL,
    Kind.FETCH_SOURCE_STOPPED: _PREFILL,
    Kind.FETCH_TARGET_KILLED: _DECODE,
    Kind.FETCH_TARGET_STOPPED: _DECODE,
    Kind.FETCH_MANAGER_KILLED: ("kvmanager",),
    Kind.FETCH_MANAGER_STOPPED: ("kvmanager",),
}
FROZEN: Final = frozenset(
    {
        Kind.MANAGER_FROZEN,
        Kind.ROUTER_FROZEN,
        Kind.WORKER_FROZEN,
        Kind.REDIS_FROZEN,
        Kind.PREFILL_WORKER_FROZEN,
    }
)
# They come while a worker that decodes fetches blocks: streams begin with that.
AMID_FETCHES: Final = frozenset(
    {
        Kind.FETCH_SOURCE_KILLED,
        Kind.FETCH_SOURCE_STOPPED,
        Kind.FETCH_TARGET_KILLED,
        Kind.FETCH_TARGET_STOPPED,
        Kind.FETCH_MANAGER_KILLED,
        Kind.FETCH_MANAGER_STOPPED,
    }
)
_OF_PREFILL: Final = AMID_FETCHES | frozenset(
    {
        Kind.PREFILL_WORKER_KILLED,
        Kind.PREFILL_WORKER_STOPPED,
        Kind.PREFILL_WORKER_FROZEN,
        Kind.PREFILL_WORKER_DRAINED,
        Kind.DECODE_WORKER_KILLED,
    }
)
CLOCKS: Final = frozenset({Kind.MANAGER_CLOCK, Kind.ROUTER_CLOCK, Kind.WORKER_CLOCK, Kind.REDIS_CLOCK})
WITHOUT_DISK: Final = frozenset({Kind.MANAGER_WITHOUT_DISK, Kind.ROUTER_WITHOUT_DISK})
LEADERS: Final = frozenset({Kind.LEADER_KILLED, Kind.LEADER_FENCED})
# Each service runs on a host of its own: what is between them fails.
NETWORK: Final = frozenset(
    {
        Kind.PACKETS_LOST,
        Kind.LINKS_SLOW,
        Kind.ROUTER_WITHOUT_WORKER,
        Kind.MANAGER_WITHOUT_WORKER,
        Kind.LEADER_ISOLATED,
        Kind.LEADER_WITHOUT_REDIS,
        Kind.MANAGERS_APART,
        Kind.ROUTER_WITHOUT_REDIS,
        Kind.ROUTER_WITHOUT_MANAGERS,
        Kind.CLIENT_WITHOUT_ROUTER,
        Kind.WORKER_MOVED,
    }
)
# Failures that last: their streams have several times the tokens, and are still there when the failure is over.
LASTING: Final = FROZEN | {Kind.ALL_DRAINED, Kind.MANAGER_GONE, Kind.LEADER_FENCED, Kind.CLIENT_WITHOUT_ROUTER}


class Form(StrEnum):
    """A suite in which failures come. Some need a suite of their own."""

    WHOLE = "two routers, two workers, one KV manager"
    IMPATIENT = "the same, whose routers give a worker up that is without a KV manager"
    LED = "the same with two KV managers, of which one leads"
    PREFILL = "two routers, one KV manager, one worker that computes prompts and two that decode"
    HOSTS = "one router, two workers, two KV managers, each on a host of its own"


def form_of(kind: Kind) -> Form:
    if kind in NETWORK:
        return Form.HOSTS
    if kind in LEADERS:
        return Form.LED
    if kind in _OF_PREFILL:
        return Form.PREFILL
    return Form.IMPATIENT if kind is Kind.MANAGER_GONE else Form.WHOLE


@dataclass(frozen=True, slots=True)
class Fault:
    """`victim` is a process, "" for none.

    It comes when the streams have `after_tokens` tokens each, on average; in a soak `after_s` seconds after the start,
    or when the one before is over.
    """

    kind: Kind
    victim: str
    after_tokens: int = 0
    after_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} of {self.victim}" if self.victim else self.kind.value


def planned(seed: int, kinds: Sequence[Kind], rounds: int, most_tokens: int) -> list[Fault]:
    """Return each kind once a round, in an order, at processes and at moments that the seed determines."""
    rng = random.Random(f"faults/{seed}")
    plan: list[Fault] = []
    for _ in range(rounds):
        order = list(kinds)
        rng.shuffle(order)
        for kind in order:
            victim = rng.choice(VICTIMS.get(kind, ("",)))
            after = rng.randrange(1, max(2, most_tokens))
            plan.append(Fault(kind, victim, 0 if kind in AMID_FETCHES else after))
    return plan


def scattered(seed: int, kinds: Sequence[Kind], seconds: float, pause: float) -> list[Fault]:
    """Return faults for so many seconds, with `pause` between two on average. Each kind comes before any comes again.

    A frozen process takes its time too, so the next fault is later by that.
    """
    rng, plan, left = random.Random(f"soak/{seed}"), list[Fault](), list[Kind]()
    at = rng.uniform(0.5, 1.5) * pause
    while at < seconds:
        if not left:
            left = rng.sample(kinds, len(kinds))
        kind = left.pop()
        plan.append(Fault(kind, rng.choice(VICTIMS.get(kind, ("",))), after_s=round(at, 1)))
        at += rng.uniform(0.5, 1.5) * pause + (FREEZE_S if kind in FROZEN else 0.0)
    return plan


def written(plan: Sequence[Fault]) -> str:
    """Return a plan as one line of JSON."""
    named = [{name: value for name, value in asdict(fault).items() if value or name == "victim"} for fault in plan]
    return json.dumps(named, separators=(",", ":"))


def read(text: str) -> list[Fault]:
    """Return the plan that `written` wrote. Raises ValueError for anything else."""
    try:
        found = json.loads(text)
        if not isinstance(found, list):
            raise TypeError("it must be a list")
        return [_fault(**each) for each in found]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"this is not a plan: {error}; expected the line that a run prints after `plan:`") from None


def _fault(kind: str, victim: str, after_tokens: int = 0, after_s: float = 0.0) -> Fault:
    known = VICTIMS.get(Kind(kind), ("",))
    if victim not in known:
        raise ValueError(f"{kind} has victim {victim!r}, expected {' or '.join(map(repr, known))}")
    return Fault(Kind(kind), victim, int(after_tokens), float(after_s))


def plan_file(kinds: Collection[Kind]) -> Callable[[str], list[Fault]]:
    """Return what argparse calls with the name of a file: it reads a plan of these kinds, or says why it cannot."""

    def plan(name: str) -> list[Fault]:
        try:
            found = read(Path(name).read_text())
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if other := sorted({fault.kind.value for fault in found} - set(kinds)):
            what = f"{name} has {', '.join(other)}; expected faults that this benchmark can inject on this machine"
            raise argparse.ArgumentTypeError(what)
        return found

    return plan
