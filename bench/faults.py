"""Injects each failure of ARCHITECTURE.md's table that comes from outside, under streams of a suite of processes.

    python -m bench.faults --json                     each failure once, under 64 streams
    python -m bench.faults --seed 7 --rounds 3
    python -m bench.faults --replay PLAN.json         the line that an earlier run printed after `plan:`

Two routers on one port, two simulated workers, the KV manager and Redis run. For each failure 64 streams start. When
all have tokens, and as many as the plan says, the failure comes; streams of one that lasts have three times the tokens.
A killed process (SIGKILL) is started again by the suite, as is a drained one (SIGTERM); workers drain with `--drain
migrate`. All are drained one after the other, too. A stopped one (SIGSTOP) goes on after 2 s, a frozen one after 20 s.
Redis is wiped, or all its values are overwritten. For 2 s a process has no file descriptor left, and 64 connections
want one; or it gets no memory, and calls of 4 MiB want some; or it can write to no file. Its wall clock jumps an hour
ahead, then an hour back (Linux with a C compiler). 16 further clients hang up, the deadline of 16 passes, and an
operator aborts 16.

Four more suites run. In one with `--manager-patience 3` the manager stands still until every stream has ended, with
its tokens or with that reason. In one with two KV managers the leader is killed; or it is stopped until the other one
leads, and goes on beside it. In one with a worker that computes prompts for two others, that worker fails; or it, the
one that fetches or the manager is killed while blocks are fetched. In the last one, services run on hosts of their own
(network namespaces: Linux, root, iproute2, iptables). There packets are lost or late, hosts cannot reach each other, or
a worker moves to another address.

A simulated worker's token is determined by seed and position, so each lost, repeated or wrong token is seen. Where
layers keep states (`--layers`), a simulated worker checks what it reads, and a sequence that reads what is not its own
gets other tokens. With `--tiny` workers are real, and each token is compared with transformers'. A gap is the longest
pause of one stream, from its first token to its last. `none` is a round without a failure. Failures inside a process (a
step that fails, a task that ends) cannot be injected from outside. tests/structure/test_failures.py names the tests
that have them. `bench.soak` mixes most of this at random.

The exit status is 1 if anything was wrong. A failure that cannot be injected, or after which the suite is not whole
again, ends the run with one line and without figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from bench.attack.victim import victim
from bench.fault_injection.clocks import compiler, shiftable_clocks
from bench.fault_injection.failure import InjectionFailed, injecting
from bench.fault_injection.hosts.injection import HostsInjector
from bench.fault_injection.hosts.network import missing
from bench.fault_injection.hosts.suite import suite_of_hosts
from bench.fault_injection.injection import Ended, Injector
from bench.fault_injection.plan import (
    AMID_FETCHES,
    CLOCKS,
    LASTING,
    NETWORK,
    WITHOUT_DISK,
    Fault,
    Form,
    Kind,
    form_of,
    plan_file,
    planned,
    written,
)
from bench.fault_injection.streams import RETRY, Reference, SimulatedReference, Stream, prompts, until_tokens
from bench.lib.demo_layers import add_layers_flag, add_tier_flags, demo_with_layers, tier_options
from bench.lib.harness import end_with_json, parser, progress, report
from bench.lib.tiny_models import FAMILIES, TinyReference, tiny_checkpoint, tiny_flags
from bench.serve import suite_flags
from cli.demo_model import CHECKPOINT
from gpuworker.simulated.plane import simulated_tokens
from quire.client import AsyncClient

WORKERS: Final = 2
# Of a suite in which one of three workers computes prompts for the others. Fetching a block takes less than that.
PREFILL_SUITE: Final = {"prefill_workers": 1, "remote_prefill": "always", "host_memory": "64MiB"}
PREFILL_STEPS: Final = "base=8ms,decode=4us,prefill=500us"
PREFILL_SUITE_WORKERS: Final = 3
_STREAMS_A_CLIENT: Final = 8
_LONGER: Final = 3  # times the tokens, for the streams of a failure that lasts
_IMPATIENT_S: Final = 3.0
# A word of the errors with which streams may end, and the largest share of the streams that may: what they needed is
# gone for good, or they hit the limit themselves.
_REASONS: Final[Mapping[Kind, tuple[str, float]]] = {
    Kind.MANAGER_GONE: ("--manager-patience", 1.0),
    Kind.ROUTER_WITHOUT_MEMORY: ("memory", 0.25),
}
DRAIN_S: Final = 60.0  # longer than any stream: a router that drains ends what is left then
NOTES: Final = {
    "faults_injected": "failures; the round without one does not count",
    "streams": "streams that ran while something failed",
    "streams_broken": "streams that ended with an error",
    "tokens_cached": "tokens of prompts that were not computed",
    "tokens_differing": "tokens that were lost, repeated or wrong",
    "blocks_leaked": "blocks that were held when nothing ran any more",
    "streams_given_up": "streams that ended with the reason of --manager-patience or of a memory limit, tokens right",
    "gap_p50_s": "longest pause of a stream between two tokens, median",
    "gap_p99_s": "the same, 99th percentile",
}


@dataclass
class Found:
    """What the streams of one kind of failure showed."""

    faults: int = 0
    streams: int = 0
    broken: int = 0
    cached: int = 0
    differing: int = 0
    leaked: int = 0
    given_up: int = 0
    gaps: list[float] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.faults += other.faults
        self.streams += other.streams
        self.broken += other.broken
        self.cached += other.cached
        self.differing += other.differing
        self.leaked += other.leaked
        self.given_up += other.given_up
        self.gaps += other.gaps

    def figures(self) -> dict[str, float]:
        return {
            "faults_injected": self.faults,
            "streams": self.streams,
            "streams_broken": self.broken,
            "tokens_cached": self.cached,
            "tokens_differing": self.differing,
            "blocks_leaked": self.leaked,
            "streams_given_up": self.given_up,
            "gap_p50_s": statistics.median(self.gaps),
            "gap_p99_s": sorted(self.gaps)[min(len(self.gaps) - 1, int(0.99 * len(self.gaps)))],
        }


Kinds: TypeAlias = dict[str, Found]


class Injects(Protocol):
    """Lets something fail in a suite, and looks at the suite afterwards."""

    async def inject(self, fault: Fault, ended: Ended) -> None: ...

    async def whole(self) -> None: ...

    async def leaked(self) -> int: ...


class Rounds:
    """Runs the streams of one failure after the other."""

    def __init__(
        self, clients: Sequence[AsyncClient], injector: Injects, reference: Reference, args: argparse.Namespace
    ) -> None:
        self._clients, self._injector, self._reference, self._args = clients, injector, reference, args
        self._rng = random.Random(f"streams/{args.seed}")

    async def run(self, fault: Fault) -> Found:
        count = self._args.tokens * (_LONGER if fault.kind in LASTING else 1)
        streams = [Stream(self._rng.randrange(1 << 30), prompt) for prompt in prompts(self._rng, self._args.streams)]
        tasks = [
            asyncio.create_task(stream.run(self._clients[number // _STREAMS_A_CLIENT], count))
            for number, stream in enumerate(streams)
        ]

        async def ended() -> None:
            await asyncio.wait(tasks)

        try:
            if fault.kind not in AMID_FETCHES:
                await until_tokens(streams, fault.after_tokens, tasks)
            injected = not all(task.done() for task in tasks)
            await self._injector.inject(fault, ended)
            await ended()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._injector.whole()
        reason, share = _REASONS.get(fault.kind, ("", 0.0))
        given_up = [each for each in streams if reason and reason in each.broken.lower()]
        if len(given_up) > share * len(streams):
            given_up = []
        broken = [each for each in streams if each.broken and each not in given_up]
        for stream in broken:
            print(f"  {fault.kind}: a stream broke after {len(stream.tokens)} tokens: {stream.broken}")
        return Found(
            faults=int(injected and fault.kind is not Kind.NONE),
            streams=len(streams),
            broken=len(broken),
            cached=sum(each.cached for each in streams),
            differing=sum(each.wrong(self._reference) for each in given_up)
            + sum(each.differing(self._reference, count) for each in streams if not each.broken),
            leaked=await self._injector.leaked(),
            given_up=len(given_up),
            gaps=[stream.longest_gap for stream in streams if stream.tokens],
        )


Injection: TypeAlias = Callable[[AsyncClient], Injects]
# Faults by their places in the whole plan, from 1 on.
Part: TypeAlias = Mapping[int, Fault]


async def inject_all(
    address: str, injected: Injection, plan: Part, args: argparse.Namespace, reference: Reference
) -> Kinds:
    """Inject a part of the plan into the suite of which a router listens at `address`. Raises InjectionFailed."""
    async with AsyncExitStack() as stack:
        wanted = -(-args.streams // _STREAMS_A_CLIENT) + 1
        clients = [await stack.enter_async_context(AsyncClient(address, retry=RETRY, ca="")) for _ in range(wanted)]
        injector = injected(clients[-1])
        rounds, found = Rounds(clients, injector, reference, args), dict[str, Found]()
        with injecting(f"the suite before round {min(plan)} (seed {args.seed})"):
            await injector.whole()
        for number, fault in plan.items():
            progress(f"{number} of the plan: {fault}")
            began = time.monotonic()
            which = f"round {number} of the plan, {fault} after {fault.after_tokens} tokens"
            with injecting(f"{which} (seed {args.seed}),"):
                one = await rounds.run(fault)
            found.setdefault(fault.kind.value, Found()).add(one)
            print(f"  {time.monotonic() - began:6.1f} s  {fault.kind} {fault.victim}", flush=True)
        return found


async def measure(args: argparse.Namespace) -> Kinds:
    kinds = [Kind(name) for name in args.kinds]
    plan = planned(args.seed, kinds, args.rounds, args.tokens // 2) if args.replay is None else args.replay
    print(f"plan: {written(plan)}", flush=True)
    found: Kinds = {}
    for form in Form:
        if part := {number: fault for number, fault in enumerate(plan, 1) if form_of(fault.kind) is form}:
            found |= await (measure_hosts(part, args) if form is Form.HOSTS else measure_part(part, form, args))
    return found


async def measure_hosts(plan: Part, args: argparse.Namespace) -> Kinds:
    """Run the failures between hosts."""
    with tempfile.TemporaryDirectory(prefix="quire-hosts-") as folder:
        async with suite_of_hosts(Path(folder), args.simulate) as suite:
            return await inject_all(suite.router, lambda _: HostsInjector(suite), plan, args, simulated_reference())


def simulated_reference() -> Reference:
    """Return the tokens of simulated workers of the demo model, whatever its layers."""
    return SimulatedReference(simulated_tokens(CHECKPOINT))


async def measure_part(plan: Part, form: Form, args: argparse.Namespace) -> Kinds:
    """Run the failures of a suite of processes on one host."""
    async with AsyncExitStack() as stack:
        model = stack.enter_context(tiny_checkpoint(args.tiny) if args.tiny else demo_with_layers(args.layers))
        options: dict[str, object] = {"model": model, "kv_blocks": args.kv_blocks, "insecure": True}
        options |= tiny_flags(args.tiny) if args.tiny else {"simulate": args.simulate}
        options |= {"max_num_seqs": 128, "trace_sample_ratio": 0.0, "drain": "migrate"}
        options |= stack.enter_context(tier_options(args))
        workers = WORKERS
        if form is Form.PREFILL:
            options, workers = options | PREFILL_SUITE, PREFILL_SUITE_WORKERS
            options |= {} if args.tiny else {"simulate": PREFILL_STEPS}
        jump = any(fault.kind in CLOCKS for fault in plan.values())
        clocks = stack.enter_context(shiftable_clocks()) if jump else None
        if any(fault.kind in WITHOUT_DISK for fault in plan.values()):
            options["decision_log"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-decisions-"))
        if form is Form.IMPATIENT:
            stack.enter_context(_environment("QUIRE_MANAGER_PATIENCE", str(_IMPATIENT_S)))
        managers = 2 if form is Form.LED else 1
        running = victim(suite_flags(options), workers, routers=2, drain_timeout=DRAIN_S, managers=managers)
        suite = await stack.enter_async_context(running)

        def injected(client: AsyncClient) -> Injector:
            return Injector(suite, client, prompts(random.Random(0), 8), workers, clocks)

        reference = TinyReference(model) if args.tiny else simulated_reference()
        return await inject_all(f"{suite.host}:{suite.grpc_port}", injected, plan, args, reference)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Let what this process starts have a variable."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def possible() -> list[Kind]:
    """Return the kinds of failures that can be injected here.

    Clocks jump where there is a compiler of C. Hosts need root and iproute2.
    """
    without = (CLOCKS if compiler() is None else frozenset()) | (NETWORK if missing() else frozenset())
    return [each for each in Kind if each not in without]


def table(found: Mapping[str, Found]) -> None:
    """Print a line for each kind of failure."""
    print(f"{'':<21} streams  broken  differing  leaked  gap p50 s  gap p99 s")
    for kind, one in sorted(found.items()):
        shown = one.figures()
        counts = f"{one.streams:>7}  {one.broken:>6}  {one.differing:>9}  {one.leaked:>6}"
        print(f"{kind:<21} {counts}  {shown['gap_p50_s']:>9.3f}  {shown['gap_p99_s']:>9.3f}")


def flags() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--streams", type=int, default=64, help="streams at once")
    made.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    made.add_argument(
        "--kinds",
        nargs="+",
        default=[each.value for each in possible()],
        choices=[each.value for each in possible()],
    )
    made.add_argument("--rounds", type=int, default=1, help="times that each failure comes")
    made.add_argument("--seed", type=int, default=0, help="of the plan and of the prompts")
    made.add_argument("--replay", type=plan_file(possible()), metavar="FILE", help="a plan that an earlier run printed")
    made.add_argument("--simulate", default="base=8ms,decode=4us,prefill=2us", help="what a simulated step costs")
    add_layers_flag(made)
    add_tier_flags(made)
    what = "real workers of a small model of this family with random weights, whose layers keep states, or none (qwen3)"
    made.add_argument("--tiny", choices=FAMILIES, help=what)
    made.add_argument("--kv-blocks", type=int, default=4096, help="blocks or pages of each worker")
    return made


def main() -> int:
    made = flags()
    args = made.parse_args()
    if args.replay == []:
        made.error("argument --replay: the plan has no fault; expected one at least")
    # Not uvloop: it forks with the handlers of gRPC, which crash some children before they are services.
    try:
        found = asyncio.run(measure(args))
    except InjectionFailed as failed:
        print(failed.line("faults"), file=sys.stderr)
        return 1
    whole = Found()
    for each in found.values():
        whole.add(each)
    table(found)
    each_kind = {f"{name}_{kind}": value for kind, one in found.items() for name, value in one.figures().items()}
    report("faults", whole.figures(), NOTES, as_json=False)
    end_with_json("faults", whole.figures() | each_kind, args.json)
    return int(bool(whole.broken or whole.differing or whole.leaked))


if __name__ == "__main__":
    sys.exit(main())
