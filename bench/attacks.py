"""Innocent streams under attack: what hostile requests through the public ports do to everybody else.

    python -m bench.attacks --json                          1,000 hostile requests of all kinds, 32 innocent streams
    python -m bench.attacks --kinds many_stop_ids --count 1 one of them alone
    python -m bench.attacks --each                          every kind alone, one suite each: which one hurts
    python -m bench.attacks --kinds flood_rapid_reset --count 100000 --seconds 240    a flood for four minutes
    python -m bench.attacks --router-memory-mib 1024        the router in a container's limit (a cgroup, as root)
    python -m bench.attacks --nginx --kinds flood_rapid_reset --count 100000 --seconds 240     the same through nginx
    python -m bench.attacks --tenants                       keys of two tenants: one innocent, one hostile

A suite of real processes runs, with simulated workers unless --real is given. First the innocent streams run alone.
Then they run again and again beside an attacking process, which makes no secret of anything, and has no key or that of
another tenant. The processor time of a turn of the router's event loop is measured by the router itself
(`common/process/loop_turns.py`): wall time would show the neighbours' load. Hostile requests that were not sent before
`--seconds` are counted as such.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import uvloop

from bench.attack.attacker import LATE, AttackPlan, words
from bench.attack.innocents import Innocents, Streams, differing
from bench.attack.kinds import KINDS
from bench.attack.memory_limit import memory_limit
from bench.attack.nginx import nginx
from bench.attack.victim import HOSTILE, INNOCENT, ROUTER, Victim, victim
from bench.attack.waits import Waits, ask
from bench.lib.harness import parser, progress, report, report_columns
from bench.serve import suite_flags
from cli.benchmark.closed_loop import percentile
from common.process import die_with_parent
from common.process.python import module_command

# Of the attacker behind a proxy, which counts by addresses: others have 127.0.0.1.
_ELSEWHERE: Final = "127.0.0.2"
DEMO: Final = Path("cli/demo_model/checkpoint")
# An attacker ends by itself this long after its last request was sent.
_LAST_ANSWERS_S: Final = 120.0
_BUGS: Final = ("INTERNAL", "INTERNAL internal error", "UNKNOWN", "HTTP_500")

Figures = dict[str, float]
NOTES: Final = {
    "innocent_failed": "innocent streams that did not end well",
    "innocent_tokens_differing": "tokens of innocent streams that are not those of the quiet run",
    "innocent_finished": "innocent streams that ended during the attack",
    "router_peak_rss_mib": "highest resident memory of the router, MiB",
    "loop_turn_cpu_max_ms": "longest turn of the router's event loop, CPU time of its thread, milliseconds",
    "loop_turn_cpu_p99_ms": "99th percentile of its turns above 0.1 ms",
    "innocent_ttft_p99_ms": "time to first token of innocent streams, milliseconds: 99th percentile",
    "quiet_ttft_p99_ms": "the same without an attack",
    "status_wait_max_ms": "longest wait of another client for GetStatus over gRPC, milliseconds",
    "status_wait_p99_ms": "99th percentile of these waits",
    "health_wait_max_ms": "longest wait for /health over HTTP, milliseconds",
    "questions_failed": "such questions that got no answer",
    "hostile_sent": "hostile requests that were sent",
    "hostile_internal": "those that were answered INTERNAL, UNKNOWN or 500",
    "restarts": "processes of the suite that had to be started again",
}


async def attacked(args: argparse.Namespace, kinds: tuple[str, ...]) -> Figures:
    """Start a suite, run the innocent streams quietly and under attack, and return the figures."""
    async with AsyncExitStack() as stack:
        suite = await stack.enter_async_context(victim(_options(args), args.workers, args.tenants))
        if args.router_memory_mib is not None:
            stack.enter_context(memory_limit([suite.pids()[ROUTER]], args.router_memory_mib << 20))
        ports, key = (suite.grpc_port, suite.http_port), suite.keys.get(INNOCENT, "")
        innocents = Innocents(suite.host, *ports, args.innocents, args.output_tokens, key)
        quiet = await innocents.run()
        if quiet.failed:
            raise RuntimeError(f"innocent streams failed without an attack: {dict(quiet.failed)}")
        await asyncio.to_thread(suite.turns)  # those of the start and of the quiet run are forgotten
        source = None
        if args.nginx:
            ports = await stack.enter_async_context(nginx(ports))
            source = _ELSEWHERE
        key = suite.keys.get(HOSTILE, "")
        plan = AttackPlan(suite.host, *ports, args.count, args.seconds, args.at_once, args.seed, kinds, key, source)
        found, waits, became = await _beside(plan, innocents, suite)
        _say(found, became)
        return await asyncio.to_thread(_figures, quiet, found, waits, became, suite)


async def _beside(plan: AttackPlan, innocents: Innocents, suite: Victim) -> tuple[Streams, Waits, Counter[str]]:
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group, suite.watched():
        running = group.create_task(innocents.run(over))
        key = suite.keys.get(INNOCENT, "")
        asking = group.create_task(ask(plan.host, plan.grpc_port, plan.http_port, key, over))
        async with _attacker(plan) as attacking:
            became = Counter(await attacking)
        over.set()
        return await running, await asking, became


@asynccontextmanager
async def _attacker(plan: AttackPlan) -> AsyncIterator[asyncio.Task[Counter[str]]]:
    """Run an attacking process; yield what becomes of its requests."""
    command = die_with_parent.command(module_command("bench.attack.attacker"))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    talk = process.communicate(f"{words(plan)}\n".encode())

    async def outcomes() -> Counter[str]:
        async with asyncio.timeout(plan.seconds + _LAST_ANSWERS_S):
            said, _ = await talk
        return Counter(json.loads(said))

    try:
        yield asyncio.create_task(outcomes())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _figures(quiet: Streams, found: Streams, waits: Waits, became: Counter[str], suite: Victim) -> Figures:
    turns = suite.turns()
    return {
        "innocent_failed": found.failed.total(),
        "innocent_tokens_differing": differing(quiet, found),
        "innocent_finished": found.finished,
        "router_peak_rss_mib": suite.peak_rss[ROUTER],
        "loop_turn_cpu_max_ms": turns.get("cpu_max_ms", -1.0),
        "loop_turn_cpu_p99_ms": turns.get("cpu_p99_ms", -1.0),
        "innocent_ttft_p99_ms": 1e3 * percentile(found.first_tokens, 0.99),
        "quiet_ttft_p99_ms": 1e3 * percentile(quiet.first_tokens, 0.99),
        "status_wait_max_ms": 1e3 * max(waits.status),
        "status_wait_p99_ms": 1e3 * percentile(waits.status, 0.99),
        "health_wait_max_ms": 1e3 * max(waits.health),
        "questions_failed": waits.failed,
        "hostile_sent": sum(count for ended, count in became.items() if not ended.endswith(LATE)),
        "hostile_internal": sum(count for ended, count in became.items() if ended.partition(" ")[2] in _BUGS),
        "restarts": suite.restarts,
    }


def _options(args: argparse.Namespace) -> list[str]:
    simulated = {"simulate": args.simulate, "kv_blocks": 65536}
    real = {"kv_blocks": 4096, "dtype": "float32", "deterministic": True}
    options = {"model": args.model, "trace_sample_ratio": args.trace_sample_ratio, "max_num_seqs": args.max_num_seqs}
    options["insecure"] = not args.tls
    return suite_flags(options | (real if args.real else simulated))


def _say(found: Streams, became: Counter[str]) -> None:
    """Print what became of the requests."""
    for ended, count in sorted(became.items()):
        print(f"  hostile  {ended}: {count}")
    for ended, count in found.failed.most_common():
        print(f"  innocent {ended}: {count}")


async def run(args: argparse.Namespace) -> None:
    """Measure, and print the figures."""
    if not args.each:
        report("attacks", await attacked(args, tuple(args.kinds)), NOTES, args.json)
        return
    columns: dict[str, Figures] = {}
    for kind in args.kinds or KINDS:
        progress(kind)
        columns[kind] = await attacked(args, (kind,))
        print(kind, {name: round(value, 1) for name, value in columns[kind].items()}, flush=True)
    report_columns("attacks", columns, NOTES, args.json)


def flags() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--requests", "--count", dest="count", type=int, default=1000, help="hostile requests")
    made.add_argument("--at-once", type=int, default=16, help="of them at a time")
    made.add_argument("--seconds", type=float, default=600.0, help="seconds after which no more of them is sent")
    made.add_argument("--kinds", nargs="+", default=[], choices=sorted(KINDS), metavar="KIND", help="some kinds alone")
    made.add_argument("--each", action="store_true", help="each kind in a suite of its own")
    made.add_argument("--innocents", type=int, default=32, help="innocent streams at once")
    made.add_argument("--output-tokens", type=int, default=64, help="tokens of each")
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--max-num-seqs", type=int, default=128)
    made.add_argument("--real", action="store_true", help="the real engine on the CPU instead of simulated steps")
    made.add_argument("--model", type=Path, default=DEMO, help="folder of a checkpoint; unset: the demo model")
    made.add_argument("--simulate", default="base=8ms,decode=4us,prefill=2us", help="what a simulated step costs")
    made.add_argument("--tenants", action="store_true", help="innocents and attacker have keys of two tenants")
    made.add_argument("--tls", action="store_true", help="TLS between the services, as `quire serve` has it")
    made.add_argument("--trace-sample-ratio", type=float, default=1.0, help="share of the requests that are traced")
    made.add_argument(
        "--nginx", action="store_true", help="floods and questions come through nginx; streams do not, for it has rates"
    )
    made.add_argument("--router-memory-mib", type=int, help="limit of the router's memory; unset: none")
    made.add_argument("--seed", type=int, default=0)
    return made


def main() -> None:
    made = flags()
    args = made.parse_args()
    if args.nginx and not (args.kinds and all(kind.startswith("flood_") for kind in args.kinds)):
        made.error("--nginx takes floods alone: name them with --kinds")
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
