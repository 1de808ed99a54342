"""Everything at random for a while: a mixed load, and faults by a plan that is printed first and can be replayed.

    make soak                                         10 minutes
    python -m bench.soak --seed 7 --json
    python -m bench.soak --plan PLAN.json             the line that an earlier run printed after `plan:`
    python -m bench.soak --minutes 30 --calm-minutes 20 --pause-s 60        memory over a long time

Two routers on one port, two simulated workers that drain with `--drain migrate`, the KV manager and Redis run. Clients
send one request after the other: good ones, and among them some that are cancelled, that are refused, that are no
messages at all, and that come over HTTP. Meanwhile processes are killed (SIGKILL), drained (SIGTERM, also all in turn),
stopped for 2 s and for 20 s (SIGSTOP), or have no file descriptor or memory left; Redis is wiped and overwritten,
clients hang up and deadlines pass. The next fault waits until the suite is whole again. The seed determines plan and
requests; how they meet depends on the machine. Each token of a good request is compared with the one that must come. At
the end no block may be held. The exit status is 1 if anything was wrong.

The resident memory of every process is read once a second. Its slope is that of a straight line through the values of
the last `--calm-minutes`, in which no fault comes. The standard error is that of means over blocks of time, because
values that follow each other are not independent. A slope below two standard errors, or below 10 MiB an hour, counts as
flat. The rings of decisions and spans have 1 MiB, and the router remembers for ten minutes where it sent a block: a run
with fewer calm minutes than that shows this growth.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import psutil
from grpc import aio

from bench.attack import wire
from bench.attack.kinds import Target, outcome, posted, streamed, unary
from bench.attack.victim import Victim, victim
from bench.fault_injection.injection import Injector
from bench.fault_injection.plan import CLOCKS, WITHOUT_DISK, Fault, Form, Kind, form_of, read, scattered, written
from bench.fault_injection.streams import RETRY, Stream
from bench.faults import DRAIN_S, prompts
from bench.lib.harness import parser, progress, report
from bench.lib.slopes import Life, slope
from bench.serve import suite_flags
from common.rpc.server import open_channel
from gpuworker.simulated.tokens import SimulatedTokens, readable_ids
from quire.client import AsyncClient
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types
from router.text.checkpoint import read_checkpoint

DEMO: Final = Path("cli/demo_model/checkpoint")
WORKERS: Final = 2
MIB: Final = 1 << 20
_UNKNOWN: Final = -1.0
_SAMPLE_S: Final = 1.0
_CANCEL_AFTER_S: Final = 0.3
# Of twenty requests: what the rest of the load is made of.
_MIX: Final = ("cancelled", "bad", "broken", "over_http")
_EVERY: Final = 5
_CLIENTS_A_CHANNEL: Final = 8
_SMALL_RINGS: Final = {"QUIRE_DECISION_RING_BYTES": "1MiB", "QUIRE_SPAN_RING_BYTES": "1MiB"}
NOTES: Final = {
    "requests": "requests of all kinds",
    "streams": "good requests whose tokens were compared",
    "streams_broken": "of these, those that ended with an error",
    "tokens_differing": "tokens that were lost, repeated or wrong",
    "blocks_leaked": "blocks that were held when nothing ran any more",
    "faults_injected": "faults of the plan that came",
    "gap_p99_s": "longest pause of a stream between two tokens, 99th percentile",
    "rss_slope_mib_per_hour": "growth of resident memory, MiB an hour, the largest of all processes",
    "rss_slope_se": "its standard error; -1: the run was too short for one",
}


class Load:
    """Clients of one suite; `became` counts the ends of their requests."""

    def __init__(self, suite: Victim, channel: aio.Channel, clients: Sequence[AsyncClient], seed: int) -> None:
        """`channel` is for requests whose end does not count: it does not try again."""
        self._target = Target(channel, suite.host, suite.grpc_port, suite.http_port, random.Random(seed))
        self._clients, self._rng = clients, random.Random(f"soak/{seed}")
        checkpoint = read_checkpoint(DEMO)
        self._tokens = SimulatedTokens(readable_ids(DEMO, checkpoint.vocab_size, checkpoint.eos_token_ids))
        self._numbers = itertools.count()
        self.became: Counter[str] = Counter()
        self.streams = self.broken = self.differing = 0
        self.gaps: list[float] = []

    async def client(self, number: int, until: float) -> None:
        """Send one request after the other."""
        kinds: dict[str, Callable[[], Coroutine[object, object, str]]] = {
            "cancelled": self._cancelled,
            "bad": self._bad,
            "broken": self._broken,
            "over_http": self._over_http,
        }
        while time.monotonic() < until:
            turn = next(self._numbers)
            if turn % _EVERY:
                await self._good(self._clients[number // _CLIENTS_A_CHANNEL])
                continue
            kind = _MIX[turn // _EVERY % len(_MIX)]
            ended = await outcome(lambda _, kind=kind: kinds[kind](), self._target)  # type: ignore[misc]
            self.became[f"{kind} {ended}"] += 1

    async def _good(self, client: AsyncClient) -> None:
        """Read a stream to its end, over whatever router and worker, and compare it."""
        (prompt,), count = prompts(self._rng, 1), self._rng.randrange(1, 400)
        prompt = [40 + self._rng.randrange(20)] * 48 + prompt
        stream = Stream(self._rng.randrange(1 << 30), prompt)
        await stream.run(client, count)
        self.streams += 1
        self.became["good broken" if stream.broken else "good OK"] += 1
        if stream.broken:
            self.broken += 1
            print(f"  a stream broke after {len(stream.tokens)} of {count} tokens: {stream.broken}", flush=True)
            return
        self.gaps.append(stream.longest_gap)
        if differing := stream.differing(self._tokens, count):
            self.differing += differing
            print(f"  {differing} of {count} tokens differ", flush=True)

    def _request(self, most: int) -> bytes:
        ids = [40 + self._rng.randrange(20)] * 48 + self._rng.choices(range(8, 200), k=self._rng.randrange(1, 64))
        sampling = types.SamplingParams(
            max_tokens=self._rng.randrange(1, most), ignore_eos=True, n=self._rng.choice((1, 1, 1, 3))
        )
        request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ids)), sampling=sampling)
        return request.SerializeToString()

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

    def __init__(self, suite: Victim, until: float) -> None:
        self._suite, self._until = suite, until
        self.lives: dict[str, dict[int, Life]] = defaultdict(dict)

    async def follow(self, faults: asyncio.Task[Counter[str]]) -> None:
        """Read the memory once a second, from the last fault on, and once at least."""
        await asyncio.wait({faults})
        began = time.monotonic()
        while True:
            for name, pid in self._suite.pids().items():
                with suppress(psutil.NoSuchProcess):
                    rss = psutil.Process(pid).memory_info().rss / MIB
                    self.lives[name].setdefault(pid, []).append((time.monotonic() - began, rss))
            if time.monotonic() >= self._until:
                return
            await asyncio.sleep(_SAMPLE_S)

    def figures(self) -> dict[str, float]:
        """Return the slope of each process in MiB an hour, with its standard error."""
        found: dict[str, float] = {}
        for name, lives in sorted(self.lives.items()):
            steepness, error = slope(list(lives.values()))
            found[f"rss_slope_mib_per_hour_{name}"] = 3600 * steepness
            found[f"rss_slope_se_{name}"] = 3600 * error if math.isfinite(error) else _UNKNOWN
            found[f"rss_mib_{name}"] = list(lives.values())[-1][-1][1]
        return found


async def disturb(injector: Injector, plan: Sequence[Fault], began: float, until: float) -> Counter[str]:
    """Inject the faults, each when it is due and the suite is whole; return how often each kind came."""
    came: Counter[str] = Counter()
    for fault in plan:
        await asyncio.sleep(max(0.0, began + fault.after_s - time.monotonic()))
        if time.monotonic() >= until:
            break
        print(f"  {time.monotonic() - began:6.1f} s  {fault.kind} {fault.victim}", flush=True)
        await injector.inject(fault, _none)
        await injector.whole()
        came[fault.kind.value] += 1
    return came


async def _none() -> None:
    """Wait for no stream: the load never ends."""


async def soak(args: argparse.Namespace) -> dict[str, float]:
    calm = min(60 * args.calm_minutes, 60 * args.minutes)
    disturbed = 60 * args.minutes - calm
    plan = read(args.plan.read_text()) if args.plan else scattered(args.seed, _KINDS, disturbed, args.pause_s)
    print(f"plan: {written(plan)}", flush=True)
    options: dict[str, object] = {"model": DEMO, "simulate": args.simulate, "kv_blocks": 2048, "drain": "migrate"}
    options |= {"trace_sample_ratio": args.trace_sample_ratio, "max_num_seqs": 64, "insecure": not args.tls}
    async with AsyncExitStack() as stack:
        running = victim(suite_flags(options), WORKERS, routers=2, drain_timeout=DRAIN_S)
        suite = await stack.enter_async_context(running)
        channel = await stack.enter_async_context(open_channel(f"{suite.host}:{suite.grpc_port}"))
        address, wanted = f"{suite.host}:{suite.grpc_port}", -(-args.clients // _CLIENTS_A_CHANNEL) + 1
        clients = [await stack.enter_async_context(AsyncClient(address, retry=RETRY, ca="")) for _ in range(wanted)]
        injector = Injector(suite, clients[-1], prompts(random.Random(0), 8), WORKERS)
        await injector.whole()
        began = time.monotonic()
        load, memory = Load(suite, channel, clients, args.seed), Memory(suite, began + disturbed + calm)
        async with asyncio.TaskGroup() as group:
            faults = group.create_task(disturb(injector, plan, began, began + disturbed))
            group.create_task(memory.follow(faults))
            group.create_task(_say(load, began + disturbed + calm))
            for number in range(args.clients):
                group.create_task(load.client(number, began + disturbed + calm))
        leaked = await injector.leaked()
        for ended, count in sorted(load.became.items()):
            print(f"  {ended}: {count}")
        return _figures(load, faults.result(), leaked, memory.figures())


async def _say(load: Load, until: float) -> None:
    while (left := until - time.monotonic()) > 0:
        progress(f"{load.became.total()} requests, {left / 60:.1f} minutes left")
        await asyncio.sleep(min(left, 5.0))


def _figures(load: Load, faults: Counter[str], leaked: int, memory: Mapping[str, float]) -> dict[str, float]:
    """Return the figures, those of the memory first of the process that grows most."""
    found = {
        "requests": load.became.total(),
        "streams": load.streams,
        "streams_broken": load.broken,
        "tokens_differing": load.differing,
        "blocks_leaked": leaked,
        "faults_injected": faults.total(),
        "gap_p99_s": sorted(load.gaps)[int(0.99 * len(load.gaps))] if load.gaps else _UNKNOWN,
    }
    name = max((name for name in memory if "_per_hour_" in name), key=lambda each: memory[each], default="")
    if name:
        process = name.removeprefix("rss_slope_mib_per_hour_")
        found["rss_slope_mib_per_hour"] = memory[name]
        found["rss_slope_se"] = memory[f"rss_slope_se_{process}"]
    return found | {f"faults_{kind}": count for kind, count in sorted(faults.items())} | dict(memory)


# Those of `bench.faults` that need no suite of another form.
# Clocks and disks need preparation. A router without memory may end some streams with that reason.
_LEFT_OUT: Final = {Kind.NONE, Kind.ROUTER_WITHOUT_MEMORY} | CLOCKS | WITHOUT_DISK
_KINDS: Final = tuple(each for each in Kind if form_of(each) is Form.WHOLE and each not in _LEFT_OUT)


def flags() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--minutes", type=float, default=10.0, help="of the whole run")
    made.add_argument("--calm-minutes", type=float, default=3.0, help="at the end, without faults: memory counts there")
    made.add_argument("--pause-s", type=float, default=5.0, help="mean seconds from one fault of the plan to the next")
    made.add_argument("--clients", type=int, default=24, help="requests at once")
    made.add_argument("--seed", type=int, default=0, help="of the plan and of the requests")
    made.add_argument("--plan", type=Path, metavar="FILE", help="a plan that an earlier run printed")
    made.add_argument("--simulate", default="base=8ms,decode=4us,prefill=2us", help="what a simulated step costs")
    made.add_argument("--tls", action="store_true", help="TLS between the services, as `quire serve` has it")
    made.add_argument("--trace-sample-ratio", type=float, default=1.0, help="share of the requests that are traced")
    return made


def main() -> int:
    args = flags().parse_args()
    os.environ.update(_SMALL_RINGS)
    found = asyncio.run(soak(args))  # not uvloop: see bench.faults
    notes = {name: "of this process" for name in found if name.startswith("rss_")} | NOTES
    report("soak", found, notes, args.json)
    return int(any(found[name] for name in ("streams_broken", "tokens_differing", "blocks_leaked")))


if __name__ == "__main__":
    sys.exit(main())
