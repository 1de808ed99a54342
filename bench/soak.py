"""Everything at random for a while: a mixed load, and faults by a plan that is printed first and can be replayed.

    make soak                                         10 minutes with faults, then 20 without: memory counts there
    python -m bench.soak --seed 7 --json
    python -m bench.soak --prefill                    one worker computes prompts for two, and is killed amid fetches
    python -m bench.soak --prefill --tiny qwen3 --kinds fetch_source_killed fetch_target_stopped      with real workers
    python -m bench.soak --plan PLAN.json             the line that an earlier run printed after `plan:`
    python -m bench.soak --minutes 10 --calm-minutes 3 --settled-minutes 1        a short one, which says less of memory

Two routers on one port, two simulated workers that drain with `--drain migrate`, the KV manager and Redis run. Clients
send one request after the other: good ones, and among them all kinds of others (`mixed_load.py`). Meanwhile
processes are killed (SIGKILL), drained (SIGTERM, also all in turn), stopped for 2 s and for 20 s (SIGSTOP), or have no
file descriptor or memory left; Redis is wiped and overwritten, clients hang up and deadlines pass. The next fault waits
until the suite is whole again. The seed determines plan and requests; how they meet depends on the machine. Each token
of a good request, and the text of each message, is compared with the one that must come. Where layers keep states
(`--layers`), a simulated worker checks what it reads, too. With `--tiny` workers are real, in float32: before anything
fails each prompt is run once, and greedy tokens are compared with those. At the end no block may be held.

Memory is judged in the calm part. Every `--rest-s` the clients pause until nothing runs, and the memory that each
process shares with no other (USS) is read. Values count from the age of `--settled-minutes` on: the router remembers
for ten minutes where it sent a block, and its page shows ten minutes. Rings of decisions and spans have 1 MiB. The
slope is Theil's, with Sen's 95 % bounds, over time and over requests. `memory_flat` is 1 if for all processes the upper
bounds are below --most-mib-per-hour and --most-bytes-per-request; 0 if the lower bound of one is above; -1 if the
values are too few, or scatter too much, to say. An entry of a dict that each request leaves has 100 bytes and more.

The exit status is 1 if anything was wrong, or memory grows. A fault that cannot be injected, or after which the suite
is not whole again, ends the run with one line and without figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

import httpx

from bench.attack.victim import Victim, victim
from bench.fault_injection.failure import InjectionFailed, failing_alone, injecting
from bench.fault_injection.injection import Injector
from bench.fault_injection.mixed_load import CLIENTS_A_CHANNEL, MixedLoad
from bench.fault_injection.plan import (
    CLOCKS,
    WITHOUT_DISK,
    Fault,
    Form,
    Kind,
    form_of,
    plan_file,
    scattered,
    written,
)
from bench.fault_injection.streams import RETRY, RecordedReference, prompts
from bench.faults import DRAIN_S, PREFILL_STEPS, PREFILL_SUITE, PREFILL_SUITE_WORKERS, Injects
from bench.lib.demo_layers import add_layers_flag, add_tier_flags, demo_with_layers, tier_options
from bench.lib.harness import parser, progress, report
from bench.lib.memory_watch import FLAT_UP_TO, GROWS, Bounds, MemoryWatch
from bench.lib.tiny_models import FAMILIES, tiny_checkpoint, tiny_flags
from bench.serve import suite_flags
from cli.demo_model import CHECKPOINT
from common.rpc.server import open_channel
from quire.client import AsyncClient

WORKERS: Final = 2
_UNKNOWN: Final = -1.0
# How long requests may take to end before memory is read, and how long what they leave behind may take.
_REST_PATIENCE_S: Final = 120.0
_SETTLE_S: Final = 2.0
# Of real workers: their prompts, how much longer these are than those of simulated ones, and the tokens of each.
_RECORDED: Final = 48
_SCALE: Final = 5
_RECORDED_TOKENS: Final = 64
_SMALL_RINGS: Final = {"QUIRE_DECISION_RING_BYTES": "1MiB", "QUIRE_SPAN_RING_BYTES": "1MiB"}
NOTES: Final = {
    "requests": "requests of all kinds",
    "streams": "good requests whose tokens were compared",
    "streams_broken": "of these, those that ended with an error",
    "messages": "answers of /v1/messages whose text was compared, as far as it came",
    "tokens_cached": "tokens of the prompts of good requests that were not computed",
    "tokens_differing": "tokens that were lost, repeated or wrong",
    "blocks_leaked": "blocks that were held when nothing ran any more",
    "faults_injected": "faults of the plan that came",
    "faults_amid_fetches": "of these, those that came while a worker fetched blocks",
    "gap_p99_s": "longest pause of a stream between two tokens, 99th percentile",
    "memory_flat": "1: the memory of every process is flat; 0: that of some process grows; -1: the run does not say",
    "uss_mib_per_hour_high": "95 % upper bound of the growth, MiB an hour, the largest of all processes",
    "uss_bytes_per_request_high": "the same in bytes for each request of the suite",
}


# By the beginning of a figure's name; of several the last one counts.
_OF_PROCESSES: Final = {
    "uss_mib_": "memory that it shares with no other process, MiB, at the end",
    "memory_flat_": "the same of this process",
    "memory_values_": "values that count",
    "uss_mib_per_hour_": "growth of its memory (USS), MiB an hour",
    "uss_bytes_per_request_": "growth of its memory, bytes for each request of the suite",
    "fds_": "file descriptors at the end",
    "fds_more_": "file descriptors more than at its first value that counts",
    "threads_": "threads at the end",
    "threads_more_": "threads more than then",
}


async def follow(
    faults: asyncio.Task[Counter[str]], load: MixedLoad, memory: MemoryWatch, suite: Victim, rest_s: float, until: float
) -> None:
    """Look at the memory whenever the suite rests, from the last fault on; once at least."""
    await asyncio.wait({faults})
    began = time.monotonic()
    while True:
        async with load.at_rest(_REST_PATIENCE_S) as rests:
            if rests:
                await asyncio.sleep(_SETTLE_S)
                memory.look(suite.pids(), time.monotonic() - began, load.became.total())
            else:
                print(f"  requests still ran after {_REST_PATIENCE_S:g} s; memory was not read", flush=True)
        if time.monotonic() >= until:
            return
        await asyncio.sleep(min(rest_s, max(0.0, until - time.monotonic())))


async def disturb(injector: Injects, plan: Sequence[Fault], began: float, until: float, seed: int) -> Counter[str]:
    """Inject the faults, each when it is due and the suite is whole; return how often each kind came.

    Raises InjectionFailed, which names the fault and its second.
    """
    came: Counter[str] = Counter()
    for number, fault in enumerate(plan, start=1):
        await asyncio.sleep(max(0.0, began + fault.after_s - time.monotonic()))
        if time.monotonic() >= until:
            break
        second = time.monotonic() - began
        print(f"  {second:6.1f} s  {fault.kind} {fault.victim}", flush=True)
        with injecting(f"fault {number} of {len(plan)}, {fault} at {second:.1f} s (seed {seed}),"):
            await injector.inject(fault, _none)
            await injector.whole()
        came[fault.kind.value] += 1
    return came


async def _none() -> None:
    """Wait for no stream: the load never ends."""


async def soak(args: argparse.Namespace) -> dict[str, float]:
    calm = min(60 * args.calm_minutes, 60 * args.minutes)
    disturbed = 60 * args.minutes - calm
    kinds = [Kind(each) for each in args.kinds] if args.kinds else (*_KINDS, *_OF_PREFILL) if args.prefill else _KINDS
    plan = scattered(args.seed, kinds, disturbed, args.pause_s) if args.plan is None else args.plan
    args.prefill |= any(fault.kind in _OF_PREFILL for fault in plan)
    workers = PREFILL_SUITE_WORKERS if args.prefill else WORKERS
    print(f"plan: {written(plan)}", flush=True)
    async with AsyncExitStack() as stack:
        model = stack.enter_context(tiny_checkpoint(args.tiny) if args.tiny else demo_with_layers(args.layers))
        options: dict[str, object] = {"model": model, "drain": "migrate"}
        options |= tiny_flags(args.tiny) if args.tiny else {"simulate": args.simulate}
        options |= {"kv_blocks": args.kv_blocks} | stack.enter_context(tier_options(args))
        options |= {"trace_sample_ratio": args.trace_sample_ratio, "max_num_seqs": 64, "insecure": not args.tls}
        if args.prefill:
            options |= PREFILL_SUITE | ({} if args.tiny else {"simulate": PREFILL_STEPS})
        running = victim(suite_flags(options), workers, routers=2, drain_timeout=DRAIN_S)
        suite = await stack.enter_async_context(running)
        channel = await stack.enter_async_context(open_channel(f"{suite.host}:{suite.grpc_port}"))
        address, wanted = f"{suite.host}:{suite.grpc_port}", -(-args.clients // CLIENTS_A_CHANNEL) + 1
        clients = [await stack.enter_async_context(AsyncClient(address, retry=RETRY, ca="")) for _ in range(wanted)]
        http = await stack.enter_async_context(_http_client(suite))
        injector = Injector(suite, clients[-1], prompts(random.Random(0), 8), workers)
        with injecting(f"the suite before fault 1 (seed {args.seed})"):
            await injector.whole()
        recorded = await _undisturbed(clients, args.seed) if args.tiny else None
        began = time.monotonic()
        load = MixedLoad(suite, channel, clients, http, CHECKPOINT, args.seed, recorded)
        bounds = Bounds(args.most_mib_per_hour, args.most_bytes_per_request)
        memory = MemoryWatch(60 * args.settled_minutes, bounds)
        with failing_alone():
            async with asyncio.TaskGroup() as group:
                faults = group.create_task(disturb(injector, plan, began, began + disturbed, args.seed))
                group.create_task(follow(faults, load, memory, suite, args.rest_s, began + disturbed + calm))
                group.create_task(_say(load, began + disturbed + calm))
                for number in range(args.clients):
                    group.create_task(load.client(number, began + disturbed + calm))
        with injecting(f"the suite at the end (seed {args.seed})"):
            leaked = await injector.leaked()
        for ended, count in sorted(load.became.items()):
            print(f"  {ended}: {count}")
        found = _figures(load, faults.result(), leaked, memory.figures())
        return found | ({"faults_amid_fetches": injector.amid_fetches} if args.prefill else {})


async def _undisturbed(clients: Sequence[AsyncClient], seed: int) -> RecordedReference:
    """Return the tokens of each prompt while nothing fails and little else runs."""
    found = RecordedReference(prompts(random.Random(f"recorded/{seed}"), _RECORDED, _SCALE), _RECORDED_TOKENS)
    with injecting(f"a stream before fault 1 (seed {seed})"):
        await found.record(clients)
    return found


def _http_client(suite: Victim) -> httpx.AsyncClient:
    """Return a client that opens a connection for each request, so that both routers get some, and waits long."""
    once = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(
        base_url=f"http://{suite.host}:{suite.http_port}", limits=once, timeout=None, trust_env=False
    )


async def _say(load: MixedLoad, until: float) -> None:
    while (left := until - time.monotonic()) > 0:
        progress(f"{load.became.total()} requests, {left / 60:.1f} minutes left")
        await asyncio.sleep(min(left, 5.0))


def _figures(load: MixedLoad, faults: Counter[str], leaked: int, memory: Mapping[str, float]) -> dict[str, float]:
    """Return the figures; a bound that some process lacks, all together lack."""
    found = {
        "requests": load.became.total(),
        "streams": load.streams,
        "streams_broken": load.broken,
        "messages": load.messages.compared,
        "tokens_cached": load.cached,
        "tokens_differing": load.differing + load.messages.differing,
        "blocks_leaked": leaked,
        "faults_injected": faults.total(),
        "gap_p99_s": sorted(load.gaps)[int(0.99 * len(load.gaps))] if load.gaps else _UNKNOWN,
        "memory_flat": memory["memory_flat"],
    }
    processes = sum(name.startswith("memory_flat_") for name in memory)
    for what in ("uss_mib_per_hour_high", "uss_bytes_per_request_high"):
        highest = [value for name, value in memory.items() if name.startswith(f"{what}_")]
        if len(highest) == processes:
            found[what] = max(highest)
    return found | {f"faults_{kind}": count for kind, count in sorted(faults.items())} | dict(memory)


# Those of `bench.faults` that need no suite of another form.
# Clocks and disks need preparation. A router without memory may end some streams with that reason.
_PREPARED: Final = CLOCKS | WITHOUT_DISK
_OF_PREFILL: Final = tuple(each for each in Kind if form_of(each) is Form.PREFILL)
_POSSIBLE: Final = tuple(each for each in Kind if form_of(each) in (Form.WHOLE, Form.PREFILL) and each not in _PREPARED)
_KINDS: Final = tuple(each for each in _POSSIBLE if each not in {Kind.NONE, Kind.ROUTER_WITHOUT_MEMORY, *_OF_PREFILL})


def flags() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--minutes", type=float, default=30.0, help="of the whole run")
    made.add_argument("--calm-minutes", type=float, default=20.0, help="at its end, without faults, for the memory")
    made.add_argument("--settled-minutes", type=float, default=11.0, help="age from which a process's memory counts")
    made.add_argument("--rest-s", type=float, default=10.0, help="seconds of load between two looks at the memory")
    made.add_argument(
        "--most-mib-per-hour", type=float, default=FLAT_UP_TO.uss_mib_per_hour, help="growth that is flat"
    )
    made.add_argument("--most-bytes-per-request", type=float, default=FLAT_UP_TO.uss_bytes_per_request, help="the same")
    made.add_argument("--pause-s", type=float, default=5.0, help="mean seconds from one fault of the plan to the next")
    made.add_argument("--clients", type=int, default=24, help="requests at once")
    made.add_argument("--seed", type=int, default=0, help="of the plan and of the requests")
    made.add_argument("--plan", type=plan_file(_POSSIBLE), metavar="FILE", help="a plan that an earlier run printed")
    kinds = [each.value for each in _POSSIBLE]
    made.add_argument("--kinds", nargs="+", choices=kinds, metavar="KIND", help="the faults of the plan; unset: all")
    what = "real workers of a small model of this family with random weights; with --prefill one without states (qwen3)"
    made.add_argument("--tiny", choices=FAMILIES, help=what)
    made.add_argument("--simulate", default="base=8ms,decode=4us,prefill=2us", help="what a simulated step costs")
    add_layers_flag(made)
    add_tier_flags(made)
    what = "one of three workers computes prompts for the others, which fetch them: faults come amid fetches too"
    made.add_argument("--prefill", action="store_true", help=what)
    made.add_argument("--kv-blocks", type=int, default=2048, help="blocks or pages of each worker")
    made.add_argument("--tls", action="store_true", help="TLS between the services, as `quire serve` has it")
    made.add_argument("--trace-sample-ratio", type=float, default=1.0, help="share of the requests that are traced")
    return made


def main() -> int:
    args = flags().parse_args()
    os.environ.update(_SMALL_RINGS)
    try:
        found = asyncio.run(soak(args))  # not uvloop: see bench.faults
    except InjectionFailed as failed:
        print(failed.line("soak"), file=sys.stderr)
        return 1
    notes = {
        name: words for prefix, words in _OF_PROCESSES.items() for name in found if name.startswith(prefix)
    } | NOTES
    report("soak", found, notes, args.json)
    wrong = any(found[name] for name in ("streams_broken", "tokens_differing", "blocks_leaked"))
    return int(wrong or found["memory_flat"] == GROWS)


if __name__ == "__main__":
    sys.exit(main())
