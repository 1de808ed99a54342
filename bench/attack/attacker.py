"""A process that attacks: reads a plan from its standard input, sends the hostile requests, prints what became of them.

`python -m bench.attack.attacker` is a process of its own, so that making hostile requests slows no innocent client.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass

import uvloop
from grpc import aio

from bench.attack.kinds import Target, of_names, outcome
from common.rpc.server import open_channel

LATE = "not sent"


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """`count` hostile requests of these kinds (all of them for none) by turns, `at_once` at a time, for `seconds`.

    Floods come from the address `source`, None for any.
    """

    host: str
    grpc_port: int
    http_port: int
    count: int
    seconds: float
    at_once: int = 16
    seed: int = 0
    kinds: tuple[str, ...] = ()
    key: str = ""
    source: str | None = None


async def attack(plan: AttackPlan) -> dict[str, int]:
    """Send the plan's requests; return how often each kind had each outcome, by `KIND OUTCOME`."""
    found: Counter[str] = Counter()
    kinds = of_names(plan.kinds)
    turns = iter(list(itertools.islice(itertools.cycle(kinds), plan.count)))
    until = time.monotonic() + plan.seconds

    async def attacker(index: int, channel: aio.Channel) -> None:
        rng = random.Random(f"{plan.seed}/{index}")
        target = Target(channel, plan.host, plan.grpc_port, plan.http_port, rng, key=plan.key, source=plan.source)
        for name in turns:
            if time.monotonic() > until:
                found[f"{name} {LATE}"] += 1
            else:
                found[f"{name} {await outcome(kinds[name], target)}"] += 1

    async with open_channel(f"{plan.host}:{plan.grpc_port}") as channel:
        await asyncio.gather(*(attacker(index, channel) for index in range(plan.at_once)))
    return dict(found)


def main() -> None:
    """Carry out one plan."""
    plan = AttackPlan(**json.loads(sys.stdin.readline()))
    print(json.dumps(uvloop.run(attack(plan))), flush=True)


def words(plan: AttackPlan) -> str:
    """Return the plan as the line that the process reads."""
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    main()
