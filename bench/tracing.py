"""What observing requests costs: the loss of throughput by sampled spans and by tail rules, and a decision record.

    python -m bench.tracing --json
    python -m bench.tracing --json --compare sampled_all

Four suites with the real engine over a small model of random weights run side by side. The first samples nothing, the
second 1 % with tail rules, the third too with every request slow, and the last one everything. One of them works at a
time. Each round runs all of them in another order, the two runs of one suite one after the other. The loss is 1 less
the ratio of output tokens a second of two runs of a round.

Two suites that do the same differ by some percent, so one suite has both runs where that is possible. In the last suite
each request brings a traceparent. In one run its flag declines a trace, in the other one it asks for it.
`overhead_suites` is the difference between two suites that sample nothing, for comparison. Processor time follows the
number of steps, which differs between equal runs: `steps_*` says by how much.

Where all are slow, the router keeps as many as it may, 5 a second, which is the most that one rule can cost for long.
Requests of one token use up what it may keep at once before each of its runs. A run ends when its spans are delivered;
what they take counts as processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from bench.lib.checkpoints import SMALL, checkpoint
from bench.lib.decision_records import bytes_of, cost_of_log, records_of
from bench.lib.harness import median_interval, parser, progress, report
from bench.lib.request_spans import SERVICES, microseconds
from bench.serve import suite_flags
from cli.benchmark.closed_loop import figures as client_figures
from cli.benchmark.requests import Workload, equal_requests
from cli.benchmark.served import ServedSuite, served_suite
from common.contracts.limits import KEPT_TRACES_BURST
from router.observe.diagnosis.outcome import Outcome
from router.observe.tail_rules import Objective, rules_for

OFF: Final = "off"
SLOW: Final = "all_slow"
ALL: Final = "sampled_all"
# Options of the suites. No first token takes as long as the first SLO, and every one takes longer than the second.
SUITES: Final[Mapping[str, Mapping[str, float]]] = {
    OFF: {"trace_sample_ratio": 0.0},
    "sampled_1pct": {"trace_sample_ratio": 0.01, "slo_ttft": 60.0},
    SLOW: {"trace_sample_ratio": 0.01, "slo_ttft": 1e-6},
    ALL: {"trace_sample_ratio": 1.0},
}
# Flags of a traceparent: the client declines a trace, or wants one.
DECLINED: Final = "00"
WANTED: Final = "01"


@dataclass(frozen=True, slots=True)
class Side:
    """A suite, and the flag of the traceparents that its requests bring; "" for none."""

    suite: str
    flag: str = ""


# Each loss is that of the second side beside the first.
COMPARED: Final[Mapping[str, tuple[Side, Side]]] = {
    "sampled_1pct": (Side(OFF), Side("sampled_1pct")),
    SLOW: (Side(OFF), Side(SLOW)),
    ALL: (Side(ALL, DECLINED), Side(ALL, WANTED)),
    "suites": (Side(OFF), Side(ALL, DECLINED)),
}
_VOCABULARY: Final = int(str(SMALL["vocab_size"]))
_RECORDS: Final = 2_000
_RULES: Final = 20_000
_TURNS: Final = 5
# Of four requests in half a second.
_SMALL_FLUSH: Final = 16
_ORDINARY: Final = Outcome(ended="length", before=(("queue", 0.01), ("prefill", 0.1)), has_first_token=True, gaps=100)
NOTES: Final = {
    "overhead_sampled_1pct": "loss of throughput, 1 % sampled, tail rules on; median over the pairs",
    "overhead_all_slow": "the same, where the tail rules keep as many requests as they may",
    "overhead_sampled_all": "loss of throughput, every request sampled; median over the pairs",
    "overhead_suites": "the same between two suites that sample nothing: how far suites differ by themselves",
    "cpu_sampled_1pct": "more processor time of all services for a token, as a share; median",
    "cpu_all_slow": "the same, where the tail rules keep as many requests as they may",
    "cpu_sampled_all": "the same, every request sampled",
    "cpu_suites": "the same between two suites that sample nothing",
    **{f"steps_{each}": f"more engine steps of such a run, as a share: {each}; median" for each in COMPARED},
    **{f"trace_us_{each}": f"more processor time of a sampled request in the {each}, us; median" for each in SERVICES},
    **{f"spans_us_{each}": f"the same without sockets and threads, in one process, us: {each}" for each in SERVICES},
    "tokens_s_off": "output tokens a second without sampling, median",
    "pairs": "pairs of each comparison",
    "record_ns": "to keep a decision record in a full ring, nanoseconds; 8 workers, mean of four kinds",
    "record_ns_log": "the same, queued for a decision log on disk too; in turns with record_ns",
    "log_write_ns": "processor time of the log's thread for a record, nanoseconds; full members",
    "log_record_bytes": "bytes of a record on disk, full members",
    "log_record_bytes_small": f"the same at {_SMALL_FLUSH} records a flush",
    "record_bytes": "memory of such a record, bytes",
    "rules_ns": "to see that no tail rule keeps a request, nanoseconds",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: output tokens a second, seconds of processor time for a token, and by service for a request; steps."""

    tokens_s: float
    cpu: float
    by_service: Mapping[str, float] = field(default_factory=dict)
    steps: float = 1.0


@dataclass(slots=True)
class Pairs:
    """The runs of two sides, each beside one of the other side."""

    off: list[Measured] = field(default_factory=list)
    on: list[Measured] = field(default_factory=list)

    def losses(self) -> list[float]:
        return [1.0 - on.tokens_s / off.tokens_s for off, on in zip(self.off, self.on, strict=True)]

    def more_cpu(self) -> list[float]:
        return [on.cpu / off.cpu - 1.0 for off, on in zip(self.off, self.on, strict=True)]

    def more_steps(self) -> list[float]:
        return [on.steps / off.steps - 1.0 for off, on in zip(self.off, self.on, strict=True)]

    def more_of(self, service: str) -> list[float]:
        """Return the additional seconds of processor time of a service for a request, of each pair."""
        both = zip(self.off, self.on, strict=True)
        return [on.by_service.get(service, 0.0) - off.by_service.get(service, 0.0) for off, on in both]


async def measure(suite: ServedSuite, side: Side, workload: Workload, salt: str, settle: float) -> Measured:
    """Run a workload, and wait until its last spans are delivered."""
    if side.suite == SLOW:
        await suite.run(equal_requests(KEPT_TRACES_BURST, 1, 1, 0, _VOCABULARY), salt)
        await asyncio.sleep(settle)
    steps, before = await suite.engine_steps(), suite.cpu_by_service()
    seconds, records = await suite.run(workload, salt, partial(_traceparent, side.flag) if side.flag else None)
    await asyncio.sleep(settle)
    found, spent = client_figures(seconds, records.values()), suite.cpu_by_service()
    spent = {name: each - before.get(name, 0.0) for name, each in spent.items()}
    by_service = {name: each / len(records) for name, each in spent.items()}
    steps = await suite.engine_steps() - steps
    return Measured(found["output_tok_s"], sum(spent.values()) / found["output_tokens"], by_service, steps)


def _traceparent(flag: str) -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flag}"


async def compare(folder: Path, load_format: str, args: argparse.Namespace) -> dict[str, Pairs]:
    """Start the suites, and run the pairs of all comparisons in turns."""
    workload = equal_requests(args.requests, args.prompt, args.output, args.seed, _VOCABULARY)
    pairs = {name: Pairs() for name in COMPARED if name in args.compare}
    sides = list(dict.fromkeys(side for name in pairs for side in COMPARED[name]))
    async with AsyncExitStack() as stack:
        suites: dict[str, ServedSuite] = {}
        for name in dict.fromkeys(side.suite for side in sides):
            options = {**_common(folder, load_format, args), **SUITES[name]}
            suites[name] = await stack.enter_async_context(served_suite(suite_flags(options)))
            await suites[name].run(workload, "warm")
        rng, names = random.Random(args.seed), list(suites)
        for number in range(args.pairs):
            rng.shuffle(names)
            turn = sides[:: 1 if number % 2 else -1]
            runs = {}
            for side in sorted(turn, key=lambda each: names.index(each.suite)):
                salt = f"{number}{side.flag}"
                runs[side] = await measure(suites[side.suite], side, workload, salt, args.settle_s)
            for name, found in pairs.items():
                off, on = COMPARED[name]
                found.off.append(runs[off])
                found.on.append(runs[on])
                progress(f"{name}, pair {number + 1}: {found.losses()[-1]:+.3f}", end=True)
    return pairs


def _common(folder: Path, load_format: str, args: argparse.Namespace) -> dict[str, object]:
    return {
        "model": folder,
        "load_format": load_format,
        "threads": args.threads,
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": 512,
        "kv_blocks": 4096,
        "log_level": "warning",
    }


def figures_of(pairs: Mapping[str, Pairs]) -> dict[str, float]:
    """Return the losses with their intervals, and what a run without sampling has."""
    found: dict[str, float] = {}
    for name, each in pairs.items():
        for figure, samples in (("overhead", each.losses()), ("cpu", each.more_cpu())):
            for suffix, value in zip(("", "_lower", "_upper"), median_interval(samples), strict=True):
                found[f"{figure}_{name}{suffix}"] = value
        found[f"steps_{name}"] = statistics.median(each.more_steps())
    if ALL in pairs:
        found |= {f"trace_us_{each}": 1e6 * statistics.median(pairs[ALL].more_of(each)) for each in SERVICES}
    every = [run.tokens_s for each in pairs.values() for run in each.off]
    return found | {"tokens_s_off": statistics.median(every), "pairs": min(len(each.off) for each in pairs.values())}


def records() -> dict[str, float]:
    """Return what a decision record and the tail rules cost."""
    made = list(records_of(_RECORDS))
    log, small = cost_of_log(made, _TURNS, len(made)), cost_of_log(made, 1, _SMALL_FLUSH)
    spans = microseconds(4 * _TURNS)
    return {
        **{f"spans_us_{service}": each for service, each in spans.items()},
        "record_ns": 1e9 * log.keep,
        "record_ns_log": 1e9 * log.keep_with_log,
        "log_write_ns": 1e9 * log.write,
        "log_record_bytes": log.bytes,
        "log_record_bytes_small": small.bytes,
        "record_bytes": bytes_of(_RECORDS // 4),
        "rules_ns": 1e9 * min(_seconds_of_rules(range(_RULES)) for _ in range(3)),
    }


def _seconds_of_rules(times: Iterable[int]) -> float:
    promised, began, count = Objective(1.0, 0.1), time.perf_counter(), 0
    for _ in times:
        count += 1
        rules_for(_ORDINARY, promised)
    return (time.perf_counter() - began) / count


def flags() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--pairs", type=int, default=16, help="pairs of each comparison")
    made.add_argument("--compare", nargs="+", choices=COMPARED, default=list(COMPARED), help="comparisons to run")
    made.add_argument("--requests", type=int, default=128, help="requests of a run, all at once")
    made.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    made.add_argument("--output", type=int, default=128, help="tokens of an output")
    made.add_argument("--max-num-seqs", type=int, default=64)
    made.add_argument("--threads", type=int, default=1, help="threads of each engine")
    made.add_argument("--settle-s", type=float, default=1.2, help="seconds after a run until its spans are delivered")
    made.add_argument("--seed", type=int, default=0)
    return made


def main() -> None:
    args = flags().parse_args()
    with checkpoint(None, SMALL) as (folder, load_format):
        pairs = uvloop.run(compare(folder, load_format, args))
    report("tracing", figures_of(pairs) | records(), NOTES, args.json)


if __name__ == "__main__":
    main()
