"""Memory over a long mixed load: good requests, cancelled ones, bad ones, and restarts of services.

    python -m bench.soak --json                       30 minutes
    python -m bench.soak --minutes 5 --restart-s 60

A suite of real processes with simulated workers runs. The resident memory of every process is read once a second. Its
slope is that of a straight line through all values after `--warm-minutes`. The line has one intercept for each life
of a process: a restarted process begins anew, and its first `--settle-s` do not count. The standard error is that of
means over blocks of time, because values that follow each other are not independent. A slope below two standard
errors, or below 10 MiB an hour, counts as flat. The rings of decisions and spans have 1 MiB, and the router
remembers for ten minutes where it sent a block: both are full before memory counts. So is what a restarted manager
remembers of evicted blocks, four for each block: the pools are small.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil
import uvloop
from grpc import aio

from bench.attack import wire
from bench.attack.kinds import Target, outcome, posted, streamed, unary
from bench.attack.victim import Victim, victim
from bench.lib.harness import parser, progress, report
from bench.lib.slopes import Life, slope
from bench.serve import suite_flags
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types

DEMO: Final = Path("cli/demo_model/checkpoint")
MIB: Final = 1 << 20
_UNKNOWN: Final = -1.0
_SAMPLE_S: Final = 1.0
_PATIENCE_S: Final = 120.0
_CANCEL_AFTER_S: Final = 0.3
# Of twenty requests: what the rest of the load is made of.
_MIX: Final = ("cancelled", "bad", "broken", "over_http")
_EVERY: Final = 5
_SMALL_RINGS: Final = {"QUIRE_DECISION_RING_BYTES": "1MiB", "QUIRE_SPAN_RING_BYTES": "1MiB"}
NOTES: Final = {
    "rss_slope_mib_per_hour": "growth of resident memory, MiB an hour, the largest of all processes",
    "rss_slope_se": "its standard error; -1: the run was too short for one",
    "requests": "requests of all kinds",
    "failed": "good requests that did not end well",
    "restarts": "processes that were killed and started again",
}


class Load:
    """Clients of one suite; `became` counts the ends of their requests."""

    def __init__(self, suite: Victim, channel: aio.Channel, seed: int) -> None:
        self._target = Target(channel, suite.host, suite.grpc_port, suite.http_port, random.Random(seed))
        self._rng = random.Random(f"soak/{seed}")
        self._numbers = itertools.count()
        self.became: Counter[str] = Counter()

    async def client(self, until: float) -> None:
        """Send one request after the other."""
        kinds: dict[str, Callable[[], Coroutine[object, object, str]]] = {
            "good": self._good,
            "cancelled": self._cancelled,
            "bad": self._bad,
            "broken": self._broken,
            "over_http": self._over_http,
        }
        while time.monotonic() < until:
            number = next(self._numbers)
            kind = _MIX[number // _EVERY % len(_MIX)] if number % _EVERY == 0 else "good"
            ended = await outcome(lambda _, kind=kind: kinds[kind](), self._target)  # type: ignore[misc]
            self.became[f"{kind} {ended}"] += 1

    def _request(self, most: int = 60) -> bytes:
        """Return a request of which some share a prefix."""
        shared = self._rng.randrange(20)
        ids = [40 + shared] * 48 + self._rng.choices(range(8, 200), k=self._rng.randrange(1, 64))
        sampling = types.SamplingParams(
            max_tokens=self._rng.randrange(1, most), ignore_eos=True, n=self._rng.choice((1, 1, 1, 3))
        )
        request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ids)), sampling=sampling)
        return request.SerializeToString()

    async def _good(self) -> str:
        await streamed(self._target, self._request(), _PATIENCE_S)
        return "OK"

    async def _cancelled(self) -> str:
        await streamed(self._target, self._request(2000), _CANCEL_AFTER_S)
        return "OK"

    async def _bad(self) -> str:
        """Send a request that is refused, with many mistakes."""
        ids = self._rng.choices(range(1 << 20, 1 << 30), k=200)
        sampling = types.SamplingParams(temperature=-1, top_p=7, n=1000)
        request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ids)), sampling=sampling)
        await streamed(self._target, request.SerializeToString())
        return "OK"

    async def _broken(self) -> str:
        await unary(self._target, "/quire.inference.v1.InferenceService/GenerateUnary", wire.garbage(self._rng))
        return "OK"

    async def _over_http(self) -> str:
        body = b'{"prompt": "Once upon a time", "max_tokens": %d, "stream": true}' % self._rng.randrange(1, 40)
        return await posted(self._target, "/v1/completions", body)


class Memory:
    """The resident memory of all processes of a suite over time."""

    def __init__(self, suite: Victim, until: float, settle: float) -> None:
        """`settle`: seconds at the beginning of a restarted process that do not count."""
        self._suite, self._until, self._settle = suite, until, settle
        self.lives: dict[str, dict[int, Life]] = defaultdict(dict)

    async def follow(self, since: float) -> None:
        """Read the memory once a second, from `since` on."""
        await asyncio.sleep(max(0.0, since - time.monotonic()))
        while time.monotonic() < self._until:
            for name, pid in self._suite.pids().items():
                try:
                    rss = psutil.Process(pid).memory_info().rss / MIB
                except psutil.NoSuchProcess:
                    continue
                if rss:  # a process that was killed, and not waited for yet, has none
                    self.lives[name].setdefault(pid, []).append((time.monotonic() - since, rss))
            await asyncio.sleep(_SAMPLE_S)

    def figures(self) -> dict[str, float]:
        """Return the slope of each process in MiB an hour, with its standard error."""
        found: dict[str, float] = {}
        for name, lives in sorted(self.lives.items()):
            first, *others = lives.values()
            steepness, error = slope([first, *([*_settled(life, self._settle)] for life in others)])
            found[f"rss_slope_mib_per_hour_{name}"] = 3600 * steepness
            found[f"rss_slope_se_{name}"] = 3600 * error if math.isfinite(error) else _UNKNOWN
            found[f"rss_mib_{name}"] = list(lives.values())[-1][-1][1]
        return found


def _settled(life: Life, settle: float) -> Iterator[tuple[float, float]]:
    """Yield what a process has after its first seconds."""
    return (pair for pair in life if pair[0] - life[0][0] >= settle)


async def restart(suite: Victim, names: Sequence[str], every: float, until: float) -> int:
    """Kill one process after the other (SIGKILL), one every so many seconds; the suite starts it again."""
    killed = 0
    for name in itertools.cycle(names):
        if time.monotonic() + every >= until:
            return killed
        await asyncio.sleep(every)
        if (pid := suite.pids().get(name)) is not None:
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


async def soak(args: argparse.Namespace) -> dict[str, float]:
    options: dict[str, object] = {"model": args.model, "simulate": args.simulate, "kv_blocks": 512}
    options |= {"trace_sample_ratio": args.trace_sample_ratio, "max_num_seqs": 64, "insecure": not args.tls}
    async with victim(suite_flags(options), 2) as suite, open_channel(f"{suite.host}:{suite.grpc_port}") as channel:
        began = time.monotonic()
        until = began + 60 * args.minutes
        load, memory = Load(suite, channel, args.seed), Memory(suite, until, args.settle_s)
        async with asyncio.TaskGroup() as group:
            restarts = group.create_task(restart(suite, args.restart, args.restart_s, until))
            group.create_task(memory.follow(began + 60 * args.warm_minutes))
            group.create_task(_say(load, until))
            for _ in range(args.clients):
                group.create_task(load.client(until))
        for ended, count in sorted(load.became.items()):
            print(f"  {ended}: {count}")
        return _figures(memory.figures(), load.became, restarts.result())


async def _say(load: Load, until: float) -> None:
    while (left := until - time.monotonic()) > 0:
        progress(f"{load.became.total()} requests, {left / 60:.1f} minutes left")
        await asyncio.sleep(min(left, 5.0))


def _figures(memory: dict[str, float], became: Counter[str], restarts: int) -> dict[str, float]:
    """Return the figures, first those of the process that grows most."""
    name = max((name for name in memory if "_per_hour_" in name), key=lambda each: memory[each])
    process = name.removeprefix("rss_slope_mib_per_hour_")
    failed = sum(count for ended, count in became.items() if ended.startswith("good ") and ended != "good OK")
    return {
        "rss_slope_mib_per_hour": memory[name],
        "rss_slope_se": memory[f"rss_slope_se_{process}"],
        "requests": became.total(),
        "failed": failed,
        "restarts": restarts,
    } | memory


def flags() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--warm-minutes", type=float, default=12.0, help="minutes before memory counts")
    made.add_argument("--clients", type=int, default=24, help="requests at once")
    made.add_argument("--restart", nargs="*", default=["worker-1", "kvmanager"], help="processes to kill, by turns")
    made.add_argument("--restart-s", type=float, default=300.0, help="seconds between two kills")
    made.add_argument("--settle-s", type=float, default=120.0, help="seconds after a restart that do not count")
    made.add_argument("--model", type=Path, default=DEMO, help="folder of a checkpoint; unset: the demo model")
    made.add_argument("--simulate", default="base=8ms,decode=4us,prefill=2us", help="what a simulated step costs")
    made.add_argument("--tls", action="store_true", help="TLS between the services, as `quire serve` has it")
    made.add_argument("--trace-sample-ratio", type=float, default=1.0, help="share of the requests that are traced")
    made.add_argument("--seed", type=int, default=0)
    return made


def main() -> None:
    args = flags().parse_args()
    os.environ.update(_SMALL_RINGS)
    found = uvloop.run(soak(args))
    notes = {name: "of this process" for name in found if name.startswith("rss_")} | NOTES
    report("soak", found, notes, args.json)


if __name__ == "__main__":
    main()
