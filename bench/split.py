"""The cost of a remote KV manager: an engine over a manager process against one over an embedded ledger.

Runs go in interleaved pairs of alternating order. Each pair gives one ratio of throughputs, embedded over remote (1.00:
no cost). The simulated step takes 5 ms and holds the GIL for 2 ms. The real ones are random Llama shapes on the CPU: a
small one, whose short steps show every cost, and one of 128 million parameters.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.lib.checkpoints import MEDIUM, SMALL
from bench.lib.harness import median_interval, parser, progress, report
from bench.lib.workers import BenchWorker, Run, identity_of, manager_process, random_prompts
from cli.certificates.folder import CertificateFolder
from common.contracts.types import KvGeometry
from common.rpc.roles import Role
from common.rpc.server import dialer
from gpuworker.scheduling.batch_plan import StepRunner
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.step_costs import StepCosts
from gpuworker.simulated.runner import SimulatedRunner
from gpuworker.simulated.tokens import SimulatedTokens

BLOCK_SIZE = 16
BLOCKS = 4096
PROMPT_TOKENS = 64
SINGLES = 8
STEP_SECONDS, HELD_SECONDS = 0.005, 0.002

MakeRunner = Callable[[AgentConfig], tuple[StepRunner, KvGeometry | None]]


@dataclass(frozen=True, slots=True)
class Pair:
    """One remote and one embedded run of the same load; `first_*` are times to a first token on an idle engine."""

    remote: Run
    embedded: Run
    manager_cpu: float
    first_remote: float
    first_embedded: float

    @property
    def ratio(self) -> float:
        return (self.embedded.tokens / self.embedded.seconds) / (self.remote.tokens / self.remote.seconds)


def first_token(worker: BenchWorker, seed: int) -> float:
    """Return the median time to the first token of requests that come one by one, in seconds."""
    prompts = random_prompts(SINGLES, PROMPT_TOKENS, seed)
    return statistics.median(worker.load([prompt], 1).first_tokens[0] for prompt in prompts)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def certificates(tls: bool) -> Iterator[CertificateFolder | None]:
    """Yield certificates of all roles, or None without TLS."""
    if not tls:
        yield None
        return
    from cli.certificates.authority import make, wanted

    with tempfile.TemporaryDirectory(prefix="quire-bench-") as path:
        folder = CertificateFolder(Path(path))
        make(folder, wanted(folder, Role))
        yield folder


@contextmanager
def workers(
    make_runner: MakeRunner, config: AgentConfig, address: str, certs: CertificateFolder | None = None
) -> Iterator[tuple[BenchWorker, BenchWorker]]:
    """Run two engines, the first over the manager at `address`, the second over a ledger of its own."""
    dial = dialer(identity_of(certs, Role.WORKER), Role.MANAGER)
    with ExitStack() as stack:
        made = []
        for manager in (address, None):
            runner, geometry = make_runner(config)
            made.append(stack.enter_context(BenchWorker(runner, config, manager, geometry, dial)))
        yield made[0], made[1]


def measure(
    make_runner: MakeRunner, config: AgentConfig, pairs: int, output_tokens: int, name: str, tls: bool = False
) -> Iterator[Pair]:
    """Yield `pairs` pairs after one that warms up. With `tls` the manager is reached as services reach it (mTLS)."""
    with (
        certificates(tls) as certs,
        manager_process(BLOCK_SIZE, certs) as (address, process),
        workers(make_runner, config, address, certs) as (remote, embedded),
    ):
        for index in range(pairs + 1):
            prompts = random_prompts(config.max_num_seqs, PROMPT_TOKENS, seed=index)
            runs: dict[str, Run] = {}
            spent = 0.0
            for which in ("remote", "embedded") if index % 2 else ("embedded", "remote"):
                before = cpu_seconds(process)
                runs[which] = (remote if which == "remote" else embedded).load(prompts, output_tokens)
                spent += cpu_seconds(process) - before if which == "remote" else 0.0
            first = first_token(remote, 1000 + index), first_token(embedded, 1000 + index)
            pair = Pair(runs["remote"], runs["embedded"], spent, *first)
            if index:
                progress(f"{name}: pair {index} of {pairs}, ratio {pair.ratio:.3f}", end=index == pairs)
                yield pair


def figures_of(name: str, pairs: list[Pair]) -> dict[str, float]:
    median, lower, upper = median_interval([pair.ratio for pair in pairs])
    first = [pair.first_remote - pair.first_embedded for pair in pairs]
    return {
        f"slowdown_{name}": median,
        f"slowdown_{name}_lower": lower,
        f"slowdown_{name}_upper": upper,
        f"manager_cpu_us_per_token_{name}": 1e6
        * sum(p.manager_cpu for p in pairs)
        / sum(p.remote.tokens for p in pairs),
        f"ttft_added_ms_{name}": 1e3 * statistics.median(first),
        f"tokens_per_second_remote_{name}": statistics.median(p.remote.tokens / p.remote.seconds for p in pairs),
        f"pairs_{name}": len(pairs),
    }


def notes_of(name: str, what: str) -> dict[str, str]:
    return {
        f"slowdown_{name}": f"embedded over remote throughput, {what}; median (1.00: the split is free)",
        f"slowdown_{name}_lower": "lower end of its 95 % bootstrap interval",
        f"slowdown_{name}_upper": "upper end",
        f"manager_cpu_us_per_token_{name}": "CPU time of the manager process a token, microseconds",
        f"ttft_added_ms_{name}": "time to first token of single requests, remote minus embedded, milliseconds",
        f"tokens_per_second_remote_{name}": "throughput over the manager process",
        f"pairs_{name}": "interleaved pairs",
    }


def simulated_runner(_: AgentConfig) -> tuple[StepRunner, None]:
    return SimulatedRunner(StepCosts(base=STEP_SECONDS), SimulatedTokens(range(7, 1007)), held=HELD_SECONDS), None


def real_runner(
    config: AgentConfig, shape: Mapping[str, object] = SMALL, dtype: str = "float32"
) -> tuple[StepRunner, KvGeometry]:
    from bench.lib.models import cpu_runner  # imports torch, which simulated steps do without

    return cpu_runner(config, shape, dtype)


def main() -> None:
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=24, help="interleaved pairs of each kind")
    flags.add_argument("--sequences", type=int, default=64, help="sequences at once")
    flags.add_argument("--output-tokens", type=int, default=96, help="output tokens of each")
    flags.add_argument("--tls", action="store_true", help="TLS between engine and manager")
    flags.add_argument("--only", choices=["sim", "cpu", "128m"], help="one kind of step alone")
    args = flags.parse_args()
    config = AgentConfig(BLOCKS, BLOCK_SIZE, max_num_seqs=args.sequences)
    kinds: dict[str, tuple[MakeRunner, str]] = {
        "sim": (simulated_runner, "simulated 5 ms step, GIL held for 2"),
        "cpu": (real_runner, "CPU engine, small model"),
        "128m": (lambda config: real_runner(config, MEDIUM, "bfloat16"), "CPU engine, 128 M model in bf16"),
    }
    figures: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, (make_runner, what) in kinds.items():
        if args.only in (None, name):
            pairs = list(measure(make_runner, config, args.pairs, args.output_tokens, name, args.tls))
            figures |= figures_of(name, pairs)
            notes |= notes_of(name, what)
    report("split", figures, notes, args.json)


if __name__ == "__main__":
    main()
